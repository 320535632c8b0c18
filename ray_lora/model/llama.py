"""The decoder: Llama, Mistral, Qwen2 and Qwen3, told apart by `Architecture`. Reads top to bottom."""

import torch
from torch import Tensor

from ray_lora.architecture import Architecture, FusedLinear
from ray_lora.backends.base import Backend, Linear
from ray_lora.model.adapter_pool import AdapterPool
from ray_lora.model.batch import Batch
from ray_lora.model.checkpoint import Checkpoint
from ray_lora.model.kv_cache import KVCache
from ray_lora.model.tensor_parallel import TensorParallel


class Decoder:
    """One rank's part of the model."""

    def __init__(
        self,
        arch: Architecture,
        checkpoint: Checkpoint,
        cache: KVCache,
        pool: AdapterPool | None,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        self._backend = backend
        self._vocabulary = Vocabulary(arch, checkpoint, parallel, backend)
        self._layers = [
            DecoderLayer(arch, layer, checkpoint, cache.layers[layer], pool, parallel, backend)
            for layer in range(arch.num_layers)
        ]
        self._final_norm = checkpoint.tensor("model.norm.weight", (arch.hidden_size,)).to(backend.device)
        self.logits = self._vocabulary.logits
        self._eps = arch.rms_norm_eps

    def forward(self, batch: Batch) -> Tensor:
        """Compute every row's KV and return the final hidden states [num_tokens, hidden_size]."""
        residual = self._vocabulary.embed(batch.token_ids)
        hidden = self._backend.rms_norm(residual, self._layers[0].input_norm, self._eps)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, next_norm in zip(self._layers, next_norms, strict=True):
            hidden = layer.attend(hidden, batch)
            hidden = self._backend.add_rms_norm_(residual, hidden, layer.post_attention_norm, self._eps)
            hidden = layer.mlp(hidden, batch)
            hidden = self._backend.add_rms_norm_(residual, hidden, next_norm, self._eps)
        return hidden


class DecoderLayer:
    """Attention and a gated MLP; each returns what is to be added to the residual stream."""

    def __init__(
        self,
        arch: Architecture,
        layer: int,
        checkpoint: Checkpoint,
        cache: tuple[Tensor, Tensor],
        pool: AdapterPool | None,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        def norm(name: str, size: int) -> Tensor:
            return checkpoint.tensor(f"model.layers.{layer}.{name}.weight", (size,)).to(backend.device)

        self._backend = backend
        self._parallel = parallel
        self._k_cache, self._v_cache = cache
        self._eps = arch.rms_norm_eps
        self._scale = arch.head_dim**-0.5
        self._window = arch.sliding_windows[layer]
        self.input_norm = norm("input_layernorm", arch.hidden_size)
        self.post_attention_norm = norm("post_attention_layernorm", arch.hidden_size)
        self._q_norm = norm("self_attn.q_norm", arch.head_dim) if arch.qk_norm else None
        self._k_norm = norm("self_attn.k_norm", arch.head_dim) if arch.qk_norm else None
        self._qkv, self._o, self._gate_up, self._down = (
            LoRALinear(fused, layer, checkpoint, pool, parallel, backend) for fused in arch.fused_linears
        )

    def attend(self, hidden: Tensor, batch: Batch) -> Tensor:
        backend, tables = self._backend, batch.tables
        qkv = self._qkv(hidden, batch)
        backend.rotary_and_cache_(
            qkv, self._q_norm, self._k_norm, self._eps, batch.cos, batch.sin, self._k_cache, self._v_cache, tables
        )
        attended = backend.paged_attention(qkv, self._k_cache, self._v_cache, tables, self._scale, self._window)
        return self._parallel.all_reduce_(self._o(attended, batch))

    def mlp(self, hidden: Tensor, batch: Batch) -> Tensor:
        activated = self._backend.silu_and_mul(self._gate_up(hidden, batch))
        return self._parallel.all_reduce_(self._down(activated, batch))


class LoRALinear:
    """A rank's part of a fused linear layer, plus the delta of every adapter in the batch, then scaled and shifted.

    Column-parallel: A whole, B cut with the outputs. Row-parallel: A cut with the inputs, B whole, and the delta joins
    the base's partial sum before the caller's all-reduce; so do scale and shift, for both are linear.
    """

    def __init__(
        self,
        fused: FusedLinear,
        layer: int,
        checkpoint: Checkpoint,
        pool: AdapterPool | None,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        weight, bias = checkpoint.fused_linear(layer, fused, parallel.rank, parallel.size)
        device = backend.device
        self._name = fused.name
        self._add_lora_, self._scale_shift_ = backend.add_lora_, backend.scale_shift_
        self._base = backend.linear(weight.to(device), None if bias is None else bias.to(device))
        if pool is not None:
            pages = pool.fused[fused.name]
            self._pool_a, self._pool_b, self._slices = pages.a[layer], pages.b[layer], pages.slices
            self._scale, self._shift = pages.scale[layer], pages.shift[layer]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        y = self._base(x)
        segments = batch.segments.get(self._name)
        if segments is not None:
            self._add_lora_(y, x, self._pool_a, self._pool_b, self._slices, segments)
        members = batch.outputs.get(self._name)
        if members is not None:
            self._scale_shift_(y, self._scale, self._shift, members)
        return y


class Vocabulary:
    """Token embeddings and the output projection, each cut over the ranks by vocabulary; one weight where tied."""

    def __init__(self, arch: Architecture, checkpoint: Checkpoint, parallel: TensorParallel, backend: Backend) -> None:
        self._parallel, self._vocab_size = parallel, arch.vocab_size
        self._width = -(-arch.vocab_size // parallel.size)
        first = min(parallel.rank * self._width, arch.vocab_size)
        self._part = slice(first, min(first + self._width, arch.vocab_size))

        def read(name: str) -> Tensor:
            weight = checkpoint.tensor(name, (arch.vocab_size, arch.hidden_size), rows=self._part)
            absent = self._width - weight.shape[0]
            if absent:
                weight = torch.cat((weight, weight.new_zeros(absent, arch.hidden_size)))
            return weight.to(backend.device)

        embedding, tied = "model.embed_tokens.weight", arch.tie_word_embeddings
        self._head = backend.linear(read(embedding if tied else "lm_head.weight"), None, tied)
        self._lookup = self._head if tied else Linear(read(embedding), None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [num_tokens] to hidden states [num_tokens, hidden_size]."""
        if self._parallel.size == 1:
            return self._lookup.rows(token_ids)
        local = token_ids - self._part.start
        absent = (local < 0) | (local >= self._width)
        rows = self._lookup.rows(local.masked_fill(absent, 0))
        return self._parallel.all_reduce_(rows.masked_fill_(absent.unsqueeze(1), 0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Logits [num_rows, vocab_size], gathered on rank 0; None on the others. Every rank must call it."""
        return self._parallel.gather_columns(self._head(hidden), self._vocab_size)
