"""The engine for asyncio: one thread steps it, any event loop talks to it."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ray_lora.adapter import AdapterInfo, AdapterManifest
from ray_lora.config import MAX_FETCHES, EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.engine.completion import RequestGroup, Tokenizer
from ray_lora.engine.engine_core import EngineCore, Event
from ray_lora.engine.executor import Executor
from ray_lora.engine.shared_calls import SharedCalls
from ray_lora.errors import AdapterExistsError, CapacityError, EngineDeadError, RayLoraError
from ray_lora.names import check_adapter_name, url_scheme
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo

T = TypeVar("T")
Stream = asyncio.Queue[GenerateChunk | RayLoraError]
Message = tuple[Callable[[], None], Callable[[BaseException], None]]
"""What to run between two steps, and whom to tell if the engine has died first."""


RETRY_S = 0.02
"""How often a cold adapter looks for room while all of host memory has requests."""


class AsyncEngine:
    """Generates, loads and unloads, all at once. Made and used in one event loop.

    A thread of its own runs the steps. Everything else reaches the engine as a function that the thread calls between
    two steps, so nothing changes while a step runs. Adapters are read and staged in other threads meanwhile; only
    their commit is such a function.
    """

    def __init__(self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer) -> None:
        self.config = config
        self.info: ModelInfo = executor.info
        self._executor = executor
        self._core = EngineCore(config, executor, tokenizer)
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()
        self._streams: dict[RequestGroup, Stream] = {}
        self._dead: EngineDeadError | None = None
        self._adapter_lock = asyncio.Lock()
        self._held: set[str] = set()
        self._cold: set[str] = set()
        """Versions that the ranks hold in host memory, and registered ones that they held before; changed under the
        lock."""
        self._warming: SharedCalls[None] = SharedCalls()
        self._resolver: AdapterResolver | None = None
        if config.lora_resolver_dir is not None:
            self._resolver = AdapterResolver(Path(config.lora_resolver_dir), config.base_model_name)
        self._resolutions: SharedCalls[None] = SharedCalls()
        self._fetches: SharedCalls[AdapterManifest] = SharedCalls()
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Stream a request's chunks. Closing the generator, or cancelling its task, cancels the request.

        Raises:
            InvalidRequestError, NotFoundError: the request cannot be served; `param` names the field.
            NumericsError: the model's output for this request is not finite.
            EngineDeadError: a rank is gone.
        """
        stream: Stream = asyncio.Queue()
        adding: asyncio.Future[RequestGroup | None] | None = None
        group: RequestGroup | None = None
        num_unfinished = request.sampling_params.n
        try:
            while group is None:
                if request.adapter is not None:
                    await self._make_ready(request.adapter)
                adding = asyncio.ensure_future(self._call(lambda: self._add(request, stream)))
                group = await asyncio.shield(adding)
            while num_unfinished:
                item = await stream.get()
                if isinstance(item, RayLoraError):
                    raise item
                num_unfinished -= sum(delta.finish_reason is not None for delta in item.outputs)
                yield item
        finally:
            if group is None:
                if adding is not None:
                    adding.add_done_callback(self._cancel_added)
            elif num_unfinished:
                self._post(partial(self._cancel, group))

    async def load_adapter(self, name: str, path: str, load_inplace: bool = False) -> tuple[AdapterInfo, bool]:
        """Register an adapter once every rank holds it; false if the name already had this content.

        Once begun, it is carried through even if the caller goes away.

        Raises:
            InvalidRequestError: the name, the path or the adapter itself, naming the field.
            CapacityError: no room for another adapter.
        """
        check_adapter_name(name, self.config.base_model_name)
        return await self._carry_through(self._load(name, path, load_inplace))

    async def unload_adapter(self, name: str) -> None:
        """Forget a name. Requests on it finish; its memory is freed when the last one has."""

        async def unload() -> None:
            async with self._adapter_lock:
                await self._call(lambda: self._core.adapters.unregister(name))

        await self._carry_through(unload())

    def list_adapters(self) -> list[AdapterInfo]:
        return self._core.adapters.list_adapters()

    def stats(self) -> EngineStats:
        return self._core.stats()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine or a rank is gone."""
        if self._dead is None:
            await asyncio.to_thread(self._executor.check_health)
        if self._dead is not None:
            raise self._dead

    async def shutdown(self) -> None:
        """End every request and let go of the ranks."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._executor.shutdown)

    async def _load(self, name: str, path: str, load_inplace: bool) -> tuple[AdapterInfo, bool]:
        manifest = await self._fetch(path) if url_scheme(path) is not None else None
        async with self._adapter_lock:
            if manifest is None:
                manifest = await asyncio.to_thread(self._executor.inspect_adapter, path)
            adapters = self._core.adapters
            if not await self._call(lambda: adapters.check_register(name, manifest, load_inplace)):
                return adapters.info(name), False
            if not await self._stage(manifest):
                raise CapacityError(
                    f"{len(self._held)} adapters in host memory, as many as max_cpu_loras allows, all have requests"
                )
            return await self._call(lambda: self._commit(name, manifest)), True

    async def _stage(self, manifest: AdapterManifest) -> bool:
        """Bring an adapter to host memory, in place of the least recently used; false if all there have requests."""
        if manifest.version in self._held:
            return True
        while len(self._held) >= self.config.max_staged_loras:
            idle = await self._call(lambda: self._core.adapters.take_idle(self._held))
            if idle is None:
                return False
            await asyncio.to_thread(self._executor.drop_adapter, idle, forget=False)
            self._held.discard(idle)
            self._cold.add(idle)
        await asyncio.to_thread(self._executor.stage_adapter, manifest)
        self._held.add(manifest.version)
        self._cold.discard(manifest.version)
        return True

    async def _make_ready(self, name: str) -> None:
        """Wait until the adapter of this name, if there is one, is in host memory; requests for it wait together."""
        await self._resolve(name)
        manifest = self._core.adapters.find_cold(name)
        if manifest is not None:
            await self._warming.run(manifest.version, partial(self._warm, manifest))

    async def _warm(self, manifest: AdapterManifest) -> None:
        while True:
            async with self._adapter_lock:
                if not await self._call(lambda: self._core.adapters.is_registered(manifest.version)):
                    return
                if await self._stage(manifest):
                    return await self._call(lambda: self._core.adapters.mark_staged(manifest.version))
            await asyncio.sleep(RETRY_S)

    async def _fetch(self, url: str) -> AdapterManifest:
        """Inspect a remote adapter, before the lock is taken: other loads do not wait for its download."""

        async def inspect() -> AdapterManifest:
            async with self._fetch_slots:
                return await asyncio.to_thread(self._executor.inspect_adapter, url)

        return await self._fetches.run(url, inspect)

    async def _resolve(self, name: str) -> None:
        """Load an adapter of `lora_resolver_dir` that is asked for by name and is not registered yet."""
        if self._resolver is None or self._core.adapters.has_name(name):
            return
        resolver = self._resolver

        async def load() -> None:
            path = await asyncio.to_thread(resolver.find, name)
            if path is not None:
                await self._load(name, path, load_inplace=False)

        with suppress(AdapterExistsError):  # somebody has loaded it under this name meanwhile
            await self._resolutions.run(name, load)

    def _commit(self, name: str, manifest: AdapterManifest) -> AdapterInfo:
        self._core.register(name, manifest)
        return self._core.adapters.info(name)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _drop(self, version: str) -> None:
        """Free a dead version on the ranks, unless it has been registered again or dropped meanwhile."""
        with suppress(EngineDeadError):  # what dead ranks held is gone
            async with self._adapter_lock:
                known = version in self._held or version in self._cold
                if known and not await self._call(lambda: self._core.adapters.is_registered(version)):
                    await asyncio.to_thread(self._executor.drop_adapter, version)
                    self._held.discard(version)
                    self._cold.discard(version)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = function()
            except BaseException as error:
                fail(error)
            else:
                self._loop.call_soon_threadsafe(_set_result, future, value)

        def fail(error: BaseException) -> None:
            self._loop.call_soon_threadsafe(_set_exception, future, error)

        self._post(run, fail)
        return await future

    def _post(self, run: Callable[[], None], fail: Callable[[BaseException], None] = lambda _: None) -> None:
        with self._inbox_lock:
            if self._dead is None:
                self._inbox.put((run, fail))
            else:
                fail(self._dead)

    def _add(self, request: GenerateRequest, stream: Stream) -> RequestGroup | None:
        """None if the adapter has left host memory since it was made ready."""
        if request.adapter is not None and self._core.adapters.find_cold(request.adapter) is not None:
            return None
        group = self._core.add(request)
        self._streams[group] = stream
        return group

    def _cancel(self, group: RequestGroup) -> None:
        self._core.cancel(group)
        self._streams.pop(group, None)

    def _cancel_added(self, adding: "asyncio.Future[RequestGroup | None]") -> None:
        """The caller left while its request was being added."""
        if not adding.cancelled() and adding.exception() is None and (group := adding.result()) is not None:
            self._post(partial(self._cancel, group))

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._drain_inbox():
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

    def _drain_inbox(self) -> bool:
        """Run what has arrived, waiting for something if there is no work; false to stop."""
        while True:
            try:
                message = self._inbox.get(block=not self._core.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            run, _ = message
            run()
            if self._inbox.empty():
                return True

    def _deliver(self, streams: list[Stream], events: list[Event], dead: list[str]) -> None:
        for stream, (_, item) in zip(streams, events, strict=True):
            stream.put_nowait(item)
        for version in dead:
            task = self._loop.create_task(self._drop(version))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _die(self, error: EngineDeadError) -> None:
        """End every stream and every waiting call with the error."""
        streams, self._streams = list(self._streams.values()), {}
        with self._inbox_lock:
            self._dead = error
            while not self._inbox.empty():
                message = self._inbox.get()
                if message is not None:
                    message[1](error)
        for stream in streams:
            self._loop.call_soon_threadsafe(stream.put_nowait, error)


def _set_result(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
