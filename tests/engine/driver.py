"""An `EngineCore` on fake ranks, driven by hand and checked after every call."""

from collections.abc import Sequence
from typing import Any

from fake_executor import (
    VOCAB_SIZE,
    FakeExecutor,
    FakeTokenizer,
    expected_tokens,
    kv_of,
    logprobs_of,
    make_manifest,
    text_of,
)

from ray_lora.config import EngineConfig
from ray_lora.engine.completion import RequestGroup
from ray_lora.engine.engine_core import EngineCore
from ray_lora.engine.grammar import Grammar
from ray_lora.errors import RayLoraError
from ray_lora.request import GenerateRequest, RequestOutput, SamplingParams
from ray_lora.step import ModelInfo

SMALL = {
    "model": "fake",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_loras": 2,
    "max_lora_rank": 32,
}


def make_config(**overrides: Any) -> EngineConfig:
    return EngineConfig.parse(SMALL | overrides)


def make_executor(
    config: EngineConfig, num_blocks: int = 16, max_model_len: int = 32, eos: tuple[int, ...] = ()
) -> FakeExecutor:
    return FakeExecutor(
        ModelInfo(VOCAB_SIZE, max_model_len, num_blocks, eos, lora_page_bytes=64),
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.num_lora_pages,
        config.max_loras,
    )


class CoreDriver:
    """Adds, steps and cancels; collects what every request got, and knows what it should have got."""

    def __init__(
        self, *, num_blocks: int = 16, max_model_len: int = 32, eos: tuple[int, ...] = (), **overrides: Any
    ) -> None:
        config = make_config(**overrides)
        self.executor = make_executor(config, num_blocks, max_model_len, eos)
        self.core = EngineCore(config, self.executor, FakeTokenizer())
        self.scheduler = self.core.scheduler
        self.outputs: dict[RequestGroup, RequestOutput] = {}
        self.errors: dict[RequestGroup, RayLoraError] = {}
        self._ended: set[RequestGroup] = set()

    def register(self, name: str, version: str | None = None, rank: int = 16, load_inplace: bool = False) -> bool:
        """Stage and commit, as a load does; false if the name has this content already."""
        manifest = make_manifest(version or name, rank)
        if not self.core.adapters.check_register(name, manifest, load_inplace):
            return False
        if not self.core.adapters.is_registered(manifest.version):
            self.executor.stage_adapter(manifest)
        self.core.adapters.register(name, manifest)
        self._settle()
        return True

    def unregister(self, name: str) -> None:
        self.core.adapters.unregister(name)
        self._settle()

    def add(
        self,
        prompt: str | Sequence[int],
        adapter: str | None = None,
        key_name: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        grammar: Grammar | None = None,
        **params: Any,
    ) -> RequestGroup:
        """Greedy, if not asked for otherwise."""
        params = SamplingParams(**({"temperature": 0} | params))
        request = GenerateRequest(
            prompt=prompt,
            adapter=adapter,
            sampling_params=params,
            key_name=key_name,
            cache_salt=cache_salt,
            priority=priority,
        )
        group = self.core.add(request, grammar=grammar)
        self.outputs[group] = RequestOutput(group.request.request_id, None)
        self._settle()
        return group

    def cancel(self, group: RequestGroup) -> None:
        self.core.cancel(group)
        self._settle()

    def step(self) -> list[RequestGroup]:
        """One step; returns the groups that it told something."""
        events = self.core.step()
        for group, item in events:
            assert group not in self._ended, "told something after its end"
            if group.finished:
                self._ended.add(group)
            if isinstance(item, RayLoraError):
                self.errors[group] = item
            else:
                self.outputs[group].append(item)
        self._settle()
        return [group for group, _ in events]

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def tokens(self, group: RequestGroup, index: int = 0) -> list[int]:
        return self.outputs[group].outputs[index].token_ids

    def check_output(self, group: RequestGroup) -> None:
        """Every completion got exactly the tokens, the text and the logprobs that it must, and the reason fits."""
        request, output = group.request, self.outputs[group]
        params = request.sampling_params
        prompt = output.prompt_token_ids
        version = output.adapter_version
        assert len(output.outputs) == params.n
        for completion in output.outputs:
            sequence = group.completions[completion.index].sequence
            stops = sequence.stop_token_ids
            expected = expected_tokens(version, prompt, params, self.core.info.max_model_len, sequence.seed, stops)
            assert completion.token_ids == expected
            stopped = expected[-1] in stops and len(expected) >= params.min_tokens
            assert completion.finish_reason == ("stop" if stopped else "length")
            shown = expected[:-1] if stopped and not params.include_stop_str_in_output else expected
            assert completion.text == text_of(shown)
        if params.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            made_up = [logprobs_of(kv, token, 0) for kv, token in zip(kv_of(version, prompt), prompt[1:], strict=False)]
            found = [
                entry[token].logprob
                for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
                if entry is not None
            ]
            assert found == [entry.logprob for entry in made_up]

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        stats = self.core.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0)
        assert all(info.num_running + info.num_waiting == 0 for info in self.core.adapters.list_adapters())
        assert set(self.executor.staged) == {info.version for info in self.core.adapters.list_adapters()}

    def _settle(self) -> None:
        """Free what has died, as the engine does between two steps, and look for what is lost."""
        for version in self.core.adapters.take_dead():
            if not self.core.adapters.is_registered(version):
                self.executor.drop_adapter(version)
        self.scheduler.check_integrity()
