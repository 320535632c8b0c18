"""How a rank's memory is shared out before anything is loaded: weights, adapters, graphs, and a KV cache."""

import torch

from ray_lora.architecture import Architecture
from ray_lora.backends.base import Backend
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.model.adapter_pool import AdapterPool
from ray_lora.model.kv_cache import block_bytes
from ray_lora.model.step_graphs import num_padding_blocks
from ray_lora.model.tensor_parallel import TensorParallel

HOST_KV_BYTES = 1 << 30
"""KV cache on a device that is not asked for its memory."""


def kv_cache_bytes(
    config: EngineConfig,
    arch: Architecture,
    parallel: TensorParallel,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    backend: Backend,
) -> int:
    """What every rank can give to the KV cache of requests. Every rank must call it.

    Raises:
        ConfigError: weights, adapter pages and graphs alone do not fit.
    """
    memory = backend.device_memory()
    if config.kv_cache_memory_bytes is not None or memory is None:
        return config.kv_cache_memory_bytes or HOST_KV_BYTES
    free, total = memory
    weights = weight_bytes(arch, parallel, dtype)
    pages = pool_bytes(config, arch, parallel, page_dtype)
    graphs = graph_bytes(config, arch, parallel, dtype) if backend.captures else 0
    left = int(total * config.gpu_memory_utilization) - (total - free) - weights - pages - graphs
    left = parallel.smallest(left, backend.device)
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization}: of {total} bytes {total - free} are in use, and "
            f"the weights' {weights}, the adapter pages' {pages} and the graphs' {graphs} leave no room for a KV "
            "cache; lower max_loras or max_lora_rank, or raise tensor_parallel_size"
        )
    return left


def weight_bytes(arch: Architecture, parallel: TensorParallel, dtype: torch.dtype) -> int:
    """The base model's weights on one rank."""
    layer = 2 * arch.hidden_size + (2 * arch.head_dim if arch.qk_norm else 0)
    for projection in arch.projections:
        part = projection.shard(parallel.rank, parallel.size)
        width = part.stop - part.start
        is_column = projection.style == "column"
        layer += width * (projection.in_features if is_column else projection.out_features)
        if arch.has_bias(projection.name) and (is_column or parallel.rank == 0):
            layer += width if is_column else projection.out_features
    _, rows = arch.vocabulary_part(parallel.rank, parallel.size)
    ends = rows * arch.hidden_size * (1 if arch.tie_word_embeddings else 2) + arch.hidden_size
    return (arch.num_layers * layer + ends) * dtype.itemsize


def graph_bytes(config: EngineConfig, arch: Architecture, parallel: TensorParallel, dtype: torch.dtype) -> int:
    """Captured steps on one rank: activations of the largest, in whose memory the others run, the result of each, and
    the KV of padding rows. What the device itself keeps for a graph is in what `gpu_memory_utilization` leaves."""
    sizes = config.graph_sizes
    row = 2 * arch.hidden_size
    for projection in arch.projections:
        part = projection.shard(parallel.rank, parallel.size)
        row += part.stop - part.start
        row += projection.in_features if projection.style == "column" else projection.out_features
    results = (2 if config.num_lora_pages else 1) * sum(sizes) * arch.hidden_size
    padding = num_padding_blocks(sizes, config.block_size) * block_bytes(arch, parallel.size, config.block_size, dtype)
    return (2 * max(sizes, default=0) * row + results) * dtype.itemsize + padding


def pool_bytes(config: EngineConfig, arch: Architecture, parallel: TensorParallel, dtype: torch.dtype) -> int:
    """The adapter pages and slots on one rank."""
    if not config.num_lora_pages:
        return 0
    meta, sizes = torch.device("meta"), (config.num_lora_pages, config.max_loras)
    pool = AdapterPool(arch, parallel.rank, parallel.size, *sizes, dtype, dtype, meta)
    return sum(part.nbytes for fused in pool.fused.values() for part in (fused.a, fused.b, fused.scale, fused.shift))
