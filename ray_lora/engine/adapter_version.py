"""What the engine knows of one adapter: a name, and the immutable content it points to."""

from dataclasses import dataclass

from ray_lora.adapter import AdapterInfo, AdapterManifest
from ray_lora.errors import AdapterExistsError, NotFoundError, VersionConflictError
from ray_lora.step import AdapterPlan


def would_change(
    name: str, current: str | None, version: str, load_inplace: bool, expected_version: str | None
) -> bool:
    """Whether a load of `version` changes what `name` points to, which is `current` now.

    Raises:
        VersionConflictError: that is not `expected_version`.
        AdapterExistsError: it is other content, and `load_inplace` is not set.
    """
    if current == version:
        return False
    if expected_version is not None and current != expected_version:
        points_to = "nothing" if current is None else f"version {current}"
        raise VersionConflictError(f"'{name}' points to {points_to}, not to {expected_version}", "expected_version")
    if current is not None and not load_inplace:
        raise AdapterExistsError(
            f"The lora adapter '{name}' has already been loaded. "
            "If you want to load the adapter in place, set 'load_inplace' to True.",
            "lora_name",
        )
    return True


def not_loaded(name: str) -> NotFoundError:
    return NotFoundError(f"The lora adapter '{name}' cannot be found.", "lora_name")


@dataclass(slots=True, eq=False)
class Version:
    """One registered content. Held by names and by requests; `num_running` of the latter use its pages."""

    manifest: AdapterManifest
    num_names: int = 0
    num_pins: int = 0
    """Names that are pinned."""
    num_requests: int = 0
    num_running: int = 0
    is_staged: bool = False
    """Every rank has it in host memory, from where it is paged in."""
    pages: tuple[int, ...] | None = None
    slot: int = -1
    """Held together with the pages."""
    last_used: int = 0
    """On the manager's own clock, which counts uses."""
    num_stagings: int = 0
    num_page_ins: int = 0

    @property
    def keeps_pages(self) -> bool:
        """Whether its pages, once it has them, are not for others."""
        return self.num_running > 0 or self.num_pins > 0

    @property
    def keeps_staged(self) -> bool:
        """Whether it stays in host memory, once it is there."""
        return self.num_requests > 0 or self.num_pins > 0

    @property
    def plan(self) -> AdapterPlan:
        assert self.pages is not None, "planned while not resident"
        return AdapterPlan(self.manifest.version, self.pages, self.slot)


@dataclass(slots=True, eq=False)
class Registration:
    """A name that requests may give."""

    name: str
    version: Version
    is_pinned: bool = False
    weight: float = 1.0
    last_used_at: float | None = None
    """Seconds since the epoch."""

    def info(self) -> AdapterInfo:
        version, manifest = self.version, self.version.manifest
        return AdapterInfo(
            name=self.name,
            version=manifest.version,
            source=manifest.source,
            rank=manifest.rank,
            num_pages=manifest.num_pages,
            num_bytes=manifest.shard_bytes,
            tier="device" if version.pages is not None else "host" if version.is_staged else "disk",
            pinned=self.is_pinned,
            weight=self.weight,
            num_running=version.num_running,
            num_waiting=version.num_requests - version.num_running,
            num_loads=version.num_stagings,
            num_page_ins=version.num_page_ins,
            last_used=self.last_used_at,
        )
