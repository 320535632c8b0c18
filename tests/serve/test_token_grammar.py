"""Whatever tokens a grammar lets through, the text matches what was asked for."""

import json
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.token_grammar import TokenGrammar
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 49152 + 7
"""A model's head may have more rows than the tokenizer has tokens."""
EOS = (2, 0)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "été"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"at": {"type": "boolean"}}, "required": ["at"]}},
}
LIST = 'root ::= item ("," item)*\nitem ::= [a-c]+ | "(" root ")"'


def compile_(tokenizer: Tokenizer, **wanted: Any) -> TokenGrammar:
    return tokenizer.grammar(StructuredOutputsParams(**wanted), VOCAB_SIZE, EOS)


def allowed_tokens(grammar: TokenGrammar) -> list[int]:
    bits = np.unpackbits(np.frombuffer(grammar.allowed, np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return bits.nonzero()[0].tolist()


def walk(tokenizer: Tokenizer, grammar: TokenGrammar, chance: random.Random, hurry: int = 60) -> str:
    """Take tokens at random until the end, and from some point on the end whenever there is one."""
    tokens: list[int] = []
    for index in range(2000):
        allowed = allowed_tokens(grammar)
        assert allowed, "nothing may follow"
        ends = sorted(set(allowed) & set(EOS))
        if ends and (index >= hurry or len(allowed) == len(ends)):
            assert ends == sorted(EOS), "either end will do"
            return tokenizer.decode(tokens, skip_special_tokens=False)
        inner = [token for token in allowed if token not in EOS]
        tokens.append(chance.choice(inner[:8] if index >= hurry else inner))  # single bytes come first
        grammar.accept(tokens[-1])
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_text", [False, True])
def test_json_fits_its_schema(tokenizer: Tokenizer, seed: int, is_text: bool) -> None:
    schema = json.dumps(PERSON) if is_text else PERSON
    text = walk(tokenizer, compile_(tokenizer, json=schema), random.Random(seed))
    jsonschema.validate(json.loads(text), PERSON)


def test_json_without_whitespace_has_none(tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 5}
    texts = [
        walk(tokenizer, compile_(tokenizer, json=schema, disable_any_whitespace=True), random.Random(seed))
        for seed in range(6)
    ]
    assert all(re.fullmatch(r"\[[12](,[12]){2,4}\]", text) for text in texts)


@pytest.mark.parametrize("seed", range(3))
def test_any_object_is_an_object(tokenizer: Tokenizer, seed: int) -> None:
    text = walk(tokenizer, compile_(tokenizer, json_object=True), random.Random(seed), hurry=8)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("regex", [r"(Paris|Rome): \d{1,3} km", r"[é-ü]{3}x?", r"a*b"])
def test_the_whole_text_matches_a_regex(tokenizer: Tokenizer, regex: str, seed: int) -> None:
    assert re.fullmatch(regex, walk(tokenizer, compile_(tokenizer, regex=regex), random.Random(seed), hurry=5))


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_is_one_of_the_texts(tokenizer: Tokenizer, seed: int) -> None:
    choice = ["yes", "yes and no", 'a "quote"', "line\nbreak", "日本"]
    assert walk(tokenizer, compile_(tokenizer, choice=choice), random.Random(seed)) in choice


@pytest.mark.parametrize(
    "grammar", [LIST, 'start: item ("," item)*\nitem: /[a-c]+/ | "(" start ")"'], ids=["gbnf", "lark"]
)
def test_a_context_free_grammar_in_either_notation(tokenizer: Tokenizer, grammar: str) -> None:
    for seed in range(4):
        text = walk(tokenizer, compile_(tokenizer, grammar=grammar), random.Random(seed), hurry=10)
        depth = [text[:end].count("(") - text[:end].count(")") for end in range(len(text) + 1)]
        assert re.fullmatch(r"[abc,()]+", text)
        assert min(depth) == depth[-1] == 0


def test_a_copy_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    first = compile_(tokenizer, choice=["ab", "cd"])
    second = first.copy()
    before = second.allowed
    first.accept(next(iter(tokenizer.encode("a"))))
    assert second.allowed == before != first.allowed


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "(a"}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": "{"}, "parsing"),
        ({"json": "[]"}, "object"),
        ({"json": {"type": "thing"}}, "thing"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "song"}}, "song"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "retriev"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength"),
        ({"json": {"const": {1, 2}}}, "JSON"),
        ({"grammar": "root ::= nowhere"}, "nowhere"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": "start: start start"}, "matches nothing"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_to_is_refused_by_name(tokenizer: Tokenizer, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compile_(tokenizer, **wanted)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 300


def repeated(levels: Sequence[int]) -> str:
    regex = "(a|b|ab)"
    for most in levels:
        regex = f"({regex}{{0,{most}}}c?){{0,{most}}}"
    return regex


@pytest.mark.parametrize("regex", [repeated([50, 50, 50]), "(.*a){1,60}" * 20, "(x+x+)+y" * 40])
def test_a_huge_one_is_refused_or_kept_to_but_never_hangs(tokenizer: Tokenizer, regex: str) -> None:
    with suppress(InvalidRequestError):
        grammar = compile_(tokenizer, regex=regex)
        for _ in range(30):
            grammar.accept(allowed_tokens(grammar)[-1])
