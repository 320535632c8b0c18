"""What the text of a completion must match, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ray_lora.errors import InvalidRequestError

TEXTS = ("regex", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of the first five is given.

    Raises:
        InvalidRequestError: none or several are given, or one of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """In the syntax of Rust's regex crate; the whole text matches it."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar, in Lark's notation or in llama.cpp's (GBNF)."""
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks between its tokens."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _error(f"needs exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        value = self.value
        if self.kind in TEXTS and not (isinstance(value, str) and value):
            raise _error("must be a text", self.kind)
        if self.kind == "choice" and not (
            isinstance(value, Sequence) and not isinstance(value, str) and value and all(_is_text(one) for one in value)
        ):
            raise _error("must be a list of texts", self.kind)
        if self.kind == "json" and not isinstance(value, (str, Mapping)):
            raise _error("must be a JSON schema", self.kind)

    @property
    def kind(self) -> str:
        """Which of them is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def value(self) -> Any:
        return getattr(self, self.kind)


KINDS = tuple(field.name for field in fields(StructuredOutputsParams))[:5]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _error(message: str, kind: str | None = None) -> InvalidRequestError:
    param = "structured_outputs" if kind is None else f"structured_outputs.{kind}"
    return InvalidRequestError(f"{param} {message}", param)
