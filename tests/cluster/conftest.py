"""One Ray on loopback for the tests that need actors; its NPUs and GPUs are numbers that Ray counts, nothing more."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    ray.init(
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=4,
        num_gpus=8,
        resources={"NPU": 8},
        log_to_driver=False,
    )
    yield
    ray.shutdown()
