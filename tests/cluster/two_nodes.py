"""Two Ray nodes on this machine, each with a network, processes and shared memory of its own, joined by one cable.

    unshare --net --mount --pid --fork --kill-child --mount-proc python two_nodes.py < case.json

This process is the first node, which starts the other one as its child. Whatever is left running ends with it. What
it tells is its last line; Ray may print before.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml

from ray_lora import LLM, SamplingParams
from ray_lora.cluster.ray_tp import RayTPExecutor, _address_of_bundle
from ray_lora.errors import EngineDeadError

NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
HEAD, OTHER = "10.77.0.1", "10.77.0.2"
HEAD_NAME, OTHER_NAME = "node0", "node1"
HEAD_RESOURCE = '--resources={"head": 1}'
NUM_CPUS = 2
"""Of each node."""
CABLE = ("node0", "node1")
"""The network interface at either end."""
RAY_PORT = 6379
JOIN_TIMEOUT_S = 90
DECODING_S = 1.0
ROOT = Path(__file__).parents[2]
RAY_SERVICE = ROOT / "k8s" / "base" / "ray_service.yaml"


def run_on_two_nodes(script: Path, case: dict[str, Any]) -> dict[str, Any]:
    """For tests: what a script tells that begins as this one does, in namespaces of its own."""
    result = subprocess.run(
        [*NAMESPACES, sys.executable, script],
        input=json.dumps(case),
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **head_env(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


def head_env() -> dict[str, str]:
    """What the manifests give to the head, which says when a node is lost."""
    head = yaml.safe_load(RAY_SERVICE.read_text())["spec"]["rayClusterConfig"]["headGroupSpec"]
    return {each["name"]: each["value"] for each in head["template"]["spec"]["containers"][0]["env"]}


def main() -> None:
    case = json.load(sys.stdin)
    other = join_nodes(case["only_here"])
    with LLM(**case["args"]) as llm:
        leave_to_first_rank(case["only_here"], llm, other)
        llm.load_adapter("a", case["adapter"])
        params = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True)
        outputs = llm.generate(case["prompts"], params, case["adapters"])
        told: dict[str, Any] = {"tokens": [output.outputs[0].token_ids for output in outputs]}
        if case["loss"] is not None:
            told |= lose_node(llm, other, case["loss"], case["prompts"][0])
        print(f"\n{json.dumps(told)}", flush=True)
        os._exit(0)  # takes both nodes with it: Ray would wait for the lost one


def join_nodes(hidden: str) -> "subprocess.Popen[str]":
    """Become the first node and connect to Ray there; the process of the other node, which has joined.

    Args:
        hidden: a directory that the other node sees empty.
    """
    become_node(HEAD_NAME)
    other = start_other_node(hidden)
    plug(CABLE[0], HEAD)
    ray_start("--head", f"--node-ip-address={HEAD}", f"--port={RAY_PORT}", "--include-dashboard=false", HEAD_RESOURCE)
    ray.init(address=f"{HEAD}:{RAY_PORT}", log_to_driver=False)
    wait_for_nodes(2)
    return other


def leave_to_first_rank(directory: str, llm: LLM, other: "subprocess.Popen[str]") -> None:
    """The first node has this directory and the other has not; the other way round if that is where rank 0 is."""
    executor = llm._engine._executor
    assert isinstance(executor, RayTPExecutor)
    if _address_of_bundle(executor._group, 0) == OTHER:
        (inside,) = psutil.Process(other.pid).children()
        shutil.copytree(directory, f"/proc/{inside.pid}/root{directory}", dirs_exist_ok=True)
        run(["mount", "-t", "tmpfs", "tmpfs", directory])


def lose_node(llm: LLM, other: "subprocess.Popen[str]", loss: str, prompt: list[int]) -> dict[str, Any]:
    """Take the other node away while a request runs; what became of it, and how long that took in seconds."""
    lost_at = 0.0

    def lose() -> None:
        nonlocal lost_at
        lost_at = time.monotonic()
        cut_off(other, loss)

    threading.Timer(DECODING_S, lose).start()
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, n=8)
    error = None
    try:
        while True:
            llm.generate([prompt], params)
    except EngineDeadError as dead:
        error = str(dead)
    return {"error": error, "seconds": time.monotonic() - lost_at}


def cut_off(other: "subprocess.Popen[str]", loss: str) -> None:
    """Take the other node away: its `raylet`, and so all that runs there, for good; or the `cable`."""
    if loss == "raylet":
        supervisor, *inside = psutil.Process(other.pid).children(recursive=True)
        supervisor.suspend()
        next(process for process in inside if process.name() == "raylet").send_signal(signal.SIGKILL)
    else:
        run(["ip", "link", "set", CABLE[0], "down"])


def mend_cable() -> None:
    run(["ip", "link", "set", CABLE[0], "up"])


def start_other_node(hidden: str) -> "subprocess.Popen[str]":
    """This script again, in namespaces of its own, with one end of a new cable."""
    other = subprocess.Popen([*NAMESPACES, sys.executable, __file__, hidden], stdout=sys.stderr, text=True)
    while os.readlink(f"/proc/{other.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    run(["ip", "link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1], "netns", str(other.pid)])
    return other


def be_other_node(hidden: str) -> None:
    """Join the first node's Ray, with an empty directory in place of one that only the first node has.

    Whenever Ray has ended here it is started again, as Kubernetes does.
    """
    become_node(OTHER_NAME)
    run(["mount", "-t", "tmpfs", "tmpfs", hidden])
    while CABLE[1] not in psutil.net_if_stats():
        time.sleep(0.01)
    plug(CABLE[1], OTHER)
    while True:
        with suppress(subprocess.CalledProcessError):
            ray_start(f"--address={HEAD}:{RAY_PORT}", f"--node-ip-address={OTHER}", "--block")
        time.sleep(0.5)


def ray_start(*options: str) -> None:
    run(["ray", "start", f"--num-cpus={NUM_CPUS}", *options])


def become_node(name: str) -> None:
    """What machines do not share: a name, Ray's files and shared memory."""
    socket.sethostname(name)
    for directory in ("/tmp/ray", "/dev/shm"):
        Path(directory).mkdir(exist_ok=True)
        run(["mount", "-t", "tmpfs", "tmpfs", directory])
    run(["ip", "link", "set", "lo", "up"])


def plug(interface: str, address: str) -> None:
    run(["ip", "addr", "add", f"{address}/24", "dev", interface])
    run(["ip", "link", "set", interface, "up"])


def wait_for_nodes(number: int) -> None:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while sum(node["Alive"] for node in ray.nodes()) < number:
        if time.monotonic() > deadline:
            sys.exit("the other node has not joined")
        time.sleep(0.1)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    be_other_node(sys.argv[1]) if sys.argv[1:] else main()
