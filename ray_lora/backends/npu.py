"""Ascend NPUs: torch_npu's fused operators around the Triton kernels of `add_lora_`. The only file to import torch_npu.

Choices, and their reasons (nothing here has been timed on a device):
- The cache is [num_blocks, block_size, num_kv_heads, head_dim]: `npu_scatter_pa_kv_cache` writes it without rearranging
  a row, and attention reads it as it lies, as [num_blocks, block_size, num_kv_heads * head_dim].
- Attention takes the rows of all sequences side by side ("TND"), chunks of prompts and decoding ones in one launch.
- Weights of a half type are stored in blocks of 16 x 16 (NZ), in the order in which the cube cores take them.
- An all-reduce stands alone. `npu_mm_all_reduce_base` would hide some of it behind the product, but LoRA's delta has to
  join the partial sum between the two, its manual excludes decode steps, and it needs a full mesh of HCCS links.
- A captured decode step is one launch, but for attention: it takes lengths as lists on the host, so torch_npu's
  `NPUGraph.update` calls every layer's attention again, on a stream of its own, and the graph waits for each. It is
  started first, so that these calls are made while it runs. A capture sees the LoRA kernels too, for triton-ascend
  launches them, unless told otherwise, through torch_npu's queue of operators.
- LoRA has no stream of its own. Shrink beside the base's product would send S, which the kernel keeps on the chip,
  through memory, in one launch more; and a decode step waits for memory in both products, which share it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch_npu
from torch import Tensor

from ray_lora.backends.base import Linear, Streams, Tables
from ray_lora.backends.lora_plan import LoraPlan, padded_plan
from ray_lora.backends.static_tables import CopyEvent, send_step
from ray_lora.backends.triton_backend import TritonBackend
from ray_lora.errors import ConfigError
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepLimits

FRACTAL_NZ = 29
"""CANN's number of the format."""
CAUSAL, BAND = 3, 4
"""Values of `sparse_mode`: all keys up to the row's own position, or the last `pre_tokens` of them and its own."""
MASK_SIZE = 2048
"""Side of the triangle that attention wants in either mode, whatever the lengths."""
UNBOUNDED = 2**31 - 1
MAX_SEQUENCES = 4096
"""Lengths that attention takes in one call."""


@dataclass(frozen=True, slots=True)
class NPUAttentionTables(AttentionTables):
    """What torch_npu's attention and rotary operators want besides."""

    query_ends: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    """`query_starts[1:]` and `context_lens` on the host, for they are arguments and not tensors. (In layout TND lengths
    of keys are running sums too, but not where there is a block table.)"""
    cos: Tensor
    sin: Tensor
    """[1, num_tokens, 1, head_dim] in the type of the activations: each row's angles, for both halves of a head."""


