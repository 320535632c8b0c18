"""The tokenizer that a configuration asks for."""

from pathlib import Path

from ray_lora.config import EngineConfig
from ray_lora.serve.no_tokenizer import NoTokenizer
from ray_lora.serve.tokenizer import Tokenizer


def load_tokenizer(config: EngineConfig) -> Tokenizer | NoTokenizer:
    """The model's tokenizer, or one that knows no text if its directory has none.

    Raises:
        ConfigError: the tokenizer's files cannot be read.
    """
    if config.tokenizer is not None:
        return Tokenizer(Path(config.tokenizer).expanduser(), config.chat_template)
    if not (config.model_path / "tokenizer.json").is_file():
        return NoTokenizer()
    return Tokenizer(config.model_path, config.chat_template)
