"""What does `ray-lora adapter compress` gain on every step?

The demo model, float32; 16 requests of 64 prompt and 64 output tokens over four adapters of rank 64 on all linear
layers, whose deltas' singular values fall by a tenth from one to the next; then the same, compressed to 99% of
their energy.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import MODEL, Row, report, seconds
from benchmarks.throughput import NUM_OUTPUT, NUM_REQUESTS, PARAMS, make_adapters, prompts
from ray_lora import LLM
from ray_lora.adapters.adapter_tools import compress

NUM_ADAPTERS, RANK, DECAY, ENERGY = 4, 64, 0.9, 0.99


def with_decay(path: Path) -> None:
    """Scale the ranks of B down, one after another."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    scales = DECAY ** torch.arange(RANK)
    save_file({name: t * scales if "lora_B" in name else t for name, t in tensors.items()}, file)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        before = make_adapters(directory / "before", [RANK] * NUM_ADAPTERS)
        after, errors, ranks = {}, [], []
        for name, path in before.items():
            with_decay(Path(path))
            after[name] = str(directory / "after" / name)
            Path(after[name]).parent.mkdir(exist_ok=True)
            cuts = compress(Path(path), Path(after[name]), energy=ENERGY, dtype=None)
            errors += [cut.error / cut.norm for cut in cuts]
            ranks.append(max(cut.new_rank for cut in cuts))
        sizes = {"max_loras": NUM_ADAPTERS, "max_lora_rank": RANK, "max_model_len": 256}
        names = [*before] * (NUM_REQUESTS // NUM_ADAPTERS)
        llms = [
            LLM(str(MODEL), adapters, adapter_store_dir=f"{temporary}/store", enable_prefix_caching=False, **sizes)
            for adapters in (before, after)
        ]
        took = [float("inf")] * 2
        for _ in range(4):
            for index, llm in enumerate(llms):
                took[index] = min(took[index], seconds(lambda llm=llm: llm.generate(prompts(), PARAMS, names), 1))
        for llm in llms:
            llm.shutdown()
    rates = [NUM_REQUESTS * NUM_OUTPUT / each for each in took]
    report(
        "adapter_compress",
        [
            Row(f"{NUM_ADAPTERS} adapters of rank {RANK}", rates[0], "tok/s", note="4 pages each"),
            Row(f"compressed to {ENERGY:.0%} of the energy", rates[1], "tok/s", note=f"rank {max(ranks)} at most"),
            Row("  gained", rates[1] / rates[0], "x"),
            Row("  largest relative error of a module's delta", max(errors), ""),
        ],
    )


if __name__ == "__main__":
    main()
