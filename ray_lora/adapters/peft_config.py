"""`adapter_config.json` -> `PeftConfig`: every field is honoured, known to be irrelevant, or refused by name."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ray_lora.adapters.pattern_matcher import (
    Pattern,
    PatternError,
    fullmatch_pattern,
    is_plain_name,
    layer_pattern,
    match_names,
    suffix_pattern,
)
from ray_lora.adapters.peft_fields import HONOURED, IRRELEVANT, REFUSED
from ray_lora.config import MAX_RANK
from ray_lora.errors import AdapterRejectedError

CONFIG_FILE = "adapter_config.json"


def reject(param: str, message: str) -> NoReturn:
    """Raise AdapterRejectedError for a field of the configuration, a tensor or a file, whatever it calls itself."""
    raise AdapterRejectedError(message, param[:200].encode("utf-8", "backslashreplace").decode())


def show(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The part of a LoRA configuration that decides what is computed. PEFT's names and defaults."""

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    """The scale is `lora_alpha / sqrt(r)` instead of `lora_alpha / r`."""
    target_modules: str | tuple[str, ...] = ("q_proj", "v_proj")
    """A regular expression for whole module names, `all-linear`, or names and their suffixes (sorted).
    The default is what PEFT infers, if the field is null, for every family that is served."""
    exclude_modules: str | tuple[str, ...] = ()
    """As `target_modules`; it wins over them."""
    layers_to_transform: tuple[int, ...] = ()
    """Empty is all layers."""
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()
    """(expression, rank) in the order of the file: the first that matches a module wins."""
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    use_dora: bool = False
    """Every target's weight is scaled row by row to a trained magnitude."""
    lora_bias: bool = False
    """Every target's B has a bias, scaled as B is."""
    bias: str = "none"
    """Which biases of the base were trained: `none`, `all`, or those of the targets (`lora_only`)."""
    modules_to_save: tuple[str, ...] = ()
    """Names and suffixes of modules that were trained as a whole (sorted); PEFT puts no LoRA on them."""
    trainable_tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """`trainable_token_indices`: (suffix of a module's name, token ids in the order of their rows)."""
    ensure_weight_tying: bool = False
    """What is done to one of a tied embedding and head is done to the other."""
    base_model_name: str | None = None
    """What the trainer called the base model: shown in messages, never trusted."""

    @property
    def targets_all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    @property
    def patterns(self) -> tuple[tuple[str, Pattern], ...]:
        """(field, expression) of every regular expression."""
        found = []
        if isinstance(self.target_modules, str) and not self.targets_all_linear:
            found.append(("target_modules", fullmatch_pattern(self.target_modules)))
        if isinstance(self.exclude_modules, str):
            found.append(("exclude_modules", fullmatch_pattern(self.exclude_modules)))
        found += [("rank_pattern", suffix_pattern(key)) for key, _ in self.rank_pattern]
        found += [("alpha_pattern", suffix_pattern(key)) for key, _ in self.alpha_pattern]
        found += [("layers_pattern", layer_pattern(name)) for name in self.layers_pattern]
        return tuple(found)

    def match(self, names: tuple[str, ...]) -> dict[Pattern, dict[str, str]]:
        """`match_names` of all expressions.

        Raises:
            AdapterRejectedError: naming the field whose expression does not compile or takes too long.
        """
        try:
            return match_names([pattern for _, pattern in self.patterns], names)
        except PatternError as error:
            fields = [field for field, pattern in self.patterns if pattern in error.suspects]
            blamed = " or ".join(dict.fromkeys(fields))
            reject(fields[0], f"{blamed} is not a usable regular expression: {show(error.message)}")

    def canonical(self) -> str:
        """JSON of all that can change the result, and of nothing else; equal for files that differ in form only.

        The patterns keep their order, because the first that matches wins.
        """
        meaning = asdict(self)
        del meaning["base_model_name"]
        return json.dumps(meaning, sort_keys=True)


def read_peft_config(directory: Path) -> PeftConfig:
    """Parse `adapter_config.json` in a directory.

    Raises:
        AdapterRejectedError: no such file, not a JSON object, or a field that cannot be honoured.
    """
    return parse_peft_config(read_config_fields(directory))


def read_config_fields(directory: Path) -> dict[str, Any]:
    """The JSON object in `adapter_config.json`, its fields not yet checked.

    Raises:
        AdapterRejectedError: no such file, or not a JSON object.
    """
    try:
        raw = (directory / CONFIG_FILE).read_bytes()
    except OSError as error:
        reject(CONFIG_FILE, f"cannot read {CONFIG_FILE}: {error.strerror}")
    try:
        config = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reject(CONFIG_FILE, f"{CONFIG_FILE} is not JSON: {show(str(error))}")
    if not isinstance(config, dict):
        reject(CONFIG_FILE, f"{CONFIG_FILE} must hold a JSON object, not {show(config)}")
    return config


