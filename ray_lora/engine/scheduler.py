"""Continuous batching: which request computes which tokens in the next step, in which blocks and pages."""

from collections import deque
from dataclasses import dataclass
from itertools import islice

from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.block_manager import BlockManager, block_key
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.request import FinishReason
from ray_lora.step import AdapterPlan, SampledToken, SequencePlan, SequenceStart, StepPlan, StepResult

MAX_BYPASS = 64
"""Requests that may be admitted past one that waits for adapter pages, before admission waits with it."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """What a step did to one sequence that sampled."""

    sequence: SequenceState
    sampled: SampledToken


class Scheduler:
    """First come, first served, with chunked prefill, prefix caching and preemption.

    `schedule` and `update` alternate: a plan's result is applied before the next plan is made. A waiting request holds
    neither blocks nor pages; a running one holds blocks for every token scheduled so far and pins its adapter's pages.
    """

    def __init__(
        self,
        blocks: BlockManager,
        adapters: AdapterManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.blocks = blocks
        self.adapters = adapters
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._finished: list[int] = []
        self._page_ins: list[AdapterPlan] = []
        self._planned: dict[int, SequenceState] = {}
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        if sequence.adapter is not None:
            self.adapters.hold(sequence.adapter)
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can run, which only happens when nothing is waiting or running."""
        scheduled: list[tuple[SequenceState, int]] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled, self.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:
            self._schedule_waiting(scheduled, budget)
        if not scheduled:
            return None
        self._step_id += 1
        self._planned = {sequence.request_id: sequence for sequence, _ in scheduled}
        return self._plan(scheduled)

    def update(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Apply a step's result; returns what it sampled. Sequences that ended are no longer running."""
        for planned in plan.sequences:
            sequence = self._planned.get(planned.request_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens += len(planned.token_ids)
            self._seal(sequence)
            if planned.request_id in result.prompt_logprobs:
                del sequence.prompt_logprobs[planned.start :]
                sequence.prompt_logprobs.extend(result.prompt_logprobs[planned.request_id])
        news = []
        for sampled in result.sampled:
            sequence = self._planned.get(sampled.request_id)
            if sequence is None:
                continue
            if sampled.error is not None:
                self.finish(sequence, "abort", keep_cached=False)
            else:
                sequence.token_ids.append(sampled.token_id)
                self._check_stop(sequence, sampled.token_id)
            news.append(NewToken(sequence, sampled))
        self._planned = {}
        return news

    def finish(self, sequence: SequenceState, reason: FinishReason, keep_cached: bool = True) -> None:
        """End a sequence wherever it is and give back all that it holds; one that has ended stays as it is."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence, keep_cached)
        else:
            self.waiting.remove(sequence)
        self._planned.pop(sequence.request_id, None)
        if sequence.started:
            self._finished.append(sequence.request_id)
        if sequence.adapter is not None:
            self.adapters.let_go(sequence.adapter)

    def check_integrity(self) -> None:
        """Assert that no block or page is lost or wrongly shared."""
        self.blocks.check_integrity(sequence.block_ids for sequence in self.running)
        self.adapters.check_integrity()
        for sequence in self.waiting:
            assert not sequence.block_ids, "a waiting request holds blocks"
            assert sequence.num_computed_tokens == 0
        for sequence in self.running:
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self.blocks.block_size
            assert sequence.adapter is None or sequence.adapter.pages is not None
        assert len(self.running) <= self.max_num_seqs

    def _schedule_running(self, scheduled: list[tuple[SequenceState, int]], budget: int) -> int:
        """Schedule who is already running, the youngest giving way when blocks run out; returns the tokens left."""
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_tokens = min(sequence.num_remaining_tokens, budget)
            needed = self.blocks.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
            while needed > 0 and not self.blocks.can_allocate(needed):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return budget
            if needed > 0:
                sequence.block_ids += self.blocks.allocate(needed)
            scheduled.append((sequence, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _schedule_waiting(self, scheduled: list[tuple[SequenceState, int]], budget: int) -> None:
        """Admit who waits, in order; one that lacks adapter pages is passed by, but not for ever."""
        blocked: list[SequenceState] = []
        patience = MAX_BYPASS
        while self.waiting and budget > 0 and patience > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.adapter is not None and not self.adapters.can_activate(sequence.adapter):
                blocked.append(self.waiting.popleft())
                patience = min(patience, MAX_BYPASS - sequence.num_bypassed)
                continue
            cached, keys = self._find_cached(sequence)
            num_cached = len(cached) * self.blocks.block_size
            num_tokens = min(sequence.num_tokens - num_cached, budget)
            num_new = self.blocks.num_blocks_for(num_cached + num_tokens) - len(cached)
            if not self.blocks.can_allocate(num_new, cached):
                break
            self.waiting.popleft()
            self._admit(sequence, self.blocks.allocate(num_new, cached), keys, num_cached)
            if blocked:
                patience -= 1
            for passed in blocked:
                passed.num_bypassed += 1
            scheduled.append((sequence, num_tokens))
            budget -= num_tokens
        self.waiting.extendleft(reversed(blocked))

    def _find_cached(self, sequence: SequenceState) -> tuple[list[int], list[bytes]]:
        if sequence.sampling_params.prompt_logprobs is not None:
            return [], []
        return self.blocks.find_cached(sequence.root_key, sequence.token_ids)

    def _admit(self, sequence: SequenceState, block_ids: list[int], keys: list[bytes], num_cached: int) -> None:
        sequence.block_ids, sequence.block_keys, sequence.num_computed_tokens = block_ids, keys, num_cached
        if not sequence.started:
            sequence.num_cached_tokens = num_cached
            self.prefix_cache_queries += sequence.num_prompt_tokens
            self.prefix_cache_hits += num_cached
        if sequence.adapter is not None:
            page_in = self.adapters.activate(sequence.adapter)
            if page_in is not None:
                self._page_ins.append(page_in)
        self.running.append(sequence)

    def _plan(self, scheduled: list[tuple[SequenceState, int]]) -> StepPlan:
        starts = []
        for sequence, _ in scheduled:
            if not sequence.started:
                sequence.started = True
                prompt = tuple(islice(sequence.token_ids, sequence.num_prompt_tokens))
                starts.append(
                    SequenceStart(
                        sequence.request_id, prompt, sequence.sampling_params, sequence.seed, sequence.stop_token_ids
                    )
                )
        scheduled.sort(key=lambda item: item[0].adapter_version or "")
        indices: dict[str, int] = {}
        adapters: list[AdapterPlan] = []
        for sequence, _ in scheduled:
            if sequence.adapter is not None and sequence.adapter.manifest.version not in indices:
                indices[sequence.adapter.manifest.version] = len(adapters)
                adapters.append(sequence.adapter.plan)
        plan = StepPlan(
            step_id=self._step_id,
            sequences=tuple(
                _plan_sequence(sequence, num_tokens, indices.get(sequence.adapter_version or "", -1))
                for sequence, num_tokens in scheduled
            ),
            adapters=tuple(adapters),
            page_ins=tuple(self._page_ins),
            starts=tuple(starts),
            finished=tuple(self._finished),
        )
        self._page_ins, self._finished = [], []
        return plan

    def _seal(self, sequence: SequenceState) -> None:
        """Let others find the blocks that are now full."""
        size = self.blocks.block_size
        for index in range(len(sequence.block_keys), sequence.num_computed_tokens // size):
            parent = sequence.block_keys[-1] if sequence.block_keys else sequence.root_key
            key = block_key(parent, sequence.token_ids[index * size : (index + 1) * size])
            sequence.block_keys.append(key)
            self.blocks.seal(sequence.block_ids[index], key)

    def _check_stop(self, sequence: SequenceState, token_id: int) -> None:
        params = sequence.sampling_params
        if token_id in sequence.stop_token_ids and sequence.num_output_tokens >= params.min_tokens:
            sequence.stop_reason = token_id if token_id in (params.stop_token_ids or ()) else None
            self.finish(sequence, "stop")
        elif sequence.num_output_tokens == params.max_tokens or sequence.num_tokens >= self.max_model_len:
            self.finish(sequence, "length")

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a running sequence's blocks; it waits in front and computes again what the prefix cache has lost."""
        self.running.remove(sequence)
        self._give_back(sequence, keep_cached=True)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _give_back(self, sequence: SequenceState, keep_cached: bool) -> None:
        self.blocks.release(sequence.block_ids, keep_cached)
        sequence.block_ids, sequence.block_keys, sequence.num_computed_tokens = [], [], 0
        if sequence.adapter is not None:
            self.adapters.deactivate(sequence.adapter)


def _plan_sequence(sequence: SequenceState, num_tokens: int, adapter: int) -> SequencePlan:
    start = sequence.num_computed_tokens
    stop = start + num_tokens
    return SequencePlan(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.token_ids[start:stop]),
        start=start,
        block_ids=tuple(sequence.block_ids),
        adapter=adapter,
        sample=stop == sequence.num_tokens,
        num_output_tokens=sequence.num_output_tokens,
        prompt_logprobs=sequence.sampling_params.prompt_logprobs is not None and start < sequence.num_prompt_tokens,
    )
