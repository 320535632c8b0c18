"""For a model directory without a tokenizer: token ids in, token ids out, no text."""

from collections.abc import Sequence

from ray_lora.errors import InvalidRequestError


class NoTokenizer:
    """Refuses text and gives none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InvalidRequestError("the model directory has no tokenizer.json; give token ids", "prompt")

    def token_text(self, token_id: int) -> str:
        return ""

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> "NoTokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""
