"""`import_path` of the Serve config files: from `args` to an application."""

from typing import Any

import ray
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.adapter_directory import AdapterDirectory
from ray_lora.serve.ingress import Ingress
from ray_lora.serve.replica import DIRECTORY_NAME, EngineStarter, LLMReplica
from ray_lora.serve.startup_checks import check_exposure, check_files, is_single_node, resolve_paths
from ray_lora.serve.startup_failure import end_serve_run

MAX_ONGOING_REQUESTS = 10_000
"""The engine's own queue decides who waits, not Serve's."""
DRAIN_TIMEOUT_S = 600
"""A replica that is to stop finishes what it has begun, within this time; only then is it killed."""

INGRESS: Deployment = serve.deployment(
    name="Ingress",
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    graceful_shutdown_wait_loop_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    health_check_period_s=1,
    logging_config={"enable_access_log": False},
    ray_actor_options={"num_cpus": 0},
)(serve.ingress()(Ingress))

REPLICA: Deployment = serve.deployment(
    name="LLMReplica",
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    graceful_shutdown_wait_loop_s=1,
    graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
    health_check_period_s=1,
    logging_config={"enable_access_log": False},
    request_router_config={
        "request_router_class": "ray_lora.serve.replica_router:ReplicaRouter",
        "request_routing_stats_period_s": 1,
    },
)(LLMReplica)

DIRECTORY: Deployment = serve.deployment(
    name=DIRECTORY_NAME,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    graceful_shutdown_wait_loop_s=1,
    health_check_period_s=1,
    logging_config={"enable_access_log": False},
    ray_actor_options={"num_cpus": 0},
)(AdapterDirectory)


def build_app(args: dict[str, Any]) -> Application:
    """The application for the `args` of a Serve config file; see `EngineConfig` for the keys.

    Raises:
        RayServeException: it cannot be served, in one line. Serve shows any other exception with its trace.
    """
    try:
        config = resolve_paths(EngineConfig.parse(args))
        check_exposure(config, http_host())
        if is_single_node():
            check_files(config)
    except ConfigError as error:
        message = f"ray_lora cannot start: {error}"
        end_serve_run(message)
        raise RayServeException(message) from None
    return bind_app(config)


def bind_app(config: EngineConfig, start: EngineStarter | None = None) -> Application:
    """An ingress in front of replicas, and the directory of their adapters.

    Args:
        start: makes a replica's engine, in place of `start_engine`; for tests.
    """
    num_cpus = 0 if config.uses_ray else 1
    replicas = REPLICA.options(ray_actor_options={"num_cpus": num_cpus}).bind(config, start)
    return INGRESS.bind(config, replicas, DIRECTORY.bind(config, replicas))


def http_host() -> str | None:
    """What Serve listens on; None if it does not run yet, or has no HTTP."""
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    host: str | None = None if client is None else client.http_config.host
    return host
