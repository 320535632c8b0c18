"""What the engine needs from the ranks; `cluster/` implements it in this process and over Ray."""

from typing import Protocol

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, StagingTimes
from ray_lora.step import ModelInfo, StepPlan, StepResult


class Executor(Protocol):
    """All ranks of a replica. `execute` is called from one thread; the adapter calls from any, at the same time."""

    @property
    def info(self) -> ModelInfo: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on every rank and wait for it.

        Raises:
            EngineDeadError: a rank is gone or did not answer in time; nothing more can be executed.
        """

    def inspect_adapter(self, source: str, version: str | None = None) -> AdapterManifest:
        """Read and check an adapter, fetching it first if it is remote, without changing what is served.

        Args:
            version: the content that is wanted, if that is known; a copy in the store then does.

        Raises:
            AdapterRejectedError, InvalidRequestError, NotFoundError: what is wrong with it, naming the field.
        """

    def validate_adapter(self, source: str) -> AdapterValidation:
        """What `inspect_adapter` would say, with every refusal in place of the first error.

        Raises:
            InvalidRequestError, NotFoundError: there is no adapter at `source`.
        """

    def has_adapter_files(self, version: str) -> bool:
        """Whether the store of rank 0 has a content."""

    def adapter_files(self, version: str) -> AdapterFiles | None:
        """A content, from the store of rank 0; None if it is not there."""

    def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        """Check a content and put it into the store of rank 0.

        Raises:
            AdapterRejectedError, CapacityError: it is not taken.
        """

    def keep_adapter(self, manifest: AdapterManifest) -> None:
        """Keep an inspected adapter's files, from where it can be staged, until it is dropped.

        Raises:
            CapacityError: they had to leave the store already.
        """

    def stage_adapter(self, manifest: AdapterManifest) -> StagingTimes:
        """Put an adapter into every rank's host memory; returns once all ranks agree on what they hold.

        Raises:
            RayLoraError: a rank failed or disagreed, and no rank holds it.
        """

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        """Free a staged adapter on every rank; no later plan may name it, unless it is staged again.

        Args:
            forget: its files may go as well.
        """

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank is gone."""

    def shutdown(self) -> None: ...
