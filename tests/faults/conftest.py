"""What fault tests have found in figures is shown at the end, also of those that passed."""

import os
import warnings
from collections.abc import Callable

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401  its own models use a deprecated spelling of pydantic's Field

FIGURES: list[str] = []


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Add something to the figures."""
    return lambda what: FIGURES.append(f"{request.node.name}: {what}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("what the faults did")
        for line in FIGURES:
            terminalreporter.write_line(line)
