"""One rank's process: the model runner for steps, and its side of the adapter load protocol."""

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, StagingTimes
from ray_lora.adapters.reader import AdapterReader
from ray_lora.adapters.store import AdapterStore
from ray_lora.backends.registry import make_backend
from ray_lora.cluster.background import give_way
from ray_lora.cluster.rank_groups import join_ranks, meeting_point
from ray_lora.cluster.staging import AdapterStaging, reading
from ray_lora.cluster.step_link import Invitation, RankLink
from ray_lora.config import EngineConfig
from ray_lora.model.model_runner import ModelRunner
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.step import ModelInfo, StepPlan, StepResult


class Worker:
    """Rank `rank` of `config.tensor_parallel_size`; nothing but `meeting_point` works before `start`.

    `execute` is called by one thread; the adapter methods by another, one at a time, while steps run. Only
    the methods that neither stage nor drop may run in several threads more. These threads give way to the steps.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._step_thread: int | None = None

    def meeting_point(self, host: str) -> str:
        return meeting_point(host)

    def start(self, init_method: str | None = None) -> ModelInfo:
        """Join the other ranks and load this rank's part of the model.

        Raises:
            ConfigError: the model cannot be served as configured.
        """
        config, rank, size = self._config, self._rank, self._config.tensor_parallel_size
        torch.set_num_threads(config.num_rank_threads)
        backend = self._backend = make_backend(config.device)
        parallel, adapter_group = TensorParallel(), None
        if init_method is not None:
            parallel, adapter_group = join_ranks(config, rank, init_method, backend)
        self._runner = ModelRunner(config, parallel, backend)
        self._reader: AdapterReader | None = None
        if rank == 0:
            store = AdapterStore(
                Path(config.adapter_store_dir), config.adapter_store_max_bytes, config.max_adapter_bytes
            )
            self._reader = AdapterReader(
                self._runner.arch,
                store,
                config.max_lora_rank,
                self._runner.open_checkpoint,
                config.adapter_fetch_retries,
                size,
                self._runner.adapter_dtype,
            )
        self._staging = AdapterStaging(rank, size, adapter_group, self._reader)
        return self._runner.info

    def process_id(self) -> int:
        return os.getpid()

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step; see `ModelRunner.execute`."""
        if self._step_thread != threading.get_ident():
            self._step_thread = threading.get_ident()
            torch.set_num_threads(self._config.num_rank_threads)  # OpenMP keeps this by thread
            self._backend.enter_thread()
        return self._runner.execute(plan)

    def run_steps(self, invitation: Invitation) -> None:
        """Execute the plans that the executor sends until it lets go; an error here ends the connection."""
        with RankLink(invitation, self._rank) as link:
            while (plan := link.receive()) is not None:
                link.send(pickle.dumps(self.execute(pickle.loads(plan))))

    def inspect_adapter(self, source: str, version: str | None = None) -> AdapterManifest:
        """On rank 0: read and check an adapter; see `Executor.inspect_adapter`."""
        give_way()
        with self._reading() as reader:
            return reader.inspect(source, version)

    def validate_adapter(self, source: str) -> AdapterValidation:
        """On rank 0; see `Executor.validate_adapter`."""
        give_way()
        with self._reading() as reader:
            return reader.validate(source)

    def has_adapter_files(self, version: str) -> bool:
        """On rank 0; see `Executor.has_adapter_files`."""
        with self._reading() as reader:
            return reader.store.has(version)

    def adapter_files(self, version: str) -> AdapterFiles | None:
        """On rank 0; see `Executor.adapter_files`."""
        give_way()
        with self._reading() as reader:
            return reader.store.files(version)

    def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        """On rank 0; see `Executor.add_adapter_files`."""
        give_way()
        with self._reading() as reader:
            reader.add(files, source)

    def keep_adapter(self, manifest: AdapterManifest) -> None:
        """On rank 0: its files stay until it is dropped."""
        with self._reading() as reader:
            reader.keep(manifest)

    def stage_adapter(self, manifest: AdapterManifest) -> StagingTimes:
        """Receive this rank's part; returns once all ranks agree, raises on every rank if one does not."""
        give_way()
        shard, times = self._staging.receive(manifest)
        self._runner.stage(shard)
        return times

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        self._runner.drop(version)
        if forget and self._reader is not None:
            self._reader.forget(version)

    def staged_versions(self) -> frozenset[str]:
        return self._runner.staged_versions

    @contextmanager
    def _reading(self) -> Iterator[AdapterReader]:
        """For what only rank 0 can do, in whose errors no other rank has a part."""
        assert self._reader is not None, "only rank 0 reads adapters"
        with reading():
            yield self._reader
