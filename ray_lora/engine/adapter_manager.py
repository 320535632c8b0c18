"""Which adapters are registered, and which of them are in host memory and on the device. Never sees a tensor.

A name points to an immutable version. A version lives while a name or a request holds it, at least on disk. Its place
in host memory and its pages may come and go with the need for room: never the first while a request holds it, never the
second while a running request uses them, and neither while a name that points to it is pinned.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ray_lora.adapter import MAX_WEIGHT, MIN_WEIGHT, AdapterInfo, AdapterManifest, Tier
from ray_lora.engine.adapter_pages import AdapterPages
from ray_lora.engine.adapter_version import Registration, Version, not_loaded, would_change
from ray_lora.engine.pin_limits import check_device_room, check_host_room
from ray_lora.errors import AdapterRejectedError, InvalidRequestError
from ray_lora.step import AdapterPlan


class AdapterManager:
    """Registers adapters, and says which of them give way when host memory or the device needs room."""

    def __init__(
        self,
        num_pages: int,
        max_resident: int,
        max_rank: int,
        max_host_bytes: int | None = None,
        now: Callable[[], float] = time.time,
        on_evict: Callable[[str | None, Tier], None] = lambda name, tier: None,
        base_weight: float = 1.0,
    ) -> None:
        """
        Args:
            on_evict: told the name, if it still has one, of each that leaves a tier to make room for others.
        """
        self.pages = AdapterPages(num_pages, max_resident, lambda version: self._tell_evicted(version, "device"))
        self.max_rank = max_rank
        self.max_host_bytes = max_host_bytes
        self.base_weight = base_weight
        self._names: dict[str, Registration] = {}
        self._versions: dict[str, Version] = {}
        self._dead: list[str] = []
        self._now = now
        self._on_evict = on_evict
        self._clock = 0

    @property
    def resident(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in list(self._names.values()) if entry.version.pages is not None)

    def get(self, name: str) -> Version:
        return self._entry(name).version

    def has_name(self, name: str) -> bool:
        """Safe to call from another thread than the engine's."""
        return name in self._names

    def list_adapters(self) -> list[AdapterInfo]:
        """Safe to call from another thread than the engine's."""
        return [entry.info() for entry in list(self._names.values())]

    def info(self, name: str) -> AdapterInfo:
        return self._entry(name).info()

    def is_registered(self, version: str) -> bool:
        """Whether a name or a request holds it. Safe to call from another thread than the engine's."""
        return version in self._versions

    def find_cold(self, name: str) -> AdapterManifest | None:
        """The adapter of this name, if it is registered and not in host memory."""
        entry = self._names.get(name)
        return entry.version.manifest if entry is not None and not entry.version.is_staged else None

    def take_idle(self, held: Iterable[str]) -> str | None:
        """Of the versions that the ranks hold, one that is dead, or the least recently used that may leave."""
        versions = {version: self._versions.get(version) for version in held}
        for name, version in versions.items():
            if version is None:
                return name
        idle = [version for version in versions.values() if version is not None and not version.keeps_staged]
        if not idle:
            return None
        oldest = min(idle, key=lambda version: version.last_used)
        oldest.is_staged = False
        self.pages.free(oldest)
        self._tell_evicted(oldest, "host")
        return oldest.manifest.version

    def mark_staged(self, version: str) -> None:
        """Every rank has the version in host memory again; nothing happens if it has died meanwhile."""
        if version in self._versions:
            self._stage(self._versions[version])

    def check_register(
        self, name: str, manifest: AdapterManifest, load_inplace: bool, expected_version: str | None = None
    ) -> bool:
        """Whether registering would change anything; false if the name already has this content.

        Raises:
            VersionConflictError: the name points to another version than `expected_version`.
            AdapterExistsError: the name has other content and `load_inplace` is not set.
            AdapterRejectedError: LoRA is off, or the rank is above `max_rank`.
            CapacityError: it does not fit into host memory beside what is pinned, or its name is pinned and the new
                content would leave others no room.
        """
        entry = self._names.get(name)
        current = entry.version.manifest.version if entry is not None else None
        if not would_change(name, current, manifest.version, load_inplace, expected_version):
            return False
        if self.pages.num_pages == 0:
            raise AdapterRejectedError("LoRA is off: max_loras is 0", "lora_path")
        if manifest.rank > self.max_rank:
            raise AdapterRejectedError(f"rank {manifest.rank} exceeds max_lora_rank {self.max_rank}", "r")
        pinned = self._pinned(instead_of=name)
        if entry is not None and entry.is_pinned:
            pinned[manifest.version] = manifest
            check_device_room(self.pages, self.max_rank, pinned)
        check_host_room(self.max_host_bytes, pinned, [manifest])
        return True

    def register(self, name: str, manifest: AdapterManifest) -> None:
        """Point `name` to a version that every rank has staged; requests on the previous one finish on it."""
        self._point(name, manifest)
        self._stage(self._versions[manifest.version])

    def register_cold(self, name: str, manifest: AdapterManifest) -> None:
        """Point `name` to a version that waits on disk, unless host memory has it."""
        self._point(name, manifest)

    def unregister(self, name: str) -> None:
        """Forget a name; requests that hold its version finish on it."""
        entry = self._entry(name)
        del self._names[name]
        self._drop_name(entry)

    def pin(self, name: str) -> None:
        """Keep a name's adapter in host memory and on the device, each from when it gets there.

        Raises:
            NotFoundError: there is none of that name.
            CapacityError: the pinned ones would leave no room for others.
        """
        entry = self._entry(name)
        if not entry.is_pinned:
            pinned = self._pinned() | {entry.version.manifest.version: entry.version.manifest}
            check_device_room(self.pages, self.max_rank, pinned)
            check_host_room(self.max_host_bytes, pinned, [version.manifest for version in self._versions.values()])
            entry.is_pinned = True
            entry.version.num_pins += 1

    def unpin(self, name: str) -> None:
        """Let a name's adapter give way again.

        Raises:
            NotFoundError: there is none of that name.
        """
        entry = self._entry(name)
        if entry.is_pinned:
            entry.is_pinned = False
            entry.version.num_pins -= 1

    def set_weight(self, name: str, weight: float) -> None:
        """Set a name's share of the service, from its next token on.

        Raises:
            InvalidRequestError, NotFoundError: the weight is out of range; there is none of that name.
        """
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidRequestError(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {weight}", "weight")
        self._entry(name).weight = weight

    def weight(self, name: str | None) -> float:
        """Of a name, also of one that was unregistered while requests ran on it; None is the base model."""
        if name is None:
            return self.base_weight
        return self._names[name].weight if name in self._names else 1.0

    def mark_used(self, name: str, at: float | None = None) -> None:
        """Tell that a request came for this name, now or at a time before."""
        self._entry(name).last_used_at = self._now() if at is None else at

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
        return self.pages.can_take(version)

    def activate(self, version: Version) -> AdapterPlan | None:
        """Keep a version's pages for one running request; returns what to page in, if it was not resident.

        Others give up their pages as needed. Ask `can_activate` first.
        """
        self._touch(version)
        version.num_running += 1
        return version.plan if self.pages.take(version) else None

    def deactivate(self, version: Version) -> None:
        """A running request no longer uses the version; its pages stay until the room is needed."""
        self._touch(version)
        version.num_running -= 1

    def check_integrity(self) -> None:
        """Assert that every page and slot is free or belongs to exactly one version, and that counts make sense."""
        for version in self._versions.values():
            assert version.num_names + version.num_requests > 0, "a dead version lingers"
            assert 0 <= version.num_running <= version.num_requests
            assert 0 <= version.num_pins <= version.num_names
            assert version.num_running == 0 or version.pages is not None, "running without pages"
            assert version.is_staged or version.pages is None, "on the device, and not in host memory"
            assert version.num_requests == 0 or version.is_staged, "a request's adapter has left host memory"
        self.pages.check_integrity(self._versions.values())

    def _entry(self, name: str) -> Registration:
        entry = self._names.get(name)
        if entry is None:
            raise not_loaded(name)
        return entry

    def _tell_evicted(self, version: Version, tier: Tier) -> None:
        self._on_evict(next((name for name, entry in self._names.items() if entry.version is version), None), tier)

    def _pinned(self, instead_of: str | None = None) -> dict[str, AdapterManifest]:
        """By version, of all names but one."""
        entries = [entry for entry in self._names.values() if entry.is_pinned and entry.name != instead_of]
        return {entry.version.manifest.version: entry.version.manifest for entry in entries}

    def _point(self, name: str, manifest: AdapterManifest) -> None:
        version = self._versions.setdefault(manifest.version, Version(manifest))
        previous = self._names.get(name)
        entry = Registration(name, version) if previous is None else replace(previous, version=version)
        version.num_names += 1
        version.num_pins += entry.is_pinned
        self._touch(version)
        self._names[name] = entry
        if previous is not None:
            self._drop_name(previous)

    def _stage(self, version: Version) -> None:
        version.num_stagings += not version.is_staged
        version.is_staged = True
        self._touch(version)  # whoever waits for it must not find it gone again

    def _touch(self, version: Version) -> None:
        self._clock += 1
        version.last_used = self._clock

    def _drop_name(self, entry: Registration) -> None:
        entry.version.num_names -= 1
        entry.version.num_pins -= entry.is_pinned
        self._bury_if_dead(entry.version)

    def _bury_if_dead(self, version: Version) -> None:
        if version.num_names == 0 and version.num_requests == 0:
            self.pages.free(version)
            del self._versions[version.manifest.version]
            self._dead.append(version.manifest.version)
