"""Every kind of adapter that is accepted, as the fields that its `LoraConfig` adds to a plain one's."""

from typing import Any

import pytest
from peft import EvaConfig

IGNORE_PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),  # it doubts biases of B
    pytest.mark.filterwarnings("ignore:lora with eva initialization"),
]

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
}
