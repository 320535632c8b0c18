"""Log-probabilities in OpenAI's shapes."""

import json
import math

from ray_lora.request import Logprob
from ray_lora.serve.logprob_shapes import CompletionLogprobs, chat_logprobs, token_label

BYTES = {1: b"a", 2: b" \xe6", 3: "日".encode()}


class Spelling:
    def token_bytes(self, token_id: int) -> bytes:
        return BYTES[token_id]


ENTRY = {1: Logprob(-3.0, 5, "a"), 2: Logprob(-0.1, 1, " \ufffd"), 3: Logprob(-0.2, 2, "日")}


def test_a_part_of_a_character_is_spelled_as_bytes() -> None:
    assert [token_label(token, Spelling()) for token in BYTES] == ["a", "bytes:\\x20\\xe6", "日"]


def test_a_chat_lists_the_most_likely_and_not_the_chosen_one_among_them() -> None:
    (entry,) = chat_logprobs([1], [ENTRY], 2, Spelling())["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -3.0, [97])
    assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [
        (" \ufffd", [32, 0xE6]),
        ("日", list("日".encode())),
    ]
    assert chat_logprobs([1], [ENTRY], 0, Spelling())["content"][0]["top_logprobs"] == []


def test_a_completion_counts_offsets_over_its_pieces() -> None:
    shape = CompletionLogprobs(Spelling())
    assert shape.push([3, 1], [None, {1: Logprob(-1.0, 1, "a")}]) == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -1.0],
        "tokens": ["日", "a"],
        "top_logprobs": [None, {"a": -1.0}],
    }
    assert shape.push([3], [ENTRY])["text_offset"] == [2]


def test_an_impossible_token_is_still_json() -> None:
    entry = {1: Logprob(-math.inf, 1, "a")}
    shape = chat_logprobs([1], [entry], 1, Spelling())
    assert "-9999.0" in json.dumps(shape, allow_nan=False)
