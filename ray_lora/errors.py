"""The errors of ray_lora: one tree, safe to pickle, free of HTTP.

RayLoraError
├── ConfigError               the server cannot start as configured
├── InvalidRequestError       the caller's mistake; `param` names the field
│   ├── AdapterRejectedError  an adapter that cannot be honoured exactly
│   ├── AdapterExistsError    the name is taken
│   ├── VersionConflictError  the name points to another version than the caller expects
│   └── RequestTooLargeError  more than the server reads of one request
├── NotFoundError             no such model or adapter
├── AuthenticationError       no API key, or one that is not known
├── PermissionDeniedError     the caller is known and may not do this
├── CapacityError             no room now; the same call may succeed later
│   ├── RateLimitError        the caller's API key or its adapter is at one of its limits
│   └── OverloadedError       the server has more to do than it can
├── RequestTimeoutError       a request ran for too long and was aborted
├── AdapterStagingError       a rank could not take an adapter; no rank keeps it
├── NumericsError             the model produced a value that is not a number
└── EngineDeadError           a rank or the engine is gone

`serve/http_errors.py` alone knows which HTTP status each one becomes.
Every constructor hands all of its arguments to `super().__init__`, because exceptions cross actors pickled.
"""

from typing import Literal


class RayLoraError(Exception):
    """Base of every error that ray_lora raises on purpose."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(RayLoraError):
    """The server cannot start as configured; the message is one line that names the key and the remedy."""


class InvalidRequestError(RayLoraError):
    """The caller sent something that cannot be served.

    Args:
        message: what is wrong and what would be right.
        param: the offending field, as the caller spells it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param


class AdapterRejectedError(InvalidRequestError):
    """The adapter cannot be honoured exactly; `param` is the field of `adapter_config.json` or the tensor at fault."""


class AdapterExistsError(InvalidRequestError):
    """The adapter's name is taken by other content."""


class VersionConflictError(InvalidRequestError):
    """The adapter's name points to another version than the caller expects: somebody else has written it."""


class RequestTooLargeError(InvalidRequestError):
    """The request is longer than the server reads."""


class NotFoundError(RayLoraError):
    """No such model or adapter.

    Args:
        message: what was looked for.
        param: the field that named it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.param = param


class AuthenticationError(RayLoraError):
    """The caller has no API key, or one that is not known."""


class PermissionDeniedError(RayLoraError):
    """The caller may not do this; the message says what would have to be so."""


class CapacityError(RayLoraError):
    """No room at the moment.

    Args:
        message: which limit was met.
        retry_after: seconds after which trying again makes sense, if known.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after


class RateLimitError(CapacityError):
    """An API key or an adapter is at one of its limits.

    Args:
        message: whose limit, and which.
        retry_after: as in `CapacityError`.
        kind: what there were too many of.
    """

    def __init__(
        self, message: str, retry_after: float | None = None, kind: Literal["requests", "tokens"] = "requests"
    ) -> None:
        RayLoraError.__init__(self, message, retry_after, kind)
        self.retry_after = retry_after
        self.kind = kind


class OverloadedError(CapacityError):
    """The server has more to do than it can; whoever asked is not to blame."""


class RequestTimeoutError(RayLoraError):
    """A request ran for longer than the server lets it, and was aborted."""


class AdapterStagingError(RayLoraError):
    """A rank could not take an adapter, or holds something else than was sent; no rank keeps it."""


class NumericsError(RayLoraError):
    """One row's logits are not finite; only its request ends."""


class EngineDeadError(RayLoraError):
    """A rank or the engine loop is gone; the replica must be rebuilt."""
