"""Ending `serve run` when its application cannot start.

Serve reports a failed build and waits for a better config. That is right for a cluster, and wrong for a terminal: a
command that cannot do what it was told should say so and end.
"""

import logging
import os
import signal
import time
from pathlib import Path

from ray import serve

logger = logging.getLogger("ray.serve")

LOG_DELAY_S = 1.5
"""Ray shows a worker's lines at the driver within this time."""


def end_serve_run(message: str) -> None:
    """End the `serve run` command that started this cluster, unless something is already served by it.

    Does nothing on a cluster that was there before, as with `serve deploy` and KubeRay. An interrupt is the only signal
    at which the command takes its cluster down in order, without a trace.
    """
    pid = serve_run_pid()
    if pid is not None and not _anything_is_served():
        logger.error(message)
        time.sleep(LOG_DELAY_S)
        os.kill(pid, signal.SIGINT)


def serve_run_pid() -> int | None:
    """The `serve run` process that this worker's raylet is a child of, if there is one."""
    raylet = _parent(os.getpid())
    driver = _parent(raylet) if raylet is not None else None
    if driver is None:
        return None
    words = _command(driver)
    names = [Path(word).name for word in words[:3]]
    return driver if "serve" in names and "run" in words else None


def _anything_is_served() -> bool:
    applications = serve.status().applications.values()
    return any(application.deployments for application in applications)


def _parent(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]) or None


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
