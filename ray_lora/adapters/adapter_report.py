"""What an adapter holds, module by module, and why the server would not take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_lora.adapter import num_pages
from ray_lora.adapters.adapter_algebra import rank_for_energy, singular_values
from ray_lora.adapters.adapter_files import StoredModule, read_adapter
from ray_lora.adapters.peft_config import read_config_fields, refused_fields
from ray_lora.adapters.peft_fields import HONOURED
from ray_lora.adapters.peft_keys import is_served_beside_lora
from ray_lora.adapters.peft_weights import read_weights
from ray_lora.architecture import Architecture
from ray_lora.config import MAX_RANK
from ray_lora.errors import AdapterRejectedError


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What one module of an adapter looks like; norms are Frobenius norms."""

    name: str
    out_features: int
    in_features: int
    rank: int
    scale: float
    norm_a: float
    norm_b: float
    norm_delta: float
    """Of `scale * lora_b @ lora_a`."""
    rank_99: int
    """Ranks that hold 99% of the delta's energy."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    modules: tuple[ModuleReport, ...]
    num_params: int
    num_bytes: int
    refusals: tuple[str, ...]
    """Why the server would not take it; empty if it would, as far as can be known."""

    @property
    def num_pages(self) -> int:
        return max((num_pages(module.rank) for module in self.modules), default=0)


def describe(directory: Path, arch: Architecture | None = None) -> AdapterReport:
    """Every linear layer's A and B, and everything that would be refused; with `arch`, by that base model too.

    Raises:
        AdapterRejectedError: `adapter_config.json` cannot be read.
    """
    fields = read_config_fields(directory)
    refusals = [str(error) for error in refused_fields(directory)]
    supported = {name: value for name, value in fields.items() if name in HONOURED} | {"peft_type": "LORA"}
    modules: Sequence[ModuleReport] = ()
    num_params = num_bytes = 0
    try:
        adapter = read_adapter(directory, supported, is_served_beside_lora)
        modules = [_describe_module(*item) for item in adapter.modules.items()]
        num_params = sum(module.num_params for module in adapter.modules.values())
        num_bytes = sum(module.num_bytes for module in adapter.modules.values())
        if arch is not None:
            read_weights(directory, arch, MAX_RANK)
    except AdapterRejectedError as error:
        refusals.append(str(error))
    return AdapterReport(tuple(modules), num_params, num_bytes, tuple(dict.fromkeys(refusals)))


def _describe_module(name: str, module: StoredModule) -> ModuleReport:
    delta = module.delta
    values = singular_values(delta)
    return ModuleReport(
        name,
        *delta.shape,
        rank=delta.rank,
        scale=module.scale,
        norm_a=float(module.lora_a.double().norm()),
        norm_b=float(module.lora_b.double().norm()),
        norm_delta=float(values.norm()),
        rank_99=rank_for_energy(values, 0.99),
    )
