"""The deployment that callers see: the HTTP API, and the same model for other Ray applications by handle.

handle = serve.get_app_handle("llama")
output = await handle.generate.remote(GenerateRequest(prompt="Hello"))                # a RequestOutput
async for chunk in handle.options(stream=True).generate.remote(request): ...         # GenerateChunks
await handle.load_adapter.remote("legal", "/adapters/legal")
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from ray_lora.adapter import AdapterInfo, AdapterValidation
from ray_lora.config import EngineConfig
from ray_lora.request import GenerateChunk, GenerateRequest, RequestOutput
from ray_lora.serve.call_kind import is_streaming_call
from ray_lora.serve.chunk_pacing import paced
from ray_lora.serve.http_api import build_api
from ray_lora.serve.replica_client import ReplicaClient
from ray_lora.serve.served_model import ServedModel, make_request_id
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.serve.tokenizer_loader import load_tokenizer
from ray_lora.tenant import ANYONE

logger = logging.getLogger("ray.serve")


class Ingress:
    """Text in and out; the model itself is behind `replicas`, and which adapters it has is in `directory`."""

    def __init__(self, config: EngineConfig, replicas: DeploymentHandle[Any], directory: DeploymentHandle[Any]) -> None:
        tokenizer = load_tokenizer(config)
        self._client = ReplicaClient(replicas, directory, config)
        if isinstance(tokenizer, Tokenizer):
            _ = tokenizer.chat_template  # now rather than with the first chat, because it takes a second
        self._served = ServedModel(config, tokenizer, self._client)
        if not config.needs_api_key:
            logger.warning("no API keys are configured: whoever reaches this server may use it")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._served)

    async def generate(self, request: GenerateRequest) -> RequestOutput | AsyncGenerator[GenerateChunk, None]:
        """Complete a prompt: the whole output, or with `options(stream=True)` its chunks as they come.

        Raises:
            InvalidRequestError, NotFoundError: the request cannot be served; `param` names the field.
            CapacityError: not now; the adapter's limits hold for handles as well.
            NumericsError, EngineDeadError: it failed on the way.
        """
        wants_stream = is_streaming_call()
        self._served.check(ANYONE, request.adapter, request.sampling_params.n)
        text = request.prompt if isinstance(request.prompt, str) else None
        if text is not None:
            request = replace(request, prompt=self._served.tokenizer.encode(text))
        if not request.request_id:
            request = replace(request, request_id=make_request_id("gen"))
        chunks = self._served.generate(ANYONE, request, wants_stream)
        if wants_stream:
            return paced(chunks)
        output = RequestOutput(request.request_id, text, adapter=request.adapter, n=request.sampling_params.n)
        async with aclosing(chunks):
            async for chunk in chunks:
                output.append(chunk)
        return output

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> AdapterInfo:
        """Load an adapter on every replica; the same name with the same content changes nothing.

        With `expected_version`, only if the name points to that version now.

        Raises:
            InvalidRequestError, NotFoundError, CapacityError: what is wrong with it; nothing has changed.
        """
        info, _ = await self._client.load_adapter(name, path, load_inplace, expected_version)
        return info

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run on it finish.

        Raises:
            NotFoundError: there is none of that name.
        """
        await self._client.unload_adapter(name)

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo:
        """Keep an adapter in host memory, and on the device from its next request on; or no longer.

        Raises:
            NotFoundError: there is none of that name.
            CapacityError: the pinned ones would leave no room for others.
        """
        return await self._client.pin_adapter(name, is_pinned)

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        """Set an adapter's share of the service on every replica; each begins with 1.

        Raises:
            InvalidRequestError, NotFoundError: the weight is out of range; there is none of that name.
        """
        return await self._client.set_adapter_weight(name, weight)

    async def validate_adapter(self, path: str, name: str | None = None) -> AdapterValidation:
        """What loading an adapter, under this name, would do; nothing changes.

        Raises:
            InvalidRequestError, NotFoundError: there is no adapter at that path, or the name is none.
        """
        return await self._client.validate_adapter(path, name)

    async def list_adapters(self) -> list[AdapterInfo]:
        return await self._client.list_adapters()
