"""Kubernetes' own objects against the schemas of its release, by `kubernetes-validate --strict`."""

import subprocess
import tempfile

import yaml

from k8s.checks.manifests import TOOLS, Document

RELEASE = "1.37"


def problems(documents: list[Document]) -> list[str]:
    """One line for each document with an unknown or a wrong field."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(documents, file)
        file.flush()
        command = [str(TOOLS / "kubernetes-validate"), "--strict", "--kubernetes-version", RELEASE, file.name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).splitlines()
    found = [line.replace(f"{file.name} ", "") for line in lines if not line.startswith("INFO")]
    if result.returncode != 0 and not found:
        return [f"kubernetes-validate ended with {result.returncode}"]
    return found
