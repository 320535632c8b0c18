"""NVIDIA GPUs: torch's own operators, FlashAttention among them, around the Triton kernels of `add_lora_`.

Choices, and their reasons (nothing here has been timed on a device):
- Attention is `torch.nn.attention.varlen`, in torch itself: FlashAttention 2 over block tables, chunks of prompts and
  decoding rows in one launch, nothing gathered. It asks for blocks of 256 tokens, a half type and an A100 or later.
- The cache is [num_blocks, block_size, num_kv_heads, head_dim], as attention reads it.
- Normalisation is torch's fused operator; rotary and the activation are a few elementwise ones.
- Steps are launched, not captured, and adapters are copied on the stream of the steps. Tables are at fixed addresses,
  as a captured graph would need.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from ray_lora.backends.base import Tables
from ray_lora.backends.static_tables import CopyEvent, send_step
from ray_lora.backends.triton_backend import TritonBackend
from ray_lora.errors import ConfigError
from ray_lora.ops.attention import AttentionTables

BLOCK_SIZE = 256
"""What FlashAttention 2 takes, whose tiles of keys each lie within one block; multiples of it would do as well."""
MAX_HEAD_DIM = 256
PROGRAMS = 1 << 16
"""Of one launch; the GPU itself shares them out."""


@dataclass(frozen=True, slots=True)
class CUDAAttentionTables(AttentionTables):
    """What attention and rotary want besides."""

    max_query_len: int
    max_context_len: int
    context_starts: Tensor
    """[num_sequences + 1] int32: running sums of `context_lens`."""
    slots: Tensor
    """`slot_mapping` as int64"""
    cos: Tensor
    sin: Tensor
    """[num_tokens, 1, head_dim] float32: each row's angles for both halves of a head, sines negative in the first."""


class CUDABackend(TritonBackend):
    """One GPU of this process: the first that `CUDA_VISIBLE_DEVICES` lets it see."""

    name = "cuda"
    collective = "nccl"

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(device)

    def open_device(self) -> tuple[int, int]:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
            raise ConfigError(
                "device 'cuda' needs a GPU of compute capability 8.0 or later; `ray-lora doctor cuda` says what is here"
            )
        return PROGRAMS, PROGRAMS

    def device_memory(self) -> tuple[int, int] | None:
        free, total = torch.cuda.mem_get_info()
        return free, total

    def copy_event(self) -> CopyEvent | None:
        return torch.cuda.Event()

    def release_unused_memory(self) -> None:
        torch.cuda.empty_cache()

    def check_model(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """What FlashAttention 2 asks for."""
        if dtype not in self.dtypes:
            names = " or ".join(str(known).removeprefix("torch.") for known in self.dtypes)
            raise ConfigError(f"dtype {str(dtype).removeprefix('torch.')} is not served on a GPU; give {names}")
        if block_size != BLOCK_SIZE:
            raise ConfigError(f"block_size {block_size}: on a GPU it must be {BLOCK_SIZE}")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"model: head_dim {head_dim} in config.json is not served on a GPU, whose attention takes "
                f"multiples of 8 up to {MAX_HEAD_DIM}"
            )

    def place(self, step: Tables) -> Tables:
        """Cut the step's segments into tiles, send all tables, and work out what every layer would."""
        assert self._static is not None, "reserve comes first"
        host = step.tables
        starts = host.query_starts.tolist()
        sent, placed = send_step(self._static, step, lambda segments: self._lora.plan(segments, starts))
        cos, sin = (table.index_select(0, sent["positions"]).unsqueeze(1) for table in (step.cos, step.sin))
        tables = CUDAAttentionTables(
            **sent,
            max_query_len=int(host.query_starts.diff().max()),
            max_context_len=int(host.context_lens.max()),
            context_starts=F.pad(sent["context_lens"].cumsum(0, dtype=torch.int32), (1, 0)),
            slots=sent["slot_mapping"].long(),
            cos=torch.cat((cos, cos), dim=-1),
            sin=torch.cat((-sin, sin), dim=-1),
        )
        return replace(placed, tables=tables)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

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
        """As the reference; the cache is in this backend's layout."""
        assert isinstance(tables, CUDAAttentionTables), "place comes first"
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_and_k, k, v = heads[:, :-num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
        if q_norm is not None and k_norm is not None:
            q = heads[:, : -2 * num_kv_heads]
            q.copy_(self.rms_norm(q, q_norm, eps))
            k.copy_(self.rms_norm(k, k_norm, eps))
        x = q_and_k.float()
        q_and_k.copy_((x * tables.cos).addcmul_(x.roll(head_dim // 2, dims=-1), tables.sin))
        k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, tables.slots, k)
        v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, tables.slots, v)

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        assert isinstance(tables, CUDAAttentionTables), "place comes first"
        num_kv_heads, head_dim = k_cache.shape[2:]
        is_causal = window is not None or tables.max_query_len > 1  # else it may take a group's query heads together
        attended = varlen_attn(
            qkv.view(qkv.shape[0], -1, head_dim)[:, : -2 * num_kv_heads],
            k_cache,
            v_cache,
            tables.query_starts,
            tables.context_starts,
            tables.max_query_len,
            tables.max_context_len,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0 if is_causal else -1),
            enable_gqa=True,
            seqused_k=tables.context_lens,
            block_table=tables.block_tables,
        )
        assert isinstance(attended, Tensor)
        return attended.flatten(1)
