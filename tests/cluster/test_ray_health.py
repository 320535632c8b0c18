"""Whether an engine that has nothing to do knows when a rank is stopped or gone."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ray_lora import EngineConfig
from ray_lora.cluster import ray_tp
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.errors import EngineDeadError
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve.start import start_engine
from tests.tiny import expected_tokens, make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

NOTICED_S = 5.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("health")
    return EngineConfig(
        model=str(make_checkpoint(directory / "model", "llama", num_attention_heads=4, num_key_value_heads=2)),
        tensor_parallel_size=2,
        kv_cache_memory_bytes=1 << 23,
        adapter_store_dir=str(directory / "store"),
    )


@asynccontextmanager
async def engine_and_ranks(config: EngineConfig) -> AsyncIterator[tuple[AsyncEngine, list[int]]]:
    """A running engine, and its ranks' process ids."""
    engine = await start_engine(config)
    executor = engine._executor
    assert isinstance(executor, RayTPExecutor)
    try:
        yield engine, executor._call_all("process_id", "health")
    finally:
        await engine.shutdown()


async def ailment_of(engine: AsyncEngine) -> str | None:
    try:
        await engine.check_health()
    except EngineDeadError as error:
        return str(error)
    return None


async def until_health(engine: AsyncEngine, is_well: bool) -> str | None:
    """Wait until the engine is well, or until it is not; what it then says."""
    deadline = time.monotonic() + NOTICED_S
    while ((ailment := await ailment_of(engine)) is None) is not is_well:
        assert time.monotonic() < deadline, f"still {ailment or 'well'}"
        await asyncio.sleep(0.05)
    return ailment


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_idle_is_noticed(victim: int, config: EngineConfig) -> None:
    async def main() -> None:
        async with engine_and_ranks(config) as (engine, pids):
            await engine.check_health()
            os.kill(pids[victim], signal.SIGKILL)
            await until_health(engine, is_well=False)

    asyncio.run(main())


def test_a_stopped_rank_is_noticed_and_so_is_that_it_goes_on(config: EngineConfig) -> None:
    async def main() -> None:
        async with engine_and_ranks(config) as (engine, pids):
            os.kill(pids[1], signal.SIGSTOP)
            try:
                ailment = await until_health(engine, is_well=False)
            finally:
                os.kill(pids[1], signal.SIGCONT)
            assert ailment == "rank 1 did not answer within 3 s"
            await until_health(engine, is_well=True)
            request = GenerateRequest(
                prompt=[5, 6, 7], sampling_params=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            )
            tokens = [token async for chunk in engine.generate(request) for token in chunk.outputs[0].token_ids]
            assert tokens == expected_tokens(Path(config.model), None, [[5, 6, 7]], 8)[0]

    asyncio.run(main())


def test_a_rank_that_stays_stopped_is_given_up_and_ends_the_requests(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tp, "GIVE_UP_S", 1.0)

    async def main() -> None:
        async with engine_and_ranks(config) as (engine, pids):
            request = GenerateRequest(prompt=[5, 6, 7], sampling_params=SamplingParams(max_tokens=200, ignore_eos=True))
            stream = engine.generate(request)
            await anext(stream)
            os.kill(pids[1], signal.SIGSTOP)
            assert "rank 1 did not answer" in (await until_health(engine, is_well=False) or "")
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert engine.dead is not None
            os.kill(pids[1], signal.SIGCONT)

    asyncio.run(main())
