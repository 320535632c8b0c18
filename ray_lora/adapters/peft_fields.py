"""Every field of PEFT 0.21's `LoraConfig`, each in exactly one of three tables: honoured, irrelevant, refused.

A field in none of them comes from another version of PEFT; it is refused unless it is off.
"""

from dataclasses import dataclass

HONOURED = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "layers_pattern",
    }
)
"""`peft_config.py` parses these, `peft_targets.py` applies them."""

IRRELEVANT = {
    "auto_mapping": "names a Python class of the trainer",
    "base_model_name_or_path": "where the trainer found its base; the shapes of the tensors decide, and it is reported",
    "corda_config": "steers an initialisation, which `init_lora_weights` selects",
    "ensure_weight_tying": "concerns adapted embeddings, whose tensors are refused",
    "eva_config": "steers an initialisation, which `init_lora_weights` selects",
    # PEFT warns and sets it to False when the base layer is nn.Linear, as all of ours are (`dispatch_default` in
    # peft/tuners/lora/layer.py), before the layer reads it: the delta is B @ A * scale, never its transpose.
    "fan_in_fan_out": "has no effect on nn.Linear base layers",
    "inference_mode": "freezes parameters",
    "loftq_config": "steers an initialisation, which `init_lora_weights` selects",
    "lora_dropout": "acts in training only",
    "lora_ga_config": "steers an initialisation, which `init_lora_weights` selects",
    "megatron_core": "names a Python module; `megatron_config` switches it on",
    "peft_version": "who wrote the file",
    "qalora_group_size": "belongs to `use_qalora`",
    "revision": "where the trainer found its base",
    "runtime_config": "concerns the memory of the trainer's process",
}
"""Field -> why its value cannot change what an adapter computes at inference."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that changes the result unless its value is one of `harmless`."""

    harmless: tuple[object, ...]
    remedy: str


_OFF = (None, False)
_NEW_BASE = (
    "trains against a changed base model; convert to plain LoRA with `ray-lora adapter convert`, or PEFT's "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)
_PLAIN_ONLY = "only plain LoRA is supported; train without it, or merge the adapter into a base model of its own"

REFUSED = {
    "peft_type": Refusal(("LORA",), "only LORA adapters are supported"),
    "task_type": Refusal(("CAUSAL_LM", None), "only CAUSAL_LM adapters are supported"),
    "bias": Refusal(("none",), "trained biases are not supported; train with bias='none'"),
    "init_lora_weights": Refusal((True, False, None, "gaussian", "eva", "orthogonal", "mica"), _NEW_BASE),
    "use_dora": Refusal(_OFF, _PLAIN_ONLY),
    "lora_bias": Refusal(_OFF, "trained biases are not supported; train with lora_bias=False"),
    "modules_to_save": Refusal((None, False, []), "fully trained modules are not supported; train without them"),
    "trainable_token_indices": Refusal((None, False, [], {}), "trained embeddings are not supported; train without"),
    "target_parameters": Refusal((None, False, []), "only nn.Linear modules can be adapted; use target_modules"),
    "layer_replication": Refusal((None, False, []), "replicate the layers in the base model's own checkpoint"),
    "megatron_config": Refusal((None, False, {}), "train on the Hugging Face model"),
    "alora_invocation_tokens": Refusal((None, False, []), "activation by tokens is not supported; train without"),
    "use_qalora": Refusal(_OFF, _PLAIN_ONLY),
    # An empty object switches these on: PEFT builds the sub-configuration with its defaults.
    "arrow_config": Refusal(_OFF, _PLAIN_ONLY),
    "kasa_config": Refusal(_OFF, _PLAIN_ONLY),
    "monteclora_config": Refusal(_OFF, _PLAIN_ONLY),
    "use_bdlora": Refusal(_OFF, _PLAIN_ONLY),
    "velora_config": Refusal(_OFF, "changes training only: remove it, and the lora_velora_embed tensors"),
}
