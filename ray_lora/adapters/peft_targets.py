"""Which modules of a base model an adapter's configuration selects, at which rank and scale: PEFT's rules, exactly.

The rules are those of `check_target_module_exists` and `get_pattern_key` in PEFT, applied to the module names of a
Hugging Face causal language model, e.g. `model.layers.0.self_attn.q_proj`.
"""

import math
from dataclasses import dataclass

from ray_lora.adapters.pattern_matcher import fullmatch_pattern, layer_pattern, suffix_pattern
from ray_lora.adapters.peft_config import PeftConfig, reject, show
from ray_lora.architecture import Architecture, Projection

_TOP_MODULES = ("model", "model.layers", "model.norm", "model.rotary_emb")
_LAYER_MODULES = (
    "self_attn",
    "mlp",
    "mlp.act_fn",
    "input_layernorm",
    "post_attention_layernorm",
)


_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True)
class TargetModule:
    """One linear layer that the adapter changes by `scale * lora_b @ lora_a`."""

    name: str
    """As PEFT sees it, e.g. `model.layers.0.self_attn.q_proj`."""
    layer: int
    """`NO_LAYER` for the embedding and the head."""
    projection: Projection
    rank: int
    scale: float


NO_LAYER = -1


def served_modules(arch: Architecture) -> dict[str, tuple[int, Projection]]:
    """Every linear layer that adapters may change, by its module name, in the order they run."""
    return {
        f"model.layers.{layer}.{projection.name}": (layer, projection)
        for layer in range(arch.num_layers)
        for projection in arch.projections
    }


def module_names(arch: Architecture) -> tuple[str, ...]:
    """Every module of the base model, by its name in PEFT."""
    return (*served_modules(arch), *arch.vocabulary, *_unserved_modules(arch))


def resolve_targets(config: PeftConfig, arch: Architecture) -> tuple[TargetModule, ...]:
    """The selected modules, those of layers in the order they run, then the embedding and the head; at least one.

    Raises:
        AdapterRejectedError: the configuration selects nothing, or a module that is not served, or is ambiguous.
    """
    served = served_modules(arch)
    names = tuple(served)
    if not config.targets_all_linear:
        served |= {name: (NO_LAYER, projection) for name, projection in arch.vocabulary.items()}
        names = module_names(arch)
    selector = ModuleSelector(config, names)
    selected = [name for name in names if selector.selects(name)]
    if config.ensure_weight_tying and arch.tie_word_embeddings and not arch.vocabulary.keys().isdisjoint(selected):
        selected = [name for name in names if name in selected or name in arch.vocabulary]
    targets = []
    for name in selected:
        if name not in served:
            reject("target_modules", f"target_modules selects {name!r}, which is not served; {_supported(arch)}")
        if config.layers_to_transform and name in selector.targeted:
            # PEFT then lets the list win, unless it is long enough to be shortened to suffixes first.
            reject("layers_to_transform", f"layers_to_transform is ambiguous when target_modules spells out {name!r}")
        layer, projection = served[name]
        targets.append(TargetModule(name, layer, projection, selector.rank(name), selector.scale(name)))
    if not targets:
        chosen = f"target_modules {show(config.target_modules)}, exclude_modules {show(config.exclude_modules)}"
        reject("target_modules", f"{chosen} and layers_to_transform select no module; {_supported(arch)}")
    return tuple(targets)


class ModuleSelector:
    """One configuration, its expressions already matched against all names."""

    def __init__(self, config: PeftConfig, names: tuple[str, ...]) -> None:
        self.config = config
        self.matches = config.match(names)
        self.targeted = _name_set(config.target_modules)
        self.excluded = _name_set(config.exclude_modules)
        self._ranks = [(self.matches[suffix_pattern(key)], rank) for key, rank in config.rank_pattern]
        self._alphas = [(self.matches[suffix_pattern(key)], alpha) for key, alpha in config.alpha_pattern]

    def selects(self, name: str) -> bool:
        config = self.config
        if any(_is_at_or_below(module, name) for module in config.modules_to_save):
            return False
        if isinstance(config.exclude_modules, str):
            if name in self.matches[fullmatch_pattern(config.exclude_modules)]:
                return False
        elif not self.excluded.isdisjoint(_suffixes(name)):
            return False
        if config.targets_all_linear:
            return True
        if isinstance(config.target_modules, str):
            return name in self.matches[fullmatch_pattern(config.target_modules)]
        if self.targeted.isdisjoint(_suffixes(name)):
            return False
        return not config.layers_to_transform or name in self.targeted or self.layer(name) in config.layers_to_transform

    def layer(self, name: str) -> int | None:
        """The index after `layers_pattern`, or the first index in the name."""
        if not self.config.layers_pattern:
            index, dot, _ = name.removeprefix("model.layers.").partition(".")
            return int(index) if dot and index.isdecimal() else None
        found = (self.matches[layer_pattern(pattern)].get(name) for pattern in self.config.layers_pattern)
        return next((int(index) for index in found if index), None)

    def rank(self, name: str) -> int:
        return next((rank for matched, rank in self._ranks if name in matched), self.config.r)

    def scale(self, name: str) -> float:
        """What `lora_b @ lora_a` is multiplied by."""
        alpha = next((alpha for matched, alpha in self._alphas if name in matched), self.config.lora_alpha)
        return alpha / (math.sqrt(self.rank(name)) if self.config.use_rslora else self.rank(name))


def _is_at_or_below(module: str, name: str) -> bool:
    """Whether `module` is a run of whole parts of a module's `name`; PEFT puts no LoRA on what it saves as a whole."""
    return f".{module}." in f".{name}."


def _name_set(modules: str | tuple[str, ...]) -> frozenset[str]:
    return frozenset() if isinstance(modules, str) else frozenset(modules)


def _suffixes(name: str) -> set[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`: what a listed module may say to mean this one."""
    parts = name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _unserved_modules(arch: Architecture) -> tuple[str, ...]:
    layers = [f"model.layers.{layer}" for layer in range(arch.num_layers)]
    modules = [*_LAYER_MODULES, *(_QK_NORMS if arch.qk_norm else ())]
    return (*_TOP_MODULES, *layers, *(f"{layer}.{module}" for layer in layers for module in modules))


def _supported(arch: Architecture) -> str:
    names = ", ".join(projection.name.rpartition(".")[2] for projection in arch.projections)
    return f"served are {names} in layers 0 to {arch.num_layers - 1}, embed_tokens and lm_head"
