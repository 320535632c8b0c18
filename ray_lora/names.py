"""Names that adapters may have, and how the places that they come from are written."""

import re
from urllib.parse import urlsplit

from ray_lora.errors import InvalidRequestError

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


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


def url_scheme(source: str) -> str | None:
    """`s3` of `s3://bucket/adapter`; None for a local path."""
    match = _SCHEME.match(source) if isinstance(source, str) else None
    return match[1].lower() if match else None


def without_credentials(source: str) -> str:
    """A source as messages and lists may show it: a URL loses its user, password, query and fragment.

    Raises:
        InvalidRequestError: it is not a URL that can be read; `param` is `lora_path`.
    """
    scheme = url_scheme(source)
    if scheme is None:
        return source
    try:
        parts = urlsplit(source)
    except ValueError:
        raise InvalidRequestError(f"lora_path is not a URL, though it begins with {scheme}://", "lora_path") from None
    return f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
