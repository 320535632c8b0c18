"""The LoRA kernels by their reference, launched as Triton launches them: from addresses and numbers alone."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_lora.adapter import PAGE_RANK
from ray_lora.backends.triton_lora import TritonLora
from ray_lora.ops.lora import Segments, add_lora_reference_


class Pointer(NamedTuple):
    """All that a launch takes of a tensor."""

    address: int
    dtype: torch.dtype

    def tensor(self, *shape: int, stride: int = 0) -> Tensor:
        """What lies there, rows `stride` elements apart."""
        strides = (stride or shape[-1], 1) if len(shape) == 2 else torch.empty(shape, device="meta").stride()
        size = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
        buffer = (ctypes.c_char * (size * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(buffer, dtype=self.dtype).as_strided(shape, strides)

    def table(self, num_entries: int) -> list[int]:
        assert self.address, "the address of an empty tensor"
        return self.tensor(num_entries).tolist() if num_entries else []


class Kernel:
    """One of both; `kernel[grid](...)` runs it."""

    def __init__(self, has_rows: bool) -> None:
        self._has_rows = has_rows

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid[0] > 0

        def launch(*args: Any) -> None:
            passed = tuple(Pointer(arg.data_ptr(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args)
            self.run(*passed)

        return launch

    def run(self, y: Pointer, x: Pointer, pool_a: Pointer, pool_b: Pointer, slices: Pointer, *rest: Any) -> None:
        (rows,) = rest[:1] if self._has_rows else (None,)
        tiles, pages, *sizes = rest[self._has_rows :]
        stride_y, stride_x, in_features, out_features, num_slices, num_work, max_rows, max_pages, *_ = sizes
        table = tiles.table(num_work // num_slices * 4)
        for first, last, first_page, last_page in zip(*[iter(table)] * 4, strict=True):
            assert last - first <= max_rows
            assert last_page - first_page <= max_pages
            if first == last:
                continue
            members = rows.table(last)[first:] if rows is not None else list(range(first, last))
            held = pages.table(last_page)[first_page:]
            num_rows, num_pages = max(members) + 1, max(held) + 1
            parts = (members, [0, len(members)], held, [0, len(held)])
            add_lora_reference_(
                y.tensor(num_rows, out_features, stride=stride_y),
                x.tensor(num_rows, in_features, stride=stride_x),
                pool_a.tensor(num_pages, num_slices, PAGE_RANK, in_features),
                pool_b.tensor(num_pages, PAGE_RANK, out_features),
                tuple(slices.table(num_slices + 1)),
                Segments(*(torch.tensor(part, dtype=torch.int32) for part in parts)),
            )


class LaunchedLora(TritonLora):
    """Triton's interpreter is slow."""

    decode_kernel, prefill_kernel = Kernel(has_rows=True), Kernel(has_rows=False)
