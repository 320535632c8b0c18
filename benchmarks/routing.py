"""What does it save to send a request where its adapter is?

Two replicas of a small random model with 8 device slots and 32 places in host memory each, 64 adapters of rank 64 that
are asked for by Zipf's law (exponent 1), at random times; the same requests for our router, for Serve's default (the
shorter queue of two) and for Serve's model multiplexing, which knows what each replica has been asked for.

Loads from disk should be a third of the default's. Loads to the device cannot be: with 2 x 8 slots these requests take
152, even if it is known beforehand what each slot will be needed for (Belady); the default takes some 370. Replicas
forget what was used longest ago, and so one of 16 slots would take 257, and the best fixed split of the adapters over
two of 8 that a search has found, 219.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica

from benchmarks.harness import Row, report
from benchmarks.throughput import make_adapters
from ray_lora.config import EngineConfig
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve.app import DIRECTORY, REPLICA
from ray_lora.serve.replica import Accepted, LLMReplica
from ray_lora.serve.replica_client import ReplicaClient
from ray_lora.serve.request_observer import RequestObserver
from tests.tiny import make_checkpoint

ARMS = ("ours", "default", "multiplexed")
NUM_ADAPTERS, NUM_SLOTS, NUM_HOST = 64, 8, 32
NUM_REQUESTS, RATE = 600, 30.0
NUM_PROMPT, NUM_OUTPUT = 16, 8
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


class DefaultRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's own, but for the stream that every replica has to the caller."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and pending_request.metadata.call_method == "outbox":
            wanted = pending_request.args[0]
            return [[each] for each in candidate_replicas if each.replica_id.unique_id == wanted]
        return await super().choose_replicas(candidate_replicas, pending_request)


class MultiplexedReplica(LLMReplica):
    """Tells Serve which adapters it was asked for last, as a model that is loaded by `serve.multiplexed` does."""

    @serve.multiplexed(max_num_models_per_replica=NUM_SLOTS)
    async def note(self, adapter: str) -> str:
        return adapter

    async def submit(
        self, request: GenerateRequest, ingress_id: str, key: int
    ) -> AsyncGenerator[Accepted | bytes, None]:
        await self.note(serve.get_multiplexed_model_id())
        async for item in super().submit(request, ingress_id, key):
            yield item


class MultiplexedCall:
    """A handle of `submit` that names the adapter to Serve."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remote(self, request: GenerateRequest, *args: Any) -> Any:
        return self._handle.options(multiplexed_model_id=request.adapter).remote(request, *args)


def start(arm: str, config: EngineConfig) -> ReplicaClient:
    """Two replicas and their directory; the calls come from this process, without an ingress."""
    replica = REPLICA.options(num_replicas=2, ray_actor_options={"num_cpus": 0})
    if arm != "ours":
        replica = replica.options(request_router_config={"request_router_class": DefaultRouter})
    if arm == "multiplexed":
        replica = replica.options(func_or_class=MultiplexedReplica)
    serve.run(DIRECTORY.bind(config, replica.bind(config)), name="routing", route_prefix=None)
    replicas, directory = serve.get_deployment_handle("LLMReplica", "routing"), serve.get_app_handle("routing")
    client = ReplicaClient(replicas, directory, RequestObserver(config, str))
    if arm == "multiplexed":
        client._submit = MultiplexedCall(client._submit)  # type: ignore[assignment]
    return client


def requests() -> list[tuple[float, GenerateRequest]]:
    """When each is sent, in seconds from the start."""
    choice = random.Random(1)
    weights = [1 / rank for rank in range(1, NUM_ADAPTERS + 1)]
    adapters = choice.choices(range(NUM_ADAPTERS), weights, k=NUM_REQUESTS)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    at, found = 0.0, []
    for adapter in adapters:
        at += choice.expovariate(RATE)
        prompt = tuple(choice.randrange(3, 300) for _ in range(NUM_PROMPT))
        found.append((at, GenerateRequest(prompt=prompt, sampling_params=params, adapter=f"adapter{adapter}")))
    return found


