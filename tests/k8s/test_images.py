"""The Dockerfiles: linted, and with what a pod needs. They are not built here."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.checks.manifests import ROOT, TOOLS

DOCKERFILES = sorted((ROOT / "k8s" / "images").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    if not (TOOLS / "hadolint").exists():
        pytest.skip("hadolint is not installed: make test-k8s")
    result = subprocess.run([TOOLS / "hadolint", path], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_tools_of_the_probes_and_the_user_of_the_pods(path: Path) -> None:
    last_stage = path.read_text().rpartition("\nFROM ")[2]
    installed = re.search(r"--no-install-recommends (.+?) \\\n", last_stage)
    assert installed is not None
    assert {"bash", "wget"} <= set(installed.group(1).split())
    service = yaml.safe_load((ROOT / "k8s" / "base" / "ray_service.yaml").read_text())
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in last_stage
    assert f"\nUSER {pod['securityContext']['runAsUser']}\n" in last_stage


@pytest.mark.parametrize("overlay", ["cpu", "ascend"])
def test_an_overlay_names_the_image_of_its_dockerfile(overlay: str) -> None:
    (image,) = yaml.safe_load((ROOT / "k8s" / "overlays" / overlay / "kustomization.yaml").read_text())["images"]
    tagged = f"{image['newName']}:{image['newTag']}"
    assert f"-t {tagged} ." in (ROOT / "k8s" / "images" / f"{overlay}.Dockerfile").read_text()
