import inspect
import pickle
import re

import pytest

from ray_lora import errors
from ray_lora.errors import (
    AdapterExistsError,
    AdapterRejectedError,
    AdapterStagingError,
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

CLASSES = [entry for entry in vars(errors).values() if inspect.isclass(entry) and issubclass(entry, RayLoraError)]


def drawn_tree() -> dict[str, str | None]:
    """The base of each class, as the module's docstring draws it."""
    bases: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│├└─ ]*)([A-Z]\w+Error)\b(?! is)", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            bases[found[2]] = path[depth - 1] if depth else None
    return bases


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    real = {entry.__name__: None if entry is RayLoraError else entry.__bases__[0].__name__ for entry in CLASSES}
    assert drawn_tree() == real
    assert all(len(entry.__bases__) == 1 for entry in CLASSES)


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_error_of_the_tree_says_what_it_is_for(error_class: type[RayLoraError]) -> None:
    assert error_class.__doc__


INSTANCES = [
    RayLoraError("what"),
    RayLoraError(),
    ConfigError("key: what"),
    InvalidRequestError("what"),
    InvalidRequestError("what", "temperature"),
    AdapterRejectedError("what", param="r"),
    AdapterExistsError("what", "lora_name"),
    VersionConflictError("what", "expected_version"),
    RequestTooLargeError("the body is longer than 5 bytes"),
    NotFoundError("what", "model"),
    CapacityError("what"),
    CapacityError("what", 1.5),
    CapacityError("what", retry_after=2),
    RateLimitError("what"),
    RateLimitError("what", 1.5, "tokens"),
    OverloadedError("what", 1.5),
    RequestTimeoutError("what"),
    AuthenticationError("what"),
    PermissionDeniedError("what"),
    NumericsError("what"),
    AdapterStagingError("rank 1 is full"),
    EngineDeadError("what"),
]


def test_every_error_of_the_tree_is_pickled_below() -> None:
    assert {type(error) for error in INSTANCES} == set(CLASSES)


@pytest.mark.parametrize("error", INSTANCES, ids=repr)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_all_it_holds(error: RayLoraError, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("error", INSTANCES, ids=repr)
def test_an_error_survives_the_way_through_two_processes(error: RayLoraError) -> None:
    """An actor pickles it, a second one hands it on."""
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert (vars(copy), str(copy)) == (vars(error), str(error))


def test_an_error_reads_as_its_message_alone() -> None:
    assert str(InvalidRequestError("top_p must be in (0, 1]", "top_p")) == "top_p must be in (0, 1]"
    assert str(CapacityError("full", 3.0)) == "full"
    assert str(RayLoraError()) == "RayLoraError"


def test_the_callers_mistakes_are_one_branch() -> None:
    assert [entry for entry in CLASSES if issubclass(entry, InvalidRequestError)] == [
        InvalidRequestError,
        AdapterRejectedError,
        AdapterExistsError,
        VersionConflictError,
        RequestTooLargeError,
    ]
