"""Tensor-parallel ranks as Ray actors of one placement group; a step reaches them over connections."""

import os
import pickle
import time
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, StagingTimes
from ray_lora.cluster.step_link import StepHub
from ray_lora.cluster.worker import Worker
from ray_lora.config import MAX_FETCHES, EngineConfig
from ray_lora.errors import ConfigError, EngineDeadError, RayLoraError
from ray_lora.names import url_scheme
from ray_lora.step import ModelInfo, StepPlan, StepResult

PLACEMENT_TIMEOUT_S = 120
HEALTH_TIMEOUT_S = 3
"""A rank that does not answer for this long is not healthy now; it may be again."""
GIVE_UP_S = 10
"""If no step has gone through for this long either, it is given up: others may need its device."""
CONNECT_TIMEOUT_S = 60
CAUSE_TIMEOUT_S = 2
"""How long to wait for Ray to say why a connection to a rank has ended."""


class RayTPExecutor:
    """Implements `Executor` with one actor per rank.

    Each actor runs steps in one long call, fed by a `StepHub`; adapter calls are ordinary actor calls in a concurrency
    group of their own, so neither waits for the other.
    """

    def __init__(self, config: EngineConfig, worker_class: type[Worker] = Worker) -> None:
        self._config = config
        self._dead: str | None = None
        self._last_step_at = time.monotonic()
        bundle = {"CPU": config.rank_num_cpus, **device_resources(config)}
        self._group = placement_group([bundle] * config.tensor_parallel_size, strategy=config.placement_group_strategy)
        try:
            self._workers = self._start_workers(worker_class)
            address = _address_of_bundle(self._group, 0)
            init_method = self._call_first("meeting_point", "health", address)
            self._info: ModelInfo = self._call_all("start", "health", init_method)[0]
            self._hub = StepHub(ray.util.get_node_ip_address(), len(self._workers), config.step_timeout_s)
            self._runs = self._submit("run_steps", "steps", self._hub.invitation)
            self._connect()
        except BaseException:
            remove_placement_group(self._group)
            raise

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            answers = self._hub.exchange(pickle.dumps(plan))
        except (EOFError, OSError) as error:
            raise self._die(f"a rank failed in step {plan.step_id}: {self._cause_of(error)}") from None
        self._last_step_at = time.monotonic()
        result = pickle.loads(answers[0])
        assert isinstance(result, StepResult), "rank 0 always answers"
        return result

    def inspect_adapter(self, source: str, version: str | None = None) -> AdapterManifest:
        group = "adapters" if url_scheme(source) is None else "fetches"
        manifest: AdapterManifest = self._call_first("inspect_adapter", group, source, version)
        return manifest

    def validate_adapter(self, source: str) -> AdapterValidation:
        found: AdapterValidation = self._call_first("validate_adapter", "fetches", source)
        return found

    def has_adapter_files(self, version: str) -> bool:
        return bool(self._call_first("has_adapter_files", "fetches", version))

    def adapter_files(self, version: str) -> AdapterFiles | None:
        files: AdapterFiles | None = self._call_first("adapter_files", "fetches", version)
        return files

    def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        self._call_first("add_adapter_files", "fetches", files, source)

    def keep_adapter(self, manifest: AdapterManifest) -> None:
        self._call_first("keep_adapter", "adapters", manifest)

    def stage_adapter(self, manifest: AdapterManifest) -> StagingTimes:
        try:
            times: StagingTimes = self._call_all("stage_adapter", "adapters", manifest)[0]
            return times
        except BaseException:
            self.drop_adapter(manifest.version, forget=False)
            raise

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        """Nothing to do once a rank is gone: the others end with it."""
        if self._dead is not None:
            return
        drops = self._submit("drop_adapter", "adapters", version, forget)
        ray.wait(drops, num_returns=len(drops), timeout=self._config.adapter_load_timeout_s)

    def staged_versions(self) -> list[frozenset[str]]:
        """What each rank holds in host memory, by rank."""
        return self._call_all("staged_versions", "adapters")

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            self._call_all("process_id", "health", timeout=HEALTH_TIMEOUT_S)
        except EngineDeadError as error:
            if time.monotonic() - self._last_step_at < GIVE_UP_S:
                raise
            self._hub.break_off()
            raise self._die(f"{error}, and no step has gone through for {GIVE_UP_S} s") from None

    def shutdown(self) -> None:
        """Stop the ranks, and give the placement group back."""
        self._dead = self._dead or "the ranks were shut down"
        self._hub.close()
        for worker in self._workers:
            ray.kill(worker)
        remove_placement_group(self._group)

    def _start_workers(self, worker_class: type[Worker]) -> list[Any]:
        config = self._config
        size, num_cpus, devices = config.tensor_parallel_size, config.rank_num_cpus, device_resources(config)
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            each = " and ".join(f"{count:g} {name}" for name, count in {"CPU": num_cpus, **devices}.items())
            raise ConfigError(
                f"tensor_parallel_size {size}: no room for {size} ranks of {each} "
                f"({config.placement_group_strategy}) in {ray.available_resources()}"
            )
        options: dict[str, Any] = {
            "concurrency_groups": {"steps": 1, "adapters": 1, "fetches": MAX_FETCHES, "health": 1}
        }
        actor_class = ray.remote(**options)(worker_class)
        return [
            actor_class.options(
                num_cpus=num_cpus,
                num_gpus=devices.get("GPU"),  # to Ray these are, like CPUs, none of the others
                resources={name: count for name, count in devices.items() if name != "GPU"},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            ).remote(config, rank)
            for rank in range(size)
        ]

    def _submit(self, method: str, group: str, *args: Any, workers: list[Any] | None = None) -> list[Any]:
        return [
            getattr(worker, method).options(concurrency_group=group).remote(*args)
            for worker in (self._workers if workers is None else workers)
        ]

    def _call_first(self, method: str, group: str, *args: Any) -> Any:
        """Rank 0 alone; see `_call_all`."""
        return self._call_all(method, group, *args, workers=self._workers[:1])[0]

    def _call_all(
        self, method: str, group: str, *args: Any, workers: list[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call the ranks and wait for all: their results, or an error they raised on purpose, or EngineDeadError.

        A rank that is lost is not waited for, once another one says so.
        """
        calls = waiting = self._submit(method, group, *args, workers=workers)
        deadline = None if timeout is None else time.monotonic() + timeout
        errors: list[RayLoraError] = []
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not ready:
                ranks = ", ".join(str(calls.index(call)) for call in waiting)
                raise EngineDeadError(f"rank {ranks} did not answer within {timeout} s")
            try:
                ray.get(ready)
            except RayError as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if not isinstance(cause, RayLoraError) or isinstance(cause, EngineDeadError):
                    raise self._die(_reason(cause)) from None
                errors.append(cause)
        if errors:
            raise errors[0]
        return list(ray.get(calls))

    def _connect(self) -> None:
        try:
            self._hub.accept(CONNECT_TIMEOUT_S)
        except OSError as error:
            raise self._die(f"a rank did not connect: {self._cause_of(error)}") from None

    def _cause_of(self, error: Exception) -> str:
        """What ended a rank's call, if Ray can tell; else what its connection says."""
        ended, _ = ray.wait(self._runs, num_returns=1, timeout=CAUSE_TIMEOUT_S)
        for run in ended:
            try:
                ray.get(run)
            except RayError as cause:
                return _reason(cause)
        return str(error)

    def _die(self, reason: str) -> EngineDeadError:
        self._dead = self._dead or reason
        return EngineDeadError(self._dead)


def device_resources(config: EngineConfig) -> dict[str, float]:
    """What Ray reserves for a rank beside CPUs.

    It then shows the rank no other device (`ASCEND_RT_VISIBLE_DEVICES`, `CUDA_VISIBLE_DEVICES`).
    """
    resources = {"cuda": {"GPU": 1.0}, "npu": {"NPU": 1.0}}
    return resources.get(config.device, {})


def require_ray() -> None:
    """Join the Ray that runs here, or start one on loopback alone, whose ranks have the priority of this process.

    To be called from a thread that lives as long as Ray is needed: Ray's own processes end with it.
    """
    if not ray.is_initialized():
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)


def _address_of_bundle(group: PlacementGroup, index: int) -> str:
    """The address by which Ray knows the node of a bundle."""
    node_id = placement_group_table(group)["bundles_to_node_id"][index]
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


def _reason(error: BaseException) -> str:
    """The line that says what happened: the last, but Ray's words about a lack of memory end with advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0 if isinstance(error, OutOfMemoryError) else -1]}"
