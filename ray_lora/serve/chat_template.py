"""From chat messages to the prompt's text, by the model's own Jinja template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ray_lora.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does, with the tokenizer's special tokens at hand.

    Args:
        directory: the tokenizer's.
        config: what its `tokenizer_config.json` holds.
        special_tokens: by name, e.g. `bos_token`.
        override: a template, or a path to one, in place of the directory's.

    Raises:
        ConfigError: the template's file is missing or is no template.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        override: str | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self.template = _find_template(directory, config) if override is None else _read_override(override)
        if self.template is not None:
            _check_syntax(self.template)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, which already holds its special tokens.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses these messages.
        """
        if self.template is None:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions, or set chat_template in the deployment.",
                "messages",
            )
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )
        kwargs = {**self._special_tokens, **(template_kwargs or {})}
        try:
            result: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise InvalidRequestError(f"The chat template refuses these messages: {error}", "messages") from None
        return str(result[0][0])


def _check_syntax(template: str) -> None:
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        if "'generation'" not in str(error):  # transformers' own tag
            raise ConfigError(f"chat_template: {error}") from None


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None and (directory / "chat_template.json").is_file():
        template = json.loads((directory / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _read_override(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    file = Path(override).expanduser()
    if not file.is_file():
        raise ConfigError(f"chat_template: {override!r} is neither a template nor a file")
    return file.read_text(encoding="utf-8")
