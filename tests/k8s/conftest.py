"""Overlays as kustomize builds them. Run by `make test-k8s`, which installs the tools; without them, tests skip."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from k8s.checks.custom_resources import CRDS, Key, load_crds
from k8s.checks.manifests import ROOT, TOOLS, Manifests, build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401  its own models use a deprecated spelling of pydantic's Field


@pytest.fixture(scope="session")
def build_overlay() -> Callable[[str], Manifests]:
    """From an overlay's name to its documents; not to be changed, for they are kept."""
    if not (TOOLS / "kubectl").exists():
        pytest.skip("kubectl is not installed: make test-k8s")
    return cache(lambda name: build(ROOT / "k8s" / "overlays" / name))


@pytest.fixture(scope="session")
def crds() -> dict[Key, Draft202012Validator]:
    if not list(Path(CRDS).glob("ray.io_*.yaml")):
        pytest.skip(f"the CRDs of KubeRay are not in {CRDS}")
    return load_crds(CRDS)
