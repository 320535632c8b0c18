"""Continuous batching: which request computes which tokens in the next step, in which blocks and pages."""

from dataclasses import dataclass

from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.block_manager import BlockManager, block_key
from ray_lora.engine.fair_queue import AdapterQueue, FairQueue
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.engine.step_planner import plan_step
from ray_lora.request import FinishReason
from ray_lora.step import AdapterPlan, SampledToken, StepPlan, StepResult

MAX_BYPASS = 64
"""Requests for other adapters that may be admitted past a queue that waits for pages; then they wait with it."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """What a step did to one sequence that sampled."""

    sequence: SequenceState
    sampled: SampledToken


class Scheduler:
    """Fair between adapters, with chunked prefill, prefix caching and preemption.

    In every step, those that decode come first, one token each. What is left of the step goes to prompts in the order
    of their queues, whether they are begun or wait, so that nobody's long prompt holds up the others' first tokens.

    Where there is no room, the one that gives way is the least urgent and youngest of the queue that was served most,
    of those that run several; and so a queue that runs nothing, when it is first in order, need not wait for another
    adapter's requests to end.

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
        self.waiting = FairQueue(adapters.weight)
        self.running: list[SequenceState] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._finished: list[int] = []
        self._page_ins: list[AdapterPlan] = []
        self._step_id = 0
        self._scheduled: dict[SequenceState, int] = {}
        """How many tokens each computes in this step."""
        self._budget = 0
        """Tokens that this step has room for beside those."""
        self._preempted: set[SequenceState] = set()
        """In this step."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        if sequence.adapter is not None:
            self.adapters.hold(sequence.adapter)
        self.waiting.push(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if nothing can run, which only happens when nothing is waiting or running."""
        self._scheduled, self._preempted = {}, set()
        self._budget = self.max_num_batched_tokens
        self._schedule_decodes()
        self._schedule_prompts()
        if not self._scheduled:
            return None
        self._step_id += 1
        plan = plan_step(self._step_id, self._scheduled, self._page_ins, self._finished)
        self._page_ins, self._finished = [], []
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Apply a step's result; returns what it sampled. Sequences that ended are no longer running."""
        sequences = {sequence.request_id: sequence for sequence in self._scheduled}
        for planned in plan.sequences:
            sequence = sequences.get(planned.request_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens += len(planned.token_ids)
            self._seal(sequence)
            if planned.request_id in result.prompt_logprobs:
                del sequence.prompt_logprobs[planned.start :]
                sequence.prompt_logprobs.extend(result.prompt_logprobs[planned.request_id])
        news = []
        for sampled in result.sampled:
            sequence = sequences.get(sampled.request_id)
            if sequence is None:
                continue
            if sampled.error is not None:
                self.finish(sequence, "abort", keep_cached=False)
            else:
                sequence.token_ids.append(sampled.token_id)
                self.waiting.charge_output(sequence)
                self._check_stop(sequence, sampled.token_id)
            news.append(NewToken(sequence, sampled))
        return news

    def finish(self, sequence: SequenceState, reason: FinishReason, keep_cached: bool = True) -> None:
        """End a sequence wherever it is and give back all that it holds; one that has ended stays as it is."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence in self.running:
            self._stop_running(sequence, keep_cached)
        else:
            self.waiting.remove(sequence)
        if sequence.started:
            self._finished.append(sequence.request_id)
        if sequence.adapter is not None:
            self.adapters.let_go(sequence.adapter)

    def check_integrity(self) -> None:
        """Assert that no block or page is lost or wrongly shared."""
        self.blocks.check_integrity(sequence.block_ids for sequence in self.running)
        self.adapters.check_integrity()
        self.waiting.check_integrity(self.running)
        for sequence in self.waiting:
            assert not sequence.block_ids, "a waiting request holds blocks"
            assert sequence.num_computed_tokens == 0
        for sequence in self.running:
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self.blocks.block_size
            assert sequence.adapter is None or sequence.adapter.pages is not None
        assert len(self.running) <= self.max_num_seqs

    def _schedule_decodes(self) -> None:
        for sequence in tuple(self.running):
            if self._budget == 0:
                break
            if sequence.block_ids and sequence.num_remaining_tokens == 1:
                self._advance(sequence)

    def _schedule_prompts(self) -> None:
        passed: list[AdapterQueue] = []
        pages_are_owed, is_full = False, False
        for queue in self.waiting.turns():
            sequence = queue.next
            is_done = is_full and len(self._scheduled) == len(self.running)
            if sequence is None or is_done or self._budget == 0:
                break
            if sequence is queue.begun:
                self._advance(sequence)
            elif is_full:
                continue
            elif sequence.adapter is not None and (pages_are_owed or not self.adapters.can_activate(sequence.adapter)):
                passed.append(queue)
                pages_are_owed = pages_are_owed or queue.num_bypassed >= MAX_BYPASS
            elif not self._admit(sequence, queue):
                is_full = True
            elif sequence.adapter is not None:
                for other in passed:
                    other.num_bypassed += 1
                    pages_are_owed = pages_are_owed or other.num_bypassed >= MAX_BYPASS

    def _advance(self, sequence: SequenceState) -> None:
        """Give a running request as many of its tokens as the step takes, unless it is the one that gives way."""
        num_tokens = min(sequence.num_remaining_tokens, self._budget)
        needed = self.blocks.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        while needed > 0 and not self.blocks.can_allocate(needed):
            victim = self._youngest(self.waiting.most_served(more_than=1))
            self._preempt(victim)
            if victim is sequence:
                return
        if needed > 0:
            sequence.block_ids += self.blocks.allocate(needed)
        self._compute(sequence, num_tokens)

    def _admit(self, sequence: SequenceState, queue: AdapterQueue) -> bool:
        """Begin a waiting request; false if there is no room, and nobody has to make any."""
        if self._preempted and (queue.num_running > 0 or sequence in self._preempted):
            return False
        if len(self.running) >= self.max_num_seqs and not self._make_way(queue):
            return False
        cached, keys = self._find_cached(sequence)
        num_cached = len(cached) * self.blocks.block_size
        num_tokens = min(sequence.num_tokens - num_cached, self._budget)
        num_new = self.blocks.num_blocks_for(num_cached + num_tokens) - len(cached)
        while not self.blocks.can_allocate(num_new, cached):
            if not self._make_way(queue):
                return False
        sequence.block_ids = self.blocks.allocate(num_new, cached)
        sequence.block_keys, sequence.num_computed_tokens = keys, num_cached
        if not sequence.started:
            sequence.num_cached_tokens = num_cached
            self.prefix_cache_queries += sequence.num_prompt_tokens
            self.prefix_cache_hits += num_cached
        if sequence.adapter is not None:
            page_in = self.adapters.activate(sequence.adapter)
            if page_in is not None:
                self._page_ins.append(page_in)
        self.waiting.admit(sequence)
        self.running.append(sequence)
        self._compute(sequence, num_tokens)
        return True

    def _make_way(self, queue: AdapterQueue) -> bool:
        """For a queue that runs nothing, preempt a request of one that was served no less and keeps its part of the
        running requests, and two at least: without those, ends come often enough. False if there is none."""
        if queue.num_running > 0:
            return False
        part = len(self.running) / self.waiting.num_active
        other = self.waiting.most_served(more_than=max(2, part + 1), at_least=queue.counter)
        if other is not None:
            self._preempt(self._youngest(other))
        return other is not None

    def _youngest(self, queue: AdapterQueue | None) -> SequenceState:
        """The running request that a queue can best do without; None is all queues together."""
        if queue is None:
            return max(self.running, key=lambda sequence: sequence.request_id)
        own = [sequence for sequence in self.running if self.waiting.queue_of(sequence) is queue]
        return max(own, key=lambda sequence: sequence.place)

    def _compute(self, sequence: SequenceState, num_tokens: int) -> None:
        self._scheduled[sequence] = num_tokens
        self._budget -= num_tokens
        self.waiting.grant(sequence, num_tokens)

    def _find_cached(self, sequence: SequenceState) -> tuple[list[int], list[bytes]]:
        if sequence.sampling_params.prompt_logprobs is not None:
            return [], []
        return self.blocks.find_cached(sequence.root_key, sequence.token_ids)

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
        """Take a running sequence's blocks; it waits again, and computes anew what the prefix cache has lost."""
        self._stop_running(sequence, keep_cached=True)
        self.waiting.push(sequence)
        self._preempted.add(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: SequenceState, keep_cached: bool) -> None:
        self.running.remove(sequence)
        self.waiting.leave(sequence)
        self._budget += self._scheduled.pop(sequence, 0)
        self.blocks.release(sequence.block_ids, keep_cached)
        sequence.block_ids, sequence.block_keys, sequence.num_computed_tokens = [], [], 0
        if sequence.adapter is not None:
            self.adapters.deactivate(sequence.adapter)
