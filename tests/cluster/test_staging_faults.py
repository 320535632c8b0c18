"""Whatever happens at whichever point of a load, either every rank has the adapter or none, and soon."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_lora import EngineConfig, SamplingParams
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.errors import AdapterStagingError, EngineDeadError
from ray_lora.step import AdapterPlan, SequencePlan, SequenceStart, StepPlan
from tests.faulty_worker import FaultyWorker
from tests.tiny import make_adapter, make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen2", **SHAPE)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> list[str]:
    return [str(make_adapter(checkpoint.parent / f"a{seed}", checkpoint, seed)) for seed in range(2)]


@pytest.fixture
def executor(checkpoint: Path, tmp_path: Path) -> Iterator[RayTPExecutor]:
    config = EngineConfig(
        model=str(checkpoint),
        kv_cache_memory_bytes=1 << 23,
        adapter_store_dir=str(tmp_path),
        tensor_parallel_size=2,
        adapter_load_timeout_s=TIMEOUT_S,
    )
    executor = RayTPExecutor(config, FaultyWorker)
    yield executor
    executor.shutdown()


FAULTS = {
    "0 read raise": "OSError: gone",
    "1 prepare fail": "rank 1 cannot hold it",
    "1 check fail": "rank 1 MemoryError: no room",
}


def test_a_rank_that_fails_leaves_every_rank_as_it_was(
    executor: RayTPExecutor, adapters: list[str], tmp_path: Path
) -> None:
    good, other = (executor.inspect_adapter(path) for path in adapters)
    executor.stage_adapter(good)
    before = step_with(executor, good.version, request_id=1)
    for number, (fault, reason) in enumerate(FAULTS.items()):
        (tmp_path / "fault").write_text(fault)
        with pytest.raises(AdapterStagingError, match=reason):
            executor.stage_adapter(other)
        assert executor.staged_versions() == [{good.version}] * 2
        assert step_with(executor, good.version, request_id=2 + number) == before, "the service goes on"
    executor.stage_adapter(other)
    assert executor.staged_versions() == [{good.version, other.version}] * 2
    executor.drop_adapter(good.version)
    assert executor.staged_versions() == [{other.version}] * 2


@pytest.mark.parametrize("fault", ["0 inspect out-of-memory", "0 read out-of-memory"])
def test_what_goes_wrong_while_an_adapter_is_read_is_an_error_of_its_load_alone(
    fault: str, executor: RayTPExecutor, adapters: list[str], tmp_path: Path
) -> None:
    (tmp_path / "fault").write_text(fault)
    with pytest.raises(AdapterStagingError, match="rank 0 could not read the adapter: MemoryError: no room"):
        executor.stage_adapter(executor.inspect_adapter(adapters[0]))
    executor.check_health()
    executor.stage_adapter(executor.inspect_adapter(adapters[0]))


@pytest.mark.parametrize("fault", ["0 read die", "1 prepare die", "0 barrier die", "1 check die", "1 barrier stop"])
def test_a_rank_that_is_lost_during_a_load_is_noticed_within_the_timeout(
    fault: str, executor: RayTPExecutor, adapters: list[str], tmp_path: Path
) -> None:
    manifest = executor.inspect_adapter(adapters[0])
    (tmp_path / "fault").write_text(fault)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError):
        executor.stage_adapter(manifest)
    assert time.monotonic() - begin < 10 * TIMEOUT_S
    with pytest.raises(EngineDeadError):
        executor.check_health()


def test_a_shutdown_during_a_load_ends_it(executor: RayTPExecutor, adapters: list[str], tmp_path: Path) -> None:
    manifest = executor.inspect_adapter(adapters[0])
    (tmp_path / "fault").write_text("1 check stop")
    timer = threading.Timer(0.5, executor.shutdown)
    timer.start()
    with pytest.raises(EngineDeadError):
        executor.stage_adapter(manifest)
    timer.join()


def step_with(executor: RayTPExecutor, version: str, request_id: int) -> int:
    """The first token of a prompt with this adapter, paged in anew."""
    adapter = AdapterPlan(version, pages=(0,), slot=0)
    prompt = (5, 6, 7)
    start = SequenceStart(request_id, prompt, SamplingParams(temperature=0), seed=0, stop_token_ids=())
    sequence = SequencePlan(request_id, prompt, 0, (0,), adapter=0, sample=True, num_output_tokens=0)
    plan = StepPlan(request_id, (sequence,), (adapter,), (adapter,), (start,), finished=())
    return executor.execute(plan).sampled[0].token_id
