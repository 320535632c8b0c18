"""From logits to tokens, one row per request, each row alone: what shares the batch cannot change a choice."""

import hashlib
import struct
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from ray_lora.request import SamplingParams
from ray_lora.step import SampledToken, SequencePlan, SequenceStart, TokenLogprobs

_LARGE_NUCLEUS = 1024
"""Candidates looked at first for `top_p`; the whole vocabulary is sorted only if they do not suffice."""


class SamplingState:
    """What one request's sampling remembers: its parameters and the tokens it has seen."""

    def __init__(self, start: SequenceStart) -> None:
        self.params = start.sampling_params
        self.seed = start.seed
        self.prompt_token_ids = start.prompt_token_ids
        self.stop_token_ids = start.stop_token_ids
        self.output_counts: Counter[int] = Counter()
        self.logit_bias = start.sampling_params.logit_bias or {}

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1

    @property
    def takes_best(self) -> bool:
        return self.params.is_greedy or self.params.top_k == 1

    def is_adjusted(self, planned: SequencePlan) -> bool:
        """Whether `adjust_` would change logits now."""
        return (
            planned.allowed is not None
            or bool(self.logit_bias)
            or self.has_penalties
            or planned.num_output_tokens < self.params.min_tokens
        )

    def wants_best_alone(self, planned: SequencePlan) -> bool:
        """Whether the next token is the likeliest one and nothing is told of the others."""
        return self.takes_best and self.params.logprobs is None and not self.is_adjusted(planned)

    def adjust_(self, logits: Tensor, planned: SequencePlan) -> None:
        """Forbid, bias and penalise, in place, in vLLM's order. logits: [vocab_size] float32."""
        if planned.allowed is not None:
            forbid_(logits, planned.allowed)
        if self.logit_bias:
            logits[torch.tensor(list(self.logit_bias))] += torch.tensor(list(self.logit_bias.values()))
        if planned.num_output_tokens < self.params.min_tokens and self.stop_token_ids:
            logits[torch.tensor(self.stop_token_ids)] = float("-inf")
        if self.has_penalties:
            self._penalise_(logits)

    def _penalise_(self, logits: Tensor) -> None:
        params = self.params
        if params.repetition_penalty != 1:
            seen = torch.tensor(sorted({*self.prompt_token_ids, *self.output_counts}))
            values = logits[seen]
            logits[seen] = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if self.output_counts:
            tokens = torch.tensor(list(self.output_counts))
            counts = torch.tensor(list(self.output_counts.values()), dtype=torch.float32)
            logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty


class Sampler:
    """Samples for the requests between their `start` and their `finished`."""

    def __init__(self) -> None:
        self._states: dict[int, SamplingState] = {}

    def start(self, start: SequenceStart) -> None:
        self._states[start.request_id] = SamplingState(start)

    def finish(self, request_id: int) -> None:
        del self._states[request_id]

    def num_prompt_logprobs(self, request_id: int) -> int:
        return self._states[request_id].params.prompt_logprobs or 0

    def prompt(self, request_id: int) -> tuple[int, ...]:
        return self._states[request_id].prompt_token_ids

    def sample(self, sequences: list[SequencePlan], logits: Tensor) -> tuple[SampledToken, ...]:
        """Choose each sequence's next token. logits: [len(sequences), vocab_size] in any float type, on any device.

        They come to the host only if a sequence wants more than its likeliest token.
        """
        logits = logits.float()
        best = logits.max(dim=-1)
        finite, argmax = best.values.isfinite().tolist(), best.indices.tolist()
        if not all(self._states[planned.request_id].wants_best_alone(planned) for planned in sequences):
            logits = logits.cpu()
        sampled = []
        for row, sequence in enumerate(sequences):
            if not finite[row]:
                sampled.append(SampledToken(sequence.request_id, -1, error="the model's logits are not finite"))
                continue
            state = self._states[sequence.request_id]
            token_id = self._choose(state, logits[row], argmax[row], sequence)
            state.output_counts[token_id] += 1
            wanted = state.params.logprobs
            entry = None if wanted is None else token_logprobs(logits[row], token_id, wanted)
            sampled.append(SampledToken(sequence.request_id, token_id, entry))
        return tuple(sampled)

    def _choose(self, state: SamplingState, logits: Tensor, argmax: int, planned: SequencePlan) -> int:
        params = state.params
        if state.is_adjusted(planned):
            logits = logits.clone()
            state.adjust_(logits, planned)
            argmax = int(logits.argmax())
        if state.takes_best:
            return argmax
        return draw(logits / params.temperature, params, uniform(state.seed, planned.num_output_tokens))


def forbid_(logits: Tensor, allowed: bytes) -> None:
    """Leave only the tokens whose bits are set; see `SequencePlan.allowed`. logits: [vocab_size] float32."""
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits == 0), float("-inf"))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides token `index` of the stream `seed`; depends on nothing else."""
    digest = hashlib.blake2b(struct.pack("<Qq", seed % 2**64, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64


def draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """Invert the cumulative distribution at `number`, after min_p, top_k and top_p.

    logits: [vocab_size] float32, divided by the temperature.
    """
    if params.min_p > 0:
        logits = logits.masked_fill((logits - logits.max()).exp() < params.min_p, float("-inf"))
    tokens: Tensor | None = None
    if 0 < params.top_k < len(logits):
        values, tokens = logits.topk(params.top_k)
        weights = values.double().softmax(dim=0)
    elif params.top_p < 1:
        weights, tokens = _nucleus_candidates(logits, params.top_p)
    else:
        weights = logits.double().softmax(dim=0)
    if params.top_p < 1:
        before = weights.cumsum(dim=0) - weights
        weights = weights.masked_fill(before >= params.top_p, 0.0)
    cumulative = weights.cumsum(dim=0)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * number, right=True))
    index = min(index, int(weights.nonzero()[-1]))
    return index if tokens is None else int(tokens[index])


def _nucleus_candidates(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities, best first, of at least the tokens that make up `top_p`, and their ids."""
    total = logits.double().logsumexp(dim=0)
    values, tokens = logits.topk(min(_LARGE_NUCLEUS, len(logits)))
    weights = (values.double() - total).exp()
    if float(weights.sum()) < top_p:
        values, tokens = logits.sort(descending=True)
        weights = (values.double() - total).exp()
    return weights, tokens


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Raw logprobs of a token and of the `num_top` most likely. logits: [vocab_size] float32."""
    logprobs = logits.log_softmax(dim=-1)
    value = logprobs[token_id]
    top = logprobs.topk(num_top)
    return TokenLogprobs(
        token_id,
        float(value),
        int((logprobs > value).sum()) + 1,
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
