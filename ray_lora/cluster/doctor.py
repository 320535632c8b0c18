"""`ray-lora doctor`: what this machine has for serving on Ascend NPUs, one line each, with the remedy where it lacks.

Nothing that it looks for need be there. A library that may end the process is imported in one of its own.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click
import ray

PROBE_TIMEOUT_S = 60
PROBE = "import torch_npu; print(torch_npu.npu.device_count())"
CANN = "install CANN 8.5 or later, toolkit and kernels, and source its set_env.sh"
INSTALL = "pip install ray_lora[npu]"
START_RAY = "start Ray on the machine that has them: ray start --head"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    found: str
    remedy: str | None = None
    """None where nothing has to be done."""

    def __str__(self) -> str:
        return f"{'ok' if self.remedy is None else '--'}  {self.subject:14} {self.found}" + (
            "" if self.remedy is None else f"; {self.remedy}"
        )


@click.command("doctor")
def doctor_command() -> None:
    """Tell what is here for NPUs, and what not.

    One line for each thing that serving on Ascend NPUs needs, with the remedy where it is missing.
    """
    for finding in examine(Path("/"), os.environ):
        click.echo(str(finding))


def examine(root: Path, environment: Mapping[str, str]) -> list[Finding]:
    """All findings about the machine whose file system begins at `root`."""
    return [
        devices(root),
        driver(root),
        cann(root, environment),
        package("torch_npu", "torch-npu", INSTALL),
        torch_npu_works(),
        triton_ascend(),
        hccl(environment),
        ray_npus(),
    ]


def devices(root: Path) -> Finding:
    found = sorted(path.name for path in root.glob("dev/davinci[0-9]*"))
    if found:
        return Finding("devices", f"{len(found)}: {' '.join(found)}")
    remedy = "install the NPU's driver and firmware; in a container, start it with the host's /dev/davinci* devices"
    return Finding("devices", "no /dev/davinci0", remedy)


def driver(root: Path) -> Finding:
    version = _version(root / "usr/local/Ascend/driver/version.info")
    if version is not None:
        return Finding("driver", version)
    remedy = "install the NPU's driver; in a container, mount /usr/local/Ascend/driver"
    return Finding("driver", "no /usr/local/Ascend/driver/version.info", remedy)


def cann(root: Path, environment: Mapping[str, str]) -> Finding:
    home = environment.get("ASCEND_HOME_PATH")
    if home is None:
        installed = (root / "usr/local/Ascend/ascend-toolkit/latest").exists()
        remedy = "source /usr/local/Ascend/ascend-toolkit/set_env.sh" if installed else CANN
        return Finding("CANN", "ASCEND_HOME_PATH is not set", remedy)
    for file in sorted(Path(home).glob("*/ascend_toolkit_install.info")):
        return Finding("CANN", f"{_version(file)} at {home}")
    return Finding("CANN", f"{home} has no ascend_toolkit_install.info", CANN)


def package(subject: str, distribution: str, remedy: str) -> Finding:
    try:
        return Finding(subject, metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return Finding(subject, "not installed", remedy)


def torch_npu_works() -> Finding:
    """Whether torch_npu can be imported and sees a device, which it may answer by ending the process."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROBE]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return Finding("torch_npu runs", f"no answer within {PROBE_TIMEOUT_S} s", "look at `npu-smi info` and dmesg")
    count = run.stdout.strip()
    if run.returncode == 0 and count not in ("", "0"):
        return Finding("torch_npu runs", f"it sees {count} devices")
    reasons = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    if run.returncode == 0:
        reasons = ["it sees no device"]
    return Finding(
        "torch_npu runs",
        f"no: {reasons[-1] if reasons else f'exit status {run.returncode}'}",
        "put right what the lines above name",
    )


def triton_ascend() -> Finding:
    """It and triton are one import package: whichever was installed last is what `import triton` gives."""
    found = package("triton-ascend", "triton-ascend", INSTALL)
    if found.remedy is None and package("triton", "triton", "").remedy is None:
        remedy = f"pip uninstall triton triton-ascend && {INSTALL}"
        return Finding("triton-ascend", f"{found.found}, and triton in its place", remedy)
    return found


def hccl(environment: Mapping[str, str]) -> Finding:
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, "libhccl.so").exists():
            return Finding("HCCL", f"{folder}/libhccl.so")
    return Finding("HCCL", "no libhccl.so in LD_LIBRARY_PATH", CANN)


def ray_npus() -> Finding:
    """What a cluster that is running would place ranks on."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        return Finding("Ray's NPUs", "no Ray is running here", START_RAY)
    try:
        return npus_of_cluster()
    finally:
        ray.shutdown()


def npus_of_cluster() -> Finding:
    free, total = ray.available_resources().get("NPU", 0), ray.cluster_resources().get("NPU", 0)
    if total:
        return Finding("Ray's NPUs", f"{free:g} of {total:g} free")
    return Finding("Ray's NPUs", "the cluster has none", f"once devices are listed above, {START_RAY}")


def _version(file: Path) -> str | None:
    """The value of `version=` in a file of CANN's; None if there is no such file."""
    if not file.is_file():
        return None
    match = re.search(r"^version=(.*)$", file.read_text(), re.IGNORECASE | re.MULTILINE)
    return match[1].strip() if match else "of unknown version"
