"""The only rank, in this process."""

import threading

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, StagingTimes
from ray_lora.cluster.background import background_threads
from ray_lora.cluster.worker import Worker
from ray_lora.config import MAX_FETCHES, EngineConfig
from ray_lora.step import ModelInfo, StepPlan, StepResult


class LocalExecutor:
    """Implements `Executor` for `tensor_parallel_size` 1 without Ray."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, rank=0)
        self._info = self._worker.start()
        self._adapter_lock = threading.Lock()
        self._threads = background_threads(1 + MAX_FETCHES)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._worker.execute(plan)
        assert result is not None, "rank 0 always answers"
        return result

    def inspect_adapter(self, source: str, version: str | None = None) -> AdapterManifest:
        return self._threads.submit(self._worker.inspect_adapter, source, version).result()

    def validate_adapter(self, source: str) -> AdapterValidation:
        return self._threads.submit(self._worker.validate_adapter, source).result()

    def has_adapter_files(self, version: str) -> bool:
        return self._worker.has_adapter_files(version)

    def adapter_files(self, version: str) -> AdapterFiles | None:
        return self._threads.submit(self._worker.adapter_files, version).result()

    def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        self._threads.submit(self._worker.add_adapter_files, files, source).result()

    def keep_adapter(self, manifest: AdapterManifest) -> None:
        self._worker.keep_adapter(manifest)

    def stage_adapter(self, manifest: AdapterManifest) -> StagingTimes:
        with self._adapter_lock:
            try:
                return self._threads.submit(self._worker.stage_adapter, manifest).result()
            except BaseException:
                self._worker.drop_adapter(manifest.version, forget=False)
                raise

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        self._worker.drop_adapter(version, forget)

    def check_health(self) -> None:
        """The rank lives as long as this process."""

    def shutdown(self) -> None:
        """The rank itself ends with the process."""
        self._threads.shutdown(wait=False)
