"""An engine without a model: token `i` of an answer is `prompt[-1] + 1 + i`, at one step per `step_s`.

Adapters add a thousand to the first token, and count their requests as page-ins; what the engine was asked and what was
cancelled can be read back.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_lora.adapter import AdapterFiles, AdapterInfo, AdapterManifest, AdapterValidation, Refusal, Tier, TierUse
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver, Candidate
from ray_lora.errors import (
    AdapterExistsError,
    AdapterRejectedError,
    CapacityError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    NumericsError,
    RayLoraError,
    VersionConflictError,
)
from ray_lora.request import CompletionDelta, GenerateChunk, GenerateRequest, Logprob, LogprobsDict, RequestMetrics
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.stats import AdapterStats, EngineStats, RequestStats
from ray_lora.step import ModelInfo

MAX_MODEL_LEN = 64
VOCAB_SIZE = 49152
PAGE_BYTES = 1000
MAX_PINS = 1
METRICS = RequestMetrics(0.0, 0.001, 0.002, 0.003, prompt_tokens=5, generation_tokens=7)
"""Of every request that comes to its end."""
FIRST_TOKENS_S = (0.015, 0.02, 0.03, 1e4)
"""What the base model's requests waited for their first tokens, as `stats` has it."""
TROUBLE: dict[int | None, RayLoraError] = {
    -1: NumericsError("the logits are not finite"),
    -2: EngineDeadError("rank 1 is gone"),
    -3: CapacityError("the queue is full", 2.5),
}
"""By the seed of a request; the first two come after two tokens, the last at once."""


def make_info(name: str, version: str, source: str, rank: int = 8) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        version=version,
        source=source,
        rank=rank,
        num_pages=1,
        num_bytes=500,
        tier="device",
        pinned=False,
        weight=1.0,
        num_running=0,
        num_waiting=0,
        num_loads=1,
        num_page_ins=1,
        last_used=None,
    )


def read_config(path: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(path) / "adapter_config.json").read_text())
    except (OSError, ValueError):
        raise NotFoundError(f"lora_path: {path} does not exist", "lora_path") from None
    return config


