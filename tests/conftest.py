"""What every test has in common."""

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-minutes", type=float, default=3, help="how long the soak of tests/soak goes on")
