from collections.abc import Sequence
from typing import Any

import pytest
from fake_executor import FakeTokenizer

from ray_lora.engine.completion import Completion, RequestGroup, logprobs_dict
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.request import (
    CompletionDelta,
    FinishReason,
    GenerateRequest,
    Logprob,
    RequestOutput,
    SamplingParams,
)
from ray_lora.stats import AdapterStats
from ray_lora.step import TokenLogprobs

TOKENIZER = FakeTokenizer()


def make_completion(prompt: str = "PROMPT", index: int = 0, **params: Any) -> Completion:
    params = {"max_tokens": 100} | params
    sequence = SequenceState(7, TOKENIZER.encode(prompt), SamplingParams(**params), 0, (), None)
    return Completion(index, sequence, TOKENIZER)


def push(
    completion: Completion, text: str, finish_reason: FinishReason | None = None, logprobs: TokenLogprobs | None = None
) -> CompletionDelta:
    """One sampled token, as the scheduler and then the engine hand it on."""
    (token_id,) = TOKENIZER.encode(text)
    completion.sequence.token_ids.append(token_id)
    completion.sequence.finish_reason = finish_reason
    return completion.push(token_id, logprobs)


def push_all(completion: Completion, text: str) -> RequestOutput:
    """Push characters until one of them ends the completion."""
    output = RequestOutput("r", None)
    group = RequestGroup(GenerateRequest(prompt="PROMPT"), [completion], TOKENIZER, AdapterStats())
    for place, character in enumerate(text):
        output.append(group.chunk([push(completion, character, "length" if place == len(text) - 1 else None)]))
        if output.finished:
            break
    return output


def test_every_token_gives_its_text() -> None:
    completion = make_completion()
    assert push(completion, "A") == CompletionDelta(0, "A", (17,))
    assert push(completion, "B", "length") == CompletionDelta(0, "B", (18,), None, "length", None)


@pytest.mark.parametrize(("include", "text"), [(False, "hello "), (True, "hello END")])
def test_a_stop_string_ends_the_text_before_or_after_it(include: bool, text: str) -> None:
    completion = make_completion(stop="END", include_stop_str_in_output=include)
    (output,) = push_all(completion, "hello ENDless").outputs
    assert output.text == text
    assert (output.finish_reason, output.stop_reason) == ("stop", "END")
    assert len(output.token_ids) == len("hello END")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    completion = make_completion(stop=["END"])
    assert [push(completion, character).text for character in "xEN"] == ["", "", "x"]
    assert push(completion, "N", "length").text == "ENN"


def test_a_stop_string_that_is_complete_with_the_last_token_is_a_stop() -> None:
    completion = make_completion(stop=["AB"])
    push(completion, "A")
    delta = push(completion, "B", "length")
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", "AB")


def test_a_stop_token_is_not_shown_but_what_was_held_back_is() -> None:
    completion = make_completion(stop=["AB"])
    push(completion, "A")
    completion.sequence.stop_reason = 18
    delta = push(completion, "B", "stop")
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("A", (18,), "stop", 18)


def test_a_stop_token_is_shown_if_asked_for() -> None:
    completion = make_completion(include_stop_str_in_output=True)
    assert push(completion, "B", "stop").text == "B"


def test_stop_strings_are_searched_after_min_tokens_only() -> None:
    (output,) = push_all(make_completion(stop=["A"], min_tokens=2), "AABAB").outputs
    assert output.text == "AAB"
    assert output.finish_reason == "stop"


class Utf8Tokenizer(FakeTokenizer):
    """Tokens are bytes; the text of a character is out with its last byte."""

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> "Utf8Detokenizer":
        return Utf8Detokenizer()


class Utf8Detokenizer:
    def __init__(self) -> None:
        self._held = b""

    def push(self, token_id: int) -> str:
        self._held += bytes([token_id])
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return ""
        self._held = b""
        return text


def test_a_character_of_several_tokens_and_a_stop_string_of_such() -> None:
    sequence = SequenceState(1, [0], SamplingParams(stop="漢字"), 0, (), None)
    completion = Completion(0, sequence, Utf8Tokenizer())
    text = ""
    for token_id in "é漢漢字x".encode():
        sequence.token_ids.append(token_id)
        delta = completion.push(token_id, None)
        text += delta.text
        if delta.finish_reason is not None:
            break
    assert (text, delta.finish_reason, delta.token_ids) == ("é漢", "stop", ("字".encode()[-1],))


def test_logprobs_hold_the_chosen_token_first_and_then_the_best() -> None:
    entry = TokenLogprobs(17, -3.0, rank=5, top=((18, -0.5), (19, -1.0)))
    assert list(logprobs_dict(entry, TOKENIZER).items()) == [
        (17, Logprob(-3.0, 5, "A")),
        (18, Logprob(-0.5, 1, "B")),
        (19, Logprob(-1.0, 2, "C")),
    ]


def test_a_chosen_token_among_the_best_is_listed_once() -> None:
    entry = TokenLogprobs(18, -0.5, rank=1, top=((18, -0.5), (19, -1.0)))
    assert list(logprobs_dict(entry, TOKENIZER)) == [18, 19]


def test_every_token_has_logprobs_even_where_it_gives_no_text() -> None:
    completion = make_completion(stop=["AB"], logprobs=0)
    deltas = [push(completion, text, logprobs=TokenLogprobs(17, -1.0, 1, ())) for text in "AA"]
    assert [delta.text for delta in deltas] == ["", "A"]
    assert all(delta.logprobs is not None and len(delta.logprobs) == 1 for delta in deltas)
    output = RequestOutput("r", None)
    group = RequestGroup(GenerateRequest(prompt="P"), [completion], TOKENIZER, AdapterStats())
    for delta in deltas:
        output.append(group.chunk([delta]))
    assert output.outputs[0].cumulative_logprob == -2.0


def test_the_first_chunk_alone_tells_of_the_prompt() -> None:
    completion = make_completion("AB", prompt_logprobs=0)
    completion.sequence.num_cached_tokens = 1
    completion.sequence.prompt_logprobs = [TokenLogprobs(18, -2.0, 3, ())]
    group = RequestGroup(GenerateRequest(prompt="AB", request_id="mine"), [completion], TOKENIZER, AdapterStats())
    first, second = group.chunk([push(completion, "C")]), group.chunk([push(completion, "D")])
    assert first.request_id == second.request_id == "mine"
    assert first.prompt_token_ids == (17, 18)
    assert first.prompt_logprobs == (None, {18: Logprob(-2.0, 3, "B")})
    assert first.num_cached_tokens == 1
    assert (second.prompt_token_ids, second.prompt_logprobs, second.num_cached_tokens) == (None, None, 0)


def test_a_group_is_finished_when_all_its_completions_are() -> None:
    completions = [make_completion(index=index) for index in range(2)]
    group = RequestGroup(GenerateRequest(prompt="P"), completions, TOKENIZER, AdapterStats())
    push(completions[1], "A", "length")
    assert not group.finished
    push(completions[0], "A", "stop")
    assert group.finished
