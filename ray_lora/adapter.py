"""What the host knows about an adapter once its files have been read and accepted."""

from dataclasses import dataclass
from typing import Literal

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

    @property
    def num_pages(self) -> int:
        return num_pages(self.rank)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One registered adapter, as `/v1/models` and `list_adapters` show it."""

    name: str
    version: str
    source: str
    rank: int
    num_pages: int
    resident: bool
    """Its pages are on the device now; otherwise they come up with its next request."""
    tier: Literal["device", "host", "disk"]
    """Where it is served from: device pages, every rank's host memory, or the store on disk."""
    num_requests: int
    """Waiting and running requests that hold this version."""
