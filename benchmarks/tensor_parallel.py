"""What do two ranks of one thread each keep of one rank of two threads, and where does a step's time go?

A random Llama of hidden size 1024 and 8 layers; 16 requests of 64 prompt and 64 output tokens, float32.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, report, seconds
from ray_lora import LLM, EngineConfig, SamplingParams
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.cluster.worker import Worker
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.step import SequencePlan, SequenceStart, StepPlan, StepResult

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 64, 64
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
VOCAB = 32000
IDLE_S = 4.0


def make_checkpoint(directory: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCAB, (NUM_REQUESTS, NUM_PROMPT), generator=generator).tolist()


def tokens_per_second(model: str, tp_size: int) -> float:
    with LLM(model, tensor_parallel_size=tp_size, enable_prefix_caching=False) as llm:
        llm.generate(prompts(), PARAMS)
        return NUM_REQUESTS * NUM_OUTPUT / seconds(lambda: llm.generate(prompts(), PARAMS), 3)


class TimedWorker(Worker):
    """Records the seconds of each step on this rank, and those inside all-reduce and gather, waiting included."""

    def start(self, init_method: str | None = None) -> Any:
        self.steps: list[tuple[float, float, float]] = []
        self.seconds = {"all_reduce_": 0.0, "gather_columns": 0.0}
        for name in self.seconds:
            setattr(TensorParallel, name, self._timed(name, getattr(TensorParallel, name)))
        return super().start(init_method)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args)
            self.seconds[name] += time.perf_counter() - begin
            return result

        return timed

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        begin = time.perf_counter()
        result = super().execute(plan)
        self.steps.append((time.perf_counter() - begin, *self.seconds.values()))
        return result

    def recorded_steps(self) -> list[tuple[float, float, float]]:
        return self.steps


def split(model: str) -> list[Row]:
    """Medians over decode steps of 16 requests, over the ranks' connections; then what the ranks cost at rest."""
    config = EngineConfig.parse({"model": model, "tensor_parallel_size": 2})
    executor = RayTPExecutor(config, TimedWorker)
    params = SamplingParams(temperature=0, max_tokens=1000)
    requests = range(NUM_REQUESTS)
    starts = tuple(SequenceStart(r, tuple(prompts()[r]), params, 0, ()) for r in requests)
    whole: list[float] = []
    for step in range(100):
        position = NUM_PROMPT + step
        sequences = tuple(
            SequencePlan(
                request_id=r,
                token_ids=(7,) if step else tuple(prompts()[r]),
                start=position if step else 0,
                block_ids=tuple(range(r * 16, r * 16 + position // 16 + 1)),
                adapter=-1,
                sample=True,
                num_output_tokens=step,
            )
            for r in requests
        )
        begin = time.perf_counter()
        executor.execute(StepPlan(step, sequences, starts=() if step else starts))
        whole.append(time.perf_counter() - begin)
    pids = executor._call_all("process_id", "health")
    before = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    time.sleep(IDLE_S)
    after = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]
    idle = max(b - a for a, b in zip(before, after, strict=True)) / IDLE_S
    by_rank: list[list[tuple[float, float, float]]] = executor._call_all("recorded_steps", "health")
    executor.shutdown()
    steps = range(20, 100)
    slowest = [max(rank[step][0] for rank in by_rank) for step in steps]
    reduces = [min(rank[step][1] for rank in by_rank) for step in steps]
    gathers = [min(rank[step][2] for rank in by_rank) for step in steps]
    rest = [whole - a - b for whole, a, b in zip(slowest, reduces, gathers, strict=True)]
    overhead = [total - inside for total, inside in zip(whole[20:], slowest, strict=True)]

    def row(name: str, values: list[float], bar: float | None = None) -> Row:
        return Row(name, statistics.median(values) * 1e3, "ms", bar, at_least=False)

    return [
        row("TP 2, a decode step of 16 requests", whole[20:]),
        row("  of it compute and sampling", rest),
        row("  of it all-reduce (16 and the embedding's)", reduces),
        row("  of it gathering the logits", gathers),
        row("  of it plan and answer", overhead, bar=0.5),
        Row("a rank at rest", idle * 100, "% of a core"),
    ]


def main() -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory() as temporary:
        model = make_checkpoint(Path(temporary) / "model")
        one = tokens_per_second(model, 1)
        two = tokens_per_second(model, 2)
        rows = [
            Row("TP 1, two threads", one, "tok/s"),
            Row("TP 2, one thread a rank", two, "tok/s"),
            Row("TP 2 / TP 1", two / one, "x", bar=0.6),
            *split(model),
        ]
    report("tensor_parallel", rows)


if __name__ == "__main__":
    main()
