"""Streamed answers: one server-sent event per delta, put together from strings because every token passes here."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from ray_lora.request import CompletionDelta, GenerateChunk, LogprobsDict
from ray_lora.serve.logprob_shapes import CompletionLogprobs, TokenSpelling, chat_logprobs
from ray_lora.serve.openai_answers import AnswerHead, usage
from ray_lora.serve.openai_types import ChatCompletionRequest, CompletionRequest

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Closes its source whatever ends it, so that a caller who leaves cancels the request at once."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **(headers or {})}
        )
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def event(data: Any) -> bytes:
    return f"data: {dumps(data)}\n\n".encode()


class Counters:
    """The usage of a stream so far."""

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    def count(self, chunk: GenerateChunk) -> None:
        if chunk.prompt_token_ids is not None:
            self.prompt_tokens += len(chunk.prompt_token_ids)
            self.cached_tokens += chunk.num_cached_tokens
        for delta in chunk.outputs:
            self.completion_tokens += len(delta.token_ids)

    @property
    def usage(self) -> dict[str, Any]:
        return usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


class EventWriter(ABC):
    """Chunks of one answer -> events. A subclass says how a delta looks.

    Args:
        kind: the `object` of every event.
    """

    def __init__(self, head: AnswerHead, kind: str, body: ChatCompletionRequest | CompletionRequest) -> None:
        self._head = head.fields(kind)
        self._before = "data: " + dumps(self._head)[:-1] + ',"choices":[{"index":'
        self._body = body
        self._counters = Counters()
        self._null_usage = ',"usage":null' if body.include_usage else ""

    def events(self, chunk: GenerateChunk, prompt: int = 0) -> bytes:
        """Everything that a chunk of the given prompt tells."""
        self._counters.count(chunk)
        first = self._opening(chunk, prompt) if chunk.prompt_token_ids is not None else ""
        text = first + "".join([self._event(delta, prompt) for delta in chunk.outputs])
        return text.encode()

    def closing(self) -> bytes:
        """What follows the last chunk."""
        if not self._body.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._counters.usage}) + DONE

    @abstractmethod
    def _event(self, delta: CompletionDelta, prompt: int) -> str:
        """What a delta of the given prompt tells."""

    def _opening(self, chunk: GenerateChunk, prompt: int) -> str:
        """Events before the first delta of a prompt."""
        return ""

    def _write(self, index: int, payload: str, logprobs: str, delta: CompletionDelta | None, after: str = "") -> str:
        """One event.

        Args:
            payload: the choice's member that holds the text.
            after: members of the whole event.
        """
        ending = ',"finish_reason":null'
        if delta is not None and delta.finish_reason is not None:
            ending = f',"finish_reason":"{delta.finish_reason}","stop_reason":{dumps(delta.stop_reason)}'
        if delta is not None and self._body.return_token_ids:
            ending += f',"token_ids":{dumps(list(delta.token_ids))}'
        after += f',"usage":{dumps(self._counters.usage)}' if self._body.continuous_usage else self._null_usage
        return f'{self._before}{index},{payload},"logprobs":{logprobs}{ending}}}]{after}}}\n\n'


class ChatWriter(EventWriter):
    """`chat.completion.chunk` events; the first of each choice tells the role."""

    def __init__(self, head: AnswerHead, body: ChatCompletionRequest, spelling: TokenSpelling) -> None:
        super().__init__(head, "chat.completion.chunk", body)
        self._num_choices = body.n or 1
        self._top = body.top_logprobs or 0
        self._spelling = spelling

    def _opening(self, chunk: GenerateChunk, prompt: int) -> str:
        payload = '"delta":{"role":"assistant","content":""}'
        after = ""
        if self._body.return_token_ids:
            after = f',"prompt_token_ids":{dumps(list(chunk.prompt_token_ids or ()))}'
        return "".join(self._write(index, payload, "null", None, after) for index in range(self._num_choices))

    def _event(self, delta: CompletionDelta, prompt: int) -> str:
        logprobs = "null"
        if delta.logprobs is not None:
            logprobs = dumps(chat_logprobs(delta.token_ids, delta.logprobs, self._top, self._spelling))
        return self._write(delta.index, f'"delta":{{"content":{dumps(delta.text)}}}', logprobs, delta)


class CompletionWriter(EventWriter):
    """`text_completion` events; with `echo` the first of each choice is the prompt.

    Args:
        echoes: the prompts' texts, empty unless `echo`.
    """

    def __init__(
        self, head: AnswerHead, body: CompletionRequest, echoes: Sequence[str], spelling: TokenSpelling
    ) -> None:
        super().__init__(head, "text_completion", body)
        self._num_choices = body.n or 1
        self._echo = bool(body.echo)
        self._echoes = echoes
        self._only_prompt = body.wants_only_prompt
        self._logprobs = (
            None
            if body.logprobs is None
            else [CompletionLogprobs(spelling) for _ in range(self._num_choices * len(echoes))]
        )

    def events(self, chunk: GenerateChunk, prompt: int = 0) -> bytes:
        if self._only_prompt:
            chunk = replace(
                chunk, outputs=tuple(CompletionDelta(d.index, "", (), None, "length") for d in chunk.outputs)
            )
        return super().events(chunk, prompt)

    def _opening(self, chunk: GenerateChunk, prompt: int) -> str:
        if not (self._echo or self._body.return_token_ids):
            return ""
        token_ids = chunk.prompt_token_ids or ()
        payload = f'"text":{dumps(self._echoes[prompt])}'
        if self._body.return_token_ids:
            payload += f',"prompt_token_ids":{dumps(list(token_ids))}'
        texts = []
        for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
            logprobs = self._push(index, token_ids, chunk.prompt_logprobs) if self._echo else "null"
            texts.append(self._write(index, payload, logprobs, None))
        return "".join(texts)

    def _event(self, delta: CompletionDelta, prompt: int) -> str:
        index = prompt * self._num_choices + delta.index
        logprobs = self._push(index, delta.token_ids, delta.logprobs)
        return self._write(index, f'"text":{dumps(delta.text)}', logprobs, delta)

    def _push(self, index: int, token_ids: Sequence[int], entries: Sequence[LogprobsDict | None] | None) -> str:
        if self._logprobs is None or entries is None:
            return "null"
        return dumps(self._logprobs[index].push(token_ids, entries))
