"""Loading and unloading adapters over HTTP, with vLLM's fields, answers and error texts; and listing them."""

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ray_lora.errors import InvalidRequestError, NotFoundError, VersionConflictError
from ray_lora.serve.access import tenant_of
from ray_lora.serve.http_errors import error_response
from ray_lora.serve.openai_types import LoadLoraRequest, UnloadLoraRequest
from ray_lora.serve.request_body import parse_body
from ray_lora.serve.served_model import ServedModel

INVALID = "InvalidUserInput"
VERSION_HEADER = "x-adapter-version"
"""Tells which version served a request, or was loaded."""


def add_adapter_routes(app: APIRouter, served: ServedModel) -> None:
    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        try:
            body = parse_body(LoadLoraRequest, await request.body())
            if not body.lora_name or not body.lora_path:
                missing = "lora_path" if body.lora_name else "lora_name"
                raise InvalidRequestError("Both 'lora_name' and 'lora_path' must be provided.", missing)
            info, changed = await served.client.load_adapter(
                body.lora_name, body.lora_path, body.load_inplace, body.expected_version
            )
        except VersionConflictError:
            raise
        except InvalidRequestError as error:
            return error_response(error, INVALID)
        headers = {VERSION_HEADER: info.version}
        if not changed:
            said = f"Success: LoRA adapter '{body.lora_name}' had this content already; nothing has changed."
            return PlainTextResponse(said, headers=headers)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.", headers=headers)

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        try:
            body = parse_body(UnloadLoraRequest, await request.body())
            if not body.lora_name:
                raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        except InvalidRequestError as error:
            return error_response(error, INVALID)
        await served.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.get("/v1/adapters")
    async def list_adapters(request: Request) -> Response:
        adapters = await served.list_adapters(tenant_of(request))
        return JSONResponse({"object": "list", "data": [asdict(info) for info in adapters]})

    @app.get("/v1/adapters/{name}")
    async def get_adapter(name: str, request: Request) -> Response:
        for info in await served.list_adapters(tenant_of(request)):
            if info.name == name:
                return JSONResponse(asdict(info))
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "name")
