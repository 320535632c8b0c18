import pickle
from typing import Any

import pytest

from ray_lora.errors import InvalidRequestError
from ray_lora.request import (
    MAX_LOGPROBS,
    CompletionDelta,
    GenerateChunk,
    GenerateRequest,
    Logprob,
    RequestOutput,
    SamplingParams,
)

REFUSED: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", float("nan")),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: -100.5}),
    ("logit_bias", {1: float("nan")}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"])
def test_a_number_that_is_not_whole_is_refused_where_one_is_meant(field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: 1.5})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 128},
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 100},
        {"seed": -(2**63)},
        {"seed": 2**63 - 2},
        {"seed": 2**63 - 1},
        {"min_tokens": 16},
        {"min_tokens": 1000, "max_tokens": None},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {0: -100, 5: 100}},
        {"logit_bias": {}},
        {"stop": []},
    ],
    ids=str,
)
def test_the_limits_themselves_are_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())])
def test_one_stop_string_or_several_are_the_same(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_near_zero_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy


def test_parameters_and_requests_are_given_by_name_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
    request = GenerateRequest(prompt=[1, 2], adapter="a", sampling_params=SamplingParams(seed=1))
    assert pickle.loads(pickle.dumps(request)) == request


def delta(index: int, text: str, token_id: int, logprob: float | None = None, **fields: Any) -> CompletionDelta:
    entry = None if logprob is None else ({token_id: Logprob(logprob, 1, text), 99: Logprob(-9.0, 2, "z")},)
    return CompletionDelta(index, text, (token_id,), entry, **fields)


def test_chunks_add_up_to_the_output() -> None:
    output = RequestOutput("r", "prompt", adapter="a")
    first = GenerateChunk("r", (delta(0, "a", 1, -1.0),), (5, 6), (None, {6: Logprob(-2.0, 1, "6")}), 4, "v1")
    output.append(first)
    assert (output.prompt_token_ids, output.num_cached_tokens, output.adapter_version) == ([5, 6], 4, "v1")
    assert output.prompt_logprobs == [None, {6: Logprob(-2.0, 1, "6")}]
    output.append(GenerateChunk("r", (delta(0, "b", 2, -0.5, finish_reason="stop", stop_reason=2),)))
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("ab", [1, 2])
    assert completion.cumulative_logprob == -1.5
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[1, 99], [2, 99]]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 2)
    assert (output.prompt_token_ids, output.num_cached_tokens, output.adapter_version) == ([5, 6], 4, "v1")


def test_completions_are_told_apart_by_index_whatever_the_order_they_come_in() -> None:
    output = RequestOutput("r", None)
    output.append(GenerateChunk("r", (delta(2, "c", 3, finish_reason="length"),), (5,)))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    output.append(GenerateChunk("r", (delta(0, "a", 1, finish_reason="length"), delta(1, "b", 2))))
    output.append(GenerateChunk("r", (delta(1, "b", 2, finish_reason="stop"),)))
    assert [completion.text for completion in output.outputs] == ["a", "bb", "c"]
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
