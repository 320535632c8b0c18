"""Tensor-parallel ranks in Ray actors: the same tokens as one rank, and loads that disturb nobody."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ray_lora import LLM, EngineConfig, SamplingParams
from ray_lora.cluster.local import LocalExecutor
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.errors import AdapterRejectedError, ConfigError, EngineDeadError, NotFoundError
from tests.file_server import file_server
from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tp") / "model", "qwen2", **SHAPE)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> dict[str, str]:
    made = checkpoint.parent
    configs: list[dict[str, Any]] = [{}, {"r": 20, "target_modules": ["k_proj", "o_proj", "down_proj"]}]
    return {f"a{i}": str(make_adapter(made / f"a{i}", checkpoint, i, **config)) for i, config in enumerate(configs)}


def settings(checkpoint: Path, **args: Any) -> dict[str, Any]:
    store = str(checkpoint.parent / "store")
    return {"model": str(checkpoint), "kv_cache_memory_bytes": 1 << 23, "adapter_store_dir": store, **args}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_give_the_tokens_of_one_rank(tp_size: int, checkpoint: Path, adapters: dict[str, str]) -> None:
    prompts = random_prompts(6, 322)
    names: list[str | None] = [None, "a0", "a1", "a0", None, "a1"]
    with LLM(**settings(checkpoint, adapters=adapters, tensor_parallel_size=tp_size)) as llm:
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, names)]
    for prompt, name, tokens in zip(prompts, names, produced, strict=True):
        path = None if name is None else Path(adapters[name])
        assert tokens == expected_tokens(checkpoint, path, [prompt], 20)[0]


@pytest.mark.parametrize(
    ("tp_size", "named"), [(3, "num_attention_heads 8"), (16, "num_attention_heads 8"), (5, "num_attention_heads 8")]
)
def test_sizes_that_do_not_divide_are_refused_by_name(tp_size: int, named: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(**settings(checkpoint, tensor_parallel_size=tp_size))


@pytest.fixture
def executor(checkpoint: Path, tmp_path: Path) -> Iterator[RayTPExecutor]:
    args = settings(checkpoint, adapter_store_dir=str(tmp_path), tensor_parallel_size=2, adapter_load_timeout_s=5.0)
    executor = RayTPExecutor(EngineConfig.parse(args))
    yield executor
    executor.shutdown()


def test_a_rejected_adapter_is_an_error_of_its_own(executor: RayTPExecutor, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(AdapterRejectedError, match=r"adapter_config\.json"):
        executor.inspect_adapter(str(bad))
    executor.check_health()


def test_a_slow_download_holds_up_no_other_load(executor: RayTPExecutor, adapters: dict[str, str]) -> None:
    with file_server() as server, ThreadPoolExecutor(1) as pool:
        server.pause_s = 2.0
        fetching = pool.submit(executor.inspect_adapter, server.put("a1", Path(adapters["a1"])))
        while not server.gets:
            time.sleep(0.01)
        local = executor.inspect_adapter(adapters["a0"])
        executor.stage_adapter(local)
        assert not fetching.done()
        remote = fetching.result(timeout=60)
        executor.stage_adapter(remote)
        assert executor.staged_versions() == [{local.version, remote.version}] * 2
        server.pause_s = 0.0
        with pytest.raises(NotFoundError) as caught:
            executor.inspect_adapter(f"http://me:hunter2@{server.address}/absent")
        assert caught.value.param == "lora_path"
        assert "hunter2" not in str(caught.value)


def test_ranks_load_what_another_groups_store_has_sent(
    executor: RayTPExecutor, checkpoint: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    args = settings(checkpoint, adapter_store_dir=str(tmp_path / "other"))
    other = LocalExecutor(EngineConfig.parse(args))
    manifest = other.inspect_adapter(adapters["a0"])
    assert not executor.has_adapter_files(manifest.version)
    assert executor.adapter_files(manifest.version) is None
    files = other.adapter_files(manifest.version)
    assert files is not None
    executor.add_adapter_files(files, "out of reach")
    assert executor.has_adapter_files(manifest.version)
    arrived = executor.inspect_adapter("out of reach", manifest.version)
    assert (arrived.version, arrived.source) == (manifest.version, "out of reach")
    executor.stage_adapter(arrived)
    assert executor.staged_versions() == [{manifest.version}] * 2
    other.shutdown()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_decoding_ends_the_requests(victim: int, checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(**settings(checkpoint, tensor_parallel_size=2)) as llm:
        executor = llm._engine._executor
        assert isinstance(executor, RayTPExecutor)
        pids = executor._call_all("process_id", "health")
        killer = threading.Timer(0.3, lambda: os.kill(pids[victim], signal.SIGKILL))
        llm.generate(random_prompts(4, 322), GREEDY)
        begin = time.monotonic()
        killer.start()
        with pytest.raises(EngineDeadError, match="a rank failed in step"):
            llm.generate(random_prompts(64, 322), params)
        assert time.monotonic() - begin < 15


def test_a_load_while_eight_requests_decode_changes_none_of_their_tokens(
    checkpoint: Path, adapters: dict[str, str]
) -> None:
    prompts = random_prompts(8, 322)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    args = settings(checkpoint, adapters={"a0": adapters["a0"]}, tensor_parallel_size=2)
    with LLM(**args) as llm:
        names = ["a0", None] * 4
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params, names)]
        done = threading.Event()
        loads = 0

        def churn() -> None:
            nonlocal loads
            while not done.is_set():
                llm.load_adapter("other", adapters["a1"])
                llm.unload_adapter("other")
                loads += 1

        loader = threading.Thread(target=churn)
        loader.start()
        disturbed = [output.outputs[0].token_ids for output in llm.generate(prompts, params, names)]
        done.set()
        loader.join()
    assert loads > 0
    assert disturbed == alone


def test_adapters_that_take_turns_in_host_memory_answer_with_their_own(
    checkpoint: Path, adapters: dict[str, str]
) -> None:
    prompts = random_prompts(8, 322)
    names = ["a0", "a1"] * 4
    args = settings(checkpoint, adapters=adapters, tensor_parallel_size=2, max_loras=1, max_cpu_loras=1)
    with LLM(**args) as llm:
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, names)]
    for prompt, name, tokens in zip(prompts, names, produced, strict=True):
        assert tokens == expected_tokens(checkpoint, Path(adapters[name]), [prompt], 20)[0]


def test_three_ranks_of_the_demo_model_answer_as_peft_does(tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "deployments" / "adapters"
    adapters = {path.parent.name: str(path.parent) for path in root.glob("*/adapter_config.json")}
    model = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
    names = [None, *adapters, None, *adapters]
    prompts = random_prompts(len(names), 40000, longest=30)
    args = {"max_model_len": 512, "kv_cache_memory_bytes": 1 << 26, "max_lora_pages": 4, "max_lora_rank": 16}
    with LLM(str(model), adapters, tensor_parallel_size=3, adapter_store_dir=str(tmp_path), **args) as llm:
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, names)]
    for name in {*names}:
        rows = [row for row, used in enumerate(names) if used == name]
        path = None if name is None else Path(adapters[name])
        assert [produced[row] for row in rows] == expected_tokens(model, path, [prompts[row] for row in rows], 20)
