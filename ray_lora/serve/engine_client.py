"""What the API layer needs of whoever generates: the replicas behind a handle, or a test's fake."""

from collections.abc import AsyncGenerator
from typing import Protocol

from ray_lora.adapter import AdapterInfo, AdapterValidation, Tier, TierUse
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo


class EngineClient(Protocol):
    """One model, however many replicas serve it. Every error is a `RayLoraError`."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's chunks; closing the generator cancels the request where it runs."""

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        """Load an adapter on every replica; false if all of them had this content under this name."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on every replica."""

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo:
        """Pin or unpin an adapter on every replica."""

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        """Set an adapter's share of the service on every replica."""

    async def validate_adapter(self, path: str, name: str | None) -> AdapterValidation:
        """What a load would do."""

    async def list_adapters(self) -> list[AdapterInfo]: ...

    async def adapter_tiers(self) -> list[dict[Tier, TierUse]]:
        """One entry per replica."""

    async def stats(self) -> dict[str, EngineStats]:
        """By the replica's id."""

    async def model_info(self) -> ModelInfo: ...

    async def check_health(self) -> None:
        """Raise EngineDeadError if a replica is gone, or does not answer, or its ranks do not."""

    async def missing(self) -> list[str]:
        """What keeps requests from being answered as they should, in words; nothing if they can be."""
