"""What no request may do to another, and what the engine promises besides tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_lora import LLM, NumericsError, RequestOutput, SamplingParams
from ray_lora.backends.base import Backend
from ray_lora.backends.cpu import CPUBackend
from tests.tiny import expected_tokens, load, make_adapter, make_checkpoint, random_prompts

WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("guarantees") / "model", "llama")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> Path:
    return make_adapter(checkpoint.parent / "adapter", checkpoint, 1)


def settings(checkpoint: Path, **args: Any) -> dict[str, Any]:
    store = str(checkpoint.parent / "store")
    return {"model": str(checkpoint), "kv_cache_memory_bytes": 1 << 24, "adapter_store_dir": store, **args}


@pytest.fixture
def llm(checkpoint: Path, adapter: Path) -> Iterator[LLM]:
    with LLM(**settings(checkpoint, adapters={"a": str(adapter)}, enable_prefix_caching=False)) as llm:
        yield llm


def observed(output: RequestOutput) -> tuple[Any, Any]:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def test_base_rows_are_bit_identical_to_the_same_batch_without_lora(llm: LLM) -> None:
    prompts = [prompt[:20] for prompt in random_prompts(6, 320, shortest=20)]
    plain = llm.generate(prompts, WITH_LOGPROBS)
    mixed = llm.generate(prompts, WITH_LOGPROBS, [None, None, None, "a", "a", "a"])
    assert [observed(output) for output in mixed[:3]] == [observed(output) for output in plain[:3]]
    assert [observed(output) for output in mixed[3:]] != [observed(output) for output in plain[3:]]


@pytest.mark.parametrize("backend", [Backend, CPUBackend])
def test_a_step_without_adapters_runs_no_lora_code(
    backend: type[Backend], checkpoint: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    counting = backend()
    original = counting.linear_lora

    def counted(*args: Any) -> Tensor:
        calls.append(args[1].shape[0])
        return original(*args)

    monkeypatch.setattr(counting, "linear_lora", counted)
    monkeypatch.setattr("ray_lora.cluster.worker.make_backend", lambda device: counting)
    with LLM(**settings(checkpoint, adapters={"a": str(adapter)})) as llm:
        llm.generate(random_prompts(3, 320), WITH_LOGPROBS)
        assert not calls
        llm.generate(random_prompts(1, 320), WITH_LOGPROBS, "a")
        assert len(calls) == 12 * 3 * 4, "one launch for each of the four fused linears of a layer and step"


def test_a_row_that_turns_nan_ends_alone(checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    explosive = make_adapter(tmp_path / "explosive", checkpoint, 2)
    file = explosive / "adapter_model.safetensors"
    save_file({name: torch.full_like(tensor, 1e30) for name, tensor in load_file(file).items()}, file)
    prompts = random_prompts(4, 320)
    args = settings(checkpoint, adapters={"a": str(adapter), "explosive": str(explosive)})
    with LLM(**args) as llm:
        alone = [observed(output) for output in llm.generate(prompts, WITH_LOGPROBS, ["a", None, "a", None])]
        for _ in range(3):
            with pytest.raises(NumericsError):
                llm.generate(prompts[:2], WITH_LOGPROBS, ["explosive", None])
            again = llm.generate(prompts, WITH_LOGPROBS, ["a", None, "a", None])
            assert [tokens for tokens, _ in map(observed, again)] == [tokens for tokens, _ in alone]
        stats = llm.stats()
        assert (stats.num_requests_running, stats.kv_cache_usage) == (0, 0)


def test_logprobs_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    prompts = random_prompts(3, 320, shortest=10)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    model = load(checkpoint)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        completion = output.outputs[0]
        tokens = torch.tensor([prompt + completion.token_ids])
        with torch.inference_mode():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        for position, entry in enumerate(entries):
            assert entry is not None
            chosen = int(tokens[0, position + 1])
            assert entry[chosen].rank == int((logprobs[position] > logprobs[position, chosen]).sum()) + 1
            assert set(logprobs[position].topk(3).indices.tolist()) <= set(entry)
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(logprobs[position, token]), abs=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype: str, checkpoint: Path, adapter: Path) -> None:
    prompts = random_prompts(4, 320)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    args = settings(checkpoint, adapters={"a": str(adapter)})
    logprobs = {}
    for served in ("float32", dtype):
        with LLM(**args, dtype=served) as llm:
            outputs = llm.generate(prompts, params, ["a", None, "a", None])
        logprobs[served] = [
            next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs or [] if entry
        ]
    difference = torch.tensor(logprobs["float32"]) - torch.tensor(logprobs[dtype])
    assert difference.abs().mean() < {"bfloat16": 0.1, "float16": 0.02}[dtype]


def test_more_adapters_than_pages_take_turns(checkpoint: Path, tmp_path: Path) -> None:
    adapters = {f"a{i}": str(make_adapter(tmp_path / f"a{i}", checkpoint, i)) for i in range(5)}
    prompts = random_prompts(10, 320)
    names = [f"a{i % 5}" for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(**settings(checkpoint, adapters=adapters, max_loras=2, max_lora_rank=8)) as llm:
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, params, names)]
    for prompt, name, tokens in zip(prompts, names, produced, strict=True):
        assert tokens == expected_tokens(checkpoint, Path(adapters[name]), [prompt], 12)[0]


def test_seeds_give_the_same_text_whatever_shares_the_batch(llm: LLM) -> None:
    prompt = random_prompts(1, 320)[0]
    params = [SamplingParams(temperature=1.0, max_tokens=16, seed=seed, ignore_eos=True) for seed in range(6)]
    alone = [llm.generate([prompt], one)[0].outputs[0].token_ids for one in params]
    together = [output.outputs[0].token_ids for output in llm.generate([prompt] * 6, params)]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == 6


def test_n_completions_differ_and_repeat(llm: LLM) -> None:
    prompt = random_prompts(1, 320)[0]
    params = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=5, ignore_eos=True)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.finished
    tokens = [output.token_ids for output in first.outputs]
    assert tokens == [output.token_ids for output in second.outputs]
    assert len({tuple(sequence) for sequence in tokens}) == 3
