"""A tiny random Llama, and adapters that PEFT itself builds and saves for it."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ray_lora.architecture import Architecture, parse_architecture

SaveAdapter = Callable[..., PeftModel]


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """Two layers, hidden 64, 4 heads of 16, 2 KV heads, intermediate 128."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def arch(tiny_llama: LlamaForCausalLM) -> Architecture:
    return parse_architecture(tiny_llama.config.to_dict(), {})


@pytest.fixture(scope="session")
def save_adapter(tiny_llama: LlamaForCausalLM) -> SaveAdapter:
    """`save_adapter(directory, seed=0, dtype=torch.float32, **lora_config)` trains nothing: A and B are random."""

    def save(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> PeftModel:
        merged: dict[str, Any] = {"r": 8, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], **fields}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for a renamed property
            model = get_peft_model(
                copy.deepcopy(tiny_llama), LoraConfig(task_type="CAUSAL_LM", **merged), autocast_adapter_dtype=False
            )
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(dtype)
        model.save_pretrained(str(directory), save_embedding_layers=False)
        return model

    return save


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """A good adapter, built by hand in milliseconds: rank 4, scale 2, on `q_proj` and `down_proj` of layer 1."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "layers_to_transform": [1],
    }
    shapes = {
        "self_attn.q_proj.lora_A": (4, 64),
        "self_attn.q_proj.lora_B": (64, 4),
        "mlp.down_proj.lora_A": (4, 128),
        "mlp.down_proj.lora_B": (64, 4),
    }
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"base_model.model.model.layers.1.{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
