"""What `ray-lora adapter` does: compress, merge and convert PEFT directories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ray_lora.adapters.adapter_algebra import LowRankDelta, TruncatedSVD, add_deltas, frobenius_norm, rank_for_energy
from ray_lora.adapters.adapter_files import StoredAdapter, read_adapter, write_adapter
from ray_lora.adapters.peft_config import read_config_fields, reject, show
from ray_lora.errors import InvalidRequestError

NEW_BASE_KINDS = ("pissa", "corda", "olora", "lora_ga")
"""Initialisations that subtract the initial delta from the base weights; the base is theirs from then on."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """What compressing one module has cost."""

    name: str
    old_rank: int
    new_rank: int
    norm: float
    """Of the delta before."""
    error: float
    """Norm of the difference between the delta before and the one written."""


def compress(
    directory: Path, output: Path, *, energy: float | None = None, rank: int | None = None, dtype: torch.dtype | None
) -> list[Truncation]:
    """Lower the rank of every module: to `rank`, or as far as what is written keeps this share of the delta's energy.

    A delta's energy is the square of its Frobenius norm. `dtype` is the adapter's own if None.

    Raises:
        AdapterRejectedError: the adapter cannot be honoured, or `dtype` cannot hold that much energy.
        InvalidRequestError: `output` cannot be written.
    """
    adapter = read_adapter(directory)
    dtype = dtype or adapter.dtype
    deltas, truncations = {}, []
    for name, module in adapter.modules.items():
        before = module.delta
        svd = TruncatedSVD(before)
        after, error = _truncate(name, before, svd, energy, rank, dtype)
        deltas[name] = after
        truncations.append(Truncation(name, before.rank, after.rank, float(svd.values.norm()), error))
    write_adapter(output, deltas, adapter.fields, dtype)
    return truncations


def merge(directories: Sequence[Path], weights: Sequence[float], output: Path, dtype: torch.dtype) -> dict[str, int]:
    """Write `sum(weight * delta)`, exact but for the rounding to `dtype`; the rank of each module, which is the sum.

    A module that an adapter does not change counts as zero there.

    Raises:
        InvalidRequestError: as many weights as adapters are needed, or `output` cannot be written.
        AdapterRejectedError: an adapter cannot be honoured, or two adapters are for different base models.
    """
    if len(weights) != len(directories):
        raise InvalidRequestError(f"{len(directories)} adapters but {len(weights)} weights", "weights")
    adapters = [read_adapter(directory) for directory in directories]
    names = list(dict.fromkeys(name for adapter in adapters for name in adapter.modules))
    deltas = {}
    for name in names:
        parts = [
            adapter.modules[name].delta * weight
            for adapter, weight in zip(adapters, weights, strict=True)
            if name in adapter.modules
        ]
        _check_one_shape(name, parts)
        deltas[name] = add_deltas(parts)
    write_adapter(output, deltas, adapters[0].fields, dtype)
    return {name: delta.rank for name, delta in deltas.items()}


def convert(trained: Path, initial: Path, output: Path, dtype: torch.dtype) -> dict[str, int]:
    """Write what training has changed, `B @ A - B0 @ A0`, a plain LoRA delta for the original base model.

    Adapters of `NEW_BASE_KINDS` start at `B0 @ A0` and are trained on a base that lacks it. Returns the ranks.

    Raises:
        AdapterRejectedError: the adapter is of another kind, or `initial` is not where it started.
        InvalidRequestError: `output` cannot be written.
    """
    fields = read_config_fields(trained)
    kind = fields.get("init_lora_weights", True)
    if not isinstance(kind, str) or not kind.lower().startswith(NEW_BASE_KINDS):
        remedy = "LoftQ's base is quantised: train anew" if kind == "loftq" else "nothing to convert"
        reject("init_lora_weights", f"init_lora_weights is {show(kind)}, not {', '.join(NEW_BASE_KINDS)}: {remedy}")
    after = read_adapter(trained, _plain(fields))
    before = read_adapter(initial, _plain(read_config_fields(initial)))
    if _shapes(after) != _shapes(before):
        reject("initial", f"{str(initial)!r} has other modules or shapes than {str(trained)!r}: not where it started")
    if all(
        torch.equal(module.lora_a, before.modules[name].lora_a)
        and torch.equal(module.lora_b, before.modules[name].lora_b)
        for name, module in after.modules.items()
    ):
        reject("initial", f"{str(initial)!r} holds the same tensors as {str(trained)!r}: nothing was trained")
    deltas = {name: after.modules[name].delta - before.modules[name].delta for name in after.modules}
    write_adapter(output, deltas, fields, dtype)
    return {name: delta.rank for name, delta in deltas.items()}


def _truncate(
    name: str, before: LowRankDelta, svd: TruncatedSVD, energy: float | None, rank: int | None, dtype: torch.dtype
) -> tuple[LowRankDelta, float]:
    """The truncated delta as `dtype` holds it, and its error. Rounding costs energy too: a rank more may be needed."""
    if energy is None:
        after = svd.at_rank(rank or svd.max_rank).to_dtype(dtype)
        return after, frobenius_norm(before - after)
    allowed = (1 - energy) ** 0.5 * float(svd.values.norm())
    for candidate in range(rank_for_energy(svd.values, energy), svd.max_rank + 1):
        after = svd.at_rank(candidate).to_dtype(dtype)
        error = frobenius_norm(before - after)
        if error <= allowed:
            return after, error
    reject(name, f"{dtype} cannot hold {energy:.15g} of the energy of {name}; choose a wider dtype or less energy")


def _shapes(adapter: StoredAdapter) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {name: (module.lora_a.shape, module.lora_b.shape) for name, module in adapter.modules.items()}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "init_lora_weights": True}


def _check_one_shape(name: str, parts: Sequence[LowRankDelta]) -> None:
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in shapes)
        reject(name, f"{name} is {shown}: these adapters are for different base models")