class NPUBackend(TritonBackend):
    """One NPU of this process: the first that `ASCEND_RT_VISIBLE_DEVICES` lets it see."""

    name = "npu"
    collective = "hccl"
    gathers_to_all = True  # torch_npu's gather is an all-gather after two broadcasts of pickled shapes
    captures = True

    def __init__(self, device: str = "npu") -> None:
        super().__init__(device)
        self._mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=self.device).triu_(1)
        self._graph_pool: object = None

    def open_device(self) -> tuple[int, int]:
        torch_npu.npu.config.allow_internal_format = True  # else `npu_format_cast` leaves weights as they are
        self.enter_thread()
        limits = torch_npu.npu.get_device_limit(0)
        return limits["vector_core_num"], limits["cube_core_num"]

    def enter_thread(self) -> None:
        """CANN has a current device for each thread, and none in a new one."""
        torch_npu.npu.set_device(0)

    def device_memory(self) -> tuple[int, int]:
        free, total = torch_npu.npu.mem_get_info()
        return free, total

    def streams(self) -> Streams | None:
        return Streams(torch_npu.npu.default_stream(), torch_npu.npu.Stream(), torch_npu.npu.stream)

    def pinned(self, x: Tensor) -> Tensor:
        self.enter_thread()
        return x.pin_memory()

    def copy_event(self) -> CopyEvent | None:
        event: CopyEvent = torch_npu.npu.Event()
        return event

    def check_model(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """What CANN's manual says of `npu_fused_infer_attention_score` in layout TND with a block table."""
        if dtype not in self.dtypes:
            names = " or ".join(str(known).removeprefix("torch.") for known in self.dtypes)
            raise ConfigError(f"dtype {str(dtype).removeprefix('torch.')} is not served on an NPU; give {names}")
        if block_size % 16 or block_size > 128:
            raise ConfigError(f"block_size {block_size}: an NPU needs a multiple of 16, 128 at most; 128 is best")
        if head_dim not in (64, 128) and (num_heads == num_kv_heads or head_dim % 16 or head_dim > 256):
            raise ConfigError(
                f"model: head_dim {head_dim} in config.json is not served on an NPU, whose attention takes 64 and 128, "
                "and multiples of 16 up to 256 where num_key_value_heads is less than num_attention_heads"
            )
        if num_heads > 256:
            raise ConfigError(f"model: {num_heads} heads on one NPU, which takes 256; raise tensor_parallel_size")

    def reserve(self, limits: StepLimits, dtype: torch.dtype) -> None:
        if limits.max_sequences > MAX_SEQUENCES:
            raise ConfigError(f"max_num_seqs {limits.max_sequences}: an NPU's attention takes {MAX_SEQUENCES} at most")
        super().reserve(limits, dtype)
        angles = (2, limits.max_tokens, 2, limits.head_dim // 2)
        self._cos, self._sin = torch.zeros(angles, dtype=dtype, device=self.device)
        self._max_pages = 1 << max(0, limits.max_adapter_pages - 1).bit_length()

    def place(self, step: Tables) -> Tables:
        """Cut the step's segments into tiles, send all tables, and look up each row's rotary angles once."""
        return self._place(step, is_captured=False)

    def capture(self, step: Tables, forward: Callable[[Tables], Tensor]) -> Callable[[Tables], Tensor]:
        def replay(other: Tables) -> Tensor:
            tables = self._place(other, is_captured=True).tables
            assert isinstance(tables, NPUAttentionTables)
            lengths = {"actual_seq_lengths": tables.query_ends, "actual_seq_lengths_kv": tables.context_lens_host}
            graph.replay()
            graph.update(cpu_update_input=[lengths])
            return hidden

        placed = self._place(step, is_captured=True)
        forward(placed)  # what is made at first use, a communicator's buffers say, cannot be made within a capture
        if self._graph_pool is None:
            self._graph_pool = torch_npu.npu.graph_pool_handle()  # one for all graphs, as they run one at a time
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph, pool=self._graph_pool, auto_dispatch_capture=True):
            hidden = forward(placed)
        return replay

    def _place(self, step: Tables, is_captured: bool) -> Tables:
        def cut(segments: Segments) -> LoraPlan:
            plan = self._lora.plan(segments, starts)
            return padded_plan(plan, len(starts) - 1, self._max_pages) if is_captured else plan

        assert self._static is not None, "reserve comes first"
        starts = step.tables.query_starts.tolist()
        sent, placed = send_step(self._static, step, cut)
        tables = NPUAttentionTables(
            **sent,
            query_ends=tuple(starts[1:]),
            context_lens_host=tuple(step.tables.context_lens.tolist()),
            cos=_place_angles(self._cos, step.cos, sent["positions"]),
            sin=_place_angles(self._sin, step.sin, sent["positions"]),
        )
        return replace(placed, tables=tables)

    def linear(self, weight: Tensor, bias: Tensor | None, tied: bool = False) -> Linear:
        """A tied weight stays as it is, for rows of it are looked up."""
        if (
            not tied
            and weight.dtype in (torch.bfloat16, torch.float16)
            and all(size % 16 == 0 for size in weight.shape)
        ):
            weight = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
        return Linear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
        return normed

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        torch_npu.npu_add_rms_norm_v2(x, residual, weight, eps)
        return x

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        activated: Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
        return activated

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
        """As the reference; the cache is in this backend's layout, and the angles are rounded to the type of qkv."""
        assert isinstance(tables, NPUAttentionTables), "place comes first"
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q_and_k, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if q_norm is not None and k_norm is not None:
            q = self.rms_norm(q_and_k[:, :num_heads].contiguous(), q_norm, eps)
            k = self.rms_norm(q_and_k[:, num_heads:].contiguous(), k_norm, eps)
            q_and_k = torch.cat((q, k), dim=1)
        rotated = torch_npu.npu_rotary_mul(q_and_k.contiguous().unsqueeze(0), tables.cos, tables.sin)[0]
        heads[:, :-num_kv_heads] = rotated
        torch_npu.npu_scatter_pa_kv_cache(
            rotated[:, num_heads:].contiguous(),
            v.contiguous(),
            k_cache,
            v_cache,
            tables.slot_mapping,
            cache_mode="Norm",
        )

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        assert isinstance(tables, NPUAttentionTables), "place comes first"
        num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        attended: Tensor = torch_npu.npu_fused_infer_attention_score(
            heads[:, :num_heads].contiguous(),
            k_cache.view(num_blocks, block_size, -1),
            v_cache.view(num_blocks, block_size, -1),
            atten_mask=self._mask,
            actual_seq_lengths=tables.query_ends,
            actual_seq_lengths_kv=tables.context_lens_host,
            block_table=tables.block_tables,
            num_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            scale=scale,
            input_layout="TND",
            block_size=block_size,
            sparse_mode=CAUSAL if window is None else BAND,
            pre_tokens=UNBOUNDED if window is None else window - 1,
            next_tokens=UNBOUNDED if window is None else 0,
        )[0]
        return attended.view(qkv.shape[0], -1)


def _place_angles(place: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rows of a table [max_positions, head_dim / 2], twice side by side, where captured steps look for them.

    Args:
        place: [max_tokens, 2, head_dim / 2].

    Returns:
        [1, num_tokens, 1, head_dim], the beginning of `place`.
    """
    placed = place[: len(positions)]
    placed.copy_(table.index_select(0, positions).unsqueeze(1))
    return placed.view(1, len(positions), 1, -1)
