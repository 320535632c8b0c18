"""Who has the device's pages and slots; the least recently used gives its own up when another needs them."""

from collections.abc import Callable, Iterable

from ray_lora.adapter import TierUse
from ray_lora.engine.adapter_version import Version


class AdapterPages:
    """Hands out pages of 16 ranks, and one of `max_resident` slots to each adapter that has pages."""

    def __init__(self, num_pages: int, max_resident: int, on_evict: Callable[[Version], None]) -> None:
        """
        Args:
            on_evict: told of each that gives its pages up to another.
        """
        self.num_pages = num_pages
        self.max_resident = max_resident
        self._on_evict = on_evict
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_resident - 1, -1, -1))
        self._resident: set[Version] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def use(self, page_bytes: int) -> TierUse:
        num_used = self.num_pages - len(self._free)
        return TierUse(len(self._resident), self.max_resident, num_used * page_bytes, self.num_pages * page_bytes)

    def can_take(self, version: Version) -> bool:
        """Whether `take` would succeed."""
        if version.pages is not None:
            return True
        idle = [other for other in self._resident if not other.keeps_pages]
        pages = len(self._free) + sum(len(other.pages or ()) for other in idle)
        return version.manifest.num_pages <= pages and len(self._resident) - len(idle) < self.max_resident

    def take(self, version: Version) -> bool:
        """Give a version its pages; false if it had them. Ask `can_take` first."""
        if version.pages is not None:
            return False
        for other in sorted(self._resident, key=lambda other: other.last_used):
            if len(self._free) >= version.manifest.num_pages and self._free_slots:
                break
            if not other.keeps_pages:
                self.free(other)
                self._on_evict(other)
        version.pages = tuple(self._free.pop() for _ in range(version.manifest.num_pages))
        version.slot = self._free_slots.pop()
        version.num_page_ins += 1
        self._resident.add(version)
        return True

    def free(self, version: Version) -> None:
        """Take a version's pages back, if it has any."""
        if version.pages is not None:
            self._free.extend(reversed(version.pages))
            self._free_slots.append(version.slot)
            version.pages = None
            self._resident.discard(version)

    def check_integrity(self, versions: Iterable[Version]) -> None:
        """Assert that every page and slot is free or belongs to exactly one of all versions there are."""
        resident = [version for version in versions if version.pages is not None]
        pages = [page for version in resident for page in version.pages or ()]
        slots = [version.slot for version in resident]
        assert sorted(pages + self._free) == list(range(self.num_pages)), "a page is lost or shared"
        assert sorted(slots + self._free_slots) == list(range(self.max_resident)), "a slot is lost or shared"
        assert set(resident) == self._resident
