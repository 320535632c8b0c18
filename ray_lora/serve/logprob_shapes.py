"""Log-probabilities in the two shapes of OpenAI's API, and in vLLM's for prompts."""

from collections.abc import Sequence
from typing import Any, Protocol

from ray_lora.request import Logprob, LogprobsDict

LOWEST = -9999.0
"""JSON has no minus infinity; this stands for it, as in OpenAI's API."""


class TokenSpelling(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[LogprobsDict], top: int, spelling: TokenSpelling
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: per token itself, and the `top` most likely ones."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        best = sorted(entry.items(), key=_rank)[:top]
        alternatives = [_chat_entry(other, logprob, spelling) for other, logprob in best]
        content.append({**_chat_entry(token_id, entry[token_id], spelling), "top_logprobs": alternatives})
    return {"content": content}


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, which may come in pieces; offsets count the characters so far."""

    def __init__(self, spelling: TokenSpelling) -> None:
        self._spelling = spelling
        self._offset = 0

    def push(self, token_ids: Sequence[int], entries: Sequence[LogprobsDict | None]) -> dict[str, Any]:
        """The next tokens; an entry of None is the first token of a prompt, which nothing precedes."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._label(token_id))
            logprobs.append(None if entry is None else _finite(entry[token_id]))
            tops.append(None if entry is None else {self._label(t): _finite(p) for t, p in entry.items()})
            offsets.append(self._offset)
            self._offset += len(self._spelling.token_bytes(token_id).decode("utf-8", errors="ignore"))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _label(self, token_id: int) -> str:
        return token_label(token_id, self._spelling)


def prompt_logprobs(entries: Sequence[LogprobsDict | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token ids as keys."""
    return [None if entry is None else {str(t): _prompt_entry(p) for t, p in entry.items()} for entry in entries]


def token_label(token_id: int, spelling: TokenSpelling) -> str:
    """A token as text, or as `bytes:\\xe6` if it is part of a character."""
    raw = spelling.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_entry(token_id: int, logprob: Logprob, spelling: TokenSpelling) -> dict[str, Any]:
    raw = spelling.token_bytes(token_id)
    return {"token": logprob.decoded_token, "logprob": _finite(logprob), "bytes": list(raw)}


def _prompt_entry(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _rank(item: tuple[int, Logprob]) -> float:
    rank = item[1].rank
    return float("inf") if rank is None else rank


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
