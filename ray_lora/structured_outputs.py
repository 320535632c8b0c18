"""What the text of a completion must match, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_lora.errors import InvalidRequestError


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
        choice = [] if self.choice is None or isinstance(self.choice, str) else self.choice
        is_good = {
            "json": isinstance(self.json, (str, Mapping)),
            "json_object": self.json_object is True,
            "regex": _is_text(self.regex),
            "choice": isinstance(choice, Sequence) and bool(choice) and all(map(_is_text, choice)),
            "grammar": _is_text(self.grammar),
        }
        given = [name for name in is_good if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            message = f"structured_outputs needs one of {', '.join(is_good)}, not {' and '.join(given) or 'none'}"
            raise InvalidRequestError(message, "structured_outputs")
        if not is_good[given[0]]:
            param = f"structured_outputs.{given[0]}"
            raise InvalidRequestError(f"{param}: {getattr(self, given[0])!r:.100} is none", param)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
