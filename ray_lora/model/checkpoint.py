"""Reading a rank's part of a Hugging Face checkpoint: sharded safetensors, one slice at a time."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ray_lora.architecture import EMBEDDING, HEAD, Architecture, FusedLinear, Projection
from ray_lora.errors import ConfigError


class Checkpoint:
    """The tensors of a model directory, read lazily.

    Raises:
        ConfigError: a file or tensor is missing, damaged, or of another shape than `config.json` says.
    """

    def __init__(self, model_path: Path, arch: Architecture, dtype: torch.dtype) -> None:
        self._arch = arch
        self._dtype = dtype
        self._files = {}
        for file in _weight_files(model_path):
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"model: {file} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def tensor(
        self, name: str, shape: tuple[int, ...], rows: slice = slice(None), columns: slice | None = None
    ) -> Tensor:
        """A tensor of the given full `shape`, or its part, in the served dtype, in memory of its own.

        What safetensors returns may lie in the mapped file, and would keep all of it resident.
        """
        handle = self._files.get(name)
        if handle is None:
            raise ConfigError(f"model: the checkpoint has no tensor {name!r}")
        stored = handle.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ConfigError(f"model: {name!r} is {tuple(stored.get_shape())} but config.json asks for {shape}")
        part: Tensor = stored[rows] if columns is None else stored[rows, columns]
        return part.to(self._dtype, copy=True)

    def fused_linear(self, layer: int, fused: FusedLinear, rank: int, tp_size: int) -> tuple[Tensor, Tensor | None]:
        """This rank's weight [out, in] and bias [out] of projections that are computed as one.

        The bias of a row-parallel layer goes to rank 0 alone, since the partial sums are added up.
        """
        weights, biases = [], []
        for projection in fused.slices:
            prefix = f"model.layers.{layer}.{projection.name}"
            shape = (projection.out_features, projection.in_features)
            part = projection.shard(rank, tp_size)
            if projection.style == "column":
                weights.append(self.tensor(f"{prefix}.weight", shape, rows=part))
            else:
                weights.append(self.tensor(f"{prefix}.weight", shape, columns=part))
            if self._arch.has_bias(projection.name) and (projection.style == "column" or rank == 0):
                rows = part if projection.style == "column" else slice(None)
                biases.append(self.tensor(f"{prefix}.bias", (projection.out_features,), rows=rows))
        return torch.cat(weights), torch.cat(biases) if biases else None

    def weight(self, module: str, projection: Projection) -> Tensor:
        """A linear layer's whole weight [out_features, in_features], also the embedding's if it is asked for."""
        out_features, in_features = projection.out_features, projection.in_features
        if module == EMBEDDING or (module == HEAD and self._arch.tie_word_embeddings):
            embedding = self.tensor(f"{EMBEDDING}.weight", (self._arch.vocab_size, self._arch.hidden_size))
            return embedding if module == HEAD else embedding.T
        return self.tensor(f"{module}.weight", (out_features, in_features))

    def bias(self, module: str, projection: Projection) -> Tensor | None:
        """A linear layer's whole bias [out_features]; None if it has none."""
        if projection.name in (EMBEDDING, HEAD) or not self._arch.has_bias(projection.name):
            return None
        return self.tensor(f"{module}.bias", (projection.out_features,))


def _weight_files(model_path: Path) -> list[Path]:
    index = model_path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [model_path / file for file in files]
    single = model_path / "model.safetensors"
    if not single.is_file():
        raise ConfigError(f"model: {model_path} has no model.safetensors; only safetensors checkpoints are served")
    return [single]
