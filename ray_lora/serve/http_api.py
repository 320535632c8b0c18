"""The routes of the HTTP API: OpenAI's, with vLLM's additions."""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ray_lora.errors import EngineDeadError, RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest, RequestOutput
from ray_lora.serve.access import AdapterChanges, Authentication, tenant_of
from ray_lora.serve.adapter_routes import VERSION_HEADER, add_adapter_routes
from ray_lora.serve.api_document import EVENTS, body_schema, install_document
from ray_lora.serve.body_limit import BodyLimit
from ray_lora.serve.http_errors import body_of, error_body, install_error_handlers, model_not_found
from ray_lora.serve.openai_answers import AnswerHead, chat_answer, completion_answer
from ray_lora.serve.openai_types import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ray_lora.serve.prometheus_text import metrics_text
from ray_lora.serve.prompt_streams import Numbered, gather_requests, stream_requests
from ray_lora.serve.refusal_log import RefusalLog, note_body, note_handed_over
from ray_lora.serve.request_body import parse_body
from ray_lora.serve.request_spans import trace_headers
from ray_lora.serve.served_model import ServedModel, in_callers_words, make_request_id
from ray_lora.serve.sse import DONE, ChatWriter, CompletionWriter, EventStream, EventWriter, event

logger = logging.getLogger("ray.serve")
Translate = Callable[[RayLoraError], RayLoraError]

REQUEST_ID_HEADER = "x-request-id"


def build_api(served: ServedModel) -> FastAPI:
    """The whole application for one model."""
    app = FastAPI(title="ray_lora", openapi_url="/openapi.json", redoc_url=None)
    app.router.redirect_slashes = False
    app.add_middleware(BodyLimit, max_bytes=served.config.max_request_body_bytes)
    app.add_middleware(Authentication, keys=served.keys)
    app.add_middleware(RefusalLog)
    install_error_handlers(app)
    _add_generation_routes(app, served)
    _add_model_routes(app, served)
    adapters = APIRouter(dependencies=[Depends(AdapterChanges(served.config.allow_runtime_lora_updating))])
    add_adapter_routes(adapters, served)
    app.include_router(adapters)
    install_document(app, served.keys.is_needed)
    return app


def _add_generation_routes(app: FastAPI, served: ServedModel) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest), responses={200: EVENTS})
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatCompletionRequest, await request.body())
        head = _head("chatcmpl", request, body, served)
        tenant = tenant_of(request)
        generate = partial(served.generate, tenant, is_streamed=bool(body.stream))
        requests = _traced([served.chat_request(body, head.id, tenant)], request, served)
        translate = _translator(body, "messages")
        note_handed_over(request)
        if body.stream:
            writer = ChatWriter(head, body, served.tokenizer)
            return await _stream(writer, stream_requests(generate, requests), translate)
        try:
            (output,) = await gather_requests(generate, requests, [None])
        except RayLoraError as error:
            raise translate(error) from error
        answer = chat_answer(head, body, output, served.tokenizer)
        return JSONResponse(answer, headers=_version_header([output]))

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest), responses={200: EVENTS})
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await request.body())
        head = _head("cmpl", request, body, served)
        tenant = tenant_of(request)
        generate = partial(served.generate, tenant, is_streamed=bool(body.stream))
        requests, echoes = served.completion_requests(body, head.id, tenant)
        requests = _traced(requests, request, served)
        translate = _translator(body, "prompt")
        note_handed_over(request)
        if body.stream:
            writer = CompletionWriter(head, body, echoes, served.tokenizer)
            return await _stream(writer, stream_requests(generate, requests), translate)
        try:
            outputs = await gather_requests(generate, requests, echoes)
        except RayLoraError as error:
            raise translate(error) from error
        answer = completion_answer(head, body, outputs, echoes, served.tokenizer)
        return JSONResponse(answer, headers=_version_header(outputs))

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeRequest, await request.body())
        return JSONResponse(await served.tokenize(body, tenant_of(request)))

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await request.body())
        return JSONResponse({"prompt": await served.detokenize(body.model, body.tokens, tenant_of(request))})


def _add_model_routes(app: FastAPI, served: ServedModel) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await served.cards(tenant_of(request))})

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        tenant = tenant_of(request)
        name = served.adapter_of(model, tenant) or served.base
        for card in await served.cards(tenant):
            if card["id"] == name:
                return JSONResponse(card)
        raise model_not_found(model)

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        await served.client.check_health()
        return Response()

    @app.get("/ready", responses={503: {"description": "Not ready, and what is missing"}})
    async def ready() -> Response:
        missing = await served.client.missing()
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        stats = await served.client.stats()
        text = metrics_text(served.base, served.config.max_loras, stats, served.limit_refusals, served.num_retries)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _stream(writer: EventWriter, chunks: AsyncGenerator[Numbered, None], translate: Translate) -> Response:
    """Answer once there is something to tell, so that a request that fails before has a status of its own."""
    try:
        first = await anext(chunks, None)
    except RayLoraError as error:
        raise translate(error) from error
    if first is None:
        raise EngineDeadError("the stream ended before its first chunk")

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            try:
                yield writer.events(first[1], first[0])
                async for index, chunk in chunks:
                    yield writer.events(chunk, index)
            except RayLoraError as error:
                yield event(body_of(translate(error))) + DONE
                return
            except Exception as error:
                logger.exception("a stream failed")
                yield event(error_body(500, f"Internal error: {type(error).__name__}")) + DONE
                return
            yield writer.closing()

    return EventStream(events(), _version_header([first[1]]))


def _head(
    prefix: str, request: Request, body: ChatCompletionRequest | CompletionRequest, served: ServedModel
) -> AnswerHead:
    given = body.request_id or request.headers.get(REQUEST_ID_HEADER)
    field = "request_id" if body.request_id else REQUEST_ID_HEADER
    head = AnswerHead(make_request_id(prefix, given, field), body.model or served.base)
    note_body(request, head.id, head.model)
    return head


def _traced(requests: list[GenerateRequest], request: Request, served: ServedModel) -> list[GenerateRequest]:
    headers = trace_headers(served.config, request.headers)
    return requests if headers is None else [replace(each, trace_headers=headers) for each in requests]


def _translator(body: ChatCompletionRequest | CompletionRequest, prompt_field: str) -> Translate:
    spelling = {"prompt": prompt_field}
    if body.response_format is not None:
        spelling["structured_outputs"] = "response_format"
    return lambda error: in_callers_words(error, body.model, spelling)


def _version_header(told: Sequence[RequestOutput | GenerateChunk]) -> dict[str, str]:
    """Prompts of one body are requests of their own: a load may come between them."""
    versions = dict.fromkeys(each.adapter_version for each in told if each.adapter_version is not None)
    return {VERSION_HEADER: ", ".join(versions)} if versions else {}