class FakeEngine:
    """Implements `serve.replica.Engine`."""

    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        self.config = config
        self.info = ModelInfo(VOCAB_SIZE, MAX_MODEL_LEN, 100, (2, 0), PAGE_BYTES)
        self.step_s = step_s
        self.tokenizer = Tokenizer(config.model)
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.num_running = 0
        self.adapters: dict[str, AdapterInfo] = {}
        self.files: dict[str, AdapterFiles] = {}
        """The store of its own, by version."""
        self.prepared: dict[str, bool] = {}
        """By version, whether it was staged."""
        self.refused: set[str] = set()
        """Names for which there is no room."""
        self.deaths: list[int] = []
        """The next requests, one each, find that a rank is gone when they have this many tokens."""
        self.is_dead = False
        self.dead: RayLoraError | None = None
        self.is_shut_down = False

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        if request.adapter in self.adapters:
            info = self.adapters[request.adapter]
            self.adapters[request.adapter] = replace(info, num_page_ins=info.num_page_ins + 1)
        params = request.sampling_params
        prompt = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise NotFoundError(f"The lora adapter '{request.adapter}' cannot be found.", "lora_name")
        if not prompt or len(prompt) >= MAX_MODEL_LEN:
            raise InvalidRequestError(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.", "prompt")
        if max(prompt) >= VOCAB_SIZE:
            raise InvalidRequestError(f"prompt has {max(prompt)}, not a token id below {VOCAB_SIZE}.", "prompt")
        if isinstance(trouble := TROUBLE.get(params.seed), CapacityError):
            raise trouble
        room = MAX_MODEL_LEN - len(prompt)
        num_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        first = prompt[-1] + 1 + (1000 if request.adapter else 0)
        detokenizers = [self.tokenizer.detokenizer(params.skip_special_tokens, prompt) for _ in range(params.n)]
        dies_at = self.deaths.pop(0) if self.deaths else None
        self.num_running += 1
        is_done = False
        try:
            for position in range(num_tokens):
                await asyncio.sleep(self.step_s)
                if position == dies_at:
                    is_done = True
                    raise EngineDeadError("rank 1 is gone")
                if position == 2 and params.seed in TROUBLE:
                    is_done = True
                    raise TROUBLE[params.seed]
                deltas = []
                for index, detokenizer in enumerate(detokenizers):
                    token = (first + position + 100 * index) % VOCAB_SIZE
                    reason = "length" if position == num_tokens - 1 else None
                    entry = None if params.logprobs is None else (self._logprobs(token, params.logprobs),)
                    deltas.append(CompletionDelta(index, detokenizer.push(token), (token,), entry, reason))
                is_done = position == num_tokens - 1
                chunk = self._chunk(request, prompt, deltas, position == 0)
                yield replace(chunk, metrics=METRICS) if is_done else chunk
        finally:
            self.num_running -= 1
            if not is_done:
                self.cancelled.append(request.request_id)

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        config = read_config(path)
        if config.get("use_dora"):
            raise AdapterRejectedError("use_dora is not supported", "use_dora")
        version = f"v{config['r']}"
        before = self.adapters.get(name)
        if expected_version is not None and (before is None or before.version not in (expected_version, version)):
            raise VersionConflictError(f"'{name}' is not at {expected_version}", "expected_version")
        if before is not None and before.version == version:
            return before, False
        if before is not None and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{name}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                "lora_name",
            )
        self.adapters[name] = make_info(name, version, path, config["r"])
        return self.adapters[name], True

    async def inspect_adapter(self, path: str) -> AdapterManifest:
        if not Path(path).is_dir():
            raise NotFoundError(f"lora_path: {path} does not exist", "lora_path")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config.get("use_dora"):
            raise AdapterRejectedError("use_dora is not supported", "use_dora")
        self.files[f"v{config['r']}"] = AdapterFiles(json.dumps(config).encode(), b"")
        return AdapterManifest(f"v{config['r']}", path, path, config["r"], ("self_attn.q_proj",), 900, 500)

    async def has_adapter_files(self, version: str) -> bool:
        return version in self.files

    async def adapter_files(self, version: str) -> AdapterFiles | None:
        return self.files.get(version)

    async def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        self.files[f"v{json.loads(files.config)['r']}"] = files

    async def _find(self, candidate: Candidate) -> AdapterManifest:
        files = self.files.get(candidate.version or "")
        if files is None or candidate.version is None:
            return await self.inspect_adapter(candidate.path)
        rank = json.loads(files.config)["r"]
        return AdapterManifest(candidate.version, "", candidate.path, rank, ("self_attn.q_proj",), 900, 500)

    async def prepare_adapter(self, name: str, candidate: Candidate, stages: bool) -> None:
        manifest = await self._find(candidate)
        if name in self.refused:
            raise CapacityError(f"no room for {name}")
        if manifest.version != candidate.version:
            raise NotFoundError(f"{candidate.path} has other content now, {manifest.version}", "lora_path")
        self.prepared[manifest.version] = stages

    async def point_adapter(self, name: str, candidate: Candidate) -> AdapterInfo:
        manifest = await self._find(candidate)
        if manifest.version != candidate.version:
            raise NotFoundError(f"{candidate.path} has other content now, {manifest.version}", "lora_path")
        self.prepared.pop(manifest.version, None)
        before = self.adapters.get(name)
        info = make_info(name, manifest.version, candidate.path, manifest.rank)
        if before is not None:
            info = replace(info, pinned=before.pinned, weight=before.weight)
        self.adapters[name] = info
        return self.adapters[name]

    def abandon_adapter(self, version: str) -> None:
        self.prepared.pop(version, None)

    async def mark_used(self, name: str, at: float) -> None:
        self.adapters[name] = replace(self.adapters[name], last_used=at)

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo:
        if name not in self.adapters:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")
        if is_pinned and sum(info.pinned for info in self.adapters.values()) == MAX_PINS:
            raise CapacityError("too many are pinned")
        self.adapters[name] = replace(self.adapters[name], pinned=is_pinned)
        return self.adapters[name]

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        if name not in self.adapters:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")
        self.adapters[name] = replace(self.adapters[name], weight=weight)
        return self.adapters[name]

    async def validate_adapter(self, path: str, name: str | None = None) -> AdapterValidation:
        config = read_config(path)
        if config.get("use_dora"):
            return AdapterValidation(None, (Refusal("use_dora is not supported", "use_dora"),))
        taken = (Refusal("the name is taken", "lora_name"),) if name in self.adapters else ()
        manifest = AdapterManifest(f"v{config['r']}", path, path, config["r"], ("self_attn.q_proj",), 900, 500)
        return AdapterValidation(manifest, taken)

    def adapter_tiers(self) -> dict[Tier, TierUse]:
        num_used = len(self.adapters)
        return {"device": TierUse(num_used, 16, num_used * PAGE_BYTES, 24 * PAGE_BYTES)}

    def list_adapters(self) -> list[AdapterInfo]:
        return list(self.adapters.values())

    def stats(self) -> EngineStats:
        base = AdapterStats()
        for seconds in FIRST_TOKENS_S:
            base.time_to_first_token.observe(seconds)
        return EngineStats(
            num_requests_running=self.num_running,
            num_requests_waiting=0,
            num_kv_blocks=100,
            block_size=16,
            kv_cache_usage=0.25,
            num_preemptions=3,
            prefix_cache_queries=60,
            prefix_cache_hits=len(self.cancelled),
            running_adapters=("pirate",),
            waiting_adapters=(),
            resident_adapters=tuple(self.adapters),
            num_lora_pages=24,
            num_free_lora_pages=20,
            tiers={"pirate": "host"},
            load_failures={"NotFoundError": 1},
            all=AdapterStats(prompt_tokens=40, generation_tokens=50, finished={"stop": 1, "length": 2}),
            requests=RequestStats(),
            by_adapter={"smollm2": base, "pirate": AdapterStats(num_loads=2)},
            max_adapter_labels=64,
            last_step_age_s=0.5,
        )

    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError("rank 1 is gone")

    async def shutdown(self) -> None:
        self.is_shut_down = True

    def _logprobs(self, token: int, count: int) -> LogprobsDict:
        entries = {token: Logprob(-1.5, 2, self.tokenizer.token_text(token))}
        best = [(100 + rank, -0.5 * rank) for rank in range(1, count + 1)]
        return entries | {
            other: Logprob(value, rank, self.tokenizer.token_text(other))
            for rank, (other, value) in enumerate(best, start=1)
            if rank != 2
        }

    def _chunk(
        self, request: GenerateRequest, prompt: list[int], deltas: list[CompletionDelta], is_first: bool
    ) -> GenerateChunk:
        if not is_first:
            return GenerateChunk(request.request_id, tuple(deltas))
        count = request.sampling_params.prompt_logprobs
        logprobs = None if count is None else (None, *(self._logprobs(token, count) for token in prompt[1:]))
        version = self.adapters[request.adapter].version if request.adapter else None
        return GenerateChunk(request.request_id, tuple(deltas), tuple(prompt), logprobs, 4, version)


async def start_fake(config: EngineConfig, resolvers: Sequence[AdapterResolver] = ()) -> FakeEngine:
    """An `EngineStarter` for real deployments; the environment says how fast it steps."""
    return FakeEngine(config, float(os.environ.get("FAKE_STEP_S", "0.02")))


class FakeClient:
    """Implements `EngineClient` over an engine in this process."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.generate = engine.generate
        self.unload_adapter = engine.unload_adapter
        self.pin_adapter = engine.pin_adapter
        self.set_adapter_weight = engine.set_adapter_weight
        self.validate_adapter = engine.validate_adapter
        self.check_health = engine.check_health

    async def adapter_tiers(self) -> list[dict[Tier, TierUse]]:
        return [self.engine.adapter_tiers()]

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        return await self.engine.load_adapter(name, path, load_inplace, expected_version)

    async def list_adapters(self) -> list[AdapterInfo]:
        return self.engine.list_adapters()

    async def stats(self) -> dict[str, EngineStats]:
        return {"0": self.engine.stats()}

    async def model_info(self) -> ModelInfo:
        return self.engine.info

    async def missing(self) -> list[str]:
        return ["rank 1 is gone"] if self.engine.is_dead else []
