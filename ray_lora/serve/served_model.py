"""The model as the API sees it: names, text, and the requests that go to the engine."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray_lora.adapter import AdapterInfo
from ray_lora.config import EngineConfig
from ray_lora.errors import EngineDeadError, InvalidRequestError, NotFoundError, RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.serve.admission import Admission
from ray_lora.serve.engine_client import EngineClient
from ray_lora.serve.http_errors import model_not_found
from ray_lora.serve.key_ring import KeyRing
from ray_lora.serve.no_tokenizer import NoTokenizer
from ray_lora.serve.openai_answers import model_cards
from ray_lora.serve.openai_types import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from ray_lora.serve.request_observer import RequestObserver
from ray_lora.serve.retry import retried
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.step import ModelInfo
from ray_lora.tenant import Tenant

MAX_REQUEST_ID = 200
"""Characters of an id that a caller brings."""


class ServedModel:
    """Turns bodies into engine requests. Text becomes token ids here, which spares the process that runs the model.

    Whoever calls sees the base model and the adapters that it may use, as if there were no others.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | NoTokenizer, client: EngineClient) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.keys = KeyRing(config)
        self.created = int(time.time())
        self.num_retries = 0
        """Requests that ran again because their replica had died."""
        self._admission = Admission(config)
        self._observer = RequestObserver(config, tokenizer.decode)
        self._info: ModelInfo | None = None

    @property
    def base(self) -> str:
        return self.config.base_model_name

    @property
    def limit_refusals(self) -> Mapping[tuple[str, str], int]:
        """Requests over a limit, by adapter and by the class of the error."""
        return self._admission.refusals

    async def info(self) -> ModelInfo:
        """Asked for once; a model does not change while it is served."""
        if self._info is None:
            self._info = await self.client.model_info()
        return self._info

    def adapter_of(self, model: str | None, tenant: Tenant) -> str | None:
        """The adapter that `model` names, None for the base; whether it is loaded, the engine says.

        Raises:
            NotFoundError: the tenant may not use it, whether it exists or not.
        """
        if model is None or model == self.base:
            return None
        adapter = model.removeprefix(f"{self.base}:")
        if not adapter or not tenant.may_use(adapter):
            raise model_not_found(model)
        return adapter

    def check(self, tenant: Tenant, adapter: str | None, count: int) -> None:
        """Refuse `count` completions that the tenant may not have now, before anything is spent on their text.

        Raises:
            CapacityError: a limit of the tenant, the adapter or the server, or they would come too late.
        """
        self._admission.check(tenant, adapter, count)

    async def generate(
        self, tenant: Tenant, request: GenerateRequest, is_streamed: bool
    ) -> AsyncGenerator[GenerateChunk, None]:
        """The chunks of a request that was checked, within the limits of the tenant and of the adapter.

        Args:
            is_streamed: whether the caller sees each as it comes; see `retried` for what that means.
        """
        arrived_at = time.monotonic()
        with self._observer.watch(request) as record, self._admission.enter(tenant, request) as ticket:

            async def run() -> AsyncGenerator[GenerateChunk, None]:
                sent = replace(request, waited_s=time.monotonic() - arrived_at)
                async with aclosing(self.client.generate(sent)) as chunks:
                    async for chunk in chunks:
                        ticket.count(chunk)
                        record.add(chunk)
                        yield chunk

            def begin_again(cause: EngineDeadError) -> None:
                self.num_retries += 1
                ticket.begin_again()
                record.begin_again(cause)

            async with aclosing(retried(run, is_streamed, begin_again)) as chunks:
                async for chunk in chunks:
                    yield chunk

    def chat_request(self, body: ChatCompletionRequest, request_id: str, tenant: Tenant) -> GenerateRequest:
        """
        Raises:
            InvalidRequestError: a field is bad, or the chat cannot be rendered.
            NotFoundError, CapacityError: the tenant may not use the model, or not now.
        """
        request = self._admit(body, tenant, num_prompts=1)
        token_ids = self._chat_token_ids(
            body.chat,
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
            bool(body.add_special_tokens),
        )
        return replace(request, prompt=token_ids, request_id=request_id)

    def completion_requests(
        self, body: CompletionRequest, request_id: str, tenant: Tenant
    ) -> tuple[list[GenerateRequest], list[str]]:
        """One request per prompt, and the texts to echo.

        Raises:
            InvalidRequestError: a field is bad.
            NotFoundError, CapacityError: the tenant may not use the model, or not now.
        """
        prompts = body.prompts
        request = self._admit(body, tenant, len(prompts))
        requests, echoes = [], []
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                token_ids = self.tokenizer.encode(prompt, body.add_special_tokens is not False)
            else:
                token_ids = prompt
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            requests.append(replace(request, prompt=token_ids, request_id=name))
            echoes.append(self._echo(prompt) if body.echo else "")
        return requests, echoes

    async def tokenize(self, body: TokenizeRequest, tenant: Tenant) -> dict[str, Any]:
        """vLLM's answer of `/tokenize`."""
        await self.check_model(body.model, tenant)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("Give either prompt or messages", "prompt")
        if body.messages is not None:
            chat = ChatCompletionRequest(messages=body.messages).chat
            token_ids = self._chat_token_ids(
                chat,
                body.add_generation_prompt,
                body.continue_final_message,
                body.chat_template_kwargs,
                bool(body.add_special_tokens),
            )
        else:
            token_ids = self.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        strings = [self.tokenizer.token_string(token) for token in token_ids] if body.return_token_strs else None
        max_model_len = (await self.info()).max_model_len
        return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}

    async def detokenize(self, model: str | None, token_ids: Sequence[int], tenant: Tenant) -> str:
        await self.check_model(model, tenant)
        vocab_size = (await self.info()).vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"tokens has {token_id}, not a token id below {vocab_size}", "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def list_adapters(self, tenant: Tenant) -> list[AdapterInfo]:
        """Those that the tenant may use."""
        return [info for info in await self.client.list_adapters() if tenant.may_use(info.name)]

    async def cards(self, tenant: Tenant) -> list[dict[str, Any]]:
        """`data` of `/v1/models`."""
        adapters = await self.list_adapters(tenant)
        info = await self.info()
        return model_cards(self.base, self.config.model, info.max_model_len, adapters, self.created)

    async def check_model(self, model: str | None, tenant: Tenant) -> None:
        """Raise NotFoundError unless `model` is served."""
        adapter = self.adapter_of(model, tenant)
        if adapter is not None and all(info.name != adapter for info in await self.list_adapters(tenant)):
            raise model_not_found(model or "")

    def _admit(
        self, body: ChatCompletionRequest | CompletionRequest, tenant: Tenant, num_prompts: int
    ) -> GenerateRequest:
        """What all prompts of a body have in common, if they may run now; before anything is spent on their text."""
        params = body.sampling_params()
        adapter = self.adapter_of(body.model, tenant)
        self.check(tenant, adapter, num_prompts * params.n)
        return GenerateRequest(
            prompt=(),
            sampling_params=params,
            adapter=adapter,
            key_name=tenant.name,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
        )

    def _chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
        add_special_tokens: bool,
    ) -> list[int]:
        """A template writes its special tokens itself, so none are added unless asked for."""
        text = self.tokenizer.render_chat(messages, add_generation_prompt, continue_final_message, template_kwargs)
        return self.tokenizer.encode(text, add_special_tokens)

    def _echo(self, prompt: str | Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)


def make_request_id(prefix: str, given: str | None = None, field: str = "request_id") -> str:
    """An id for logs and answers: the caller's, or a new one.

    Args:
        field: where the caller gave it.

    Raises:
        InvalidRequestError: it is too long, or would not be one word of a log.
    """
    if given and not (len(given) <= MAX_REQUEST_ID and given.isprintable()):
        raise InvalidRequestError(f"{field} must be at most {MAX_REQUEST_ID} printable characters", field)
    return f"{prefix}-{given or uuid.uuid4().hex}"


def in_callers_words(error: RayLoraError, model: str | None, spelling: Mapping[str, str]) -> RayLoraError:
    """The engine's error with the names that the HTTP request used.

    Args:
        spelling: the caller's name for a field that has another one in the engine.
    """
    if isinstance(error, NotFoundError):
        return model_not_found(model or "")
    if isinstance(error, InvalidRequestError) and error.param is not None and error.param in spelling:
        return InvalidRequestError(str(error), spelling[error.param])
    return error
