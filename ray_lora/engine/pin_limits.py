"""What is pinned leaves room for others."""

from collections.abc import Iterable, Mapping

from ray_lora.adapter import AdapterManifest, num_pages
from ray_lora.engine.adapter_pages import AdapterPages
from ray_lora.errors import CapacityError


def check_device_room(pages: AdapterPages, max_rank: int, pinned: Mapping[str, AdapterManifest]) -> None:
    """On the device there must be room for another one, whatever its rank.

    Raises:
        CapacityError: there is none.
    """
    left, needed = pages.num_pages - sum(each.num_pages for each in pinned.values()), num_pages(max_rank)
    if len(pinned) >= pages.max_resident:
        raise CapacityError(f"pinning {len(pinned)} of max_loras {pages.max_resident} leaves none for others")
    if left < needed:
        raise CapacityError(
            f"pinning would leave {left} of {pages.num_pages} pages; an adapter of max_lora_rank {max_rank} "
            f"needs {needed}"
        )


def check_host_room(
    max_host_bytes: int | None, pinned: Mapping[str, AdapterManifest], others: Iterable[AdapterManifest]
) -> None:
    """In host memory there must be room for each of the others beside the pinned ones.

    Raises:
        CapacityError: there is none.
    """
    if max_host_bytes is None:
        return
    taken = sum(each.shard_bytes for each in pinned.values())
    largest = max((each.shard_bytes for each in others if each.version not in pinned), default=0)
    if taken + largest > max_host_bytes:
        raise CapacityError(
            f"{taken} bytes of pinned adapters and {largest} of another one exceed max_cpu_lora_bytes {max_host_bytes}"
        )
