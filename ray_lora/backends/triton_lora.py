"""Launches the Triton kernels of `add_lora_`, for the backends whose device Triton compiles for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ray_lora.adapter import PAGE_RANK
from ray_lora.backends.lora_blocks import BLOCKS, PAGE_BOUNDS
from ray_lora.backends.lora_plan import MIN_CHUNK, LoraPlan, plan_lora
from ray_lora.backends.triton_lora_kernels import add_lora_decode, add_lora_prefill
from ray_lora.ops.lora import Segments, check_add_lora

_NO_ROWS = Segments(*(torch.empty(0, dtype=torch.int32) for _ in range(4)))


class TritonLora:
    """`add_lora_` on an NPU or a GPU. Importing this module imports triton, so a backend does it when it is made."""

    decode_kernel, prefill_kernel = add_lora_decode, add_lora_prefill

    def __init__(self, target: str, decode_programs: int, prefill_programs: int) -> None:
        """
        Args:
            target: `npu` or `cuda`.
            decode_programs, prefill_programs: programs of a launch at most, each looping over tiles: the vector and
                cube cores of an NPU; on a GPU any large number.
        """
        self._blocks = BLOCKS[target]
        self._programs = decode_programs, prefill_programs
        self._slices: dict[tuple[int, ...], Tensor] = {}

    def compile(self, max_adapter_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        """Launch each kernel that adapters of so many pages can need, once: no step then waits for a compiler.

        Triton compiles anew for types and for what 16 divides, and not for sizes, so small layers do.
        """
        for num_pages in (bound + 1 for bound in (0, *PAGE_BOUNDS) if bound < max_adapter_pages):
            y, x = (torch.zeros(MIN_CHUNK + 1, 32, dtype=dtype, device=device) for _ in range(2))
            pool_a = torch.zeros(num_pages, 1, PAGE_RANK, 32, dtype=dtype, device=device)
            tables = (range(MIN_CHUNK + 1), (0, MIN_CHUNK + 1), range(num_pages), (0, num_pages))
            segments = Segments(*(torch.tensor(values, dtype=torch.int32, device=device) for values in tables))
            plan = self.plan(segments, (0, MIN_CHUNK, MIN_CHUNK + 1))
            self.add_lora_(y, x, pool_a, pool_a.view(num_pages, PAGE_RANK, 32), (0, 32), plan)

    def plan(self, segments: Segments, query_starts: Sequence[int] | None = None) -> LoraPlan:
        """Cut a step's rows into tiles; see `plan_lora`."""
        return plan_lora(segments, self._blocks, query_starts)

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], plan: LoraPlan
    ) -> None:
        """As `ray_lora.ops.lora.add_lora_reference_`: one launch, two where the step mixes decode and prefill, or none.

        Raises:
            ValueError: shapes, types or strides that break the contract. Indices were the host's own and stay unread.
        """
        check_add_lora(y, x, pool_a, pool_b, slices, _NO_ROWS)
        if y.stride(1) != 1 or x.stride(1) != 1:
            raise ValueError(f"rows of x and y must be contiguous: strides are {x.stride()} and {y.stride()}")
        offsets = self._slices.get(slices)
        if offsets is None:
            offsets = self._slices[slices] = torch.tensor(slices, dtype=torch.int32).to(y.device)
        sizes = (y.stride(0), x.stride(0), x.shape[1], y.shape[1], len(slices) - 1)
        tensors = (y, x, pool_a, pool_b, offsets)
        if plan.num_decode_tiles:
            work, blocks = plan.num_decode_tiles * (len(slices) - 1), self._blocks.decode[plan.max_pages]
            self.decode_kernel[(min(work, self._programs[0]),)](
                *tensors, plan.rows, plan.decode_tiles, plan.pages, *sizes, work,
                blocks.max_rows, plan.max_pages, blocks.block_k, blocks.block_n,
            )  # fmt: skip
        if plan.num_prefill_tiles:
            work, blocks = plan.num_prefill_tiles * (len(slices) - 1), self._blocks.prefill[plan.max_pages]
            self.prefill_kernel[(min(work, self._programs[1]),)](
                *tensors, plan.prefill_tiles, plan.pages, *sizes, work,
                blocks.max_rows, plan.max_pages, blocks.block_k, blocks.block_n,
            )  # fmt: skip
