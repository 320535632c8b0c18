"""The line in the log for a call that was refused before a replica had it; `RequestObserver` tells of the others."""

from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.access import OPEN_PATHS, path_of
from ray_lora.serve.request_log import log_pairs
from ray_lora.tenant import ANYONE

MAX_CHARS = 200
"""Of what a caller has made up, in a log."""


class RefusalLog:
    """Outermost, so that it sees every answer. Pure ASGI, so that a stream passes through untouched.

    Probes have no lines: they ask all the time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in OPEN_PATHS:
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})

        def tell(status: int) -> None:
            if status >= 400 and "is_handed_over" not in state:
                log_pairs(_pairs(scope, status))

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                tell(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:  # which becomes an answer outside of here
            state["error"] = error
            tell(500)
            raise


def note_body(request: Request, request_id: str, model: str) -> None:
    """What the call is about, once its body has been read."""
    request.state.request_id, request.state.model = request_id, model


def note_handed_over(request: Request) -> None:
    """From here on the line of the request itself tells what becomes of it."""
    request.state.is_handed_over = True


def _pairs(scope: Scope, status: int) -> dict[str, Any]:
    state = scope["state"]
    return {
        "request_id": state.get("request_id"),
        "status": status,
        "method": scope["method"],
        "path": path_of(scope)[:MAX_CHARS],
        "model": state.get("model", "")[:MAX_CHARS],
        "key_name": state.get("tenant", ANYONE).name,
        "error": _reason(state.get("error")),
    }


def _reason(error: Exception | None) -> str | None:
    """Of a bad body the field alone, for what is wrong with it may be quoted from the prompt."""
    if error is None:
        return None
    says = error.param if isinstance(error, InvalidRequestError) else str(error)
    return f"{type(error).__name__}: {says}"[:MAX_CHARS] if says else type(error).__name__
