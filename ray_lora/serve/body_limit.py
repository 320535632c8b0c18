"""No body is read beyond a limit: one huge request must not take the memory of everybody's server."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_lora.errors import RequestTooLargeError


class BodyLimit:
    """Raises where the application reads the body, within its error handlers. Pure ASGI, as `Authentication` is.

    A body that says its length is refused before any of it is read; a chunked one once it is too long.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        num_declared = int(declared) if declared.isdecimal() else 0
        num_received = 0

        async def count() -> Message:
            nonlocal num_received
            self._check(num_declared)
            message = await receive()
            num_received += len(message.get("body", b""))
            self._check(num_received)
            return message

        await self._app(scope, count, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLargeError(f"The body is longer than max_request_body_bytes, {self._max_bytes} bytes.")
