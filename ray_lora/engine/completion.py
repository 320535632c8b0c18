"""From sampled tokens to the chunks that a caller sees: text, stop strings, logprobs, `n` completions."""

from collections.abc import Sequence
from typing import Protocol

from ray_lora.engine.grammar import Grammar
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.engine.stop_strings import StopStrings
from ray_lora.engine.timeline import Timeline
from ray_lora.request import CompletionDelta, GenerateChunk, GenerateRequest, Logprob, LogprobsDict, RequestMetrics
from ray_lora.stats import AdapterStats
from ray_lora.step import TokenLogprobs
from ray_lora.structured_outputs import StructuredOutputsParams


class IncrementalDetokenizer(Protocol):
    """Text of one completion, as far as it is complete."""

    def push(self, token_id: int) -> str: ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_text(self, token_id: int) -> str: ...

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> IncrementalDetokenizer: ...

    def grammar(self, wanted: StructuredOutputsParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammar: ...


class Completion:
    """One sequence's text on its way out."""

    def __init__(self, index: int, sequence: SequenceState, tokenizer: Tokenizer) -> None:
        params = sequence.sampling_params
        self.index = index
        self.sequence = sequence
        self.timeline = Timeline()
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            params.skip_special_tokens, sequence.token_ids[: sequence.num_prompt_tokens]
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> CompletionDelta:
        """The delta of one more token; sets the sequence's `stop_reason` if its text ends at a stop string."""
        sequence = self.sequence
        params = sequence.sampling_params
        hidden = sequence.finish_reason == "stop" and not params.include_stop_str_in_output
        text = "" if hidden else self._detokenizer.push(token_id)
        text, stop = self._stops.push(text, may_stop=sequence.num_output_tokens > params.min_tokens)
        reason = sequence.finish_reason
        if stop is not None:
            reason, sequence.stop_reason = "stop", stop
        elif reason is not None:
            text += self._stops.flush()
        entry = None if logprobs is None else (logprobs_dict(logprobs, self._tokenizer),)
        return CompletionDelta(self.index, text, (token_id,), entry, reason, sequence.stop_reason)


class RequestGroup:
    """A caller's request and its `n` completions.

    Args:
        stats: where its tokens are counted.
    """

    def __init__(
        self, request: GenerateRequest, completions: list[Completion], tokenizer: Tokenizer, stats: AdapterStats
    ) -> None:
        self.request = request
        self.completions = completions
        self.stats = stats
        self._tokenizer = tokenizer
        self._told_prompt = False

    @property
    def started(self) -> bool:
        """Whether any of it has been in a step. Safe to call from another thread than the engine's."""
        return any(completion.sequence.started for completion in self.completions)

    @property
    def finished(self) -> bool:
        return all(completion.sequence.finish_reason is not None for completion in self.completions)

    def chunk(self, deltas: Sequence[CompletionDelta]) -> GenerateChunk:
        """Wrap what one step gave; the first chunk also tells of the prompt, the last where the time went."""
        metrics = request_metrics(self.completions) if self.finished else None
        if self._told_prompt:
            return GenerateChunk(self.request.request_id, tuple(deltas), metrics=metrics)
        self._told_prompt = True
        first = self.completions[deltas[0].index].sequence  # its prompt is whole: others may have given way before
        prompt_logprobs = None
        if first.sampling_params.prompt_logprobs is not None:
            entries = [logprobs_dict(entry, self._tokenizer) for entry in first.prompt_logprobs]
            prompt_logprobs = (None, *entries)
        return GenerateChunk(
            request_id=self.request.request_id,
            outputs=tuple(deltas),
            prompt_token_ids=tuple(first.token_ids[: first.num_prompt_tokens]),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            adapter_version=first.adapter_version,
            metrics=metrics,
        )


def request_metrics(completions: Sequence[Completion]) -> RequestMetrics:
    """Where the time of completions of one request went, all of which have come to their end."""
    first = completions[0].timeline
    scheduled_at = min(completion.timeline.scheduled_at for completion in completions)
    first_token_at = min(completion.timeline.first_token_at for completion in completions)
    return RequestMetrics(
        load_wait_s=first.queued_at - first.arrived_at,
        queue_s=scheduled_at - first.queued_at,
        prefill_s=first_token_at - scheduled_at,
        decode_s=max(completion.timeline.last_token_at for completion in completions) - first_token_at,
        prompt_tokens=completions[0].sequence.num_prompt_tokens,
        generation_tokens=sum(completion.sequence.num_output_tokens for completion in completions),
    )


def logprobs_dict(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsDict:
    """The chosen token first, then the alternatives, best first."""
    entries = {logprobs.token_id: Logprob(logprobs.logprob, logprobs.rank, tokenizer.token_text(logprobs.token_id))}
    for rank, (token_id, logprob) in enumerate(logprobs.top, start=1):
        entries.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return entries
