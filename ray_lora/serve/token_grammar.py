"""Structured outputs: which tokens may come next, by llguidance."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ray_lora.errors import InvalidRequestError
from ray_lora.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(step_lexer_fuel=100_000, step_max_items=25_000, verbose_errors=False)
"""About 8 ms at the most after a token, for which all requests of a step wait."""


class TokenGrammar:
    """The `Grammar` of an engine."""

    def __init__(self, matcher: LLMatcher, allowed: bytes | None = None) -> None:
        self._matcher = matcher
        self.allowed = self._find_allowed() if allowed is None else allowed

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self.allowed = self._find_allowed()

    def copy(self) -> "TokenGrammar":
        return TokenGrammar(self._matcher.deep_copy(), self.allowed)

    def _find_allowed(self) -> bytes:
        allowed = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())
        return allowed


class GrammarCompiler:
    """Grammars over one vocabulary. Safe to use from several threads.

    Args:
        tokenizer: the text of a `tokenizer.json`.
        vocab_size: of the model, which may have rows beyond the tokenizer's.
        eos_token_ids: allowed wherever the text may end.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def compile(self, wanted: StructuredOutputsParams) -> TokenGrammar:
        """
        Raises:
            InvalidRequestError: it is no grammar, or matches nothing, or is beyond what is supported.
        """
        return self._compiled(_source(wanted)).copy()

    def _compile(self, source: str) -> TokenGrammar:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return TokenGrammar(matcher)


def _source(wanted: StructuredOutputsParams) -> str:
    """In llguidance's own notation."""
    try:
        if wanted.regex is not None:
            return grammar_from("regex", wanted.regex)
        if wanted.grammar is not None:
            return grammar_from("grammar", wanted.grammar)
        if wanted.choice is not None:
            return grammar_from("choice", json.dumps(list(wanted.choice)))
        schema = {"type": "object"} if wanted.json is None else wanted.json
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        options: JsonCompileOptions = {"lenient": False}  # also if the schema's own `x-guidance` says otherwise
        if wanted.disable_any_whitespace:
            options["whitespace_flexible"] = False
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    except (ValueError, TypeError) as error:
        raise _refusal(str(error)) from None


def _refusal(message: str) -> InvalidRequestError:
    reason = message.removesuffix("<non-verbose/>").strip()
    if reason == "NoExtensionBias":
        reason = "it matches nothing"
    return InvalidRequestError(f"This structure cannot be kept to: {reason}", "structured_outputs")
