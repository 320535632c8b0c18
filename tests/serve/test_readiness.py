"""What `/ready` says of a replica whose adapters are coming back."""

import asyncio
import json
from pathlib import Path
from typing import Any

from replica_group import in_event_loop, running

from ray_lora.config import EngineConfig


@in_event_loop
async def test_adapters_that_come_back_behind_the_first_are_missing_until_they_are_there(
    config: EngineConfig, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    config = config.model_copy(update={"max_loras": 2, "max_cpu_loras": 2})
    async with running(config, 1) as group:
        for number in range(5):
            await group.client.load_adapter(f"a{number}", str(tmp_path))
        assert await group.client.missing() == []

        may_go_on = asyncio.Semaphore(2)
        starts = group._start

        async def start_slow(*args: Any) -> Any:
            engine = await starts(*args)
            point = engine.point_adapter  # type: ignore[attr-defined]

            async def wait(*args: Any) -> Any:
                await may_go_on.acquire()
                return await point(*args)

            engine.point_adapter = wait  # type: ignore[attr-defined]
            return engine

        group._start = start_slow
        late = await group.start_replica()
        assert len(late._engine.adapters) == 2
        for num_missing in (3, 2, 1):
            assert await group.client.missing() == [f"adapters that are still coming back: {num_missing}"]
            may_go_on.release()
            while len(late._engine.adapters) < 6 - num_missing:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await group.client.missing() == []