async def first_token_s(client: ReplicaClient, begin: float, at: float, request: GenerateRequest) -> float:
    await asyncio.sleep(begin + at - time.perf_counter())
    sent, first = time.perf_counter(), 0.0
    async for _ in client.generate(request):
        first = first or time.perf_counter() - sent
    return first


async def measure(client: ReplicaClient, adapters: dict[str, str]) -> dict[str, float]:
    for name, path in adapters.items():
        await client.load_adapter(name, path)
    before = await client.list_adapters()
    begin = time.perf_counter()
    times = sorted(await asyncio.gather(*[first_token_s(client, begin, at, request) for at, request in requests()]))
    after = await client.list_adapters()
    page_ins = sum(info.num_page_ins for info in after) - sum(info.num_page_ins for info in before)
    return {
        "loads": sum(info.num_loads for info in after) - sum(info.num_loads for info in before),
        "page_ins": page_ins,
        "cold_share": page_ins / NUM_REQUESTS,
        "p50_ms": 1e3 * times[len(times) // 2],
        "p99_ms": 1e3 * times[len(times) * 99 // 100],
    }


def run(arm: str, directory: Path) -> dict[str, float]:
    model = directory / "model"
    config = EngineConfig(
        model=str(model),
        max_loras=NUM_SLOTS,
        max_cpu_loras=NUM_HOST,
        max_lora_rank=64,
        max_num_seqs=NUM_SLOTS,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 24,
        num_threads=1,
        adapter_store_dir=str(directory / f"store-{arm}"),
    )
    adapters = {path.name: str(path) for path in sorted((directory / "adapters").iterdir())}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(proxy_location="Disabled")
    try:
        client = start(arm, config)
        return asyncio.run(measure(client, adapters))
    finally:
        serve.shutdown()
        ray.shutdown()


def fewest_loads(asked: Sequence[object], num_slots: int) -> int:
    """Of a cache in which always that gives way which is not needed for the longest time."""
    never = len(asked)
    next_use, coming = [never] * len(asked), dict[object, int]()
    for index in reversed(range(len(asked))):
        next_use[index] = coming.get(asked[index], never)
        coming[asked[index]] = index
    held: dict[object, int] = {}
    num_loads = 0
    for name, again in zip(asked, next_use, strict=True):
        if name not in held:
            num_loads += 1
            if len(held) == num_slots:
                del held[max(held, key=held.__getitem__)]
        held[name] = again
    return num_loads


def table(figures: dict[str, dict[str, float]]) -> None:
    ours, default, multiplexed = (figures[arm] for arm in ARMS)
    rows = []
    for key, name, unit in (
        ("loads", "loads from disk to host memory", ""),
        ("page_ins", "loads from host memory to the device", ""),
        ("cold_share", "requests that wait for one, share", ""),
        ("p50_ms", "time to first token, p50", "ms"),
        ("p99_ms", "time to first token, p99", "ms"),
    ):
        rows += [Row(f"{name}: {arm}", figures[arm][key], unit) for arm in ARMS]
    best = min(default["p99_ms"], multiplexed["p99_ms"])
    floor = fewest_loads([request.adapter for _, request in requests()], 2 * NUM_SLOTS)
    rows += [
        Row("loads from disk: ours / default", ours["loads"] / default["loads"], "x", bar=1 / 3, at_least=False),
        Row("loads to the device: ours / default", ours["page_ins"] / default["page_ins"], "x"),
        Row("the same, if all slots were one cache that knows the future", floor / default["page_ins"], "x"),
        Row("p99: ours / the better of the others", ours["p99_ms"] / best, "x", bar=1.0, at_least=False),
    ]
    report("routing", rows)


def prepare(directory: Path) -> None:
    model = make_checkpoint(directory / "model", "llama", **SHAPE)
    make_adapters(directory / "adapters", [64] * NUM_ADAPTERS, model)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        figures = {}
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.routing", arm, temporary]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures[arm] = json.loads(output.splitlines()[-1])
    table(figures)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
