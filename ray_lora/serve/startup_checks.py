"""What can be seen wrong with a configuration before any process is started for it."""

import ipaddress
from pathlib import Path
from typing import Any

import ray

import ray_lora
from ray_lora.architecture import read_architecture
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError, InvalidRequestError
from ray_lora.names import check_adapter_name, url_scheme
from ray_lora.serve.key_ring import KeyRing
from ray_lora.serve.request_spans import check_tracing
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.serve.tokenizer_loader import load_tokenizer


def resolve_paths(config: EngineConfig) -> EngineConfig:
    """Make relative paths absolute, because replicas run in other directories.

    They count from the directory that `serve run` was started in, and failing that from the root of the checkout that
    this package is installed from, so that `deployments/llama.yaml` works from anywhere.
    """
    modules = [module.model_copy(update={"path": _resolve(module.path)}) for module in config.lora_modules]
    update: dict[str, Any] = {"model": _resolve(config.model), "lora_modules": tuple(modules)}
    if config.lora_resolver_dir is not None:
        update["lora_resolver_dir"] = _resolve(config.lora_resolver_dir)
    if config.tokenizer is not None:
        update["tokenizer"] = _resolve(config.tokenizer)
    if config.api_keys_file is not None:
        update["api_keys_file"] = _resolve(config.api_keys_file)
    if config.served_model_name is None:
        update["served_model_name"] = config.base_model_name
    return config.model_copy(update=update)


def is_single_node() -> bool:
    """Whether this process sees the files that the replicas will see."""
    return not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) <= 1


def check_exposure(config: EngineConfig, host: str | None) -> None:
    """
    Args:
        host: what HTTP listens on; None if it does not.

    Raises:
        ConfigError: other machines would be served without API keys, and nobody has said that they should.
    """
    if not (config.needs_api_key or config.allow_unauthenticated or host is None or _is_loopback(host)):
        raise ConfigError(
            f"api_keys_file: without API keys, http_options.host must be 127.0.0.1 and not {host}; give keys, or set "
            "allow_unauthenticated: true"
        )


def check_files(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: the model, its tokenizer, an adapter, the file of API keys or what traces need is missing or cannot
            be served; one line that names it.
    """
    KeyRing(config)
    if not config.model_path.is_dir():
        raise ConfigError(f"model: {config.model_path} does not exist{_hint(config.model_path)}")
    read_architecture(config.model_path).check_tensor_parallel(config.tensor_parallel_size)
    tokenizer = load_tokenizer(config)
    if config.chat_template is not None and isinstance(tokenizer, Tokenizer):
        _ = tokenizer.chat_template
    if config.lora_resolver_dir is not None and not Path(config.lora_resolver_dir).expanduser().is_dir():
        raise ConfigError(f"lora_resolver_dir: {config.lora_resolver_dir} is not a directory")
    check_tracing(config)
    names = set()
    for module in config.lora_modules:
        try:
            check_adapter_name(module.name, config.base_model_name)
        except InvalidRequestError as error:
            raise ConfigError(f"lora_modules: {error}") from None
        if module.name in names:
            raise ConfigError(f"lora_modules: {module.name!r} is given twice")
        names.add(module.name)
        if url_scheme(module.path) is None and not (Path(module.path).expanduser() / "adapter_config.json").is_file():
            raise ConfigError(f"lora_modules: {module.name!r}: {module.path} has no adapter_config.json")


def _resolve(path: str) -> str:
    expanded = Path(path).expanduser()
    if url_scheme(path) is not None:
        return path
    if expanded.is_absolute():
        return str(expanded)
    package = Path(ray_lora.__file__).parent
    for root in (Path.cwd(), package.parent):
        if (root / expanded).exists():
            return str(root / expanded)
    return str(Path.cwd() / expanded)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hint(path: Path) -> str:
    """The demo model is made by `make`."""
    return "; run `make install` to prepare it" if ".cache/ray_lora" in str(path) else ""
