"""Tiny random checkpoints and adapters, and what transformers and PEFT generate with them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_checkpoint(directory: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of a family, with weights large enough that its tokens vary."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SHAPE, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, 0.08)
    model.save_pretrained(directory)
    return directory


def make_adapter(directory: Path, checkpoint: Path, seed: int, strength: float = 0.3, **config: Any) -> Path:
    """Save a random PEFT adapter in which nothing that PEFT trains has its initial value, but A.

    `config` goes to LoraConfig; all-linear rank 8 by default.
    """
    torch.manual_seed(seed)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(load(checkpoint), LoraConfig(**settings))
    perturb(model, strength)
    model.save_pretrained(directory)
    return directory


def perturb(model: PeftModel, strength: float) -> None:
    """What training would do to all that PEFT trains, but A."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, strength / parameter.shape[-1] ** 0.5)
            elif "lora_embedding_A" in name:
                parameter.normal_(0, strength)
            elif "magnitude" in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
            elif parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=strength * float(parameter.std()))


def load(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def expected_tokens(
    checkpoint: Path, adapter: Path | None, prompts: list[list[int]], max_tokens: int, ignore_eos: bool = True
) -> list[list[int]]:
    """Greedy tokens by transformers, with PEFT for an adapter, one prompt at a time.

    Dynamic rotary scaling remembers the longest sequence that a model object has seen, so each prompt gets a fresh one.
    """
    model: Any = None
    results = []
    for prompt in prompts:
        if model is None or model.config.rope_parameters["rope_type"] == "dynamic":
            model = load(checkpoint)
            if adapter is not None:
                model = PeftModel.from_pretrained(model, str(adapter)).eval()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None if ignore_eos else model.config.eos_token_id,
                pad_token_id=0,
            )
        results.append(out[0, len(prompt) :].tolist())
    return results


def random_prompts(num: int, vocab_size: int, seed: int = 0, shortest: int = 3, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
