"""Names that adapters may have."""

import re

from ray_lora.errors import InvalidRequestError

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_adapter_name(name: str, base_model_name: str) -> None:
    """Raise InvalidRequestError unless `name` can stand in `model`, in a URL, in a metric and in a file name."""
    if not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"lora_name {str(name)[:140]!r} is not a name: 1 to 128 letters, digits, '.', '_' or '-', starting with a "
            "letter, a digit or '_'",
            "lora_name",
        )
    if name == base_model_name:
        raise InvalidRequestError(f"lora_name {name!r} is the base model's name", "lora_name")
