"""Chat messages as OpenAI's API takes them -> as a chat template reads them."""

from typing import Any, ClassVar, Literal

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.refused_fields import MESSAGE, Values
from ray_lora.serve.request_body import RequestBody, validate


class ChatMessage(RequestBody):
    """One message; its content is text, or parts that are all text."""

    REFUSED: ClassVar[dict[str, Values]] = MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


def parse_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain `{"role", "content"}` messages; `developer`, OpenAI's newer word, becomes `system`.

    Raises:
        InvalidRequestError: a message is malformed or holds more than text; `param` says which, `messages[1].content`.
    """
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _parse_message(data: dict[str, Any], path: str) -> dict[str, Any]:
    message = validate(ChatMessage, data, f"{path}.")
    if message.content is None:
        raise InvalidRequestError(f"{path}.content is missing", f"{path}.content")
    role = "system" if message.role == "developer" else message.role
    parsed = {"role": role, "content": _text(message.content, f"{path}.content")}
    return parsed if message.name is None else {**parsed, "name": message.name}


def _text(content: str | list[dict[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind != "text" and isinstance(kind, str):
            raise InvalidRequestError(f"{path}[{index}]: {kind} is not supported by this server", f"{path}[{index}]")
        texts.append(validate(TextPart, part, f"{path}[{index}].").text)
    return "\n".join(texts)
