"""An application on two nodes, as `tests/cluster/two_nodes.py` makes them, of which one is lost under traffic.

A cable that was cut may be mended after a while. It is run as that is; its last line tells what became of it, in JSON.
The HTTP ingress is on the first node, which is never lost; everything else is where Ray puts it.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from ray import serve

from ray_lora.config import EngineConfig
from ray_lora.serve import app
from tests.cluster.two_nodes import HEAD, cut_off, join_nodes, mend_cable, wait_for_nodes
from tests.faults.served_app import App, deploy, wait_for
from tests.faults.traffic import Traffic, learn
from tests.file_server import FileServer
from tests.soak.process_watch import is_alive

PORT = 8000
STEADY_S = 300
ENDED_S = 60


def main() -> None:
    case = json.load(sys.stdin)
    other = join_nodes(case["only_here"])
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    app.INGRESS = app.INGRESS.options(ray_actor_options={"num_cpus": 0, "resources": {"head": 0.01}})
    config, num_replicas = EngineConfig(**case["args"]), case["num_replicas"]
    deploy(config, num_replicas)
    served = App(f"http://127.0.0.1:{PORT}", config, num_replicas, start_s=0.0)
    refusal = served.load("nowhere", "/nowhere")
    files = FileServer(HEAD)
    for name, path in case["adapters"].items():
        source = files.put(name, Path(path)) if case["by_url"] else path
        served.load(name, source).raise_for_status()
    questions = learn(served.url, ["base", *case["adapters"]], case["prompts"], case["max_tokens"])
    told: dict[str, Any] = {
        "refusal": refusal.json()["error"],
        "tokens": [[question.model, question.prompt, question.tokens] for question in questions],
        "before": len(there := processes_on(other, case["title"])),
    }
    with Traffic(served.url, questions) as traffic:
        traffic.wait_for_answers(16)
        traffic.wait_for_streams()
        workers = processes_on(other, "ray::")
        traffic.mark_fault()
        cut_off(other, case["loss"])
        if case["mended_after_s"] is not None:
            time.sleep(case["mended_after_s"])
            mend_cable()
        traffic.wait_until_steady(STEADY_S)
        wait_for(lambda: served.get("/ready").status_code == 200, STEADY_S, "ready")
        if case["used_again"]:
            told["ended_s"] = wait_for(lambda: not any(map(is_alive, workers)), ENDED_S, "the old workers' end")
            wait_for_nodes(2)
            deploy(config, num_replicas + 1)
            traffic.wait_until_steady(STEADY_S)
        told["alive"] = sum(map(is_alive, there))
        told["after"] = len(processes_on(other, case["title"]))
    told |= {"report": asdict(traffic.report), "said": str(traffic.report), "adapters": sorted(served.adapters)}
    print(f"\n{json.dumps(told)}", flush=True)
    os._exit(0)  # takes both nodes with it


def processes_on(node: "subprocess.Popen[str]", title: str) -> list[psutil.Process]:
    """Those of another node that are called so."""
    found = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


if __name__ == "__main__":
    main()
