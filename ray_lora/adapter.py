"""What the host knows about an adapter once its files have been read and accepted."""

from dataclasses import dataclass, field
from typing import Literal

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Of a name's share of the service: an adapter of weight 2 is served twice as many tokens as one of weight 1, while
requests for both wait."""

PAGE_RANK = 16
"""Ranks in one page: the tile of the cube unit, and the only rank the kernels know."""


def num_pages(rank: int) -> int:
    """Pages that an adapter of this rank occupies, the last one padded with zero rows."""
    return -(-rank // PAGE_RANK)


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """An adapter that was read, checked and copied to the store. Filled by `adapters/`, read by every layer above.

    `version` is the digest of the content, so equal manifests mean equal weights whatever the name or the path.
    """

    version: str
    """SHA-256, in hex, over the configuration's meaning and every tensor."""
    path: str
    """Directory in the content-addressed store; the source may change or vanish."""
    source: str
    """Where it was loaded from, as the caller wrote it."""
    rank: int
    """Largest rank of any module."""
    modules: tuple[str, ...]
    """Projections that it changes in at least one layer, e.g. `("self_attn.q_proj", "mlp.down_proj")`, and the full
    names of other modules."""
    num_bytes: int
    """Size of its tensors in the file."""
    shard_bytes: int
    """Host memory that it takes on each rank; on the largest, if they differ."""
    shard_digests: tuple[str, ...] = ()
    """By rank: the digest of its part, cut and converted; what it must come to hold at every load."""
    fetch_s: float = field(default=0.0, compare=False)
    """How long it took to fetch what was read; next to nothing for a local directory."""
    parse_s: float = field(default=0.0, compare=False)
    """How long it took to copy and check that."""

    @property
    def num_pages(self) -> int:
        return num_pages(self.rank)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter, on its way to another store."""

    config: bytes
    """Of `adapter_config.json`."""
    weights: bytes
    """Of `adapter_model.safetensors`."""


@dataclass(frozen=True, slots=True)
class StagingTimes:
    """Seconds in which an adapter came to every rank, as rank 0 saw it."""

    stage_s: float
    """Until rank 0 had sent every rank its part and checked its own."""
    barrier_s: float
    """From then until all ranks agreed on what they hold."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an adapter is not taken."""

    message: str
    param: str | None
    """The field, file or tensor at fault."""


@dataclass(frozen=True, slots=True)
class AdapterValidation:
    """What a load would do."""

    manifest: AdapterManifest | None
    """None if it would be refused for what it is."""
    refusals: tuple[Refusal, ...]
    """Empty if it would be taken."""


Tier = Literal["device", "host", "disk"]
"""Where every rank has an adapter: in device pages, in host memory, or only in the store on disk."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier is, on each rank of a replica."""

    num_adapters: int
    max_adapters: int
    num_bytes: int
    max_bytes: int | None
    """None if their number alone is limited."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One registered name, as `/v1/adapters` and `list_adapters` show it."""

    name: str
    version: str
    source: str
    rank: int
    num_pages: int
    num_bytes: int
    """Host memory that it takes on each rank."""
    tier: Tier
    pinned: bool
    """Stays in host memory and on the device once it is there."""
    weight: float
    """Of its share of the service, beside others'."""
    num_running: int
    """Running requests of this version, under whichever name."""
    num_waiting: int
    """Requests of this version that wait for room."""
    num_loads: int
    """How often this version came from disk to host memory."""
    num_page_ins: int
    """How often it came from there to the device."""
    last_used: float | None
    """When a request last came for this name, in seconds since the epoch."""
