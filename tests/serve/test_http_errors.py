"""Every error has one status, and what Ray raises becomes one of ours."""

import inspect

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from ray_lora import errors
from ray_lora.serve.http_errors import CODE, TYPE, body_of, error_response, status_of
from ray_lora.serve.replica_client import as_ours

EVERY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RayLoraError)]


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_has_a_status_and_a_type(kind: type[errors.RayLoraError]) -> None:
    error = kind("what is wrong")
    status = status_of(error)
    assert status in TYPE
    if kind not in CODE:
        expected = {"message": "what is wrong", "type": TYPE[status], "param": None, "code": status}
        assert body_of(error)["error"] == expected


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (errors.AuthenticationError("a"), "invalid_request_error", "invalid_api_key"),
        (errors.RateLimitError("a"), "requests", "rate_limit_exceeded"),
        (errors.RateLimitError("a", 2.0, "tokens"), "tokens", "rate_limit_exceeded"),
    ],
)
def test_keys_and_limits_have_openais_words(error: errors.RayLoraError, kind: str, code: str) -> None:
    assert body_of(error)["error"] == {"message": "a", "type": kind, "param": None, "code": code}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.AdapterRejectedError("a", "r"), 400),
        (errors.AdapterExistsError("a", "lora_name"), 400),
        (errors.NotFoundError("a"), 404),
        (errors.AuthenticationError("a"), 401),
        (errors.PermissionDeniedError("a"), 403),
        (errors.CapacityError("a"), 429),
        (errors.RateLimitError("a"), 429),
        (errors.OverloadedError("a"), 503),
        (errors.RequestTimeoutError("a"), 504),
        (errors.NumericsError("a"), 500),
        (errors.EngineDeadError("a"), 503),
    ],
)
def test_the_table_of_statuses(error: errors.RayLoraError, status: int) -> None:
    assert status_of(error) == status


@pytest.mark.parametrize(("after", "header"), [(None, "1"), (0.2, "1"), (7.5, "8")])
def test_no_room_says_when_to_come_again(after: float | None, header: str) -> None:
    for kind in (errors.CapacityError, errors.RateLimitError, errors.OverloadedError):
        assert error_response(kind("full", after)).headers["retry-after"] == header
    assert error_response(errors.EngineDeadError("rank 1 is gone")).headers["retry-after"] == "1"


def test_rays_errors_become_ours() -> None:
    bad = errors.InvalidRequestError("bad", "prompt")
    assert as_ours(RayTaskError("f", "trace", bad).as_instanceof_cause()) is bad
    assert isinstance(as_ours(ActorUnavailableError("gone", None)), errors.EngineDeadError)
    assert isinstance(as_ours(BackPressureError(num_queued_requests=1, max_queued_requests=1)), errors.CapacityError)
    assert not isinstance(as_ours(RequestCancelledError("r1")), errors.EngineDeadError), "nothing to try again"
    assert str(as_ours(ValueError("first\nsecond"))) == "ValueError: first"
