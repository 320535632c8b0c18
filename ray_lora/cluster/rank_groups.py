"""How the ranks find each other, and the two process groups that join them."""

import os
import socket
from datetime import timedelta
from urllib.parse import urlparse

import psutil
import torch.distributed as dist

from ray_lora.backends.base import Backend
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.model.tensor_parallel import TensorParallel


def meeting_point(host: str) -> str:
    """A free address of this host, where the ranks find each other."""
    with socket.create_server((host, 0)) as server:
        return f"tcp://{host}:{server.getsockname()[1]}"


def join_ranks(
    config: EngineConfig, rank: int, init_method: str, backend: Backend
) -> tuple[TensorParallel, dist.ProcessGroup]:
    """The group of the steps, and one for adapter loads, so that neither waits for, or overtakes, the other.

    Every rank makes them in this order. The steps' group is the device's own (`Backend.collective`); what is too late
    there ends the rank, or its connection to the executor (`StepHub`), and so the replica. Loads go from host memory to
    host memory, over gloo whatever the device: most adapters are to stay there, and no step shares the links between
    devices with one. An adapter crosses to the device on a stream of its own, when a plan says so (`AdapterCopies`).
    """
    size = config.tensor_parallel_size
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(init_method))
    step_timeout = timedelta(seconds=config.step_timeout_s)
    dist.init_process_group(
        backend.collective, init_method=init_method, rank=rank, world_size=size, timeout=step_timeout
    )
    adapter_timeout = timedelta(seconds=config.adapter_load_timeout_s)
    adapter_group = dist.new_group(timeout=adapter_timeout, backend="gloo")
    step_group = dist.group.WORLD
    assert step_group is not None
    assert isinstance(adapter_group, dist.ProcessGroup)
    reduce = backend.join_reduce(step_group, rank, size, config.step_timeout_s)
    return TensorParallel(rank, size, step_group, reduce, backend.gathers_to_all), adapter_group


def _interface_towards(init_method: str) -> str:
    """The network interface by which this host reaches the meeting point; gloo would guess from the host's name."""
    target = urlparse(init_method)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port))
        address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    raise ConfigError(f"no network interface has the address {address}")
