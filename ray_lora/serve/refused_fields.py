"""Fields of OpenAI's and vLLM's requests that this server does not honour, and the values at which they mean nothing.

A request that sets one of them to anything else is refused by name: an ignored field is a wrong answer.
"""

from typing import Any

from ray_lora.errors import InvalidRequestError

Values = tuple[Any, ...]

IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""They never change an answer."""

COMMON: dict[str, Values] = {
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "logits_processors": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None,),
    "mm_processor_kwargs": (None,),
}

CHAT: dict[str, Values] = {
    **COMMON,
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "documents": (None, []),
    "chat_template": (None,),
    "include_reasoning": (None, True),
    "echo": (None, False),
    "best_of": (None, 1),
}

COMPLETION: dict[str, Values] = {**COMMON, "suffix": (None, "")}

MESSAGE: dict[str, Values] = {
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
    "reasoning": (None,),
    "reasoning_content": (None,),
    "weight": (None, 1),
}

STRUCTURED_OUTPUTS: dict[str, Values] = {
    "disable_fallback": (None, False, True),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}

LOAD_LORA: dict[str, Values] = {"is_3d_lora_weight": (None, False), "base_model_name": (None,)}

UNLOAD_LORA: dict[str, Values] = {"lora_int_id": (None,)}


def drop_refused(data: dict[str, Any], refused: dict[str, Values], path: str = "") -> dict[str, Any]:
    """The fields that are honoured.

    Raises:
        InvalidRequestError: a refused field has a value that would have to change something.
    """
    for name, harmless in refused.items():
        if name in data and not any(_equal(data[name], value) for value in harmless):
            raise InvalidRequestError(f"{path}{name} is not supported by this server", f"{path}{name}")
    return {name: value for name, value in data.items() if name not in refused and name not in IGNORED}


def _equal(value: Any, other: Any) -> bool:
    """Equality that keeps `true` and `1` apart."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
