"""The all-reduce of one host: exact, the same bits on every rank, whatever the sizes and however late a rank is."""

import ctypes
import mmap
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ray_lora.backends.cpu_library import load_cpu_kernels

KERNELS = load_cpu_kernels()
SLOT = 1000


def ranks(size: int, timeout_s: float = 20.0) -> list["Rank"]:
    assert KERNELS is not None
    region = mmap.mmap(-1, KERNELS.all_reduce_bytes(size, SLOT))
    return [Rank(region, rank, size, timeout_s) for rank in range(size)]


class Rank:
    """A thread's side of the exchange; ctypes lets threads run at once, as processes do."""

    def __init__(self, region: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self.region, self.rank, self.size, self.timeout_s = region, rank, size, timeout_s
        self.round = ctypes.c_uint64(0)

    def reduce(self, x: Tensor) -> Tensor:
        assert KERNELS is not None
        KERNELS.all_reduce(
            *(self.address, x.data_ptr(), x.numel(), self.rank, self.size, SLOT),
            *(ctypes.addressof(self.round), self.timeout_s),
        )
        return x


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_those_of_the_ranks_in_order_and_equal_everywhere(size: int) -> None:
    rng = random.Random(size)
    lengths = [rng.choice([1, 7, 999, 1000, 1001, 2500, 5000]) for _ in range(60)]
    inputs = [[torch.randn(length) for _ in range(size)] for length in lengths]

    def work(rank: Rank) -> list[Tensor]:
        late = random.Random(rank.rank)
        results = []
        for parts in inputs:
            if late.random() < 0.1:
                time.sleep(0.002)
            results.append(rank.reduce(parts[rank.rank].clone()))
        return results

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(work, ranks(size)))
    for index, parts in enumerate(inputs):
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        assert all(torch.equal(results[index], expected) for results in by_rank)


def test_a_rank_that_never_comes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not come"):
        ranks(2, timeout_s=0.05)[0].reduce(torch.ones(3))
