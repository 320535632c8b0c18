"""Adapters that are more than A and B: in one batch with plain ones and base rows, each equals PEFT token for token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ray_lora import LLM, AdapterRejectedError, SamplingParams
from ray_lora.backends.cpu import CPUBackend
from ray_lora.cluster.local import LocalExecutor
from tests.kinds import IGNORE_PEFT_WARNINGS, KINDS
from tests.tiny import expected_tokens, load, make_adapter, make_checkpoint, perturb, random_prompts

pytestmark = IGNORE_PEFT_WARNINGS
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
}
MIXED = ("plain", "dora", "dora-bias", "norms", "saved-head", "lora-both", "tokens")
NAMES = [None, *KINDS, None, *reversed(KINDS)]


@pytest.fixture(scope="module", params=BASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param.split("-")[0]
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "model", family, **BASES[request.param])


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> dict[str, str]:
    made = checkpoint.parent
    return {name: str(make_adapter(made / name, checkpoint, i, **kind)) for i, (name, kind) in enumerate(KINDS.items())}


@pytest.fixture
def llm(checkpoint: Path, adapters: dict[str, str]) -> Iterator[LLM]:
    store = str(checkpoint.parent / "store")
    args = {"kv_cache_memory_bytes": 1 << 24, "adapter_store_dir": store, "enable_prefix_caching": False}
    with LLM(str(checkpoint), adapters=adapters, max_loras=len(KINDS), max_num_batched_tokens=96, **args) as llm:
        yield llm


def test_every_kind_in_one_batch_equals_peft(llm: LLM, checkpoint: Path, adapters: dict[str, str]) -> None:
    prompts = random_prompts(len(NAMES), 320, seed=1, longest=30)
    produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, NAMES)]
    for name in {*NAMES}:
        rows = [row for row, used in enumerate(NAMES) if used == name]
        path = None if name is None else Path(adapters[name])
        expected = expected_tokens(checkpoint, path, [prompts[row] for row in rows], 16)
        assert [produced[row] for row in rows] == expected, name


def test_rows_of_the_base_and_of_plain_adapters_do_not_notice(llm: LLM) -> None:
    prompts = [prompt[:12] for prompt in random_prompts(len(NAMES), 320, shortest=12)]

    def others(names: list[str | None]) -> list[Any]:
        outputs = llm.generate(prompts, WITH_LOGPROBS, names)
        kept = [output.outputs[0] for output, name in zip(outputs, NAMES, strict=True) if name in (None, "plain")]
        return [(output.token_ids, output.logprobs) for output in kept]

    mixed = others(NAMES)
    assert mixed == others([name if name == "plain" else None for name in NAMES])


def open_with(checkpoint: Path, adapters: dict[str, str], **args: Any) -> LLM:
    store = str(checkpoint.parent / "store")
    return LLM(
        str(checkpoint), {name: adapters[name] for name in MIXED}, adapter_store_dir=store,
        kv_cache_memory_bytes=1 << 24, **args,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", {}),
        ("dora", {"scale_shift_": 16 * 3 * 4}),
        ("lora-both", {"change_embedding_": 16, "change_logits_": 16}),
    ],
)
def test_only_adapters_that_need_it_run_more_code(
    name: str, expected: dict[str, int], checkpoint: Path, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    backend = CPUBackend()

    def count(operator: str) -> None:
        original = getattr(backend, operator)

        def counted(*args: Any) -> None:
            calls.append(operator)
            original(*args)

        monkeypatch.setattr(backend, operator, counted)

    for operator in ("scale_shift_", "change_embedding_", "change_logits_"):
        count(operator)
    monkeypatch.setattr("ray_lora.cluster.worker.make_backend", lambda device: backend)
    with open_with(checkpoint, adapters) as llm:
        llm.generate(random_prompts(2, 320), GREEDY, [name, None])
    assert {operator: calls.count(operator) for operator in calls} == expected


@pytest.mark.parametrize("max_cpu_loras", [None, 2, 4])
def test_kinds_take_turns_on_the_device_and_in_host_memory_and_leave_nothing_behind(
    max_cpu_loras: int | None, checkpoint: Path, adapters: dict[str, str]
) -> None:
    names = list(MIXED) * 2
    prompts = random_prompts(len(names), 320, seed=2, longest=20)
    with open_with(checkpoint, adapters, max_loras=2, max_cpu_loras=max_cpu_loras) as llm:
        for _ in range(2):
            produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, names)]
            for name, prompt, tokens in zip(names, prompts, produced, strict=True):
                assert tokens == expected_tokens(checkpoint, Path(adapters[name]), [prompt], 16)[0], name
        executor = llm._engine._executor
        assert isinstance(executor, LocalExecutor)
        runner = executor._worker._runner
        for name in MIXED:
            llm.unload_adapter(name)
        llm.generate(prompts[:1], GREEDY)
        assert runner._pool is not None
        assert not runner._pool.unpaged
        assert not runner.staged_versions


def test_logprobs_of_prompts_come_from_the_adapters_own_head(checkpoint: Path, adapters: dict[str, str]) -> None:
    prompts = random_prompts(len(MIXED), 320, shortest=10, longest=20)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with open_with(checkpoint, adapters) as llm:
        outputs = llm.generate(prompts, params, list(MIXED))
    for name, prompt, output in zip(MIXED, prompts, outputs, strict=True):
        model = PeftModel.from_pretrained(load(checkpoint), adapters[name]).eval()
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            chosen = prompt[position + 1]
            assert entry[chosen].logprob == pytest.approx(float(logprobs[position, chosen]), abs=2e-4), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype: str, checkpoint: Path, adapters: dict[str, str]) -> None:
    prompts = random_prompts(len(MIXED), 320)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs: dict[str, list[float]] = {}
    for served in ("float32", dtype):
        with open_with(checkpoint, adapters, dtype=served) as llm:
            outputs = llm.generate(prompts, params, list(MIXED))
        logprobs[served] = [
            next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs or [] if entry
        ]
    difference = torch.tensor(logprobs["float32"]) - torch.tensor(logprobs[dtype])
    assert difference.abs().mean() < {"bfloat16": 0.1, "float16": 0.02}[dtype]


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_a_kind_that_changes_the_base_is_served_once_peft_has_converted_it(kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    targets = ["q_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=kind, task_type="CAUSAL_LM")
    model = get_peft_model(load(checkpoint), config)
    model.save_pretrained(tmp_path / "initial")
    perturb(model, 0.3)
    model.save_pretrained(tmp_path / "trained")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    prompts = random_prompts(3, 320)
    with LLM(str(checkpoint), kv_cache_memory_bytes=1 << 24, adapter_store_dir=str(tmp_path / "store")) as llm:
        with pytest.raises(AdapterRejectedError, match="adapter convert"):
            llm.load_adapter("trained", str(tmp_path / "trained"))
        llm.load_adapter("plain", str(tmp_path / "plain"))
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, "plain")]
    assert produced == expected_tokens(checkpoint, tmp_path / "trained", prompts, 16)
    assert produced != expected_tokens(checkpoint, None, prompts, 16)
