"""The kernels that launches by `ray_lora/backends/triton_lora.py` have Triton compile."""

from dataclasses import dataclass
from typing import Any

from ray_lora.backends.lora_blocks import BLOCKS, PAGE_BOUNDS, Blocks

FORMS = ("decode", "prefill")
TABLES = ("slices", "rows", "tiles", "pages")
TENSORS = ("y", "x", "pool_a", "pool_b")


@dataclass(frozen=True, slots=True)
class Specialization:
    """One compiled kernel. Sizes of layers are arguments, so it serves every layer whose sizes are multiples of 16."""

    form: str
    target: str
    """`npu` or `cuda`."""
    dtype: str
    """Triton's name: `bf16`, `fp16` or `fp32`."""
    max_pages: int
    blocks: Blocks

    def __str__(self) -> str:
        blocks = self.blocks
        return f"{self.form}-{self.dtype}-pages{self.max_pages}-{blocks.max_rows}x{blocks.block_k}x{blocks.block_n}"

    @property
    def kernel(self) -> Any:
        from ray_lora.backends import triton_lora_kernels

        return getattr(triton_lora_kernels, f"add_lora_{self.form}")

    @property
    def constants(self) -> dict[str, int]:
        blocks = self.blocks
        return {
            "MAX_ROWS": blocks.max_rows,
            "MAX_PAGES": self.max_pages,
            "BLOCK_K": blocks.block_k,
            "BLOCK_N": blocks.block_n,
        }

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        types = dict.fromkeys(TENSORS, f"*{self.dtype}") | dict.fromkeys(TABLES, "*i32")
        types |= dict.fromkeys(self.constants, "constexpr")
        return {name: types.get(name, "i32") for name in self.kernel.arg_names}

    @property
    def multiples_of_16(self) -> list[int]:
        """Positions of the arguments that a launch finds to be multiples of 16: pointers, strides and sizes."""
        unspecialized = {"num_slices", "num_work", *self.constants}
        return [index for index, name in enumerate(self.kernel.arg_names) if name not in unspecialized]


def specialize(form: str, target: str, dtype: str, max_pages: int) -> Specialization:
    return Specialization(form, target, dtype, max_pages, getattr(BLOCKS[target], form)[max_pages])


def served(target: str) -> list[Specialization]:
    """Every kernel that can be launched for half types and ranks up to 512."""
    return [
        specialize(form, target, dtype, max_pages)
        for form in FORMS
        for dtype in ("bf16", "fp16")
        for max_pages in PAGE_BOUNDS
    ]
