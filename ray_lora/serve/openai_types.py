"""The requests of the HTTP API: OpenAI's fields, vLLM's additions, and what each means to the engine."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

from pydantic import Field

from ray_lora.adapter import MAX_WEIGHT, MIN_WEIGHT
from ray_lora.errors import InvalidRequestError
from ray_lora.request import SamplingParams
from ray_lora.serve.chat_messages import parse_messages
from ray_lora.serve.refused_fields import CHAT, COMPLETION, LOAD_LORA, UNLOAD_LORA, Values
from ray_lora.serve.request_body import RequestBody
from ray_lora.serve.structured_fields import ResponseFormat, structured_outputs


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(RequestBody):
    """What chat and completions share. Null means the default, as in OpenAI's API."""

    model: str | None = None
    """The base's name, an adapter's, or `base:adapter`; the base if absent."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: what the text must match; see `StructuredOutputsParams`."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None
    """vLLM's: shown in logs and answers in place of a made-up id."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    """vLLM's: share cached prefixes only with requests of the same salt."""
    priority: int | None = None
    """vLLM's: of one adapter's requests that wait, those with the lowest number run first, but for every fourth; 0 if
    absent."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def _sampling_params(self, spelling: Mapping[str, str], **fields: Any) -> SamplingParams:
        """`fields` over what the caller gave, over the engine's defaults.

        Args:
            spelling: the caller's name for a parameter that has another one in `SamplingParams`.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs is not available with stream", "prompt_logprobs")
        shared = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if name in type(self).model_fields and (value := getattr(self, name)) is not None
        }
        shared.pop("logprobs", None)
        shared["structured_outputs"] = structured_outputs(self.structured_outputs, self.response_format)
        if self.logit_bias is not None:
            shared["logit_bias"] = _logit_bias(self.logit_bias)
        try:
            return SamplingParams(**{**shared, **fields})
        except InvalidRequestError as error:
            param = spelling.get(error.param or "", error.param)
            message = str(error).replace(error.param or "", param or "", 1)
            raise InvalidRequestError(message, param) from None


class ChatCompletionRequest(SamplingBody):
    """`POST /v1/chat/completions`"""

    REFUSED: ClassVar[dict[str, Values]] = CHAT

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`; either one, the context's end if neither."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages as a template reads them.

        Raises:
            InvalidRequestError: a message is malformed or holds more than text.
        """
        return parse_messages(self.messages)

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            InvalidRequestError: a parameter out of range, or tools that cannot be called.
        """
        if self.tools and self.tool_choice != "none":
            raise InvalidRequestError("tools is not supported by this server unless tool_choice is 'none'", "tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice is not supported by this server", "tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
        newer = self.max_completion_tokens is not None
        spelling = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens" if newer else "max_tokens"}
        max_tokens = self.max_completion_tokens if newer else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(spelling, max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`"""

    REFUSED: ClassVar[dict[str, Values]] = COMPLETION

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids.

        Raises:
            InvalidRequestError: there is none, or a number that is no token id of any model.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt must not be empty", "prompt")
        token_ids = [token for token in prompt if isinstance(token, int)]
        prompts: list[str | list[int]] = [part for part in prompt if not isinstance(part, int)]
        if token_ids:
            prompts = [token_ids]
        for token in chain.from_iterable(part for part in prompts if not isinstance(part, str)):
            if not 0 <= token < 2**31:
                raise InvalidRequestError(f"prompt has {token}, which is not a token id", "prompt")
        return prompts

    @property
    def wants_only_prompt(self) -> bool:
        """`echo` with `max_tokens` 0 asks about the prompt alone; the one token that is generated is not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for, for every prompt.

        Raises:
            InvalidRequestError: a parameter out of range.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError("best_of is not supported by this server unless it equals n", "best_of")
        fields: dict[str, Any] = {"logprobs": self.logprobs}
        if self.wants_only_prompt:
            fields["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            fields["prompt_logprobs"] = self.logprobs
        return self._sampling_params({"prompt_logprobs": "logprobs"} if fields.get("prompt_logprobs") else {}, **fields)


class TokenizeRequest(RequestBody):
    """`POST /tokenize`, of a prompt or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: list[int]


class LoadLoraRequest(RequestBody):
    """`POST /v1/load_lora_adapter`"""

    REFUSED: ClassVar[dict[str, Values]] = LOAD_LORA

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    expected_version: str | None = None


class ValidateLoraRequest(RequestBody):
    """`POST /v1/validate_lora_adapter`"""

    lora_path: str
    lora_name: str | None = None
    """Under which it would be loaded."""


class AdapterWeightRequest(RequestBody):
    """`POST /v1/adapters/{name}/weight`"""

    weight: float = Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)


class UnloadLoraRequest(RequestBody):
    """`POST /v1/unload_lora_adapter`"""

    REFUSED: ClassVar[dict[str, Values]] = UNLOAD_LORA

    lora_name: str | None = None


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias: every key must be a token id", "logit_bias") from None
