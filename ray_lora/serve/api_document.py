"""The document of the HTTP API, at `/openapi.json`, which `/docs` shows: what no route's signature can say."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from ray_lora.serve.access import OPEN_PATHS
from ray_lora.serve.http_errors import error_body

EVENTS: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
"""An answer with `stream`, beside that without."""


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The body's schema; the routes read the bytes themselves, for errors in OpenAI's format."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _without_references(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def install_document(app: FastAPI, needs_key: bool) -> None:
    """Let the application's document tell of errors and keys, once all routes are there."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, needs_key)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=version("ray_lora"), routes=app.routes)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own; all of ours are 400
            operation["responses"] = {"4XX": _ERROR, "5XX": _ERROR} | operation["responses"]
            if path in OPEN_PATHS:
                operation["security"] = []
    components = document.setdefault("components", {})
    components["schemas"] = {"Error": _ERROR_SCHEMA}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _without_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Models within models spelled out where they stand."""
    if isinstance(schema, list):
        return [_without_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_references(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {key: _without_references(value, definitions) for key, value in schema.items()}


_ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"], "description": "the field at fault, as the caller wrote it"},
    "code": {"type": ["integer", "string"], "description": "the status, or OpenAI's word where clients look for one"},
}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {"type": "object", "properties": _ERROR_FIELDS, "required": list(error_body(500, "")["error"])}
    },
    "required": ["error"],
}
_ERROR = {
    "description": "An error, in OpenAI's format",
    "headers": {
        "Retry-After": {"schema": {"type": "integer"}, "description": "seconds, where the same request may work later"}
    },
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
