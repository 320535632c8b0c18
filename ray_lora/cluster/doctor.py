"""`ray-lora doctor`: what this machine has for serving on NPUs or GPUs, one line each, with the remedy where it lacks.

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
PROBES = {
    "torch": "import torch; torch.cuda.init(); print(torch.cuda.device_count())",
    "torch_npu": "import torch_npu; print(torch_npu.npu.device_count())",
}
"""By package, what prints the number of devices that it sees."""
CANN = "install CANN 8.5 or later, toolkit and kernels, and source its set_env.sh"
NPU_DRIVER = "install the NPU's driver and firmware; in a container, start it with the host's /dev/davinci* devices"
GPU_DRIVER = "install NVIDIA's driver; for a container, also its container toolkit, and give it the GPUs (--gpus all)"
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
@click.argument("device", type=click.Choice(("npu", "cuda")), default="npu")
def doctor_command(device: str) -> None:
    """Tell what is here for NPUs or GPUs, and what not.

    One line for each thing that serving on Ascend NPUs, or on NVIDIA GPUs, needs, with the remedy where it is missing.
    """
    root = Path("/")
    for finding in examine_npu(root, os.environ) if device == "npu" else examine_cuda(root):
        click.echo(str(finding))


def examine_npu(root: Path, environment: Mapping[str, str]) -> list[Finding]:
    """All findings about the machine whose file system begins at `root`, for serving on NPUs."""
    return [
        devices(root, "davinci", NPU_DRIVER),
        driver(root),
        cann(root, environment),
        package("torch_npu", "torch-npu", INSTALL),
        works("torch_npu"),
        triton_ascend(),
        hccl(environment),
        ray_devices("NPU"),
    ]


def examine_cuda(root: Path) -> list[Finding]:
    """The same for serving on GPUs."""
    return [
        devices(root, "nvidia", GPU_DRIVER),
        works("torch"),
        package("triton", "triton", "pip install ray_lora[cuda]"),
        ray_devices("GPU"),
    ]


def devices(root: Path, name: str, remedy: str) -> Finding:
    """Device files of that name and a number."""
    found = sorted(path.name for path in root.glob(f"dev/{name}[0-9]*"))
    if found:
        return Finding("devices", f"{len(found)}: {' '.join(found)}")
    return Finding("devices", f"no /dev/{name}0", remedy)


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


def works(name: str) -> Finding:
    """Whether a package can be imported and sees a device, which torch_npu may answer by ending the process."""
    subject, environment = f"{name} runs", {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", PROBES[name]]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        remedy = "look at dmesg, and at `npu-smi info` or `nvidia-smi`"
        return Finding(subject, f"no answer within {PROBE_TIMEOUT_S} s", remedy)
    count = run.stdout.strip()
    if run.returncode == 0 and count not in ("", "0"):
        return Finding(subject, f"it sees {count} devices")
    reasons = [line.strip() for line in run.stderr.splitlines() if line.strip()]
    if run.returncode == 0:
        reasons = ["it sees no device"]
    reason = reasons[-1] if reasons else f"exit status {run.returncode}"
    return Finding(subject, f"no: {reason}", "put right what this and the lines above name")


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


def ray_devices(resource: str) -> Finding:
    """What a cluster that is running would place ranks on."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        return Finding(f"Ray's {resource}s", "no Ray is running here", START_RAY)
    try:
        return devices_of_cluster(resource)
    finally:
        ray.shutdown()


def devices_of_cluster(resource: str) -> Finding:
    subject = f"Ray's {resource}s"
    free, total = (found.get(resource, 0) for found in (ray.available_resources(), ray.cluster_resources()))
    if total:
        return Finding(subject, f"{free:g} of {total:g} free")
    return Finding(subject, "the cluster has none", f"once devices are listed above, {START_RAY}")


def _version(file: Path) -> str | None:
    """The value of `version=` in a file of CANN's; None if there is no such file."""
    if not file.is_file():
        return None
    match = re.search(r"^version=(.*)$", file.read_text(), re.IGNORECASE | re.MULTILINE)
    return match[1].strip() if match else "of unknown version"
