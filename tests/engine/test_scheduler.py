from typing import Any

import pytest
from fake_executor import POISON, VOCAB_SIZE, FakeExecutor, expected_tokens, make_manifest

from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.block_manager import BlockManager
from ray_lora.engine.scheduler import MAX_BYPASS, Scheduler
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.request import SamplingParams
from ray_lora.step import AdapterPlan, ModelInfo, StepPlan, StepResult


class Harness:
    """A scheduler with fake ranks that check every plan."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        num_pages: int = 2,
        max_loras: int = 2,
        enable_prefix_caching: bool = True,
    ) -> None:
        info = ModelInfo(VOCAB_SIZE, max_model_len, num_blocks, (), lora_page_bytes=64)
        self.executor = FakeExecutor(info, 4, max_num_seqs, max_num_batched_tokens, num_pages, max_loras)
        self.adapters = AdapterManager(num_pages, max_loras, max_rank=64)
        blocks = BlockManager(num_blocks, 4, enable_prefix_caching)
        self.scheduler = Scheduler(blocks, self.adapters, max_num_seqs, max_num_batched_tokens, max_model_len)
        self._next_id = 0

    def register(self, name: str, version: str | None = None, rank: int = 16) -> None:
        manifest = make_manifest(version or name, rank)
        if not self.adapters.is_registered(manifest.version):
            self.executor.stage_adapter(manifest)
        self.adapters.register(name, manifest)

    def add(
        self,
        prompt: int | list[int],
        adapter: str | None = None,
        stop_token_ids: tuple[int, ...] = (),
        max_tokens: int = 2,
        priority: int = 0,
        **params: Any,
    ) -> SequenceState:
        """A prompt of given tokens, or of that many which no other prompt shares."""
        self._next_id += 1
        if isinstance(prompt, int):
            prompt = [self._next_id % POISON] * prompt
        sampling_params = SamplingParams(max_tokens=max_tokens, **params)
        version = self.adapters.get(adapter) if adapter else None
        sequence = SequenceState(
            self._next_id,
            prompt,
            sampling_params,
            0,
            stop_token_ids,
            version,
            adapter_name=adapter,
            priority=priority,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.check_integrity()
        self.scheduler.update(plan, self.executor.execute(plan))
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 1000) -> None:
        while self.scheduler.has_work:
            self.step()
            max_steps -= 1
            assert max_steps, "still at work"
        assert self.scheduler.schedule() is None
        assert self.scheduler.blocks.num_free_blocks == self.scheduler.blocks.num_blocks

    def expected(self, sequence: SequenceState) -> list[int]:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        return expected_tokens(
            sequence.adapter_version,
            prompt,
            sequence.sampling_params,
            self.scheduler.max_model_len,
            sequence.seed,
            sequence.stop_token_ids,
        )


def output(sequence: SequenceState) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def spans(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """First position and number of tokens, by request."""
    return {planned.request_id: (planned.start, len(planned.token_ids)) for planned in plan.sequences}


# Chunks, budget, number of sequences


@pytest.mark.parametrize(
    ("prompt_len", "budget", "steps"),
    [
        (1, 16, [(0, 1), (1, 1)]),
        (16, 16, [(0, 16), (16, 1)]),
        (17, 16, [(0, 16), (16, 1), (17, 1)]),
        (40, 16, [(0, 16), (16, 16), (32, 8), (40, 1)]),
        (5, 3, [(0, 3), (3, 2), (5, 1)]),
        (3, 1, [(0, 1), (1, 1), (2, 1), (3, 1)]),
    ],
)
def test_a_long_prompt_is_computed_in_chunks(prompt_len: int, budget: int, steps: list[tuple[int, int]]) -> None:
    harness = Harness(max_num_batched_tokens=budget)
    sequence = harness.add(prompt_len)
    plans = [harness.step() for _ in steps]
    assert [spans(plan)[sequence.request_id] for plan in plans] == steps
    assert [plan.sequences[0].sample for plan in plans] == [False] * (len(steps) - 2) + [True, True]
    assert sequence.finish_reason == "length"
    assert output(sequence) == harness.expected(sequence)


def test_running_requests_come_before_new_ones_and_share_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=8)
    first = harness.add(6, max_tokens=5)
    assert spans(harness.step()) == {first.request_id: (0, 6)}
    second, third = harness.add(9), harness.add(4)
    assert spans(harness.step()) == {first.request_id: (6, 1), second.request_id: (0, 7)}
    assert spans(harness.step()) == {first.request_id: (7, 1), second.request_id: (7, 2), third.request_id: (0, 4)}


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_in_order() -> None:
    harness = Harness(max_num_seqs=2)
    sequences = [harness.add(2, max_tokens=n) for n in (3, 1, 1, 1)]
    admitted = [sorted(spans(harness.step())) for _ in range(3)]
    ids = [sequence.request_id for sequence in sequences]
    assert admitted == [[ids[0], ids[1]], [ids[0], ids[2]], [ids[0], ids[3]]]


@pytest.mark.parametrize("other", ["a", None])
def test_a_request_that_lacks_blocks_is_overtaken_by_nobody(other: str | None) -> None:
    harness = Harness(num_blocks=4, max_num_batched_tokens=32)
    harness.register("a")
    first, large, small = harness.add(8, max_tokens=4), harness.add(12), harness.add(1, other)
    harness.scheduler.waiting.queue_of(small).counter += 100 * (other is not None)
    assert list(spans(harness.step())) == [first.request_id]
    assert list(spans(harness.step())) == [first.request_id]
    harness.run()
    assert [output(sequence) for sequence in (first, large, small)] == [
        harness.expected(sequence) for sequence in (first, large, small)
    ]


def test_an_idle_scheduler_plans_nothing() -> None:
    harness = Harness()
    assert not harness.scheduler.has_work
    assert harness.scheduler.schedule() is None


def test_the_ranks_are_told_of_each_start_and_each_end_once() -> None:
    harness = Harness(max_num_seqs=1)
    first, second = harness.add(20, max_tokens=2), harness.add(4, max_tokens=1)
    plans = [harness.step() for _ in range(4)]
    assert [[start.request_id for start in plan.starts] for plan in plans] == [[1], [], [], [2]]
    assert [plan.finished for plan in plans] == [(), (), (), (1,)]
    assert plans[0].starts[0].prompt_token_ids == tuple(first.token_ids[:20])
    harness.add(1)
    assert harness.step().finished == (second.request_id,)


# Prefix cache


def test_a_prefix_is_computed_once() -> None:
    harness = Harness()
    prompt = list(range(10))
    first = harness.add(prompt)
    harness.run()
    second = harness.add([*prompt[:9], 40])
    plan = harness.step()
    assert spans(plan)[second.request_id] == (8, 2)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (harness.scheduler.prefix_cache_queries, harness.scheduler.prefix_cache_hits) == (20, 8)
    harness.run()
    assert output(second) == harness.expected(second)


def test_an_answer_is_part_of_the_prefix_of_the_next_turn() -> None:
    harness = Harness()
    first = harness.add(6, max_tokens=8)
    harness.run()
    second = harness.add([*first.token_ids, 5, 6])
    harness.run()
    assert second.num_cached_tokens == 12
    assert output(second) == harness.expected(second)


def test_a_running_request_shares_what_it_has_computed() -> None:
    harness = Harness()
    first = harness.add(9, max_tokens=20)
    plan = harness.step()
    second = harness.add(first.token_ids[:9])
    shared = harness.step()
    assert spans(shared)[second.request_id] == (8, 1)
    blocks = {planned.request_id: planned.block_ids for planned in shared.sequences}
    assert blocks[second.request_id][:2] == plan.sequences[0].block_ids[:2]
    assert blocks[second.request_id][2] != blocks[first.request_id][2]
    harness.run()
    assert [output(first), output(second)] == [harness.expected(first), harness.expected(second)]


def test_two_equal_prompts_in_one_step_get_the_same_answer_from_blocks_of_their_own() -> None:
    harness = Harness()
    prompt = list(range(8))
    first, second = harness.add(prompt, max_tokens=8), harness.add(prompt, max_tokens=8)
    plan = harness.step()
    assert spans(plan) == {first.request_id: (0, 8), second.request_id: (0, 8)}
    harness.run()
    assert output(first) == output(second) == harness.expected(first)
    third = harness.add([*first.token_ids, 1])
    harness.run()
    assert third.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("earlier", "later", "num_cached"),
    [
        (None, None, 8),
        ("one", "one", 8),
        ("one", "alias of one", 8),
        ("one", "two", 0),
        ("one", None, 0),
        (None, "one", 0),
    ],
)
def test_a_prefix_is_shared_exactly_by_requests_of_one_version(
    earlier: str | None, later: str | None, num_cached: int
) -> None:
    harness = Harness()
    for name, version in (("one", "v1"), ("alias of one", "v1"), ("two", "v2")):
        harness.register(name, version)
    harness.add(list(range(9)), earlier)
    harness.run()
    sequence = harness.add(list(range(9)), later)
    harness.run()
    assert sequence.num_cached_tokens == num_cached
    assert output(sequence) == harness.expected(sequence)


def test_a_name_with_new_content_finds_no_prefix_of_the_old_and_the_old_content_finds_its_own() -> None:
    harness = Harness()
    harness.register("a", "v1")
    harness.add(list(range(9)), "a")
    harness.run()
    harness.register("a", "v2")
    reloaded = harness.add(list(range(9)), "a")
    harness.run()
    harness.register("a", "v1")
    back = harness.add(list(range(9)), "a")
    harness.run()
    assert (reloaded.num_cached_tokens, back.num_cached_tokens) == (0, 8)
    assert output(reloaded) != output(back) == harness.expected(back)


def test_prompt_logprobs_are_computed_anew() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add(list(range(9)))
    harness.run()
    sequence = harness.add(list(range(9)), prompt_logprobs=0)
    harness.run()
    assert sequence.num_cached_tokens == 0
    assert [entry.token_id for entry in sequence.prompt_logprobs] == list(range(1, 9))


# Preemption


def test_the_youngest_gives_way_and_continues_where_it_was() -> None:
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    old, middle, young = (harness.add(7, max_tokens=8) for _ in range(3))
    plan = harness.step()
    while list(spans(plan)) != [old.request_id, middle.request_id]:
        plan = harness.step()
    assert list(harness.scheduler.waiting) == [young]
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for sequence in (old, middle, young):
        assert output(sequence) == harness.expected(sequence)
    started = [start.request_id for plan in harness.executor.plans for start in plan.starts]
    assert started == [old.request_id, middle.request_id, young.request_id]


def test_a_preempted_request_is_not_admitted_again_in_the_same_step() -> None:
    harness = Harness(num_blocks=4, max_num_batched_tokens=9, enable_prefix_caching=False)
    old, young = harness.add(4, max_tokens=8), harness.add(8, max_tokens=8)
    assert spans(harness.step()) == {old.request_id: (0, 4), young.request_id: (0, 5)}
    assert spans(harness.step()) == {old.request_id: (4, 1), young.request_id: (5, 3)}
    assert spans(harness.step()) == {old.request_id: (5, 1)}
    assert list(harness.scheduler.waiting) == [young]
    harness.run()
    assert [output(old), output(young)] == [harness.expected(old), harness.expected(young)]


def test_a_preempted_request_waits_in_front() -> None:
    harness = Harness(num_blocks=4)
    old, young = harness.add(7, max_tokens=9), harness.add(8, max_tokens=9)
    harness.step()
    waiting = harness.add(1)
    harness.step()
    plan = harness.step()
    assert list(spans(plan)) == [old.request_id]
    assert list(harness.scheduler.waiting) == [young, waiting]
    assert young.block_ids == []
    assert young.num_output_tokens == 1
    assert plan.finished == ()


def test_a_resumed_request_reads_from_the_cache_what_is_left_there() -> None:
    harness = Harness(num_blocks=6)
    old, young = harness.add(4, max_tokens=1), harness.add(17, max_tokens=6)
    harness.step()
    harness.step()
    harness.scheduler._preempt(young)
    harness.scheduler.check_integrity()
    start, num_tokens = spans(harness.step())[young.request_id]
    assert start == 16
    assert num_tokens == young.num_tokens - 1 - 16
    assert (old.num_cached_tokens, young.num_cached_tokens) == (0, 0)
    harness.run()
    assert output(young) == harness.expected(young)


def test_preemption_ends_for_sequences_that_just_fit() -> None:
    harness = Harness(num_blocks=16, max_model_len=64, max_num_seqs=4, enable_prefix_caching=False)
    sequences = [harness.add(30, max_tokens=34) for _ in range(4)]
    harness.run()
    for sequence in sequences:
        assert output(sequence) == harness.expected(sequence)
    assert harness.scheduler.num_preemptions > 0


def test_a_preempted_request_lets_go_of_its_pages_but_not_of_its_version() -> None:
    harness = Harness(num_blocks=4, num_pages=1, max_loras=1)
    harness.register("a")
    old, young = harness.add(7, max_tokens=9), harness.add(8, "a", max_tokens=9)
    harness.step()
    harness.step()
    harness.step()
    assert young in harness.scheduler.waiting
    assert harness.adapters.get("a").num_running == 0
    harness.adapters.unregister("a")
    assert harness.adapters.take_dead() == []
    harness.run()
    assert harness.adapters.take_dead() == ["a"]
    assert [output(old), output(young)] == [harness.expected(old), harness.expected(young)]


# Adapter pages


def test_base_rows_take_no_page() -> None:
    harness = Harness(num_pages=1, max_loras=1)
    harness.register("a")
    base, adapted, another = harness.add(3), harness.add(3, "a"), harness.add(3)
    plan = harness.step()
    assert {planned.request_id: planned.adapter for planned in plan.sequences} == {
        base.request_id: -1,
        adapted.request_id: 0,
        another.request_id: -1,
    }
    assert plan.adapters == (AdapterPlan("a", (0,), 0),)


def test_a_step_of_base_rows_alone_names_no_adapter() -> None:
    harness = Harness(num_pages=0, max_loras=0)
    harness.add(3)
    plan = harness.step()
    assert (plan.adapters, plan.page_ins) == ((), ())


def test_an_adapter_is_paged_in_exactly_when_it_is_not_there() -> None:
    harness = Harness(num_pages=2, max_loras=2)
    for name in "abc":
        harness.register(name)
    paged_in = []
    for name in ["a", "a", None, "b", "a", "c", "a", "b"]:
        harness.add(3, name, max_tokens=1)
        paged_in.append([adapter.version for adapter in harness.step().page_ins])
    assert paged_in == [["a"], [], [], ["b"], [], ["c"], [], ["b"]]


def test_sequences_of_one_adapter_are_adjacent_whatever_the_order_they_came_in() -> None:
    harness = Harness(max_num_seqs=8, num_pages=3, max_loras=3)
    for name in "abc":
        harness.register(name)
    sequences = [harness.add(2, name) for name in ["b", None, "a", "b", "c", None, "a", "b"]]
    plan = harness.step()
    assert len(plan.sequences) == 8
    versions = [plan.adapters[planned.adapter].version if planned.adapter >= 0 else None for planned in plan.sequences]
    assert versions == [None, None, "a", "a", "b", "b", "b", "c"]
    harness.run()
    for sequence in sequences:
        assert output(sequence) == harness.expected(sequence)


def test_a_request_that_lacks_pages_is_passed_by_requests_that_need_none() -> None:
    harness = Harness(num_pages=1, max_loras=1)
    harness.register("a")
    harness.register("b")
    first, blocked, same, base = harness.add(2, "a"), harness.add(2, "b"), harness.add(2, "a"), harness.add(2)
    assert set(spans(harness.step())) == {first.request_id, same.request_id, base.request_id}
    assert harness.scheduler.waiting.queue_of(blocked).num_bypassed == 1, "the base model's take no pages from it"
    harness.run()
    assert output(blocked) == harness.expected(blocked)


def test_requests_passed_by_keep_their_order() -> None:
    harness = Harness(num_pages=1, max_loras=1)
    for name in "abc":
        harness.register(name)
    harness.add(2, "a")
    b, c, another_b, another_c = (harness.add(2, name) for name in "bcbc")
    harness.step()
    assert list(harness.scheduler.waiting) == [b, another_b, c, another_c]


def test_nobody_starves_however_many_others_come() -> None:
    harness = Harness(num_pages=1, max_loras=1)
    harness.register("a")
    harness.register("b")
    harness.add(2, "a", max_tokens=60)
    blocked = harness.add(2, "b")
    queue = harness.scheduler.waiting.queue_of(blocked)
    others = [harness.add(2, "a") for _ in range(3)]
    num_admitted = 0
    while blocked in harness.scheduler.waiting:
        num_admitted = sum(sequence.started for sequence in others)
        assert queue.num_bypassed <= num_admitted
        harness.step()
        others += [harness.add(2, "a") for _ in range(4 - len(harness.scheduler.waiting))]
        assert len(others) < 200
    assert num_admitted == MAX_BYPASS


def test_with_one_page_a_b_a_a_all_are_served() -> None:
    harness = Harness(num_pages=1, max_loras=1, max_num_seqs=2)
    harness.register("a")
    harness.register("b")
    sequences = [harness.add(2, name, max_tokens=3) for name in ["a", "b", *"a" * (2 * MAX_BYPASS)]]
    while sequences[1] in harness.scheduler.waiting:
        assert harness.scheduler.waiting.queue_of(sequences[1]).num_bypassed <= MAX_BYPASS
        harness.step()
    harness.run()
    for sequence in sequences:
        assert output(sequence) == harness.expected(sequence)


def test_after_max_bypass_admissions_all_that_need_pages_wait_too() -> None:
    harness = Harness(num_pages=1, max_loras=1)
    harness.register("a")
    harness.register("b")
    running = harness.add(2, "a", max_tokens=30)
    harness.step()
    blocked = harness.add(2, "b")
    harness.scheduler.waiting.queue_of(blocked).num_bypassed = MAX_BYPASS - 1
    last, late, base = harness.add(2, "a"), harness.add(2, "a"), harness.add(2)
    assert set(spans(harness.step())) == {running.request_id, last.request_id, base.request_id}
    assert list(harness.scheduler.waiting) == [late, blocked]


def test_an_adapter_of_many_pages_waits_for_them_and_gets_them() -> None:
    harness = Harness(num_pages=4, max_loras=4)
    harness.register("small")
    harness.register("large", rank=64)
    small, large = harness.add(2, "small", max_tokens=4), harness.add(2, "large")
    assert list(spans(harness.step())) == [small.request_id]
    harness.run()
    assert output(large) == harness.expected(large)


# Ends


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_stop_token_ends_a_request(index: int) -> None:
    harness = Harness()
    free = harness.add([1, 2, 3], max_tokens=8)
    harness.run()
    stop = output(free)[index]
    assert stop not in output(free)[:index]
    by_parameter = harness.add([1, 2, 3], stop_token_ids=(stop,), max_tokens=8)
    by_parameter.sampling_params = SamplingParams(max_tokens=8, stop_token_ids=[stop])
    by_eos = harness.add([1, 2, 3], stop_token_ids=(stop,), max_tokens=8)
    harness.run()
    for sequence in (by_parameter, by_eos):
        assert output(sequence) == output(free)[: index + 1]
        assert sequence.finish_reason == "stop"
    assert (by_parameter.stop_reason, by_eos.stop_reason) == (stop, None)


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    harness = Harness()
    free = harness.add([1, 2, 3], max_tokens=4)
    harness.run()
    sequence = harness.add([1, 2, 3], stop_token_ids=(output(free)[3],), max_tokens=4)
    harness.run()
    assert sequence.finish_reason == "stop"


def test_before_min_tokens_a_stop_token_ends_nothing() -> None:
    harness = Harness()
    sequence = harness.add([1, 2, 3], stop_token_ids=(7,), max_tokens=6, min_tokens=3)
    plan = harness.scheduler.schedule()
    assert plan is not None
    result = harness.executor.execute(plan)
    told = StepResult(result.step_id, (type(result.sampled[0])(sequence.request_id, 7),))
    harness.scheduler.update(plan, told)
    assert sequence.finish_reason is None


@pytest.mark.parametrize(("prompt_len", "max_tokens", "num_output"), [(60, 10, 4), (63, 10, 1), (10, 5, 5)])
def test_a_request_ends_at_max_tokens_or_at_the_context(prompt_len: int, max_tokens: int, num_output: int) -> None:
    harness = Harness()
    sequence = harness.add(prompt_len, max_tokens=max_tokens)
    harness.run()
    assert len(output(sequence)) == num_output
    assert sequence.finish_reason == "length"


def test_a_row_that_is_not_finite_ends_only_itself() -> None:
    harness = Harness(max_num_batched_tokens=20)
    harness.register("a")
    before, broken, after = harness.add(5, "a"), harness.add([1] * 9 + [POISON], "a"), harness.add(5)
    plan = harness.scheduler.schedule()
    assert plan is not None
    news = harness.scheduler.update(plan, harness.executor.execute(plan))
    assert [entry.sequence.request_id for entry in news if entry.sampled.error] == [broken.request_id]
    assert broken.finish_reason == "abort"
    assert broken.num_output_tokens == 0
    harness.run()
    for sequence in (before, after):
        assert output(sequence) == harness.expected(sequence)


def test_the_blocks_of_a_row_that_is_not_finite_are_forgotten() -> None:
    harness = Harness()
    harness.add([1] * 9 + [POISON])
    harness.run()
    again = harness.add([1] * 9)
    harness.run()
    assert again.num_cached_tokens == 0
    assert output(again) == harness.expected(again)


# Cancelling


def test_a_waiting_request_can_be_cancelled_and_the_ranks_never_hear_of_it() -> None:
    harness = Harness(max_num_seqs=1)
    harness.register("a")
    harness.add(2)
    waiting = harness.add(2, "a")
    harness.scheduler.finish(waiting, "abort")
    harness.adapters.unregister("a")
    assert harness.adapters.take_dead() == ["a"]
    harness.run()
    assert all(plan.finished == () for plan in harness.executor.plans)
    assert {start.request_id for plan in harness.executor.plans for start in plan.starts} == {1}


def test_a_running_request_gives_back_its_blocks_and_pages() -> None:
    harness = Harness()
    harness.register("a")
    sequence = harness.add(20, "a")
    harness.step()
    harness.scheduler.finish(sequence, "abort")
    harness.scheduler.check_integrity()
    assert harness.scheduler.blocks.num_free_blocks == 16
    assert harness.adapters.get("a").num_running == 0
    assert harness.add(1) is not None
    assert harness.step().finished == (sequence.request_id,)


def test_a_preempted_request_can_be_cancelled() -> None:
    harness = Harness()
    sequence = harness.add(5, max_tokens=9)
    harness.step()
    harness.scheduler._preempt(sequence)
    harness.scheduler.finish(sequence, "abort")
    harness.scheduler.check_integrity()
    harness.add(1)
    assert harness.step().finished == (sequence.request_id,)


def test_a_request_cancelled_during_a_step_takes_no_token_from_it() -> None:
    harness = Harness()
    sequence, other = harness.add(5), harness.add(5)
    plan = harness.scheduler.schedule()
    assert plan is not None
    harness.scheduler.finish(sequence, "abort")
    news = harness.scheduler.update(plan, harness.executor.execute(plan))
    assert [entry.sequence for entry in news] == [other]
    assert sequence.num_output_tokens == 0
    harness.scheduler.check_integrity()


def test_ending_twice_changes_nothing() -> None:
    harness = Harness()
    sequence = harness.add(5)
    harness.step()
    harness.scheduler.finish(sequence, "abort")
    harness.scheduler.finish(sequence, "stop")
    assert sequence.finish_reason == "abort"
    harness.add(1)
    assert harness.step().finished == (sequence.request_id,)
