"""Text to token ids and back, from a Hugging Face directory. Gives what transformers' AutoTokenizer gives, without it.

Importing AutoTokenizer takes seconds and 200 MB because it brings torch; the process that serves HTTP needs neither.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers.decoders import DecodeStream

from ray_lora.errors import ConfigError
from ray_lora.serve.token_bytes import TokenBytes
from ray_lora.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from ray_lora.serve.chat_template import ChatTemplate
    from ray_lora.serve.token_grammar import GrammarCompiler, TokenGrammar

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizer.json` with the special tokens of `tokenizer_config.json`. Safe to use from several threads.

    Which of them are added around a text, the former alone decides; transformers too ignores `add_bos_token` beside it.

    Args:
        path: a Hugging Face directory.
        chat_template: a Jinja template, or a path to one, in place of the directory's.

    Raises:
        ConfigError: the directory holds no tokenizer that can be read.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None) -> None:
        directory = Path(path).expanduser()
        self._directory = directory
        self._template_override = chat_template
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"tokenizer: {directory} has no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            self.config = _read_config(directory / "tokenizer_config.json")
        except Exception as error:
            raise ConfigError(f"tokenizer: {file} cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_tokens = {
            name: token for name in SPECIAL_TOKENS if (token := _content(self.config.get(name))) is not None
        }
        extra = self.config.get("additional_special_tokens") or []
        self._tokenizer.add_special_tokens([*self.special_tokens.values(), *(_content(token) for token in extra)])
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_bytes = TokenBytes(self._tokenizer)
        self._grammar_compiler = lru_cache(maxsize=1)(self._make_grammar_compiler)
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """Found and compiled when a chat is first rendered; most processes never do.

        Raises:
            ConfigError: the template's file is missing or is no template.
        """
        from ray_lora.serve.chat_template import ChatTemplate

        return ChatTemplate(self._directory, self.config, self.special_tokens, self._template_override)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text for a chat, special tokens written out.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses these messages.
        """
        return self.chat_template.render(messages, add_generation_prompt, continue_final_message, template_kwargs)

    @property
    def eos_token_id(self) -> int | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text become themselves."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> "IncrementalDetokenizer":
        """Decode tokens that follow a prompt as they come."""
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens, prompt_token_ids)

    def grammar(
        self, wanted: StructuredOutputsParams, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> "TokenGrammar":
        """What keeps a completion to the structure that is wanted; see `GrammarCompiler`."""
        return self._grammar_compiler(vocab_size, eos_token_ids).compile(wanted)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which may be part of a character."""
        return self._token_bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it, e.g. `Ġthe`."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _make_grammar_compiler(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "GrammarCompiler":
        from ray_lora.serve.token_grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer.to_str(), vocab_size, eos_token_ids)

    def _token_text(self, token_id: int) -> str:
        """One token as text; part of a character is U+FFFD."""
        return self._token_bytes[token_id].decode("utf-8", errors="replace")


class IncrementalDetokenizer:
    """The text of one completion, token by token. What has been pushed adds up to `decode` of all of it.

    Example: `" 日"` may be three tokens; the first two give `""` and the third gives `" 日"`.

    Bytes that are no character at all are the exception: `decode` of SentencePiece then also takes back characters
    before them, which a stream has told already; here each stays, and the broken ones become one U+FFFD.
    """

    _CONTEXT = 8
    """Prompt tokens that the first tokens are decoded after; spaces depend on what stands before."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._anchor = list(prompt_token_ids[-self._CONTEXT :])
        # A prompt that ends within a character would hold back the text that follows, so it is left out.
        if tokenizer.decode(self._anchor, skip_special_tokens=skip_special_tokens).endswith("\ufffd"):
            self._anchor = []
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library has no class for it: what came before has changed
            self._stream = self._new_stream()
            return "\ufffd" + (self._stream.step(self._tokenizer, token_id) or "")
        if text is None:
            return ""
        self._anchor = [token_id]
        return text

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._anchor, skip_special_tokens=self._skip_special_tokens)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def _content(token: Any) -> str | None:
    """A special token may be written as a string or as a serialized AddedToken."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
