"""From the bytes of a request to a checked model, with errors that name the field as the caller wrote it."""

import difflib
import json
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.refused_fields import IGNORED, Values, drop_refused


class RequestBody(BaseModel):
    """Base of the request models: numbers are numbers, and no field is ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    REFUSED: ClassVar[dict[str, Values]] = {}
    """Known fields that are accepted only at harmless values."""


Body = TypeVar("Body", bound=RequestBody)


def parse_body(model: type[Body], raw: bytes) -> Body:
    """Read one request.

    Raises:
        InvalidRequestError: no JSON object in UTF-8, an unknown field (with the nearest known one), a refused or a bad
            one.
    """
    try:
        text = raw.decode("utf-8")
        data = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():  # half a character, which only an escape can write
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, not {_kind(data)}")
    return validate(model, data)


def validate(model: type[Body], data: dict[str, Any], path: str = "") -> Body:
    """Check a JSON object; `path` is where it stands in the body, e.g. `messages[0].`."""
    for name in data:
        if name not in model.model_fields and name not in model.REFUSED and name not in IGNORED:
            _refuse_unknown(name, [*model.model_fields, *model.REFUSED], path)
    data = drop_refused(data, model.REFUSED, path)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = path + _spell(model, first["loc"], data)
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"{where}: {message}" if where else message, where or None) from None


def _refuse_unknown(name: str, known: list[str], path: str) -> NoReturn:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise InvalidRequestError(f"Unknown field '{path}{name}'{hint}", f"{path}{name}")


def _spell(model: type[BaseModel], loc: tuple[int | str, ...], data: Any) -> str:
    """`("messages", 0, "role")` as `messages[0].role`, without the names that pydantic gives to members of a union."""
    spelled = ""
    for part in loc:
        if isinstance(part, int):
            if not isinstance(data, list):
                break
            spelled += f"[{part}]"
            data = data[part] if part < len(data) else None
        elif not spelled or isinstance(data, dict):
            spelled += f".{part}" if spelled else part
            data = data.get(part) if isinstance(data, dict) else None
        else:
            break
    return spelled


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: object) -> str:
    return {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
