"""What the model needs from a device. Here is the reference of everything; a device overrides what it does better."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ray_lora.ops.attention import (
    AttentionTables,
    paged_attention_reference,
    rms_norm_reference,
    rotary_and_cache_reference_,
)
from ray_lora.ops.elementwise import add_rms_norm_reference_, silu_and_mul_reference
from ray_lora.ops.lora import Segments, add_lora_reference_
from ray_lora.ops.scale_shift import SlotRows, scale_shift_reference_
from ray_lora.ops.step_tables import StepLimits, StepTables
from ray_lora.ops.vocabulary_change import VocabularyChange, change_embedding_reference_, change_logits_reference_

Tables = TypeVar("Tables", bound=StepTables)


class Linear:
    """`x -> x @ weight.T + bias` for one weight [out_features, in_features], kept in whatever layout suits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight [num_ids, in_features]: what an embedding that is tied to this layer looks up."""
        return torch.nn.functional.embedding(ids, self.weight)


class Stream(Protocol):
    """A device's queue of work, which it does in order; torch's streams are such."""

    def record_event(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Streams:
    """Two queues of a device, that of the steps and one for copies beside them."""

    steps: Stream
    copies: Stream
    within: Callable[[Stream], AbstractContextManager[Any]]
    """Where work is queued meanwhile; at other times it is with the steps."""


class Backend:
    """The references of `ops/` on any torch device: slow, and the truth that other backends are compared with."""

    name = "reference"
    collective = "gloo"
    """torch.distributed's name for the library that joins the ranks."""
    gathers_to_all = False
    """Whether that library lacks a gather to one rank."""
    captures = False
    """Whether `capture` saves launches."""
    mixes_dtypes = True
    """Whether `add_lora_` takes pages of another type than the activations."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def join_reduce(
        self, group: dist.ProcessGroup, rank: int, size: int, timeout_s: float
    ) -> Callable[[Tensor], None] | None:
        """What sums float32 tensors among the ranks faster than `group`, if there is such; every rank must call it."""
        return None

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes of the device that are free, and all of them; None where caches are not sized by the device."""
        return None

    def streams(self) -> Streams | None:
        """None where a copy to the device is done when the call returns."""
        return None

    def pinned(self, x: Tensor) -> Tensor:
        """A tensor in host memory from which copies to the device do not keep the host; may be `x`. From any thread."""
        return x

    def enter_thread(self) -> None:
        """Called first in the thread that executes steps, which may not be the one that made this backend."""

    def check_model(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """Called before anything is loaded, with the heads of one rank.

        Raises:
            ConfigError: this backend's attention does not take them, or such blocks, or that type.
        """

    def reserve(self, limits: StepLimits, dtype: torch.dtype) -> None:
        """Get ready for any step within `limits`, with activations of that type."""

    def place(self, step: Tables) -> Tables:
        """Bring a step's tables from the host to the device, as this backend's operators want them."""
        return step if self.device.type == "cpu" else step.to(self.device)

    def capture(self, step: Tables, forward: Callable[[Tables], Tensor]) -> Callable[[Tables], Tensor]:
        """Record what `forward` launches for a decode step; the result, given another of that shape, runs it again.

        Both steps are on the host, and of one row a sequence; those with segments have them for every linear. What the
        result returns holds until any captured step runs next.
        """
        return lambda other: forward(self.place(other))

    def linear(self, weight: Tensor, bias: Tensor | None, tied: bool = False) -> Linear:
        """Prepare a linear layer; weight [out_features, in_features]. Only a `tied` one is asked for rows."""
        return Linear(weight, bias)

    def allocate_kv_cache(
        self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, in the layout that this backend's attention reads."""
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))  # type: ignore[return-value]

    def release_unused_memory(self) -> None:
        """Give back what loading the model has left over."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_reference(x, weight, eps)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm_reference_(residual, x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul_reference(gate_up)

    def rotary_and_cache_(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: AttentionTables,
    ) -> None:
        rotary_and_cache_reference_(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, tables)

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        return paged_attention_reference(qkv, k_cache, v_cache, tables, scale, window)

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> None:
        add_lora_reference_(y, x, pool_a, pool_b, slices, segments)

    def linear_lora(
        self,
        linear: Linear,
        x: Tensor,
        pool_a: Tensor,
        pool_b: Tensor,
        slices: tuple[int, ...],
        segments: Segments,
    ) -> Tensor:
        """A linear layer with every row's adapter: `linear(x)`, then `add_lora_` to it; a backend may fuse the two."""
        y = linear(x)
        self.add_lora_(y, x, pool_a, pool_b, slices, segments)
        return y

    def scale_shift_(self, y: Tensor, scale: Tensor, shift: Tensor, members: SlotRows) -> None:
        scale_shift_reference_(y, scale, shift, members)

    def change_embedding_(self, hidden: Tensor, members: Tensor, ids: Tensor, change: VocabularyChange) -> None:
        change_embedding_reference_(hidden, members, ids, change)

    def change_logits_(self, logits: Tensor, hidden: Tensor, members: Tensor, change: VocabularyChange) -> None:
        change_logits_reference_(logits, hidden, members, change)
