"""Whole answers of the HTTP API, from finished outputs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray_lora.adapter import AdapterInfo
from ray_lora.request import CompletionOutput, LogprobsDict, RequestOutput
from ray_lora.serve.logprob_shapes import CompletionLogprobs, TokenSpelling, chat_logprobs, prompt_logprobs
from ray_lora.serve.openai_types import ChatCompletionRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer begins with."""

    id: str
    model: str
    """As the caller wrote it, or the base's name."""
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_answer(
    head: AnswerHead, body: ChatCompletionRequest, output: RequestOutput, spelling: TokenSpelling
) -> dict[str, Any]:
    """The `chat.completion` object."""
    choices = []
    for completion in output.outputs:
        logprobs = None
        if completion.logprobs is not None:
            logprobs = chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0, spelling)
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choices.append({"index": completion.index, "message": message, **_ending(completion, logprobs)})
        if body.return_token_ids:
            choices[-1]["token_ids"] = completion.token_ids
    answer = {**head.fields("chat.completion"), "choices": choices, "usage": _usage([output])}
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
    return answer


def completion_answer(
    head: AnswerHead,
    body: CompletionRequest,
    outputs: Sequence[RequestOutput],
    echoes: Sequence[str],
    spelling: TokenSpelling,
) -> dict[str, Any]:
    """The `text_completion` object.

    Args:
        outputs: one per prompt.
        echoes: the prompts' texts, empty unless `echo`.
    """
    if body.wants_only_prompt:
        outputs = [_without_tokens(output) for output in outputs]
    choices: list[dict[str, Any]] = []
    for output, echo in zip(outputs, echoes, strict=True):
        for completion in output.outputs:
            choices.append(_completion_choice(len(choices), body, output, completion, echo, spelling))
    return {**head.fields("text_completion"), "choices": choices, "usage": _usage(outputs)}


def _completion_choice(
    index: int,
    body: CompletionRequest,
    output: RequestOutput,
    completion: CompletionOutput,
    echo: str,
    spelling: TokenSpelling,
) -> dict[str, Any]:
    token_ids: list[int] = completion.token_ids
    entries: list[LogprobsDict | None] = [*(completion.logprobs or [])]
    if body.echo:
        token_ids = [*output.prompt_token_ids, *token_ids]
        entries = [*(output.prompt_logprobs or []), *entries]
    logprobs = None if body.logprobs is None else CompletionLogprobs(spelling).push(token_ids, entries)
    choice = {"index": index, "text": echo + completion.text, **_ending(completion, logprobs)}
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
    if body.return_token_ids:
        choice |= {"token_ids": completion.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def model_cards(
    base: str, root: str, max_model_len: int, adapters: Sequence[AdapterInfo], created: int
) -> list[dict[str, Any]]:
    """`data` of `/v1/models`: the base, then every adapter with the base as its parent."""
    cards = [_model_card(base, root, None, created) | {"max_model_len": max_model_len}]
    for adapter in adapters:
        cards.append(_model_card(adapter.name, adapter.source, base, created) | _adapter_fields(adapter))
    return cards


def _model_card(name: str, root: str, parent: str | None, created: int) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "ray_lora"}
    return card | {"root": root, "parent": parent, "permission": []}


def _adapter_fields(adapter: AdapterInfo) -> dict[str, Any]:
    return {"version": adapter.version, "rank": adapter.rank, "tier": adapter.tier}


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """As if nothing had been generated."""
    empty = [CompletionOutput(completion.index, finish_reason="length") for completion in output.outputs]
    return replace(output, outputs=empty)


def _ending(completion: CompletionOutput, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    reason, stop = completion.finish_reason, completion.stop_reason
    return {"logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}


def _usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )
