"""The decoder: Llama, Mistral, Qwen2 and Qwen3, told apart by `Architecture`. Reads top to bottom."""

from torch import Tensor

from ray_lora.architecture import Architecture, FusedLinear
from ray_lora.backends.base import Backend
from ray_lora.model.adapter_pool import AdapterPool
from ray_lora.model.batch import Batch
from ray_lora.model.checkpoint import Checkpoint
from ray_lora.model.kv_cache import KVCache
from ray_lora.model.rotary import score_scale
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.model.vocabulary import Vocabulary


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
        self._norms = [Norm(name, arch, checkpoint, backend) for name in arch.norms]
        self.logits = self._vocabulary.logits

    def forward(self, batch: Batch) -> Tensor:
        """Compute every row's KV and return the final hidden states [num_tokens, hidden_size]."""
        norms = iter(self._norms)
        residual = self._vocabulary.embed(batch)
        hidden = next(norms)(residual, None, batch)
        for layer in self._layers:
            hidden = next(norms)(residual, layer.attend(hidden, batch), batch)
            hidden = next(norms)(residual, layer.mlp(hidden, batch), batch)
        return hidden


class Norm:
    """One RMSNorm of the residual stream, to which the output of the block before it is added first."""

    def __init__(self, name: str, arch: Architecture, checkpoint: Checkpoint, backend: Backend) -> None:
        self._name, self._eps, self._backend = name, arch.rms_norm_eps, backend
        self._weight = checkpoint.tensor(f"{name}.weight", (arch.hidden_size,)).to(backend.device)

    def __call__(self, residual: Tensor, x: Tensor | None, batch: Batch) -> Tensor:
        """Changes `residual`; the result has the rows of adapters that bring this norm normalised by theirs."""
        backend, eps = self._backend, self._eps
        if x is None:
            hidden = backend.rms_norm(residual, self._weight, eps)
        else:
            hidden = backend.add_rms_norm_(residual, x, self._weight, eps)
        for part, rows in batch.unpaged:
            weight = part.norms.get(self._name)
            if weight is not None:
                hidden[rows] = backend.rms_norm(residual[rows], weight, eps)
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
        def norm(name: str) -> Tensor:
            return checkpoint.tensor(f"model.layers.{layer}.{name}.weight", (arch.head_dim,)).to(backend.device)

        self._backend = backend
        self._parallel = parallel
        self._k_cache, self._v_cache = cache
        self._eps = arch.rms_norm_eps
        self._scale = score_scale(arch)
        self._window = arch.sliding_windows[layer]
        self._q_norm = norm("self_attn.q_norm") if arch.qk_norm else None
        self._k_norm = norm("self_attn.k_norm") if arch.qk_norm else None
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
        self._linear_lora, self._scale_shift_ = backend.linear_lora, backend.scale_shift_
        self._base = backend.linear(weight.to(device), None if bias is None else bias.to(device))
        if pool is not None:
            pages = pool.fused[fused.name]
            self._pool_a, self._pool_b, self._slices = pages.a[layer], pages.b[layer], pages.slices
            self._scale, self._shift = pages.scale[layer], pages.shift[layer]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        segments = batch.segments.get(self._name)
        if segments is None:
            y = self._base(x)
        else:
            y = self._linear_lora(self._base, x, self._pool_a, self._pool_b, self._slices, segments)
        members = batch.outputs.get(self._name)
        if members is not None:
            self._scale_shift_(y, self._scale, self._shift, members)
        return y
