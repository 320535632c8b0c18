"""Every overlay, with every component, passes every check."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from k8s.checks.check import find_problems, is_core
from k8s.checks.custom_resources import Key, problems
from k8s.checks.manifests import OVERLAYS, ROOT, ManifestError, Manifests, build, load
from k8s.checks.pod_rules import quantity

NAMES = [overlay.name for overlay in OVERLAYS]


def test_every_overlay_is_checked() -> None:
    assert sorted(NAMES) == sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_is_built_and_keeps_the_rules(name: str, build_overlay: Callable[[str], Manifests]) -> None:
    assert find_problems(build_overlay(name), {}) == []


@pytest.mark.parametrize("name", NAMES)
def test_custom_resources_fit_their_crds(
    name: str, build_overlay: Callable[[str], Manifests], crds: dict[Key, Draft202012Validator]
) -> None:
    custom = [document for document in build_overlay(name).documents if not is_core(document)]
    assert "RayService" in {document["kind"] for document in custom}
    assert [problems(document, crds) for document in custom] == [[]] * len(custom)


@pytest.mark.parametrize(
    ("component", "resource", "scheduler"),
    [
        ("mindcluster", "huawei.com/Ascend910", "volcano"),
        ("cce", "huawei.com/ascend-1980", None),
        ("plain", "huawei.com/Ascend910", None),
    ],
)
@pytest.mark.parametrize("overlay", ["ascend", "ascend-ha"])
@pytest.mark.usefixtures("build_overlay")
def test_one_line_chooses_whose_npus_these_are(
    overlay: str, component: str, resource: str, scheduler: str | None, tmp_path: Path
) -> None:
    copy = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", copy)
    kustomization = copy / "overlays" / "ascend" / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("components/mindcluster", f"components/{component}"))
    manifests = build(copy / "overlays" / overlay)
    assert find_problems(manifests, {}) == []
    (workers,) = manifests.workers
    assert workers.limits[resource] == "8"
    assert workers.template.spec.get("schedulerName") == scheduler


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ManifestError, match="'a' is there twice"):
        load("a: 1\nb: 2\na: 3\n")


@pytest.mark.parametrize(
    ("text", "number"), [("500m", 0.5), ("2", 2), (2, 2), ("1Ki", 1024), ("512Gi", 512 << 30), ("1.5G", 1.5e9)]
)
def test_quantities_are_numbers(text: str | int, number: float) -> None:
    assert quantity(text) == number
