"""What the backends of accelerators share: Triton's kernels for `add_lora_`, and tables at fixed addresses."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ray_lora.backends.base import Backend
from ray_lora.backends.static_tables import CopyEvent, StaticTables, TiledSegments, table_capacities
from ray_lora.backends.triton_lora import TritonLora
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepLimits


class TritonBackend(Backend, ABC):
    """One device of this process, of a kind that Triton compiles for under this backend's name."""

    mixes_dtypes = False
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    """What attention accepts."""

    def __init__(self, device: str) -> None:
        """
        Raises:
            ConfigError: there is no such device.
        """
        super().__init__(device)
        decode_programs, prefill_programs = self.open_device()
        self._lora = TritonLora(self.name, decode_programs, prefill_programs)
        self._static: StaticTables | None = None

    @abstractmethod
    def open_device(self) -> tuple[int, int]:
        """Make the device ready; how many programs a launch has at most, see `TritonLora`."""

    @abstractmethod
    def copy_event(self) -> CopyEvent | None:
        """See `StaticTables`."""

    def reserve(self, limits: StepLimits, dtype: torch.dtype) -> None:
        self._static = StaticTables(table_capacities(limits), self.device, self.copy_event())
        self._lora.compile(limits.max_adapter_pages, dtype, self.device)

    def allocate_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device)

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> None:
        assert isinstance(segments, TiledSegments), "place comes first"
        self._lora.add_lora_(y, x, pool_a, pool_b, slices, segments.plan)
