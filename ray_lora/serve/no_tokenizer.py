"""For a model directory without a tokenizer: token ids in, token ids out, no text."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ray_lora.errors import InvalidRequestError
from ray_lora.structured_outputs import StructuredOutputsParams


class NoTokenizer:
    """Refuses text and gives none."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _refuse("prompt", "give token ids")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> "NoTokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_string(self, token_id: int) -> str:
        return ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        _refuse("messages", "use /v1/completions with token ids")

    def grammar(self, wanted: StructuredOutputsParams, vocab_size: int, eos_token_ids: tuple[int, ...]) -> NoReturn:
        _refuse("structured_outputs", "without one there is no text to keep to a grammar")


def _refuse(param: str, remedy: str) -> NoReturn:
    raise InvalidRequestError(f"the model directory has no tokenizer.json; {remedy}", param)
