"""`ray-lora doctor` names what is there and what is missing, on machines with and without NPUs."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner

from ray_lora.__main__ import main
from ray_lora.cluster import doctor
from ray_lora.cluster.doctor import (
    Finding,
    cann,
    devices,
    devices_of_cluster,
    driver,
    examine_cuda,
    examine_npu,
    hccl,
    triton_ascend,
    works,
)


def no_ray(**_: object) -> None:
    raise ConnectionError


def test_a_machine_without_anything_gets_a_remedy_for_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", no_ray)
    findings = examine_npu(tmp_path, {})
    assert [finding.subject for finding in findings] == [
        "devices", "driver", "CANN", "torch_npu", "torch_npu runs", "triton-ascend", "HCCL", "Ray's NPUs",
    ]  # fmt: skip
    assert [finding.subject for finding in findings if finding.remedy is None] == []
    assert any("No module named 'torch_npu'" in finding.found for finding in findings)


def test_a_machine_without_gpus_is_told_what_gpus_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", no_ray)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = examine_cuda(tmp_path)
    assert [finding.subject for finding in findings] == ["devices", "torch runs", "triton", "Ray's GPUs"]
    without_packages = [finding for finding in findings if finding.subject != "triton"]
    assert all(finding.remedy is not None for finding in without_packages)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert devices(tmp_path, "nvidia", "") == Finding("devices", "2: nvidia0 nvidia1")


def test_the_command_prints_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("devices", "8: davinci0"), Finding("HCCL", "no libhccl.so", "install CANN")]
    monkeypatch.setattr(doctor, "examine_npu", lambda root, environment: findings)
    monkeypatch.setattr(doctor, "examine_cuda", lambda root: [Finding("devices", "2: nvidia0 nvidia1")])
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "ok  devices        8: davinci0",
        "--  HCCL           no libhccl.so; install CANN",
    ]
    assert CliRunner().invoke(main, ["doctor", "cuda"]).output == "ok  devices        2: nvidia0 nvidia1\n"


def test_what_a_machine_with_npus_has_is_found(tmp_path: Path) -> None:
    toolkit = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for file, text in {
        "dev/davinci0": "",
        "dev/davinci1": "",
        "dev/davinci_manager": "",
        "usr/local/Ascend/driver/version.info": "Version=25.2.0\nascendhal_version=7.35\n",
        f"{toolkit}/x86_64-linux/ascend_toolkit_install.info": "arch=x86_64\nversion=8.5.0\n",
        f"{toolkit}/lib64/libhccl.so": "",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert devices(tmp_path, "davinci", "") == Finding("devices", "2: davinci0 davinci1")
    assert driver(tmp_path) == Finding("driver", "25.2.0")
    assert cann(tmp_path, {"ASCEND_HOME_PATH": str(toolkit)}) == Finding("CANN", f"8.5.0 at {toolkit}")
    assert cann(tmp_path, {}).remedy == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    libraries = f"/nowhere:{toolkit}/lib64"
    assert hccl({"LD_LIBRARY_PATH": libraries}) == Finding("HCCL", f"{toolkit}/lib64/libhccl.so")


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "found"),
    [
        (0, "8\n", "a warning\n", "it sees 8 devices"),
        (0, "0\n", "a warning\n", "no: it sees no device"),
        (1, "", "Traceback\nImportError: libhccl.so: cannot open\n", "no: ImportError: libhccl.so: cannot open"),
        (-11, "", "", "no: exit status -11"),
    ],
)
def test_what_importing_a_package_comes_to(
    returncode: int, stdout: str, stderr: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result: Any = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
    assert works("torch_npu").found == found


def test_triton_in_place_of_triton_ascend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"triton": "3.9.0", "triton-ascend": "3.2.0"}[name])
    assert triton_ascend().found == "3.2.0, and triton in its place"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("resource", ["GPU", "NPU"])
def test_the_devices_of_a_cluster_are_counted(resource: str) -> None:
    assert devices_of_cluster(resource) == Finding(f"Ray's {resource}s", "8 of 8 free")
