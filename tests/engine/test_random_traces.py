"""Any order of requests, cancellations, steps and adapter changes on pools that are too small for them."""

from typing import Any
from unittest.mock import patch

from driver import CoreDriver
from fake_executor import POISON
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ray_lora.engine import scheduler as scheduler_module
from ray_lora.engine.completion import RequestGroup
from ray_lora.errors import AdapterExistsError, NumericsError

NAMES = ("a", "b", "c")
VERSIONS = {"v0": 1, "v1": 16, "v2": 17, "v3": 32, "v4": 16}
"""Ranks, by version."""
MAX_BYPASS = 2

PROMPTS = st.builds(
    lambda common, num_common, rest: common[:num_common] + rest,
    st.sampled_from([[1] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]]),
    st.integers(0, 8),
    st.lists(st.sampled_from([1, 2, 3, POISON - 1]), min_size=1, max_size=3),
)


class EngineTrace(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        max_loras=st.integers(1, 3),
        spare_pages=st.integers(0, 2),
        caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, max_num_seqs: int, budget: int, max_loras: int, spare_pages: int, caching: bool
    ) -> None:
        self.patch = patch.object(scheduler_module, "MAX_BYPASS", MAX_BYPASS)
        self.patch.start()
        self.driver = CoreDriver(
            num_blocks=num_blocks,
            max_model_len=16,
            block_size=2,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_loras=max_loras,
            max_lora_rank=32,
            max_lora_pages=2 + spare_pages,
            max_cpu_loras=4,
            enable_prefix_caching=caching,
        )
        self.open: list[RequestGroup] = []

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.driver.core.adapters.list_adapters()]

    @rule(name=st.sampled_from(NAMES), version=st.sampled_from(list(VERSIONS)), load_inplace=st.booleans())
    def register(self, name: str, version: str, load_inplace: bool) -> None:
        before = {info.name: info.version for info in self.driver.core.adapters.list_adapters()}
        try:
            changed = self.driver.register(name, version, VERSIONS[version], load_inplace)
        except AdapterExistsError:
            assert before[name] != version
            assert not load_inplace
        else:
            assert changed == (before.get(name) != version)
            before[name] = version
        assert {info.name: info.version for info in self.driver.core.adapters.list_adapters()} == before

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        self.driver.unregister(data.draw(st.sampled_from(self.names)))

    @rule(
        data=st.data(),
        prompt=PROMPTS,
        poisoned=st.integers(0, 9).map(lambda value: value == 0),
        priority=st.sampled_from([0, 0, -1, 1]),
        params=st.fixed_dictionaries(
            {"max_tokens": st.integers(1, 9), "n": st.sampled_from([1, 1, 2, 3])},
            optional={
                "seed": st.integers(0, 3),
                "prompt_logprobs": st.integers(0, 1),
                "stop_token_ids": st.just(list(range(0, 40, 2))),
                "min_tokens": st.integers(0, 1),
            },
        ),
    )
    def add(
        self, data: st.DataObject, prompt: list[int], poisoned: bool, priority: int, params: dict[str, Any]
    ) -> None:
        adapter = data.draw(st.sampled_from([None, *self.names]))
        prompt = [*prompt, POISON] if poisoned else prompt
        group = self.driver.add(prompt, adapter, priority=priority, temperature=1, **params)
        self.open.append(group)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), weight=st.sampled_from([0.001, 0.5, 3.0, 1000.0]))
    def set_weight(self, data: st.DataObject, weight: float) -> None:
        self.driver.core.adapters.set_weight(data.draw(st.sampled_from(self.names)), weight)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.open))
        self.driver.cancel(group)
        self.open.remove(group)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once()

    def step_once(self) -> None:
        driver = self.driver
        resident = {info.version for info in driver.core.adapters.list_adapters() if info.tier == "device"}
        num_plans = len(driver.executor.plans)
        for group in driver.step():
            assert group in self.open, "a request that has ended is told something"
            if group.finished:
                self.check_ended(group)
                self.open.remove(group)
        assert driver.errors == {}, "a good request ended with an error"
        assert driver.core.has_work or not self.open
        for plan in driver.executor.plans[num_plans:]:
            assert not plan.page_ins or plan.page_ins[0].version not in resident, "pages in what is there"

    def check_ended(self, group: RequestGroup) -> None:
        if POISON in group.completions[0].sequence.token_ids:
            assert isinstance(self.driver.errors.pop(group), NumericsError)
            assert self.driver.outputs[group].outputs == []
        else:
            self.driver.check_output(group)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.driver.scheduler.check_integrity()
        waiting = self.driver.scheduler.waiting
        assert all(waiting.queue_of(sequence).num_bypassed <= MAX_BYPASS for sequence in waiting)
        stats = self.driver.core.stats()
        assert stats.num_requests_running + stats.num_requests_waiting == sum(
            completion.sequence.finish_reason is None for group in self.open for completion in group.completions
        )

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            for _ in range(1000):
                if not self.open:
                    break
                self.step_once()
            assert not self.open, "requests starve"
            self.driver.check_idle()
        finally:
            self.patch.stop()


TestEngineTrace = EngineTrace.TestCase
TestEngineTrace.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
