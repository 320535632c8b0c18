"""The constants that the Triton kernels of `add_lora_` are compiled with, by target."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of one kernel's loops; powers of two."""

    max_rows: int
    """Rows in a tile."""
    block_k: int
    """Inputs that are read at a time."""
    block_n: int
    """Outputs that are computed at a time."""


@dataclass(frozen=True, slots=True)
class TargetBlocks:
    """Both kernels' blocks by `max_pages`, which bounds the pages of an adapter."""

    decode: dict[int, Blocks]
    prefill: dict[int, Blocks]


PAGE_BOUNDS = (1, 2, 4, 8, 16, 32)
"""Values of `max_pages`: ranks up to 512."""

BLOCKS = {
    "npu": TargetBlocks(
        decode=dict.fromkeys(PAGE_BOUNDS, Blocks(4, 512, 512)),
        prefill=dict.fromkeys(PAGE_BOUNDS, Blocks(64, 256, 128)) | {16: Blocks(32, 256, 128), 32: Blocks(16, 256, 128)},
    ),
    "cuda": TargetBlocks(
        decode=dict.fromkeys(PAGE_BOUNDS, Blocks(4, 64, 64)),
        prefill=dict.fromkeys(PAGE_BOUNDS, Blocks(32, 64, 32)) | dict.fromkeys((16, 32), Blocks(16, 64, 32)),
    ),
}
"""On an NPU as large as double buffers leave room for; on a GPU as large as spills next to no register.

Decode has the same blocks and prefill the same `block_k` for all bounds: they fix the order of a row's sums, which must
not change with the pages that another adapter of the step has.
"""
