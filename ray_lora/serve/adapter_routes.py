"""Loading and unloading adapters over HTTP, with vLLM's fields, answers and error texts; and what else is
asked of them: whether one would be taken, to stay, to get its share, where they are."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ray_lora.adapter import AdapterValidation
from ray_lora.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, VersionConflictError
from ray_lora.serve.access import tenant_of
from ray_lora.serve.api_document import body_schema
from ray_lora.serve.http_errors import error_response
from ray_lora.serve.openai_types import AdapterWeightRequest, LoadLoraRequest, UnloadLoraRequest, ValidateLoraRequest
from ray_lora.serve.request_body import parse_body
from ray_lora.serve.served_model import ServedModel

INVALID = "InvalidUserInput"
VERSION_HEADER = "x-adapter-version"
"""Tells which version served a request, or was loaded. Prompts of one body may be served by several: all of them are
told, and by a stream that of the first to answer."""


def add_adapter_routes(app: APIRouter, served: ServedModel) -> None:
    async def _validation(found: AdapterValidation) -> dict[str, Any]:
        """A refused adapter is an answer, not an error: the question was whether it would be."""
        refusals = [asdict(refusal) for refusal in found.refusals]
        manifest = found.manifest
        if manifest is None:
            return {"valid": False, "refusals": refusals}
        page_bytes = (await served.info()).lora_page_bytes
        return {
            "valid": not refusals,
            "refusals": refusals,
            "version": manifest.version,
            "rank": manifest.rank,
            "modules": manifest.modules,
            "num_pages": manifest.num_pages,
            "num_bytes": manifest.shard_bytes,
            "device_bytes": manifest.num_pages * page_bytes,
        }

    @app.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadLoraRequest), response_class=PlainTextResponse)
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

    @app.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadLoraRequest), response_class=PlainTextResponse)
    async def unload_lora_adapter(request: Request) -> Response:
        try:
            body = parse_body(UnloadLoraRequest, await request.body())
            if not body.lora_name:
                raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        except InvalidRequestError as error:
            return error_response(error, INVALID)
        await served.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post("/v1/validate_lora_adapter", openapi_extra=body_schema(ValidateLoraRequest))
    async def validate_lora_adapter(request: Request) -> Response:
        body = parse_body(ValidateLoraRequest, await request.body())
        found = await served.client.validate_adapter(body.lora_path, body.lora_name)
        return JSONResponse(await _validation(found))

    @app.post("/v1/adapters/{name}/pin")
    async def pin_adapter(name: str) -> Response:
        return JSONResponse(asdict(await served.client.pin_adapter(name, True)))

    @app.post("/v1/adapters/{name}/unpin")
    async def unpin_adapter(name: str) -> Response:
        return JSONResponse(asdict(await served.client.pin_adapter(name, False)))

    @app.post("/v1/adapters/{name}/weight", openapi_extra=body_schema(AdapterWeightRequest))
    async def set_adapter_weight(name: str, request: Request) -> Response:
        """A share is taken from others, so it is not for those to set who may not see them."""
        tenant = tenant_of(request)
        if not tenant.sees_everything:
            raise PermissionDeniedError(f"API key '{tenant.name}' may not set weights: it is not for all adapters.")
        body = parse_body(AdapterWeightRequest, await request.body())
        return JSONResponse(asdict(await served.client.set_adapter_weight(name, body.weight)))

    @app.get("/v1/adapters")
    async def list_adapters(request: Request) -> Response:
        """How full the tiers are is for those to see who see all adapters."""
        tenant = tenant_of(request)
        adapters = await served.list_adapters(tenant)
        answer = {"object": "list", "data": [asdict(info) for info in adapters]}
        if tenant.sees_everything:
            replicas = await served.client.adapter_tiers()
            answer["tiers"] = [{tier: asdict(use) for tier, use in replica.items()} for replica in replicas]
        return JSONResponse(answer)

    @app.get("/v1/adapters/{name}")
    async def get_adapter(name: str, request: Request) -> Response:
        for info in await served.list_adapters(tenant_of(request)):
            if info.name == name:
                return JSONResponse(asdict(info))
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.", "name")
