"""The two ends of the decoder: token ids to hidden states, and hidden states to logits."""

import torch
from torch import Tensor

from ray_lora.architecture import EMBEDDING, HEAD, Architecture
from ray_lora.backends.base import Backend, Linear
from ray_lora.model.batch import Batch
from ray_lora.model.checkpoint import Checkpoint
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.model.unpaged_part import Members


class Vocabulary:
    """Token embeddings and the output projection, each cut over the ranks by vocabulary; one weight where tied."""

    def __init__(self, arch: Architecture, checkpoint: Checkpoint, parallel: TensorParallel, backend: Backend) -> None:
        self._parallel, self._backend, self._vocab_size = parallel, backend, arch.vocab_size
        self._part, self._width = arch.vocabulary_part(parallel.rank, parallel.size)

        def read(name: str) -> Tensor:
            weight = checkpoint.tensor(name, (arch.vocab_size, arch.hidden_size), rows=self._part)
            absent = self._width - weight.shape[0]
            if absent:
                weight = torch.cat((weight, weight.new_zeros(absent, arch.hidden_size)))
            return weight.to(backend.device)

        tied = arch.tie_word_embeddings
        self._head = backend.linear(read(f"{EMBEDDING if tied else HEAD}.weight"), None, tied)
        self._lookup = self._head if tied else Linear(read(f"{EMBEDDING}.weight"), None)

    def embed(self, batch: Batch) -> Tensor:
        """The hidden states [num_tokens, hidden_size] of a step's tokens."""
        if self._parallel.size == 1:
            hidden = self._lookup.rows(batch.token_ids)
            self._change(hidden, batch.token_ids, batch.unpaged)
            return hidden
        local = batch.token_ids - self._part.start
        absent = (local < 0) | (local >= self._width)
        hidden = self._lookup.rows(local.masked_fill(absent, 0)).masked_fill_(absent.unsqueeze(1), 0)
        self._change(hidden, local.masked_fill(absent, -1) if batch.unpaged else local, batch.unpaged)
        return self._parallel.all_reduce_(hidden)

    def _change(self, hidden: Tensor, ids: Tensor, unpaged: Members) -> None:
        for part, rows in unpaged:
            if part.embedding is not None:
                self._backend.change_embedding_(hidden, rows, ids, part.embedding)

    def logits(self, hidden: Tensor, unpaged: Members = ()) -> Tensor | None:
        """Logits [num_rows, vocab_size], gathered on rank 0; None on the others. Every rank must call it.

        Args:
            unpaged: adapters that may bring a head, each with its rows of `hidden`.
        """
        logits = self._head(hidden)
        for part, rows in unpaged:
            if part.head is not None:
                self._backend.change_logits_(logits, hidden, rows, part.head)
        return self._parallel.gather_columns(logits, self._vocab_size)
