"""The fields of a body that ask for structured outputs: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.refused_fields import STRUCTURED_OUTPUTS, drop_refused
from ray_lora.serve.request_body import RequestBody
from ray_lora.structured_outputs import StructuredOutputsParams


class JsonSchemaFormat(RequestBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """The schema is kept to either way."""


class ResponseFormat(RequestBody):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def params(self) -> StructuredOutputsParams | None:
        """
        Raises:
            InvalidRequestError: a schema without its type, or the type without a schema.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format needs json_schema if and only if its type is json_schema", "response_format"
            )
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


def structured_outputs(
    given: Mapping[str, Any] | None, response_format: ResponseFormat | None
) -> StructuredOutputsParams | None:
    """What a body asks for, in either way.

    Raises:
        InvalidRequestError: in both ways, or with a field that is unknown or bad.
    """
    params = None if response_format is None else response_format.params
    if given is None:
        return params
    if params is not None:
        raise InvalidRequestError("response_format and structured_outputs are both given", "structured_outputs")
    fields = drop_refused(dict(given), STRUCTURED_OUTPUTS, "structured_outputs.")
    for name in fields:
        if name not in StructuredOutputsParams.__dataclass_fields__:
            raise InvalidRequestError(f"Unknown field 'structured_outputs.{name}'", f"structured_outputs.{name}")
    return StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None})
