"""What strangers send: any JSON at all, and good documents with a few changes; and how long to go on inventing them."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
EFFORTS = [
    pytest.param(settings(max_examples=200, derandomize=True, suppress_health_check=_HEALTH), id="brief"),
    pytest.param(
        settings(max_examples=5_000, suppress_health_check=_HEALTH),
        id="long",
        marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
    ),
]
"""The same examples every time, or many new ones."""

TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", "\ud800", "\0", "a\nb", "null", "-1", "1e400", "٣", "{{ x }}", "x" * 5000]
)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, 5e-324, -0.0])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS


JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))


def nested(depth: int) -> str:
    """JSON of arrays within arrays; Python reads about as many as its stack may be deep."""
    return "[" * depth + "]" * depth


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Anything, half of the time of the same type."""
    return (TEXTS if isinstance(value, str) else NUMBERS if isinstance(value, (int, float)) else JSON) | JSON


@st.composite
def mutated(draw: st.DrawFn, document: dict[str, Any], names: st.SearchStrategy[str] = TEXTS) -> dict[str, Any]:
    """`document` with up to three places changed, left out or added; `names` are those of what is added."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(place[key], (dict, list)) or draw(st.booleans()):
                break
            place = place[key]
        change = draw(st.sampled_from(["replace", "drop", "add"]))
        if change == "add" and isinstance(place, dict):
            place[draw(names)] = draw(JSON)
        elif change == "add":
            place.append(draw(JSON))
        elif key is not None and change == "drop":
            del place[key]
        elif key is not None:
            place[key] = draw(_like(place[key]))
    return changed
