"""The KV cache of one rank: blocks of keys and values, by layer. Holds tensors, decides nothing."""

import torch
from torch import Tensor

from ray_lora.architecture import Architecture
from ray_lora.backends.base import Backend


def local_kv_heads(arch: Architecture, tp_size: int) -> int:
    """KV heads on one rank; at least one, replicated where ranks outnumber them."""
    return max(1, arch.num_kv_heads // tp_size)


def block_bytes(arch: Architecture, tp_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Size of one block over all layers of one rank, keys and values."""
    return 2 * arch.num_layers * local_kv_heads(arch, tp_size) * block_size * arch.head_dim * dtype.itemsize


class KVCache:
    def __init__(
        self, arch: Architecture, tp_size: int, num_blocks: int, block_size: int, dtype: torch.dtype, backend: Backend
    ) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = [
            backend.allocate_kv_cache(num_blocks, local_kv_heads(arch, tp_size), block_size, arch.head_dim, dtype)
            for _ in range(arch.num_layers)
        ]
        """Keys and values of each layer, in the backend's layout."""
