"""The engine for asyncio: one thread steps it, any event loop talks to it."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

from ray_lora.adapter import AdapterFiles, AdapterInfo, AdapterManifest, AdapterValidation, Tier, TierUse
from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.engine.adapter_loader import AdapterLoader
from ray_lora.engine.adapter_resolver import AdapterResolver, Candidate, DirectoryResolver
from ray_lora.engine.completion import RequestGroup, Tokenizer
from ray_lora.engine.deadlines import Deadlines
from ray_lora.engine.engine_core import EngineCore, Event
from ray_lora.engine.executor import Executor
from ray_lora.engine.grammar import Grammar
from ray_lora.engine.mailbox import Mailbox
from ray_lora.errors import EngineDeadError, RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo

Stream = asyncio.Queue[GenerateChunk | RayLoraError]

HEARTBEAT_S = 1.0
"""An engine without work lets the ranks meet this often."""
OVERDUE_S = 4.0
"""Without work, ranks that have not met for this long cannot."""


class AsyncEngine:
    """Generates, loads and unloads, all at once. Made and used in one event loop.

    A thread of its own runs the steps. Everything else reaches the engine as a function that the thread calls between
    two steps, so nothing changes while a step runs. Adapters are read and staged in other threads meanwhile; only
    their commit is such a function.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        resolvers: Sequence[AdapterResolver] = (),
    ) -> None:
        """
        Args:
            resolvers: know adapters that are loaded on first use, those of `lora_resolver_dir` aside.
        """
        self.config = config
        self.info: ModelInfo = executor.info
        self._executor = executor
        self._core = EngineCore(config, executor, tokenizer)
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._loop)
        self._streams: dict[RequestGroup, Stream] = {}
        if config.lora_resolver_dir is not None:
            directory = DirectoryResolver(Path(config.lora_resolver_dir), config.base_model_name)
            resolvers = (*resolvers, directory)
        self._loader = AdapterLoader(
            config, executor, self._core.adapters, self._mailbox.call, resolvers, self._core.metrics
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's chunks. Closing the generator, or cancelling its task, cancels the request.

        Raises:
            InvalidRequestError, NotFoundError: the request cannot be served; `param` names the field.
            OverloadedError, RequestTimeoutError: it waited or ran for too long.
            NumericsError: the model's output for this request is not finite.
            EngineDeadError: a rank is gone.
        """
        stream: Stream = asyncio.Queue()
        adding: asyncio.Future[RequestGroup | None] | None = None
        group: RequestGroup | None = None
        num_unfinished = request.sampling_params.n
        arrived_at = time.monotonic()
        deadlines = Deadlines(self.config, request.waited_s)
        try:
            async with deadlines.while_waiting():
                grammar = await self._compile_grammar(request)
                while group is None:
                    async with self._loader.ready(request.adapter):
                        adding = self._mailbox.call(partial(self._add, request, stream, arrived_at, grammar))
                        group = await asyncio.shield(adding)
            deadlines.watch_start(group, stream.put_nowait)
            deadlines.watch_end(stream.put_nowait)
            while num_unfinished:
                item = await stream.get()
                if isinstance(item, RayLoraError):
                    raise item
                num_unfinished -= sum(delta.finish_reason is not None for delta in item.outputs)
                yield item
        finally:
            deadlines.close()
            if group is None:
                if adding is not None:
                    adding.add_done_callback(self._cancel_added)
            elif num_unfinished:
                self._mailbox.post(partial(self._cancel, group))

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        """Register an adapter once every rank holds it; false if the name already had this content.

        Once begun, it is carried through even if the caller goes away.

        Args:
            load_inplace: also in place of other content of that name.
            expected_version: what the name must point to now, so that of two writers one is told.

        Raises:
            InvalidRequestError: the name, the path or the adapter itself, naming the field.
            VersionConflictError: the name points to another version.
            CapacityError: no room for another adapter.
        """
        return await self._loader.load(name, path, load_inplace, expected_version)

    async def unload_adapter(self, name: str) -> None:
        """Forget a name. Requests on it finish; its memory is freed when the last one has."""
        await self._loader.unload(name)

    async def inspect_adapter(self, path: str) -> AdapterManifest:
        """Fetch, copy and check an adapter; it then waits to be prepared or abandoned.

        Raises:
            InvalidRequestError, NotFoundError, CapacityError: what is wrong with it, naming the field.
        """
        return await self._loader.inspect(path)

    async def has_adapter_files(self, version: str) -> bool:
        """Whether a content can be had here without its source."""
        return await asyncio.to_thread(self._executor.has_adapter_files, version)

    async def adapter_files(self, version: str) -> AdapterFiles | None:
        """A content, for a replica that cannot read its source; None if it is not here."""
        return await asyncio.to_thread(self._executor.adapter_files, version)

    async def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        """Have a content that came from another replica.

        Raises:
            AdapterRejectedError, CapacityError: it is not taken.
        """
        await asyncio.to_thread(self._executor.add_adapter_files, files, source)

    async def prepare_adapter(self, name: str, candidate: Candidate, stages: bool) -> None:
        """Do all of a load that may fail, so that `point_adapter` with the same arguments will not.

        Args:
            stages: to host memory; else only its files are made ready.

        Raises:
            InvalidRequestError, NotFoundError, CapacityError: it cannot be had, or not under this name.
        """
        await self._loader.prepare(name, candidate, stages)

    async def point_adapter(self, name: str, candidate: Candidate) -> AdapterInfo:
        """Point a name to a content, whatever it pointed to: one that was prepared, or that was here before.

        Raises:
            InvalidRequestError, NotFoundError: its content is lost.
        """
        return await self._loader.point(name, candidate)

    def abandon_adapter(self, version: str) -> None:
        """Let go of what was prepared, if no name points to it."""
        self._loader.abandon(version)

    async def load_configured(self, module: LoRAModule) -> None:
        """Load an adapter of `lora_modules`."""
        await self._loader.load_configured(module)

    async def mark_used(self, name: str, at: float) -> None:
        """Tell when a request last came for this name, in seconds since the epoch."""
        await self._mailbox.call(partial(self._core.adapters.mark_used, name, at))

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo:
        """Bring an adapter to host memory and keep it there, and on the device from its next request on; or no longer.

        Raises:
            NotFoundError: there is none of that name.
            CapacityError: the pinned ones would leave no room for others.
        """
        return await self._loader.pin(name, is_pinned)

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        """Set an adapter's share of the service, from its next token on; see `AdapterManager.set_weight`."""
        return await self._loader.set_weight(name, weight)

    async def validate_adapter(self, path: str, name: str | None = None) -> AdapterValidation:
        """What loading an adapter, under this name, would do. Nothing that is served changes.

        Raises:
            InvalidRequestError, NotFoundError: there is no adapter at that path, or the name is none.
        """
        return await self._loader.validate(path, name)

    def list_adapters(self) -> list[AdapterInfo]:
        return self._core.adapters.list_adapters()

    def adapter_tiers(self) -> dict[Tier, TierUse]:
        """How full the device and host memory are."""
        return {"device": self._core.adapters.pages.use(self.info.lora_page_bytes), "host": self._loader.host.use()}

    def stats(self) -> EngineStats:
        return self._core.stats()

    @property
    def dead(self) -> RayLoraError | None:
        """Why nothing can be executed any more, if so."""
        return self._mailbox.error

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine or a rank is gone or does not answer.

        That it computes is seen from its steps, and without work from its heartbeats.
        """
        if self.dead is None:
            await asyncio.to_thread(self._executor.check_health)
        if self.dead is not None:
            raise self.dead
        age = time.monotonic() - self._core.last_step_at
        if age > OVERDUE_S and not self._core.has_work:
            raise EngineDeadError(f"no step has gone through every rank for {age:.0f} s")

    async def shutdown(self) -> None:
        """End every request and let go of the ranks."""
        self._mailbox.stop()
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._executor.shutdown)

    async def _compile_grammar(self, request: GenerateRequest) -> Grammar | None:
        """In a thread of its own, for it may take longer than a step."""
        if request.sampling_params.structured_outputs is None:
            return None
        try:
            return await asyncio.to_thread(self._core.compile_grammar, request.sampling_params.structured_outputs)
        except RayLoraError as error:
            await self._mailbox.call(partial(self._core.metrics.refused, request.adapter, error))
            raise

    def _add(
        self, request: GenerateRequest, stream: Stream, arrived_at: float, grammar: Grammar | None
    ) -> RequestGroup | None:
        """None if the adapter has left host memory since it was made ready."""
        if request.adapter is not None and self._core.adapters.find_cold(request.adapter) is not None:
            return None
        group = self._core.add(request, arrived_at, grammar)
        self._streams[group] = stream
        return group

    def _cancel(self, group: RequestGroup) -> None:
        self._core.cancel(group)
        self._streams.pop(group, None)

    def _cancel_added(self, adding: "asyncio.Future[RequestGroup | None]") -> None:
        """The caller left while its request was being added."""
        if not adding.cancelled() and adding.exception() is None and (group := adding.result()) is not None:
            self._mailbox.post(partial(self._cancel, group))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._run_messages():
                events = self._core.step()
                dead = self._core.adapters.take_dead()
                finished = {group: self._streams.pop(group) for group, _ in events if group.finished}
                streams = [finished.get(group) or self._streams[group] for group, _ in events]
                if events or dead:
                    self._loop.call_soon_threadsafe(self._deliver, streams, events, dead)
            self._die(EngineDeadError("the engine was shut down"))
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:
            self._die(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def _run_messages(self) -> bool:
        """Run what has arrived, waiting for something if there is no work; false to stop."""
        while True:
            next_beat_in = max(0.0, self._core.last_step_at + HEARTBEAT_S - time.monotonic())
            try:
                if not self._mailbox.run_next(None if self._core.has_work else next_beat_in):
                    return False
            except queue.Empty:
                if self._core.has_work:
                    return True
                self._core.heartbeat()
            else:
                if self._mailbox.is_empty:
                    return True

    def _deliver(self, streams: list[Stream], events: list[Event], dead: list[str]) -> None:
        for stream, (_, item) in zip(streams, events, strict=True):
            stream.put_nowait(item)
        for version in dead:
            self._loader.drop_soon(version)

    def _die(self, error: EngineDeadError) -> None:
        """End every stream and every waiting call with the error."""
        streams, self._streams = list(self._streams.values()), {}
        self._mailbox.close(error)
        for stream in streams:
            self._loop.call_soon_threadsafe(stream.put_nowait, error)
