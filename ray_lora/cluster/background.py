"""Threads that work on adapters let the steps go first."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

NICENESS = 10
"""A tenth of the share of a thread that runs steps, where both want the same core."""

_this_thread = threading.local()


def give_way() -> None:
    """Lower this thread's priority and keep it to one core, for good."""
    if getattr(_this_thread, "gives_way", False):
        return
    _this_thread.gives_way = True
    torch.set_num_threads(1)
    with suppress(AttributeError, OSError):  # where a thread has no priority of its own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def background_threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="adapters", initializer=give_way)
