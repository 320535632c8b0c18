"""Which adapters are registered, and which of them are in host memory and on the device. Never sees a tensor.

A name points to an immutable version. A version lives while a name or a request holds it, at least on disk. Its place
in host memory and its pages may come and go with the need for room: never the first while a request holds it, never the
second while a running request uses them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ray_lora.adapter import AdapterInfo, AdapterManifest
from ray_lora.errors import AdapterExistsError, AdapterRejectedError, NotFoundError, VersionConflictError
from ray_lora.step import AdapterPlan


@dataclass(slots=True, eq=False)
class Version:
    """One registered content. Held by names and by requests; `num_running` of the latter pin its pages."""

    manifest: AdapterManifest
    num_names: int = 0
    num_requests: int = 0
    num_running: int = 0
    is_staged: bool = True
    """Every rank has it in host memory, from where it is paged in."""
    pages: tuple[int, ...] | None = None
    slot: int = -1
    """Held together with the pages."""
    last_used: int = 0

    @property
    def plan(self) -> AdapterPlan:
        assert self.pages is not None, "planned while not resident"
        return AdapterPlan(self.manifest.version, self.pages, self.slot)


class AdapterManager:
    """Registers adapters and hands out pages of 16 ranks, and one of `max_resident` slots to each resident adapter."""

    def __init__(self, num_pages: int, max_resident: int, max_rank: int) -> None:
        self.num_pages = num_pages
        self.max_resident = max_resident
        self.max_rank = max_rank
        self._names: dict[str, Version] = {}
        self._versions: dict[str, Version] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(max_resident - 1, -1, -1))
        self._dead: list[str] = []
        self._clock = 0

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(name for name, version in list(self._names.items()) if version.pages is not None)

    def get(self, name: str) -> Version:
        version = self._names.get(name)
        if version is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")
        return version

    def has_name(self, name: str) -> bool:
        """Safe to call from another thread than the engine's."""
        return name in self._names

    def list_adapters(self) -> list[AdapterInfo]:
        """Safe to call from another thread than the engine's."""
        return [_info(name, version) for name, version in list(self._names.items())]

    def info(self, name: str) -> AdapterInfo:
        return _info(name, self.get(name))

    def is_registered(self, version: str) -> bool:
        """Whether a name or a request holds it."""
        return version in self._versions

    def find_cold(self, name: str) -> AdapterManifest | None:
        """The adapter of this name, if it is registered and not in host memory."""
        version = self._names.get(name)
        return version.manifest if version is not None and not version.is_staged else None

    def take_idle(self, held: Iterable[str]) -> str | None:
        """Of the versions that the ranks hold, one that is dead, or the least recently used that no request holds."""
        versions = {version: self._versions.get(version) for version in held}
        for name, version in versions.items():
            if version is None:
                return name
        idle = [version for version in versions.values() if version is not None and version.num_requests == 0]
        if not idle:
            return None
        oldest = min(idle, key=lambda version: version.last_used)
        oldest.is_staged = False
        self._free_pages(oldest)
        return oldest.manifest.version

    def mark_staged(self, version: str) -> None:
        """Every rank has the version in host memory again; nothing happens if it has died meanwhile."""
        if version in self._versions:
            self._versions[version].is_staged = True

    def check_register(
        self, name: str, manifest: AdapterManifest, load_inplace: bool, expected_version: str | None = None
    ) -> bool:
        """Whether registering would change anything; false if the name already has this content.

        Raises:
            VersionConflictError: the name points to another version than `expected_version`.
            AdapterExistsError: the name has other content and `load_inplace` is not set.
            AdapterRejectedError: LoRA is off, or the rank is above `max_rank`.
        """
        current = self._names.get(name)
        if current is not None and current.manifest.version == manifest.version:
            return False
        if expected_version is not None and (current is None or current.manifest.version != expected_version):
            points_to = "nothing" if current is None else f"version {current.manifest.version}"
            raise VersionConflictError(f"'{name}' points to {points_to}, not to {expected_version}", "expected_version")
        if current is not None and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{name}' has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                "lora_name",
            )
        if self.num_pages == 0:
            raise AdapterRejectedError("LoRA is off: max_loras is 0", "lora_path")
        if manifest.rank > self.max_rank:
            raise AdapterRejectedError(f"rank {manifest.rank} exceeds max_lora_rank {self.max_rank}", "r")
        return True

    def register(self, name: str, manifest: AdapterManifest) -> None:
        """Point `name` to a version that every rank has staged; requests on the previous one finish on it."""
        version = self._versions.setdefault(manifest.version, Version(manifest))
        version.is_staged = True
        version.num_names += 1
        self._touch(version)
        previous = self._names.get(name)
        self._names[name] = version
        if previous is not None:
            self._drop_name(previous)

    def unregister(self, name: str) -> None:
        """Forget a name; requests that hold its version finish on it."""
        version = self.get(name)
        del self._names[name]
        self._drop_name(version)

    def hold(self, version: Version) -> None:
        """A request needs this version until `let_go`."""
        version.num_requests += 1

    def let_go(self, version: Version) -> None:
        """A request is done with the version."""
        version.num_requests -= 1
        self._bury_if_dead(version)

    def take_dead(self) -> list[str]:
        """Versions that neither a name nor a request holds any more, each told once; no later plan names them."""
        dead, self._dead = self._dead, []
        return dead

    def can_activate(self, version: Version) -> bool:
        """Whether `activate` would succeed."""
        if version.pages is not None:
            return True
        idle = [other for other in self._versions.values() if other.pages is not None and other.num_running == 0]
        num_busy = sum(other.pages is not None for other in self._versions.values()) - len(idle)
        pages = len(self._free) + sum(len(other.pages or ()) for other in idle)
        return version.manifest.num_pages <= pages and num_busy < self.max_resident

    def activate(self, version: Version) -> AdapterPlan | None:
        """Pin a version's pages for one running request; returns what to page in, if it was not resident.

        The least recently used idle adapters give up their pages as needed. Ask `can_activate` first.
        """
        self._touch(version)
        version.num_running += 1
        if version.pages is not None:
            return None
        resident = sorted(
            (other for other in self._versions.values() if other.pages is not None), key=lambda v: v.last_used
        )
        num_resident = len(resident)
        for other in resident:
            if len(self._free) >= version.manifest.num_pages and num_resident < self.max_resident:
                break
            if other.num_running == 0:
                self._free_pages(other)
                num_resident -= 1
        version.pages = tuple(self._free.pop() for _ in range(version.manifest.num_pages))
        version.slot = self._free_slots.pop()
        return version.plan

    def deactivate(self, version: Version) -> None:
        """A running request no longer uses the version; its pages stay until the room is needed."""
        self._touch(version)
        version.num_running -= 1

    def check_integrity(self) -> None:
        """Assert that every page and slot is free or belongs to exactly one version, and that counts make sense."""
        pages, slots = list(self._free), list(self._free_slots)
        for version in self._versions.values():
            assert version.num_names + version.num_requests > 0, "a dead version lingers"
            assert 0 <= version.num_running <= version.num_requests
            assert version.num_running == 0 or version.pages is not None, "running without pages"
            assert version.is_staged or version.pages is None, "on the device, and not in host memory"
            assert version.num_requests == 0 or version.is_staged, "a request's adapter has left host memory"
            if version.pages is not None:
                pages.extend(version.pages)
                slots.append(version.slot)
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or shared"
        assert sorted(slots) == list(range(self.max_resident)), "a slot is lost or shared"
        assert sum(version.pages is not None for version in self._versions.values()) <= self.max_resident

    def _touch(self, version: Version) -> None:
        self._clock += 1
        version.last_used = self._clock

    def _drop_name(self, version: Version) -> None:
        version.num_names -= 1
        self._bury_if_dead(version)

    def _bury_if_dead(self, version: Version) -> None:
        if version.num_names == 0 and version.num_requests == 0:
            self._free_pages(version)
            del self._versions[version.manifest.version]
            self._dead.append(version.manifest.version)

    def _free_pages(self, version: Version) -> None:
        if version.pages is not None:
            self._free.extend(reversed(version.pages))
            self._free_slots.append(version.slot)
            version.pages = None


def _info(name: str, version: Version) -> AdapterInfo:
    manifest = version.manifest
    return AdapterInfo(
        name=name,
        version=manifest.version,
        source=manifest.source,
        rank=manifest.rank,
        num_pages=manifest.num_pages,
        resident=version.pages is not None,
        tier="device" if version.pages is not None else "host" if version.is_staged else "disk",
        num_requests=version.num_requests,
    )
