"""The engine, one step at a time: add and cancel requests, `step`. Used from one thread."""

import random
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.adapter_version import Version
from ray_lora.engine.block_manager import BlockManager
from ray_lora.engine.completion import Completion, RequestGroup, Tokenizer, request_metrics
from ray_lora.engine.engine_metrics import EngineMetrics
from ray_lora.engine.executor import Executor
from ray_lora.engine.grammar import Grammar
from ray_lora.engine.scheduler import NewToken, Scheduler
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.errors import InvalidRequestError, NumericsError, RayLoraError
from ray_lora.request import CompletionDelta, GenerateChunk, GenerateRequest
from ray_lora.stats import EngineStats
from ray_lora.step import HEARTBEAT, StepPlan, StepResult
from ray_lora.structured_outputs import StructuredOutputsParams

Event = tuple[RequestGroup, GenerateChunk | RayLoraError]
"""What a step has to tell a request: a chunk, or the error that ended it."""


class EngineCore:
    """Ties the scheduler to the ranks and to the text. Every method runs between steps, in the engine's thread."""

    def __init__(self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer) -> None:
        info = executor.info
        self.info = info
        self.executor = executor
        self.tokenizer = tokenizer
        self.adapters = AdapterManager(
            config.num_lora_pages,
            config.max_loras,
            config.max_lora_rank,
            config.max_cpu_lora_bytes,
            on_evict=lambda name, tier: self.metrics.evicted(name, tier),
            base_weight=config.base_model_weight,
        )
        self.scheduler = Scheduler(
            BlockManager(
                info.num_kv_blocks,
                config.block_size,
                config.enable_prefix_caching and info.has_stable_prefixes,
            ),
            self.adapters,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            info.max_model_len,
        )
        self._random = random.Random(config.seed)
        self._completions: dict[int, tuple[RequestGroup, Completion]] = {}
        self._next_id = 0
        self.metrics = EngineMetrics(config.base_model_name, config.max_adapter_labels, self.adapters.has_name)
        self.last_step_at = time.monotonic()
        """When a step last went through every rank."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def compile_grammar(self, wanted: StructuredOutputsParams) -> Grammar:
        """Safe to call from another thread than the engine's.

        Raises:
            InvalidRequestError: it is no grammar, or one that cannot be kept to.
        """
        if not self.info.eos_token_ids:
            raise InvalidRequestError(
                "structured_outputs needs a model with an end-of-sequence token", "structured_outputs"
            )
        return self.tokenizer.grammar(wanted, self.info.vocab_size, self.info.eos_token_ids)

    def add(
        self, request: GenerateRequest, arrived_at: float | None = None, grammar: Grammar | None = None
    ) -> RequestGroup:
        """Accept a request.

        Args:
            arrived_at: when it came, by `time.monotonic`, if not just now.
            grammar: of its structured outputs, if it asks for any.

        Raises:
            InvalidRequestError: the prompt is empty, too long or no prompt, or a parameter does not fit the model.
            NotFoundError: no adapter of that name.
        """
        try:
            group = self._accept(request, grammar)
        except RayLoraError as error:
            self.metrics.refused(request.adapter, error)
            raise
        self.metrics.added(group.stats, group.completions[0].sequence.num_prompt_tokens)
        now = time.monotonic()
        for completion in group.completions:
            completion.timeline.arrived_at = now if arrived_at is None else arrived_at
            completion.timeline.queued_at = now
            self._completions[completion.sequence.request_id] = (group, completion)
            self.scheduler.add(completion.sequence)
        return group

    def _accept(self, request: GenerateRequest, grammar: Grammar | None) -> RequestGroup:
        adapter = self.adapters.get(request.adapter) if request.adapter is not None else None
        prompt = request.prompt
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(request, token_ids)
        if request.adapter is not None:
            self.adapters.mark_used(request.adapter)
        if not request.request_id:
            request = replace(request, request_id=f"req-{uuid.uuid4().hex}")
        params = request.sampling_params
        completions = []
        for index in range(params.n):
            sequence = self._sequence(request, token_ids, index, adapter, grammar)
            completions.append(Completion(index, sequence, self.tokenizer))
        return RequestGroup(request, completions, self.tokenizer, self.metrics.of(request.adapter))

    def cancel(self, group: RequestGroup, reason: str = "abort") -> None:
        """End a request that nobody waits for; nothing happens if it has ended."""
        for completion in group.completions:
            self.scheduler.finish(completion.sequence, "abort")
            if self._completions.pop(completion.sequence.request_id, None) is not None:
                self.metrics.ended(group.stats, reason)

    def step(self) -> list[Event]:
        """Run one step and return what it has to tell. Does nothing without work."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        begin = time.monotonic()
        for start in plan.starts:
            self._completions[start.request_id][1].timeline.scheduled_at = begin
        result = self._execute(plan)
        now = self.last_step_at
        deltas: dict[RequestGroup, list[CompletionDelta]] = defaultdict(list)
        errors: dict[RequestGroup, RayLoraError] = {}
        for news in self.scheduler.update(plan, result):
            group, completion = self._completions[news.sequence.request_id]
            if news.sampled.error is not None:
                errors[group] = NumericsError(news.sampled.error)
            else:
                deltas[group].append(self._push(group, completion, news, now))
                try:
                    news.sequence.follow_grammar()
                except InvalidRequestError as error:
                    errors[group] = error
        for group in errors:
            self.cancel(group, "error")
        events: list[Event] = [(group, group.chunk(found)) for group, found in deltas.items() if group not in errors]
        return events + list(errors.items())

    def heartbeat(self) -> None:
        """Let every rank meet the others, when there is no step to show that they can.

        Raises:
            EngineDeadError: a rank is gone.
        """
        self._execute(HEARTBEAT)

    def stats(self) -> EngineStats:
        """Safe to call from another thread than the engine's."""
        scheduler, blocks, metrics = self.scheduler, self.scheduler.blocks, self.metrics
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting),
            num_kv_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            kv_cache_usage=1 - blocks.num_free_blocks / blocks.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            running_adapters=self._names_of(list(scheduler.running)),
            waiting_adapters=self._names_of(list(scheduler.waiting)),
            resident_adapters=self.adapters.resident,
            num_lora_pages=self.adapters.pages.num_pages,
            num_free_lora_pages=self.adapters.pages.num_free,
            tiers={info.name: info.tier for info in self.adapters.list_adapters()},
            load_failures=metrics.load_failures,
            all=metrics.all,
            requests=metrics.requests,
            by_adapter=dict(metrics.by_adapter),
            max_adapter_labels=metrics.max_labels,
            last_step_age_s=time.monotonic() - self.last_step_at,
        )

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        self.last_step_at = time.monotonic()
        return result

    def _push(self, group: RequestGroup, completion: Completion, news: NewToken, now: float) -> CompletionDelta:
        sequence = completion.sequence
        delta = completion.push(news.sampled.token_id, news.sampled.logprobs)
        self.metrics.sampled(group.stats, completion.timeline, now)
        if delta.finish_reason is not None:
            self.scheduler.finish(sequence, delta.finish_reason)
            self.metrics.ended(group.stats, delta.finish_reason)
            self.metrics.finished(request_metrics([completion]))
            del self._completions[sequence.request_id]
        return delta

    def _sequence(
        self,
        request: GenerateRequest,
        token_ids: list[int],
        index: int,
        adapter: Version | None,
        grammar: Grammar | None,
    ) -> SequenceState:
        params = request.sampling_params
        seed = self._random.getrandbits(63) if params.seed is None else params.seed + index
        stops = tuple(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops += tuple(token for token in self.info.eos_token_ids if token not in stops)
        room = self.info.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._next_id += 1
        params = replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
        return SequenceState(
            self._next_id,
            token_ids,
            params,
            seed,
            stops,
            adapter,
            request.key_name,
            request.cache_salt,
            request.adapter,
            request.priority,
            grammar.copy() if grammar is not None else None,
        )

    def _check(self, request: GenerateRequest, token_ids: list[int]) -> None:
        vocab_size, max_model_len = self.info.vocab_size, self.info.max_model_len
        params = request.sampling_params
        if not isinstance(request.priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {request.priority!r}", "priority")
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        if len(token_ids) >= max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {max_model_len} tokens; the prompt has {len(token_ids)}, "
                "which leaves none for the answer.",
                "prompt",
            )
        for param, tokens in (
            ("prompt", token_ids),
            ("stop_token_ids", params.stop_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
        ):
            for token in tokens:
                if not (isinstance(token, int) and 0 <= token < vocab_size):
                    raise InvalidRequestError(f"{param} has {token!r}, not a token id below {vocab_size}.", param)

    def _names_of(self, sequences: Iterable[SequenceState]) -> tuple[str, ...]:
        versions = {sequence.adapter_version for sequence in sequences}
        return tuple(info.name for info in self.adapters.list_adapters() if info.version in versions)
