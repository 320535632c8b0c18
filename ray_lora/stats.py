"""A replica's counters at one moment, as `/metrics` shows them."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import partial

FINISH_REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("InvalidRequestError", "NotFoundError", "CapacityError", "RayLoraError")
"""Why a request was not accepted: the nearest of these classes. Keys are all there from the start, for a dict that
grows cannot be copied while another thread counts."""
LOAD_FAILURES = ("AdapterRejectedError", "AdapterStagingError", "EngineDeadError", *REFUSALS)
LOAD_STAGES = ("fetch", "parse", "stage", "barrier", "commit")
TIERS = ("disk", "host", "device")

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
LENGTH_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""vLLM's buckets, in seconds and in tokens, so that panels and alerts made for it fit."""


class Histogram:
    """How many values fell into each bucket, and their sum. One thread observes; any may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """The last is of values above every bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class AdapterStats:
    """What the requests and loads of one adapter have come to; or of the base model, or of all together."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    """Completions that ended."""
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    """Requests that were not accepted."""
    evictions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS[1:], 0))
    """How often it gave way to others, by the tier that it left."""
    num_loads: int = 0
    """How often it came to host memory."""
    load_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOAD_STAGES, 0.0))
    """In all loads together."""
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, TTFT_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    queue_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))

    @property
    def loads(self) -> dict[str, tuple[int, float]]:
        """By stage: how many, and their seconds in all. Empty before the first."""
        return {stage: (self.num_loads, total) for stage, total in self.load_seconds.items() if self.num_loads}


@dataclass(slots=True)
class RequestStats:
    """What is told of all completions together, once each has ended."""

    e2e_latency: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    load_wait: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    prefill_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    decode_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    inference_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    time_per_output_token: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, LENGTH_BOUNDS))
    generation_tokens: Histogram = field(default_factory=partial(Histogram, LENGTH_BOUNDS))


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_requests_running: int
    num_requests_waiting: int
    num_kv_blocks: int
    block_size: int
    kv_cache_usage: float
    """Share of KV blocks in use by running requests, from 0 to 1."""
    num_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens found there."""
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    resident_adapters: tuple[str, ...]
    num_lora_pages: int
    num_free_lora_pages: int
    tiers: dict[str, str]
    """Where each registered adapter is: `device`, `host` or `disk`."""
    load_failures: dict[str, int]
    """By the nearest class of `LOAD_FAILURES`."""
    all: AdapterStats
    """Since the start, as is all that is not about this moment."""
    requests: RequestStats
    by_adapter: dict[str, AdapterStats]
    """By adapter as far as they are told apart, the base model under its name."""
    max_adapter_labels: int
    last_step_age_s: float
    """Seconds since a step last went through every rank."""

    @property
    def prompt_tokens(self) -> int:
        return self.all.prompt_tokens

    @property
    def generation_tokens(self) -> int:
        return self.all.generation_tokens

    @property
    def requests_succeeded(self) -> dict[str, int]:
        """Completions that came to their end, by reason."""
        return {reason: count for reason in ("stop", "length") if (count := self.all.finished[reason])}

    @property
    def cache_config(self) -> dict[tuple[str, str], int]:
        return {(str(self.block_size), str(self.num_kv_blocks)): 1}

    @property
    def adapter_tiers(self) -> dict[str, int]:
        """The tiers of adapters that are told apart, as numbers that rise with speed."""
        return {name: TIERS.index(tier) for name, tier in self.tiers.items() if name in self.by_adapter}

    @property
    def num_adapters(self) -> dict[str, int]:
        """By tier."""
        tiers = list(self.tiers.values())
        return {tier: tiers.count(tier) for tier in TIERS}

    @property
    def num_adapter_labels(self) -> int:
        return len(self.adapter_tiers)
