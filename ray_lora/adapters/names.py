"""Which names an adapter may carry. Free of torch, so every layer may ask."""

import re

from ray_lora.errors import InvalidRequestError

MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def check_adapter_name(name: str) -> None:
    """Accept 1 to 128 letters, digits, `.`, `_` and `-`, not starting with `.`.

    No `/`, so a name is never a path; no `:`, which parts base and adapter in the model id `base:adapter`.

    Raises:
        InvalidRequestError: anything else; `param` is `lora_name`.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"lora_name must be 1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' or '-' and not start with '.', "
            f"not {str(name)[:MAX_NAME_LENGTH]!r}",
            "lora_name",
        )
