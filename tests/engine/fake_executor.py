"""Ranks whose tokens can be computed by hand, and a tokenizer of one character per token.

The KV of a token is one number that depends on the adapter version, on the token and on all tokens before it. The fake
stores it where the plan says, reads the context through the plan's block table, and samples from what it finds there.
So a token that is swapped, lost or doubled, a wrong block, a block handed out twice and a stale prefix all change what
comes out; most of them also break one of the assertions about the plan.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from zlib import crc32

from ray_lora.adapter import AdapterFiles, AdapterManifest, AdapterValidation, Refusal, StagingTimes, num_pages
from ray_lora.errors import AdapterRejectedError, EngineDeadError, InvalidRequestError, NotFoundError
from ray_lora.request import SamplingParams
from ray_lora.step import (
    ModelInfo,
    SampledToken,
    SequencePlan,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from ray_lora.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 64
POISON = 63
"""A prompt with this token has logits that are not finite, if not told otherwise; it is never sampled."""
_MODULUS = (1 << 61) - 1


def make_manifest(version: str, rank: int = 16) -> AdapterManifest:
    return AdapterManifest(
        version=version,
        path=f"/store/{version}",
        source=f"/adapters/{version}",
        rank=rank,
        modules=("self_attn.q_proj",),
        num_bytes=rank * 100,
        shard_bytes=rank * 50,
    )


@cache
def _seed_of(version: str | None) -> int:
    return crc32((version or "").encode()) + (version is not None)


def _kv(version: str | None, before: int, token_id: int) -> int:
    return ((before + 1) * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + _seed_of(version)) % _MODULUS


def kv_of(version: str | None, token_ids: Sequence[int]) -> list[int]:
    """The KV of every token of a text."""
    values: list[int] = []
    for token_id in token_ids:
        values.append(_kv(version, values[-1] if values else 0, token_id))
    return values


def sample_from(kv: int, params: SamplingParams, seed: int, stop_token_ids: Sequence[int], index: int) -> int:
    """The token that follows; none of `stop_token_ids` before `min_tokens`. The seed counts unless greedy."""
    noise = 0 if params.is_greedy else (seed + 1) * (index + 1)
    token_id = ((kv >> 20) + noise) % POISON
    while index < params.min_tokens and token_id in stop_token_ids:
        token_id = (token_id + 1) % POISON
    return token_id


def expected_tokens(
    version: str | None,
    prompt: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    seed: int = 0,
    stop_token_ids: Sequence[int] = (),
) -> list[int]:
    """What one request must get, computed alone and without blocks."""
    tokens, kv = list(prompt), kv_of(version, prompt)[-1]
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    for index in range(limit):
        token_id = sample_from(kv, params, seed, stop_token_ids, index)
        tokens.append(token_id)
        kv = _kv(version, kv, token_id)
        if token_id in stop_token_ids and index + 1 >= params.min_tokens:
            break
    return tokens[len(prompt) :]


@dataclass
class _Running:
    """What the fake knows of a request between its start and its end."""

    start: SequenceStart
    token_ids: list[int]
    version: str | None = None
    seen: bool = False


@dataclass
class FakeExecutor:
    """Implements `Executor`; every plan is checked before it is run."""

    info: ModelInfo
    block_size: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    num_lora_pages: int = 0
    max_loras: int = 0
    sources: dict[str, AdapterManifest] = field(default_factory=dict)
    """What `inspect_adapter` finds, by path."""
    files: dict[str, AdapterFiles] = field(default_factory=dict)
    """The store, by version."""
    is_broken: Callable[[SequenceStart], bool] = lambda start: POISON in start.prompt_token_ids
    """Whether a request's logits are not finite."""
    before_step: Callable[[StepPlan], None] = lambda _: None
    before_heartbeat: Callable[[], None] = lambda: None
    before_inspect: Callable[[str], None] = lambda _: None
    before_stage: Callable[[AdapterManifest], None] = lambda _: None
    before_drop: Callable[[str], None] = lambda _: None
    plans: list[StepPlan] = field(default_factory=list)
    staged: dict[str, AdapterManifest] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """`("inspect", source)`, `("stage", version)` and `("drop", version)` in the order they came."""
    num_heartbeats: int = 0
    dead: bool = False
    was_shut_down: bool = False

    def __post_init__(self) -> None:
        self.kv: dict[tuple[int, int], int] = {}
        self.pages: dict[int, str] = {}
        self.slots: dict[int, str] = {}
        self.running: dict[int, _Running] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def execute(self, plan: StepPlan) -> StepResult:
        if not plan.sequences:
            return self._meet(plan)
        self.before_step(plan)
        if self.dead:
            raise EngineDeadError("rank 0 is gone")
        self._check_shape(plan)
        with self._lock:
            self._update_requests(plan)
            self._update_pages(plan)
        self.plans.append(plan)
        sampled, prompt_logprobs = [], {}
        for sequence in plan.sequences:
            values = self._compute(plan, sequence)
            request = self.running[sequence.request_id]
            if sequence.prompt_logprobs:
                prompt_logprobs[sequence.request_id] = self._prompt_logprobs(request, sequence, values)
            if sequence.sample:
                sampled.append(self._sample(request, sequence, values[-1]))
        return StepResult(plan.step_id, tuple(sampled), prompt_logprobs)

    def _meet(self, plan: StepPlan) -> StepResult:
        self.before_heartbeat()
        if self.dead:
            raise EngineDeadError("rank 0 is gone")
        self.num_heartbeats += 1
        return StepResult(plan.step_id)

    def inspect_adapter(self, source: str, version: str | None = None) -> AdapterManifest:
        self.calls.append(("inspect", source))
        self.before_inspect(source)
        if source not in self.sources:
            raise NotFoundError(f"{source} is not a directory", "lora_path")
        return self.sources[source]

    def validate_adapter(self, source: str) -> AdapterValidation:
        try:
            return AdapterValidation(self.inspect_adapter(source), ())
        except AdapterRejectedError as error:
            return AdapterValidation(None, (Refusal(str(error), error.param),))

    def has_adapter_files(self, version: str) -> bool:
        return version in self.files

    def adapter_files(self, version: str) -> AdapterFiles | None:
        return self.files.get(version)

    def add_adapter_files(self, files: AdapterFiles, source: str) -> None:
        self.files[files.config.decode()] = files

    def keep_adapter(self, manifest: AdapterManifest) -> None:
        self.calls.append(("keep", manifest.version))

    def stage_adapter(self, manifest: AdapterManifest) -> StagingTimes:
        self.calls.append(("stage", manifest.version))
        self.before_stage(manifest)
        with self._lock:
            self.staged[manifest.version] = manifest
        return StagingTimes(stage_s=0.5, barrier_s=0.25)

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        self.calls.append(("drop" if forget else "unstage", version))
        self.before_drop(version)
        with self._lock:
            self.staged.pop(version, None)

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("rank 0 is gone")

    def shutdown(self) -> None:
        self.was_shut_down = True

    def _check_shape(self, plan: StepPlan) -> None:
        """The plan keeps the limits, and its tables name only what exists."""
        assert plan.step_id == (self.plans[-1].step_id if self.plans else 0) + 1
        assert 0 < len(plan.sequences) <= self.max_num_seqs
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        indices = [sequence.adapter for sequence in plan.sequences]
        runs = [index for previous, index in zip([None, *indices], indices, strict=False) if index != previous]
        assert len(runs) == len(set(runs)), f"sequences of one adapter are not adjacent: {indices}"
        assert set(indices) - {-1} == set(range(len(plan.adapters))), "an adapter is unused or unknown"
        assert len(plan.adapters) <= self.max_loras
        assert len({adapter.version for adapter in plan.adapters}) == len(plan.adapters)
        assert {adapter.version for adapter in plan.page_ins} <= set(self.staged), "pages in what the ranks do not hold"
        pages = [page for adapter in plan.adapters for page in adapter.pages]
        assert len(set(pages)) == len(pages), "two adapters share a page"
        assert all(0 <= page < self.num_lora_pages for page in pages)
        assert len({adapter.slot for adapter in plan.adapters}) == len(plan.adapters), "two adapters share a slot"
        assert all(0 <= adapter.slot < self.max_loras for adapter in plan.adapters)

        request_ids = [sequence.request_id for sequence in plan.sequences]
        assert len(set(request_ids)) == len(request_ids), "a request is planned twice"
        for sequence in plan.sequences:
            num_positions = sequence.start + len(sequence.token_ids)
            assert len(sequence.token_ids) > 0
            assert num_positions <= self.info.max_model_len
            assert len(sequence.block_ids) == -(-num_positions // self.block_size), "more or fewer blocks than needed"
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            assert all(0 <= block < self.info.num_kv_blocks for block in sequence.block_ids)
            for other in plan.sequences:
                written = sequence.block_ids[sequence.start // self.block_size :]
                assert other is sequence or not set(written) & set(other.block_ids), "writes to a shared block"

    def _update_requests(self, plan: StepPlan) -> None:
        for request_id in plan.finished:
            del self.running[request_id]
            self._ended.add(request_id)
        for start in plan.starts:
            assert start.request_id not in self.running
            assert start.request_id not in self._ended
            self.running[start.request_id] = _Running(start, list(start.prompt_token_ids))
        for sequence in plan.sequences:
            request = self.running[sequence.request_id]
            version = plan.adapters[sequence.adapter].version if sequence.adapter >= 0 else None
            assert not request.seen or request.version == version, "an adapter was exchanged under a request"
            request.seen, request.version = True, version
            stop = sequence.start + len(sequence.token_ids)
            assert tuple(request.token_ids[sequence.start : stop]) == sequence.token_ids, "not the request's tokens"
            assert sequence.sample == (stop == len(request.token_ids))
            assert sequence.num_output_tokens == len(request.token_ids) - len(request.start.prompt_token_ids)
            asked = request.start.sampling_params.prompt_logprobs is not None
            assert sequence.prompt_logprobs == (asked and sequence.start < len(request.start.prompt_token_ids))
        assert {start.request_id for start in plan.starts} <= {sequence.request_id for sequence in plan.sequences}

    def _update_pages(self, plan: StepPlan) -> None:
        for adapter in plan.page_ins:
            assert len(adapter.pages) == num_pages(self.staged[adapter.version].rank)
            self.pages.update(dict.fromkeys(adapter.pages, adapter.version))
            self.slots[adapter.slot] = adapter.version
        for adapter in plan.adapters:
            assert adapter.version in self.staged, "the plan names an adapter that the ranks do not hold"
            assert len(adapter.pages) == num_pages(self.staged[adapter.version].rank)
            assert all(self.pages.get(page) == adapter.version for page in adapter.pages), "pages hold something else"
            assert self.slots.get(adapter.slot) == adapter.version, "the slot holds something else"

    def _compute(self, plan: StepPlan, sequence: SequencePlan) -> list[int]:
        """Write the KV of the sequence's tokens, after checking that all before them is what this request needs."""
        request = self.running[sequence.request_id]
        slots = [
            (sequence.block_ids[position // self.block_size], position % self.block_size)
            for position in range(sequence.start + len(sequence.token_ids))
        ]
        context = [self.kv.get(slot, 0) for slot in slots[: sequence.start]]
        assert context == kv_of(request.version, request.token_ids[: sequence.start]), "the context is another one's"
        values: list[int] = []
        before = context[-1] if context else 0
        for slot, token_id in zip(slots[sequence.start :], sequence.token_ids, strict=True):
            before = self.kv[slot] = _kv(request.version, before, token_id)
            values.append(before)
        return values

    def _sample(self, request: _Running, sequence: SequencePlan, kv: int) -> SampledToken:
        if self.is_broken(request.start):
            return SampledToken(sequence.request_id, -1, error="the model's logits are not finite")
        start, params = request.start, request.start.sampling_params
        token_id = sample_from(kv, params, start.seed, start.stop_token_ids, sequence.num_output_tokens)
        while sequence.allowed is not None and not sequence.allowed[token_id // 8] >> token_id % 8 & 1:
            token_id = (token_id + 1) % POISON
        request.token_ids.append(token_id)
        entry = None if params.logprobs is None else logprobs_of(kv, token_id, params.logprobs)
        return SampledToken(sequence.request_id, token_id, entry)

    def _prompt_logprobs(
        self, request: _Running, sequence: SequencePlan, values: list[int]
    ) -> tuple[TokenLogprobs, ...]:
        num_top = request.start.sampling_params.prompt_logprobs
        assert num_top is not None
        targets = request.start.prompt_token_ids[sequence.start + 1 : sequence.start + len(values) + 1]
        return tuple(logprobs_of(kv, target, num_top) for kv, target in zip(values, targets, strict=False))


def logprobs_of(kv: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Made up, but a function of the position's KV."""
    top = tuple(((kv + i) % VOCAB_SIZE, -float(i + 1)) for i in range(num_top))
    return TokenLogprobs(token_id, -float(kv % 997) / 100, kv % 7 + 1, top)


class FakeTokenizer:
    """Token `i` is the character `chr(0x30 + i)`, so `"0"` is token 0 and `"A"` token 17."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) - 0x30 for character in text]

    def token_text(self, token_id: int) -> str:
        return chr(0x30 + token_id)

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> "FakeDetokenizer":
        return FakeDetokenizer()

    def grammar(
        self, wanted: StructuredOutputsParams, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> "FakeGrammar":
        """A choice between words."""
        if wanted.choice is None:
            raise InvalidRequestError("it knows choices alone", "structured_outputs")
        return FakeGrammar([self.encode(word) for word in wanted.choice], eos_token_ids)


class FakeGrammar:
    """What is left of the words that the tokens so far begin, then the end. POISON in a word is too complex to pass."""

    def __init__(self, words: list[list[int]], eos_token_ids: tuple[int, ...]) -> None:
        self._words = words
        self._eos_token_ids = eos_token_ids

    @property
    def allowed(self) -> bytes:
        tokens = {word[0] for word in self._words if word}
        if any(not word for word in self._words):
            tokens.update(self._eos_token_ids)
        bits = sum(1 << token_id for token_id in tokens)
        return bits.to_bytes(VOCAB_SIZE // 8, "little")

    def accept(self, token_id: int) -> None:
        self._words = [word[1:] for word in self._words if word and word[0] == token_id]
        if any(word and word[0] == POISON for word in self._words):
            raise InvalidRequestError("too complex", "structured_outputs")

    def copy(self) -> "FakeGrammar":
        return FakeGrammar(self._words, self._eos_token_ids)


class FakeDetokenizer:
    def push(self, token_id: int) -> str:
        return chr(0x30 + token_id)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(0x30 + token_id) for token_id in token_ids)
