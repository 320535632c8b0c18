"""What a driver's error means: whether to try again, and what the caller is told.

Drivers bring their own exceptions, which are known by name here so that none of them has to be installed. Their
messages can hold URLs with credentials, so nothing of a message is passed on, only statuses and names of classes.
"""

from dataclasses import dataclass
from typing import Literal

from ray_lora.adapters.store import WEIGHTS_FILE
from ray_lora.errors import AdapterRejectedError, InvalidRequestError, NotFoundError, RayLoraError

_ABSENT = {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}
"""The hub answers 401 for what does not exist."""
_DENIED = {"GatedRepoError", "PermissionError", "NoCredentialsError", "PartialCredentialsError"}
_SLOW = {"TimeoutError", "TimeoutException", "ConnectTimeoutError", "ReadTimeoutError"}
_UNREACHABLE = {
    "ConnectionError",
    "ClientConnectionError",  # aiohttp, as is the next
    "ClientPayloadError",
    "HTTPClientError",  # botocore
    "TransportError",  # httpx
    "LocalEntryNotFoundError",  # huggingface_hub, when the hub cannot be reached
}


Kind = Literal["absent", "denied", "slow", "unreachable", "other"]
_KINDS: dict[int, Kind] = {401: "denied", 403: "denied", 404: "absent", 410: "absent", 408: "slow", 504: "slow"}
"""By HTTP status."""


@dataclass(frozen=True, slots=True)
class Failure:
    kind: Kind
    is_transient: bool
    detail: str
    """An HTTP status or the name of an exception."""


def failure_of(error: Exception) -> Failure:
    """Classify by the HTTP status, if there is one, and else by the most telling class."""
    names = {kind.__name__ for kind in type(error).__mro__}
    detail = type(error).__name__
    if names & _DENIED:
        return Failure("denied", False, detail)
    if names & _ABSENT:
        return Failure("absent", False, detail)
    status = _status_of(error)
    if status is not None:
        transient = status in (408, 425, 429) or status >= 500
        return Failure(_KINDS.get(status, "unreachable" if transient else "other"), transient, f"status {status}")
    if names & _SLOW:
        return Failure("slow", True, detail)
    if names & _UNREACHABLE:
        return Failure("unreachable", True, detail)
    if isinstance(error, FileNotFoundError):
        return Failure("absent", False, detail)
    return Failure("other", False, detail)


def rejection(failure: Failure, shown: str, num_attempts: int) -> RayLoraError:
    """The error for the caller; `shown` is the URL without credentials."""
    attempts = f"{num_attempts} attempt{'' if num_attempts == 1 else 's'}"
    match failure.kind:
        case "absent" if shown.endswith(WEIGHTS_FILE):
            return AdapterRejectedError(f"{WEIGHTS_FILE} is missing: {shown!r} does not exist", WEIGHTS_FILE)
        case "absent":
            return NotFoundError(f"lora_path: {shown!r} does not exist", "lora_path")
        case "denied":
            reason = f"may not be read with the server's credentials ({failure.detail})"
        case "slow":
            reason = f"did not answer in time ({attempts}, {failure.detail})"
        case "unreachable":
            reason = f"cannot be reached ({attempts}, {failure.detail})"
        case _:
            reason = f"cannot be read ({failure.detail})"
    return InvalidRequestError(f"lora_path: {shown!r} {reason}", "lora_path")


def _status_of(error: Exception) -> int | None:
    """Of aiohttp's, gcsfs's, and requests' or httpx's exceptions."""
    response = getattr(error, "response", None)
    for holder, attribute in ((error, "status"), (response, "status_code"), (error, "code")):
        status = getattr(holder, attribute, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None