def parse_peft_config(config: dict[str, Any]) -> PeftConfig:
    """Check every field.

    Raises:
        AdapterRejectedError: a field that changes the result and is not supported, an unknown field that is not off,
            or a value of the wrong type or range; `param` is the field.
    """
    if "peft_type" not in config:
        reject("peft_type", f"peft_type is missing; {REFUSED['peft_type'].remedy}")
    for name, value in config.items():
        check_field(name, value)
    default = PeftConfig()
    parsed = PeftConfig(
        r=_rank("r", config.get("r", default.r)),
        lora_alpha=_alpha("lora_alpha", config.get("lora_alpha", default.lora_alpha)),
        use_rslora=_flag(config, "use_rslora"),
        target_modules=_modules(config, "target_modules", default.target_modules),
        exclude_modules=_modules(config, "exclude_modules", default.exclude_modules) or (),
        layers_to_transform=_layers(config.get("layers_to_transform")),
        layers_pattern=_names(config, "layers_pattern"),
        rank_pattern=tuple((key, _rank("rank_pattern", value)) for key, value in _mapping(config, "rank_pattern")),
        alpha_pattern=tuple((key, _alpha("alpha_pattern", value)) for key, value in _mapping(config, "alpha_pattern")),
        use_dora=_flag(config, "use_dora"),
        lora_bias=_flag(config, "lora_bias"),
        bias=_bias(config.get("bias", "none")),
        modules_to_save=tuple(sorted(set(_plain_names(config, "modules_to_save")))),
        trainable_tokens=_trainable_tokens(config.get("trainable_token_indices")),
        ensure_weight_tying=_flag(config, "ensure_weight_tying"),
        base_model_name=str(config["base_model_name_or_path"]) if config.get("base_model_name_or_path") else None,
    )
    for name in ("layers_to_transform", "layers_pattern"):
        if isinstance(parsed.target_modules, str) and getattr(parsed, name):
            reject(name, f"{name} cannot be used when target_modules is a string; list the module names")
    if parsed.layers_pattern and config.get("layers_to_transform") is None:
        reject("layers_pattern", "layers_pattern needs layers_to_transform")
    if parsed.use_dora and parsed.lora_bias:
        reject("lora_bias", "lora_bias cannot be used with use_dora, in PEFT either")
    parsed.match(())
    return parsed


def check_field(name: str, value: object) -> None:
    """Raise AdapterRejectedError if a field changes the result in a way that is not supported."""
    if name in REFUSED:
        if value not in REFUSED[name].harmless:
            reject(name, f"{name} {show(value)} is not supported: {REFUSED[name].remedy}")
    elif name not in HONOURED and name not in IRRELEVANT and value is not None and value is not False:
        reject(name, f"unknown field {show(name)} is {show(value)} and may change the result; if not, remove it")


def refused_fields(directory: Path) -> list[AdapterRejectedError]:
    """Every field of a configuration that cannot be honoured, where reading it stops at the first.

    Raises:
        AdapterRejectedError: `adapter_config.json` cannot be read.
    """
    refused = []
    for name, value in read_config_fields(directory).items():
        try:
            check_field(name, value)
        except AdapterRejectedError as error:
            refused.append(error)
    return refused


def _rank(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        reject(field, f"{field} must be a rank between 1 and {MAX_RANK}, not {show(value)}")
    return value


def _alpha(field: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
    reject(field, f"{field} must be a finite number, not {show(value)}")


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        reject(field, f"{field} must be true or false, not {show(value)}")
    return bool(value)


def _bias(value: object) -> str:
    if not isinstance(value, str) or value not in ("none", "all", "lora_only"):
        reject("bias", f"bias must be 'none', 'all' or 'lora_only', not {show(value)}")
    return value


def _names(config: dict[str, Any], field: str) -> tuple[str, ...]:
    value = config.get(field)
    names = [] if value is None or value == "" else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        reject(field, f"{field} must be a string or a list of strings, not {show(value)}")
    return tuple(names)


def _plain_names(config: dict[str, Any], field: str) -> tuple[str, ...]:
    """Names that mean themselves, for PEFT takes them as regular expressions too."""
    names = () if config.get(field) is False else _names(config, field)
    if not all(is_plain_name(name) for name in names):
        reject(field, f"{field} must hold the names of modules, not {show(names)}")
    return names


def _trainable_tokens(value: object) -> tuple[tuple[str, tuple[int, ...]], ...]:
    field = "trainable_token_indices"
    by_module: dict[str, Any] = value if isinstance(value, dict) else {"embed_tokens": value} if value else {}
    for module, token_ids in by_module.items():
        is_valid = isinstance(token_ids, list) and all(type(token_id) is int for token_id in token_ids)
        if not is_valid or not is_plain_name(module):
            reject(field, f"{field} must be a list of token ids, or map modules to such lists, not {show(value)}")
        if len(set(token_ids)) != len(token_ids) or min(token_ids, default=0) < 0:
            reject(field, f"{field} must name every token once, by its id, not {show(token_ids)}")
    return tuple((module, tuple(token_ids)) for module, token_ids in sorted(by_module.items()) if token_ids)


def _modules(config: dict[str, Any], field: str, default: str | tuple[str, ...]) -> str | tuple[str, ...]:
    value = config.get(field)
    if value is None:
        return default
    return value if isinstance(value, str) else tuple(sorted(set(_names(config, field))))


def _layers(value: object) -> tuple[int, ...]:
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        reject("layers_to_transform", f"layers_to_transform must be a layer or a list of layers, not {show(value)}")
    return tuple(sorted(set(layers)))


def _mapping(config: dict[str, Any], field: str) -> list[tuple[str, Any]]:
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        reject(field, f"{field} must map module names to numbers, not {show(value)}")
    return list((value or {}).items())
