"""What a caller asks for and what comes back: the nouns shared by HTTP, handles and `LLM`. Names are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ray_lora.errors import InvalidRequestError
from ray_lora.structured_outputs import StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20
"""OpenAI's and vLLM's limit on alternatives per position."""


def _require(condition: bool, param: str, value: object, right: str) -> None:
    if not condition:
        raise InvalidRequestError(f"{param} must be {right}, not {value!r}", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Raises:
        InvalidRequestError: a value out of range; `param` names the field.
    """

    n: int = 1
    """Completions per prompt; completion `i` of a seeded request uses `seed + i`."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Same seed, same text, whatever shares the batch."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    """None fills the context."""
    logprobs: int | None = None
    """Alternatives per generated token; 0 gives the chosen token's alone."""
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, each within [-100, 100]."""
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must match. It ends with the grammar, so neither `min_tokens` nor `ignore_eos` goes with it."""

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, int), name, value, "a whole number")
        _require(1 <= self.n <= 128, "n", self.n, "between 1 and 128")
        _require(0 <= self.temperature <= 100, "temperature", self.temperature, "between 0 and 100")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1, 0 or positive")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        _require(0 < self.repetition_penalty <= 100, "repetition_penalty", self.repetition_penalty, "in (0, 100]")
        if self.seed is not None:
            _require(-(2**63) <= self.seed <= 2**63 - self.n, "seed", self.seed, "a 64-bit integer")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        longest = self.max_tokens or self.min_tokens
        _require(0 <= self.min_tokens <= longest, "min_tokens", self.min_tokens, f"between 0 and max_tokens {longest}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _require(count is None or 0 <= count <= MAX_LOGPROBS, name, count, f"between 0 and {MAX_LOGPROBS}")
        for text in self.stop_strings:
            _require(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
        for token_id, bias in (self.logit_bias or {}).items():
            _require(isinstance(token_id, int) and token_id >= 0, "logit_bias", token_id, "a mapping of token ids")
            _require(-100 <= bias <= 100, "logit_bias", bias, "in [-100, 100]")
        if self.structured_outputs is not None:
            _require(self.min_tokens == 0, "min_tokens", self.min_tokens, "0 with structured outputs")
            _require(not self.ignore_eos, "ignore_eos", self.ignore_eos, "false with structured outputs")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt for one adapter, as HTTP, a handle and `LLM` hand it to the engine."""

    prompt: str | Sequence[int]
    """Text, or token ids that are used as they are."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    adapter: str | None = None
    """Name of a registered adapter; None is the base model."""
    request_id: str = ""
    """Shown in logs and answers; the engine makes one up if empty."""
    key_name: str | None = None
    """Name of the API key that it came with; requests share cached prefixes within a key only."""
    cache_salt: str | None = None
    """vLLM's: and within a key only with requests of the same salt."""
    trace_headers: Mapping[str, str] | None = None
    """W3C `traceparent` and `tracestate` of who asked."""
    priority: int = 0
    """vLLM's: of the requests for one adapter that wait, those with the lowest number run first, but for every
    fourth; see `engine/fair_queue.py`."""
    waited_s: float = field(default=0.0, compare=False)
    """How long ago it came in when it was sent to the engine, for its deadlines."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's raw log-probability at its position, and its rank there (1 is the most likely)."""

    logprob: float
    rank: int | None
    decoded_token: str


LogprobsDict = dict[int, Logprob]
"""By token id: the chosen token and the asked-for alternatives, best first."""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one completion gained since the previous chunk of its stream."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobsDict, ...] | None = None
    """One entry per token, if asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, if one did."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a finished request's time went, in the order that it went there."""

    load_wait_s: float
    """Until its adapter was in host memory."""
    queue_s: float
    """Until it was first in a step."""
    prefill_s: float
    """From then to its first token."""
    decode_s: float
    """From there to its last."""
    prompt_tokens: int
    generation_tokens: int

    @property
    def time_to_first_token_s(self) -> float:
        return self.load_wait_s + self.queue_s + self.prefill_s

    @property
    def e2e_s(self) -> float:
        return self.time_to_first_token_s + self.decode_s

    @property
    def time_per_output_token_s(self) -> float:
        """Mean over all tokens but the first; 0 if that is all."""
        return self.decode_s / (self.generation_tokens - 1) if self.generation_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """One item of a stream: everything new for a request. The first chunk also tells of the prompt."""

    request_id: str
    outputs: tuple[CompletionDelta, ...]
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[LogprobsDict | None, ...] | None = None
    """One entry per prompt token, the first None, if asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    adapter_version: str | None = None
    metrics: RequestMetrics | None = None
    """In the last chunk."""


@dataclass(slots=True)
class CompletionOutput:
    """One finished completion, with vLLM's fields."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsDict] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def append(self, delta: CompletionDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(delta.logprobs)
            gained = sum(entry[token].logprob for token, entry in zip(delta.token_ids, delta.logprobs, strict=True))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + gained
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its finished completions, with vLLM's fields."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[LogprobsDict | None] | None = None
    num_cached_tokens: int = 0
    adapter: str | None = None
    adapter_version: str | None = None
    n: int = 1
    """Completions asked for."""
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return len(self.outputs) == self.n and all(output.finish_reason is not None for output in self.outputs)

    def append(self, chunk: GenerateChunk) -> None:
        if chunk.prompt_token_ids is not None:
            self.prompt_token_ids = list(chunk.prompt_token_ids)
            self.num_cached_tokens = chunk.num_cached_tokens
            self.adapter_version = chunk.adapter_version
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = list(chunk.prompt_logprobs)
        self.metrics = chunk.metrics
        for delta in chunk.outputs:
            while len(self.outputs) <= delta.index:
                self.outputs.append(CompletionOutput(index=len(self.outputs)))
            self.outputs[delta.index].append(delta)
