"""PEFT directories as deltas by module and back, without a base model: for tools that work on adapters offline."""

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ray_lora.adapters.adapter_algebra import LowRankDelta
from ray_lora.adapters.finite import all_finite
from ray_lora.adapters.peft_config import CONFIG_FILE, PeftConfig, parse_peft_config, read_config_fields, reject, show
from ray_lora.adapters.peft_targets import ModuleSelector
from ray_lora.adapters.peft_weights import DTYPES, check_header_length, finite
from ray_lora.adapters.store import WEIGHTS_FILE
from ray_lora.config import MAX_RANK
from ray_lora.errors import InvalidRequestError

TENSOR_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class StoredModule:
    """One module's factors as they lie in the file, on the CPU; `scale * lora_b @ lora_a` is what it adds."""

    lora_a: torch.Tensor
    """`[rank, in_features]`, in the file's dtype, as is `lora_b`."""
    lora_b: torch.Tensor
    """`[out_features, rank]`."""
    scale: float

    @property
    def delta(self) -> LowRankDelta:
        return LowRankDelta(self.lora_a.double(), self.lora_b.double() * self.scale)

    @property
    def num_params(self) -> int:
        return self.lora_a.numel() + self.lora_b.numel()

    @property
    def num_bytes(self) -> int:
        return self.lora_a.nbytes + self.lora_b.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredAdapter:
    """A whole adapter, checked as far as is possible without its base model."""

    fields: Mapping[str, Any]
    """`adapter_config.json`."""
    modules: Mapping[str, StoredModule]
    """By module, e.g. `model.layers.0.self_attn.q_proj`, in natural order."""

    @property
    def dtype(self) -> torch.dtype:
        """The widest of its tensors'."""
        dtypes = {tensor.dtype for module in self.modules.values() for tensor in (module.lora_a, module.lora_b)}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32


def read_adapter(
    directory: Path, fields: Mapping[str, Any] | None = None, ignore_key: Callable[[str], bool] = lambda key: False
) -> StoredAdapter:
    """Read both files; `fields` stand in for those of `adapter_config.json`.

    Tensors other than A and B of linear layers are refused, unless `ignore_key` says to leave them out.

    Raises:
        AdapterRejectedError: a field, a file or a tensor that the server would refuse whatever the base model.
    """
    fields = read_config_fields(directory) if fields is None else fields
    config = parse_peft_config(dict(fields))
    try:
        check_header_length(directory / WEIGHTS_FILE)
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as tensors:
            stored = list(tensors.keys())
            if not stored:
                reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} holds no tensors")
            keys = _pair_keys([key for key in stored if not ignore_key(key)])
            _check_selected(keys, config)
            selector = ModuleSelector(config, tuple(keys))
            modules = {
                name: _checked_module(tensors, key_a, key_b, selector.rank(name), selector.scale(name))
                for name, (key_a, key_b) in keys.items()
            }
    except FileNotFoundError:
        reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} is missing in {str(directory)!r}")
    except (SafetensorError, OSError, ValueError) as error:
        reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} is truncated or damaged: {show(str(error))}")
    return StoredAdapter(fields, modules)


def write_adapter(
    directory: Path, deltas: Mapping[str, LowRankDelta], like: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write deltas as plain LoRA of scale 1, for PEFT and the server; the directory appears complete or not at all.

    Args:
        directory: must not exist.
        deltas: by module.
        like: fields of an `adapter_config.json` whose base model and task are kept.
        dtype: what the factors are rounded to.

    Raises:
        InvalidRequestError: the directory exists, or cannot be written; `param` is `output`.
        AdapterRejectedError: a rank above `MAX_RANK`, or a value beyond the range of `dtype`; `param` is the module.
    """
    tensors = {}
    for name, delta in deltas.items():
        if delta.rank > MAX_RANK:
            reject(name, f"{name} has rank {delta.rank}, more than the {MAX_RANK} that are served; compress first")
        for side, factor in (("A", delta.lora_a), ("B", delta.lora_b)):
            rounded = factor.to(dtype).contiguous()
            if not all_finite(rounded):
                reject(name, f"{name} has values beyond the range of {dtype}; choose another dtype")
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = rounded
    config = _plain_config({name: delta.rank for name, delta in deltas.items()}, like)
    with _complete_or_absent(directory) as incoming:
        (incoming / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, incoming / WEIGHTS_FILE, metadata={"format": "pt"})


def _pair_keys(keys: list[str]) -> dict[str, tuple[str, str]]:
    """By module: the keys of its A and its B."""
    found: dict[tuple[str, str], str] = {}
    for key in keys:
        match = TENSOR_KEY.fullmatch(key)
        if match is None:
            reject(key, f"tensor {show(key)} is not supported: only lora_A.weight and lora_B.weight of modules are")
        if (match["module"], match["side"]) in found:
            reject(key, f"tensor {show(key)} is there twice, also as {show(found[match['module'], match['side']])}")
        found[match["module"], match["side"]] = key
    names = sorted({module for module, _ in found}, key=_natural_order)
    for name in names:
        for side in "AB":
            if (name, side) not in found:
                reject(name, f"tensor base_model.model.{name}.lora_{side}.weight is missing")
    return {name: (found[name, "A"], found[name, "B"]) for name in names}


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _check_selected(names: Mapping[str, object], config: PeftConfig) -> None:
    selector = ModuleSelector(config, tuple(names))
    for name in names:
        if not selector.selects(name):
            reject(name, f"there are tensors of {name}, which target_modules and its like do not select")


def _checked_module(tensors: Any, key_a: str, key_b: str, rank: int, scale: float) -> StoredModule:
    """`tensors` is a `safe_open`, which is untyped."""
    factors = []
    for key, rank_axis in ((key_a, 0), (key_b, 1)):
        stored = tensors.get_slice(key)
        shape, dtype = stored.get_shape(), stored.get_dtype()
        if len(shape) != 2 or shape[rank_axis] != rank:
            reject(key, f"tensor {show(key)} is {list(shape)}, but {CONFIG_FILE} gives the module rank {rank}")
        if dtype not in DTYPES:
            reject(key, f"tensor {show(key)} is of type {dtype}; save it as one of {', '.join(DTYPES)}")
        factors.append(finite(tensors.get_tensor(key), key).clone())
    return StoredModule(factors[0], factors[1], scale)


def _plain_config(ranks: Mapping[str, int], like: Mapping[str, Any]) -> dict[str, Any]:
    """Every module is spelled out; alpha equals the rank everywhere, so the scale is 1."""
    ((usual, _),) = Counter(ranks.values()).most_common(1)
    exceptions = {name.replace(".", r"\."): rank for name, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": like.get("task_type"),
        "base_model_name_or_path": like.get("base_model_name_or_path"),
        "revision": like.get("revision"),
        "r": usual,
        "lora_alpha": usual,
        "target_modules": list(ranks),
        "rank_pattern": exceptions,
        "alpha_pattern": exceptions,
        "bias": "none",
        "inference_mode": True,
    }


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """A directory to write to, which gets its name once all is written."""
    try:
        if directory.exists():
            raise InvalidRequestError(f"{directory} exists; give a directory that does not", "output")
        directory.parent.mkdir(parents=True, exist_ok=True)
        incoming = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            incoming.chmod(0o755)
            yield incoming
            incoming.rename(directory)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {directory}: {error.strerror}", "output") from None
