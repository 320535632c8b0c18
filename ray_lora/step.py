"""The two messages between the scheduler and the ranks: `StepPlan` down, `StepResult` up.

The scheduler fills a plan from ids alone; every rank turns the same plan into tensors. A rank keeps, for each request
between its `start` and its `finished`, only what sampling needs.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from ray_lora.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A request that enters a plan for the first time. Read by the sampler."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    seed: int
    """Seed of this request's own random stream; token `i` depends on `(seed, i)` and on nothing else."""
    stop_token_ids: tuple[int, ...]
    """End-of-sequence and stop tokens, forbidden until `min_tokens` are out."""


class SequencePlan(NamedTuple):
    """What one request computes in this step. A tuple, for plans are made and pickled at every step."""

    request_id: int
    token_ids: tuple[int, ...]
    """The tokens whose KV is computed: a prompt chunk, or the last sampled token."""
    start: int
    """Position of `token_ids[0]`, which is also the number of tokens already in the KV cache."""
    block_ids: tuple[int, ...]
    """KV blocks in position order, covering `start + len(token_ids)` positions.
    Example: with blocks of 16, `block_ids=(7, 2)` puts position 17 at row 1 of block 2."""
    adapter: int
    """Index into `StepPlan.adapters`, -1 for the base model."""
    sample: bool
    """Whether the last token's logits give the next token (false for all but the last chunk of a prompt)."""
    num_output_tokens: int
    """Tokens sampled before this step; the index of the one sampled now."""
    prompt_logprobs: bool = False
    """Whether the logprobs of the prompt tokens that follow each position of this chunk are wanted."""
    allowed: bytes | None = None
    """The tokens that may be sampled, for bit `i % 8` of byte `i // 8` is token `i`; None for all."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter in use by this step; its pages are committed on every rank."""

    version: str
    pages: tuple[int, ...]
    slot: int
    """Its number among the resident adapters, below `max_loras`: where ranks keep what is not paged by rank."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a replica. Sequences of one adapter are adjacent."""

    step_id: int
    sequences: tuple[SequencePlan, ...]
    adapters: tuple[AdapterPlan, ...] = ()
    page_ins: tuple[AdapterPlan, ...] = ()
    """Adapters to be written from host memory into their pages before the step computes, in this order. One whose
    request had to give way in the same step is not used by it."""
    starts: tuple[SequenceStart, ...] = ()
    finished: tuple[int, ...] = ()
    """Requests that ended since the last plan; their sampling state is dropped."""

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def version_of(self, sequence: SequencePlan) -> str | None:
        """The adapter of one of its sequences; None for the base model."""
        return self.adapters[sequence.adapter].version if sequence.adapter >= 0 else None


HEARTBEAT = StepPlan(step_id=0, sequences=())
"""A plan to compute nothing: the ranks meet on their devices and answer, which shows that a step would get through."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-softmax values at one position, before penalties and temperature, as OpenAI and vLLM report them."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely `(token_id, logprob)`, best first."""


class SampledToken(NamedTuple):
    """The token that one request sampled in this step."""

    request_id: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Set if this row's logits were not finite; `token_id` then means nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What rank 0 answers to a plan."""

    step_id: int
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By request id: one entry for each prompt token that follows a position of this step's chunk."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the ranks report once the model is loaded. Read by the engine and by the API."""

    vocab_size: int
    max_model_len: int
    """Longest prompt plus output that is served, in tokens."""
    num_kv_blocks: int
    eos_token_ids: tuple[int, ...]
    lora_page_bytes: int
    """Of one page of 16 ranks, on each rank."""
    has_stable_prefixes: bool = True
    """Whether a token's KV depends only on the tokens before it. Not so with dynamic rotary scaling beyond the trained
    length, where it depends on the length of the whole prompt; prefixes are then not cached."""
