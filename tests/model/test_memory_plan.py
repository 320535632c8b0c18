"""What a device's memory is shared out to is what is loaded, and the KV cache has the rest of the stated part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_lora.architecture import read_architecture
from ray_lora.backends.base import Backend
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.model.kv_cache import block_bytes
from ray_lora.model.memory_plan import pool_bytes, weight_bytes
from ray_lora.model.model_runner import ModelRunner
from ray_lora.model.tensor_parallel import TensorParallel
from tests.tiny import make_checkpoint

GIB = 1 << 30


class Sized(Backend):
    """A reference on a device with so much memory, which counts the weights that it is given."""

    def __init__(self, free: int, total: int) -> None:
        super().__init__()
        self._memory = free, total
        self.linear_bytes = 0

    def device_memory(self) -> tuple[int, int]:
        return self._memory

    def linear(self, weight: Tensor, bias: Tensor | None, tied: bool = False) -> Any:
        self.linear_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)
        return super().linear(weight, bias, tied)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("memory") / "model", "qwen3", num_hidden_layers=2)


def make_config(checkpoint: Path, **args: Any) -> EngineConfig:
    return EngineConfig.parse({"model": str(checkpoint), "max_loras": 4, "max_lora_rank": 32, **args})


def test_weights_and_pages_take_what_is_foreseen(checkpoint: Path) -> None:
    config, alone = make_config(checkpoint), TensorParallel()
    backend = Sized(GIB, GIB)
    runner = ModelRunner(config, alone, backend)
    arch = runner.arch
    norms = (len(arch.norms) * arch.hidden_size + 2 * arch.num_layers * arch.head_dim) * 4
    embedding = arch.vocab_size * arch.hidden_size * 4
    assert weight_bytes(arch, alone, torch.float32) == backend.linear_bytes + embedding + norms
    assert runner._pool is not None
    held = [part for pages in runner._pool.fused.values() for part in (pages.a, pages.b, pages.scale, pages.shift)]
    assert pool_bytes(config, arch, alone, torch.float32) == sum(part.nbytes for part in held)


@pytest.mark.parametrize(("family", "biases"), [("qwen2", {}), ("llama", {"attention_bias": True, "mlp_bias": True})])
@pytest.mark.parametrize("tp_size", [2, 3, 6])
def test_the_ranks_share_the_weights_and_repeat_only_norms_and_kv_heads(
    family: str, biases: dict[str, bool], tp_size: int, tmp_path: Path
) -> None:
    shape = {"tie_word_embeddings": True, "num_key_value_heads": 6, **biases}
    arch = read_architecture(make_checkpoint(tmp_path, family, **shape))
    parts = [weight_bytes(arch, TensorParallel(rank, tp_size), torch.bfloat16) for rank in range(tp_size)]
    padding = (tp_size * arch.vocabulary_part(0, tp_size)[1] - arch.vocab_size) * arch.hidden_size
    norms = len(arch.norms) * arch.hidden_size
    whole = weight_bytes(arch, TensorParallel(), torch.bfloat16)
    assert sum(parts) == whole + 2 * (padding + (tp_size - 1) * norms)


def test_the_kv_cache_has_what_the_stated_part_leaves(checkpoint: Path) -> None:
    config, alone = make_config(checkpoint, gpu_memory_utilization=0.5), TensorParallel()
    total, others = 64 << 20, 8 << 20
    runner = ModelRunner(config, alone, Sized(total - others, total))
    arch = runner.arch
    fixed = weight_bytes(arch, alone, torch.float32) + pool_bytes(config, arch, alone, torch.float32)
    block = block_bytes(arch, 1, config.block_size, torch.float32)
    assert runner.info.num_kv_blocks == (total // 2 - others - fixed) // block
    assert runner.info.num_kv_blocks > 0


def test_bytes_that_are_named_win_over_the_device(checkpoint: Path) -> None:
    config = make_config(checkpoint, kv_cache_memory_bytes=1 << 22)
    runner = ModelRunner(config, TensorParallel(), Sized(GIB, GIB))
    assert runner.info.num_kv_blocks == (1 << 22) // block_bytes(runner.arch, 1, config.block_size, torch.float32)


def test_what_does_not_fit_is_refused_before_it_is_loaded(checkpoint: Path) -> None:
    backend = Sized(2 << 20, 4 << 20)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.9: of 4194304 bytes 2097152 are in use"):
        ModelRunner(make_config(checkpoint), TensorParallel(), backend)
    assert backend.linear_bytes == 0


def test_pages_of_another_type_are_refused_where_the_kernel_takes_none(checkpoint: Path) -> None:
    backend = Sized(GIB, GIB)
    backend.mixes_dtypes = False
    config = make_config(checkpoint, lora_dtype="bfloat16", kv_cache_memory_bytes=1 << 22)
    with pytest.raises(ConfigError, match="lora_dtype bfloat16: on reference it must be that of the model"):
        ModelRunner(config, TensorParallel(), backend)
