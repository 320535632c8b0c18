"""How many tokens a second, beside transformers for the base model and PEFT for mixed adapters?

16 requests of 64 prompt and 64 output tokens, float32, greedy, the same two threads for everyone.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.harness import MODEL, Row, report, seconds
from ray_lora import LLM, SamplingParams
from ray_lora.architecture import read_architecture

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 64, 64
RANKS = (8, 16, 32, 64)
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(100, 40000, (NUM_REQUESTS, NUM_PROMPT), generator=generator).tolist()


def make_adapters(
    directory: Path, ranks: list[int], model: Path = MODEL, dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """Random adapters on all seven linear layers, as PEFT saves them."""
    arch = read_architecture(model)
    paths = {}
    for index, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer in range(arch.num_layers):
            for projection in arch.projections:
                prefix = f"base_model.model.model.layers.{layer}.{projection.name}"
                lora_a = torch.randn(rank, projection.in_features, generator=generator) * 0.05
                lora_b = torch.randn(projection.out_features, rank, generator=generator) * 0.02
                tensors[f"{prefix}.lora_A.weight"] = lora_a.to(dtype)
                tensors[f"{prefix}.lora_B.weight"] = lora_b.to(dtype)
        path = directory / f"adapter{index}"
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=[projection.name.split(".")[1] for projection in arch.projections],
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(path))
        paths[path.name] = str(path)
    return paths


def generate_with_transformers(model: Any, adapter_names: list[str] | None = None) -> None:
    ids = torch.tensor(prompts())
    extra = {} if adapter_names is None else {"adapter_names": adapter_names}
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NUM_OUTPUT}
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings, **extra)


def with_llm(adapters: dict[str, str], same: dict[str, str], store: str, lora_dtype: str) -> dict[str, float]:
    """Tokens per second of each workload; `adapters` are of ranks 8 to 64, `same` all of rank 16."""
    args: dict[str, Any] = {
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "max_lora_pages": 48,
        "max_loras": 32,
        "adapter_store_dir": store,
        "lora_dtype": lora_dtype,
    }
    distinct = {f"same-{name}": path for name, path in same.items()}
    workloads: dict[str, list[str] | str | None] = {
        "base": None,
        "mixed": list(adapters),
        "distinct": list(distinct),
        "one": "same-adapter0",
    }
    with LLM(str(MODEL), adapters={**adapters, **distinct}, **args) as llm:
        llm.generate(prompts(), PARAMS)
        best = dict.fromkeys(workloads, 0.0)
        for _ in range(4):  # in turn, so that a busy moment of the machine does not fall on one alone
            for name, used in workloads.items():
                rate = NUM_REQUESTS * NUM_OUTPUT / seconds(partial(llm.generate, prompts(), PARAMS, used), 1)
                best[name] = max(best[name], rate)
        return best


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    num_tokens = NUM_REQUESTS * NUM_OUTPUT
    with tempfile.TemporaryDirectory() as temporary:
        ranks = [RANKS[index % len(RANKS)] for index in range(NUM_REQUESTS)]
        adapters = make_adapters(Path(temporary), ranks)
        same = make_adapters(Path(temporary) / "same", [16] * NUM_REQUESTS)
        wide, narrow = (with_llm(adapters, same, f"{temporary}/store", dtype) for dtype in ("float32", "bfloat16"))
        model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        generate_with_transformers(model)
        their_base = num_tokens / seconds(lambda: generate_with_transformers(model))
        model = PeftModel.from_pretrained(model, adapters["adapter0"], adapter_name="adapter0")
        for name, path in list(adapters.items())[1:]:
            model.load_adapter(path, name)
        model.eval()
        their_mixed = num_tokens / seconds(lambda: generate_with_transformers(model, list(adapters)))
    ratios = [
        Row(f"{what} / base, {dtype} pages", figures[key] / figures["base"], "x", bar=bar)
        for what, key, bar in (
            ("one rank-16 adapter", "one", 0.93),
            ("16 distinct rank-16 adapters", "distinct", 0.85),
            ("16 adapters of ranks 8 to 64", "mixed", 0.75),
        )
        for dtype, figures in (("float32", wide), ("bfloat16", narrow))
    ]
    report(
        "throughput",
        [
            Row("base, LLM", wide["base"], "tok/s"),
            Row("base, transformers", their_base, "tok/s"),
            Row("16 adapters of ranks 8 to 64, LLM", wide["mixed"], "tok/s"),
            Row("16 adapters of ranks 8 to 64, PEFT", their_mixed, "tok/s"),
            Row("base: LLM / transformers", wide["base"] / their_base, "x", bar=2.0),
            Row("16 mixed adapters: LLM / PEFT", wide["mixed"] / their_mixed, "x", bar=4.0),
            *ratios,
            Row("PEFT mixed / transformers", their_mixed / their_base, "x"),
        ],
    )


if __name__ == "__main__":
    main()
