"""Decode steps as captured graphs: each is padded with rows that nobody asked for, to one of a few sizes, and replayed.

A padding row is a sequence of one token at position 0, of the base model. Its KV goes to blocks that no request can
have, so it touches no row and no cache but its own.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ray_lora.backends.base import Backend
from ray_lora.model.batch import Batch
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepLimits

_NO_ROWS = Segments(*(torch.tensor(values, dtype=torch.int32) for values in ((), (0,), (), (0,))))


def num_padding_blocks(sizes: tuple[int, ...], block_size: int) -> int:
    """KV blocks beyond those of requests, for the padding rows of the largest size."""
    return -(-max(sizes, default=0) // block_size)


class StepGraphs:
    """Two graphs of each size: one for steps of the base model alone, one with the LoRA kernels of every linear.

    Adapters that change more than linears' deltas (their outputs, the embedding, norms) are computed outside.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        limits: StepLimits,
        block_size: int,
        first_padding_block: int,
        backend: Backend,
        forward: Callable[[Batch], Tensor],
    ) -> None:
        self._sizes, self._linears, self._max_blocks = sizes, limits.linears, limits.max_blocks
        self._with_lora = limits.max_pages > 0
        self._block_size, self._first_padding_block = block_size, first_padding_block
        self._backend, self._forward = backend, forward
        self._replays: dict[tuple[int, bool], Callable[[Batch], Tensor]] = {}

    @torch.inference_mode()
    def capture(self, cos: Tensor, sin: Tensor) -> None:
        """Capture every graph, the largest first, in whose memory the others then fit. Every rank must call it.

        Args:
            cos, sin: rotary tables, for padding rows alone.
        """
        none = torch.empty(0, dtype=torch.int32)
        tables = AttentionTables(torch.zeros(1, dtype=torch.int32), none, none.view(0, 1), none, none)
        for size in reversed(self._sizes):
            for with_lora in (False, True)[: 1 + self._with_lora]:
                segments = dict.fromkeys(self._linears, _NO_ROWS) if with_lora else {}
                empty = Batch(none.long(), tables, cos, sin, segments, {}, ())
                self._replays[size, with_lora] = self._backend.capture(self.padded(empty, size), self._forward)

    def run(self, batch: Batch) -> Tensor | None:
        """The final hidden states [num_tokens, hidden_size] of a step on the host; None if no graph computes it."""
        num_rows = len(batch.token_ids)
        is_decode = num_rows == len(batch.tables.context_lens)
        index = bisect_left(self._sizes, num_rows)
        if not is_decode or index == len(self._sizes) or batch.outputs or batch.unpaged:
            return None
        size = self._sizes[index]
        return self._replays[size, bool(batch.segments)](self.padded(batch, size))[:num_rows]

    def padded(self, batch: Batch, size: int) -> Batch:
        """A decode step with `size` rows; its tables have one shape, whatever the step."""
        tables, num_rows = batch.tables, len(batch.token_ids)
        slots = torch.arange(size - num_rows, dtype=torch.int32) + self._first_padding_block * self._block_size
        block_tables = torch.zeros(size, self._max_blocks, dtype=torch.int32)
        block_tables[:num_rows, : tables.block_tables.shape[1]] = tables.block_tables
        block_tables[num_rows:, 0] = slots // self._block_size
        return replace(
            batch,
            token_ids=_extended(batch.token_ids, size, 0),
            tables=AttentionTables(
                query_starts=torch.arange(size + 1, dtype=torch.int32),
                context_lens=_extended(tables.context_lens, size, 1),
                block_tables=block_tables,
                positions=_extended(tables.positions, size, 0),
                slot_mapping=torch.cat((tables.slot_mapping, slots)),
            ),
            segments={name: batch.segments.get(name, _NO_ROWS) for name in self._linears} if batch.segments else {},
        )


def _extended(values: Tensor, size: int, value: int) -> Tensor:
    return torch.cat((values, values.new_full((size - len(values),), value)))
