"""The engine in this process, for scripts and notebooks: the same path as a replica's, without HTTP."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from copy import deepcopy
from types import TracebackType
from typing import Any, TypeVar, cast

from ray_lora.adapter import AdapterInfo
from ray_lora.cluster.launch import prepare_cluster
from ray_lora.config import EngineConfig
from ray_lora.errors import EngineDeadError, InvalidRequestError
from ray_lora.request import GenerateRequest, RequestOutput, SamplingParams
from ray_lora.serve.start import start_alone
from ray_lora.stats import EngineStats

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""


class LLM:
    """A base model and its adapters.

    Example:
        llm = LLM(model="~/models/llama", adapters={"legal": "~/adapters/legal"}, max_loras=8)
        for output in llm.generate(["Hello", "Hello"], SamplingParams(max_tokens=32), adapters=["legal", None]):
            print(output.outputs[0].text)

    Every method may be called from any thread, also while others generate.

    Args:
        model: a Hugging Face directory.
        adapters: PEFT directories by name, loaded at once.
        args: any key of a deployment's `args`; see `EngineConfig`.

    Raises:
        ConfigError: what cannot be served, in one line.
    """

    def __init__(self, model: str, adapters: Mapping[str, str] | None = None, **args: Any) -> None:
        if adapters:
            args["lora_modules"] = dict(adapters)
        self.config = EngineConfig.parse({"model": str(model), **args})
        prepare_cluster(self.config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._is_open = True
        try:
            self._engine = self._run(start_alone(self.config))
        except BaseException:
            self._close_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, all in one batch as far as they fit; results in the order of the prompts.

        Args:
            prompts: one prompt or several.
            sampling_params: for all, or one for each prompt.
            adapters: for all, or one for each prompt; None is the base model.

        Raises:
            InvalidRequestError, NotFoundError: nothing is generated, for any prompt.
        """
        requests = _requests(prompts, sampling_params or SamplingParams(), adapters)
        return self._run(self._generate(requests))

    def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> AdapterInfo:
        """Register an adapter; with `load_inplace` also in place of another of that name.

        With `expected_version`, only if the name points to that version now.

        Raises:
            InvalidRequestError, NotFoundError, CapacityError: what is wrong with it; nothing has changed.
        """
        info, _ = self._run(self._engine.load_adapter(name, str(path), load_inplace, expected_version))
        return info

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that run on it finish."""
        self._run(self._engine.unload_adapter(name))

    def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo:
        """Keep an adapter in host memory, and on the device from its next request on; or no longer.

        Raises:
            NotFoundError: there is none of that name.
            CapacityError: the pinned ones would leave no room for others.
        """
        return self._run(self._engine.pin_adapter(name, is_pinned))

    def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        """Set an adapter's share of the service; each begins with 1.

        Raises:
            InvalidRequestError, NotFoundError: the weight is out of range; there is none of that name.
        """
        return self._run(self._engine.set_adapter_weight(name, weight))

    def list_adapters(self) -> list[AdapterInfo]:
        return self._engine.list_adapters()

    def stats(self) -> EngineStats:
        return deepcopy(self._engine.stats())

    def shutdown(self) -> None:
        """End what is running and free everything. Again is harmless."""
        if self._is_open:
            self._is_open = False
            self._submit(self._engine.shutdown())
            self._close_loop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _generate(self, requests: list[GenerateRequest]) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._generate_one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _generate_one(self, request: GenerateRequest) -> RequestOutput:
        text = request.prompt if isinstance(request.prompt, str) else None
        output = RequestOutput(request.request_id, text, adapter=request.adapter, n=request.sampling_params.n)
        async for chunk in self._engine.generate(request):
            output.append(chunk)
        return output

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._is_open:
            work.close()
            raise EngineDeadError("this LLM was shut down")
        return self._submit(work)

    def _submit(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except CancelledError:
            raise EngineDeadError("this LLM was shut down") from None
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _close_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _requests(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    adapters: str | Sequence[str | None] | None,
) -> list[GenerateRequest]:
    several = _several(prompts)
    params = [sampling_params] * len(several) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
    names = [adapters] * len(several) if adapters is None or isinstance(adapters, str) else list(adapters)
    for param, values in (("sampling_params", params), ("adapters", names)):
        if len(values) != len(several):
            raise InvalidRequestError(f"{len(several)} prompts but {len(values)} {param}", param)
    return [
        GenerateRequest(prompt=_prompt(prompt), sampling_params=chosen, adapter=name, request_id=str(index))
        for index, (prompt, chosen, name) in enumerate(zip(several, params, names, strict=True))
    ]


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _prompt(prompt: Prompt) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        for key in ("prompt_token_ids", "prompt"):
            if key in prompt:
                return cast("str | Sequence[int]", prompt[key])
        raise InvalidRequestError(f"a prompt has neither 'prompt' nor 'prompt_token_ids': {sorted(prompt)}", "prompts")
    return prompt
