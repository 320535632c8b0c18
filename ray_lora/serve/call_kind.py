"""Whether the handle call that runs now wants a stream."""

import sys


def is_streaming_call() -> bool:
    """True within `handle.options(stream=True).method.remote(...)`, false within `handle.method.remote(...)`.

    One method can so answer both: Serve awaits a coroutine method either way, and then wants an async generator for
    a stream and anything else for a plain call. It tells a method nothing about which one it is; only the frame that
    called it knows, in the `RequestMetadata` that every one of Serve's entry points holds as `request_metadata`.
    Call this before the first `await`, while that frame is on the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        metadata = frame.f_locals.get("request_metadata")
        if metadata is not None:
            return bool(metadata.is_streaming)
        frame = frame.f_back  # type: ignore[assignment]
    return False
