"""Every kind of adapter that is accepted, as the fields that its `LoraConfig` adds to a plain one's."""

from typing import Any

import pytest
from peft import EvaConfig

IGNORE_PEFT_WARNINGS = [pytest.mark.filterwarnings("ignore::UserWarning:peft")]
"""It has doubts about most of these."""

TOKENS = [*range(319, 120, -1), 3, 7]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora-bias": {"lora_bias": True},
    "lora-bias-some": {"lora_bias": True, "target_modules": ["k_proj", "down_proj"], "alpha_pattern": {"k_proj": 3}},
    "bias-all": {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
    "bias-all-one-layer": {"bias": "all", "target_modules": ["o_proj"], "layers_to_transform": [1]},
    "bias-lora-only": {"bias": "lora_only", "target_modules": ["v_proj", "o_proj"]},
    "both-biases": {"bias": "all", "lora_bias": True},
    "dora": {"use_dora": True},
    "dora-rank17": {"use_dora": True, "r": 17, "use_rslora": True, "target_modules": ["v_proj", "up_proj", "o_proj"]},
    "dora-bias": {"use_dora": True, "bias": "all", "target_modules": ["k_proj", "down_proj", "gate_proj"]},
    "eva": {"init_lora_weights": "eva", "eva_config": EvaConfig()},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "norms": {"modules_to_save": ["model.norm", "input_layernorm"], "target_modules": ["q_proj"]},
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-embedding": {"modules_to_save": ["embed_tokens"], "target_modules": ["v_proj", "lm_head"]},
    "saved-both": {"modules_to_save": ["lm_head", "model.embed_tokens", "post_attention_layernorm"]},
    "lora-head": {"target_modules": ["lm_head"], "r": 5},
    "lora-head-bias": {"target_modules": ["lm_head", "o_proj"], "lora_bias": True},
    "dora-head": {"target_modules": ["lm_head", "o_proj"], "use_dora": True},
    "dora-embedding": {"target_modules": ["embed_tokens", "up_proj"], "use_dora": True},
    "lora-embedding": {"target_modules": ["embed_tokens", "down_proj"], "rank_pattern": {"embed_tokens": 3}},
    "lora-both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "saved-tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": TOKENS},
    "tokens-head": {"trainable_token_indices": {"lm_head": TOKENS[:100]}},
    "tokens-both": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[::3]}},
    "tokens-same": {"trainable_token_indices": {"embed_tokens": TOKENS[:50], "lm_head": TOKENS[:50]}},
}
