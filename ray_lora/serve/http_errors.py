"""What each error of `errors.py` is over HTTP: the one place that knows statuses, in OpenAI's and vLLM's format."""

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ray_lora.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    NumericsError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RayLoraError,
    RequestTimeoutError,
    RequestTooLargeError,
    VersionConflictError,
)

STATUS: dict[type[RayLoraError], int] = {
    InvalidRequestError: 400,
    VersionConflictError: 409,
    RequestTooLargeError: 413,
    NotFoundError: 404,
    AuthenticationError: 401,
    PermissionDeniedError: 403,
    CapacityError: 429,
    OverloadedError: 503,
    RequestTimeoutError: 504,
    NumericsError: 500,
    ConfigError: 500,
    EngineDeadError: 503,
    RayLoraError: 500,
}
"""By the most specific class; a subclass that is not here has its parent's status."""

TYPE = {
    400: "BadRequestError",
    401: "invalid_request_error",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

CODE: dict[type[RayLoraError], str] = {
    AuthenticationError: "invalid_api_key",
    RateLimitError: "rate_limit_exceeded",
}
"""OpenAI's word for what clients look for by `code`; it is the status, as vLLM's, for all others."""

DEFAULT_RETRY_AFTER_S = 1.0


def status_of(error: RayLoraError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def error_body(
    status: int, message: str, param: str | None = None, kind: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object, with vLLM's `code` if there is none of OpenAI's."""
    kind = kind or TYPE.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def body_of(error: RayLoraError, kind: str | None = None) -> dict[str, Any]:
    """The error object of one of ours, also for the middle of a stream."""
    kind = error.kind if isinstance(error, RateLimitError) else kind
    return error_body(status_of(error), str(error), getattr(error, "param", None), kind, CODE.get(type(error)))


def error_response(error: RayLoraError, kind: str | None = None) -> JSONResponse:
    """The answer to a request that failed before anything was sent."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, CapacityError | EngineDeadError):
        retry_after = getattr(error, "retry_after", None)
        headers = {"Retry-After": str(math.ceil(retry_after or DEFAULT_RETRY_AFTER_S))}
    elif isinstance(error, AuthenticationError):
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(body_of(error, kind), status_of(error), headers)


def model_not_found(model: str) -> NotFoundError:
    """vLLM's words for a name that is neither the base nor an adapter."""
    return NotFoundError(f"The model `{model}` does not exist.", "model")


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure the same format, also a wrong path, a wrong method and a bug."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RayLoraError)
        request.state.error = error
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"No such path: {request.method} {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed for {request.url.path}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    async def bug(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, f"Internal error: {type(error).__name__}"), 500)

    app.add_exception_handler(RayLoraError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
