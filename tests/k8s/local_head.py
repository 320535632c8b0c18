"""What a head pod and KubeRay do, on this machine: start Ray, PUT a serve config, wait for it, ask it something.

    unshare --net --mount --pid --fork --kill-child --mount-proc python local_head.py < case.json

Ray and Serve listen on every address, so the network is one that has loopback alone; the volumes are mounted where the
pods mount them, and whatever is left running ends with the process namespace.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

DASHBOARD = "http://127.0.0.1:8265/api/serve/applications/"
SERVE = "http://127.0.0.1:8000"
PLACEMENT_GROUPS = "http://127.0.0.1:8265/api/v0/placement_groups?detail=true"
TOKEN = "0123456789abcdef0123456789abcdef"
"""KubeRay makes one for each cluster, because of `authOptions`."""
AUTHORIZATION = {"x-ray-authorization": f"Bearer {TOKEN}"}
START_TIMEOUT_S = 300
REQUEST_TIMEOUT_S = 200  # ranks of two replicas on few cores


def main() -> None:
    case = json.load(sys.stdin)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    mount_volumes({path: Path(source) for path, source in case["volumes"].items()})
    # by a shell, as in the pod: the quotes around `--resources` are for it
    flags = " ".join(f"--{name}={value}" for name, value in case["start_params"].items())
    command = f"ray start --head --node-ip-address=127.0.0.1 --dashboard-host=127.0.0.1 {flags}"
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    subprocess.run(["bash", "-c", command], check=True, stdout=sys.stderr, env=environment)
    with httpx.Client(timeout=REQUEST_TIMEOUT_S) as client:
        deploy(client, case["serve_config"])
        caller = {"Authorization": f"Bearer {case['api_key']}"}
        answers = [client.post(SERVE + path, json=body, headers=caller) for path, body in case["requests"]]
        groups = client.get(PLACEMENT_GROUPS, headers=AUTHORIZATION).json()["data"]["result"]["result"]
    told = [[answer.status_code, answer.text] for answer in answers]
    json.dump({"answers": told, "placement_groups": groups}, sys.stdout)


def mount_volumes(volumes: dict[str, Path]) -> None:
    """Bind directories below /mnt, seen in this mount namespace alone; Ray's own files are apart as well."""
    for directory in ("/mnt", "/tmp/ray"):
        Path(directory).mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", directory], check=True)
    for path, source in volumes.items():
        Path(path).mkdir(parents=True)
        subprocess.run(["mount", "--bind", source, path], check=True)


def deploy(client: httpx.Client, serve_config: str) -> None:
    """KubeRay reads the text as YAML, sends it as JSON, and asks until all applications run."""
    client.put(DASHBOARD, json=yaml.safe_load(serve_config), headers=AUTHORIZATION).raise_for_status()
    deadline = time.monotonic() + START_TIMEOUT_S
    applications: dict[str, Any] = {}
    while time.monotonic() < deadline:
        applications = client.get(DASHBOARD, headers=AUTHORIZATION).json()["applications"]
        states = {application["status"] for application in applications.values()}
        if states == {"RUNNING"}:
            return
        if "DEPLOY_FAILED" in states:
            break
        time.sleep(0.5)
    for application in applications.values():
        print(application["status"], application["message"], file=sys.stderr)
        for name, deployment in application["deployments"].items():
            print(name, deployment["status"], deployment["message"], file=sys.stderr)
    sys.exit("not deployed")


if __name__ == "__main__":
    main()
