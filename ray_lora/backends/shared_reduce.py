"""All-reduce between ranks of one host through shared memory, without the latency of a collective library."""

import ctypes
import mmap
import os
import uuid

import torch.distributed as dist
from torch import Tensor

from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_library import load_cpu_kernels

SLOT_FLOATS = 1 << 18
"""Floats that one exchange carries; longer tensors take several."""
_DIRECTORY = "/dev/shm"


class SharedMemoryReduce:
    """Sums float32 tensors over the ranks, in place; the ranks' parts are added in one order everywhere.

    Raises:
        RuntimeError: a rank did not come within `timeout_s`.
    """

    def __init__(self, kernels: CPUKernels, region: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        self._function = kernels.all_reduce
        self._region = region
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._round = ctypes.c_uint64(0)
        self._rank, self._size, self._timeout_s = rank, size, timeout_s

    def __call__(self, x: Tensor) -> None:
        self._function(
            *(self._address, x.data_ptr(), x.numel(), self._rank, self._size, SLOT_FLOATS),
            *(ctypes.addressof(self._round), self._timeout_s),
        )


def join_shared_reduce(group: dist.ProcessGroup, rank: int, size: int, timeout_s: float) -> SharedMemoryReduce | None:
    """Set up the region with the other ranks; None on all of them if one cannot see it or has no kernels.

    Every rank of `group` must call this.
    """
    kernels = load_cpu_kernels()
    box: list[str | None] = [None]
    region: mmap.mmap | None = None
    if rank == 0 and kernels is not None and os.path.isdir(_DIRECTORY):
        created = f"{_DIRECTORY}/ray_lora-{uuid.uuid4().hex}"
        box[0] = created
        region = _map(created, kernels.all_reduce_bytes(size, SLOT_FLOATS), create=True)
    dist.broadcast_object_list(box, src=0, group=group)
    path = box[0]
    if rank != 0 and kernels is not None and path is not None:
        region = _map(path, kernels.all_reduce_bytes(size, SLOT_FLOATS), create=False)
    joined: list[bool] = [False] * size
    dist.all_gather_object(joined, region is not None, group=group)
    if rank == 0 and path is not None and os.path.exists(path):
        os.unlink(path)
    if kernels is None or region is None or not all(joined):
        return None
    return SharedMemoryReduce(kernels, region, rank, size, timeout_s)


def _map(path: str, num_bytes: int, create: bool) -> mmap.mmap | None:
    """The file's memory; None where there is no such file or no room."""
    try:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    except OSError:
        return None
    try:
        if create:
            os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)
