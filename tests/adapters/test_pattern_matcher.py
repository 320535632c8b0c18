import re
import time

import pytest

from ray_lora.adapters import pattern_matcher
from ray_lora.adapters.pattern_matcher import (
    PatternError,
    fullmatch_pattern,
    layer_pattern,
    match_names,
    suffix_pattern,
)

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.10.mlp.up_proj", "lm_head")


@pytest.mark.parametrize("source", ["lm_head", ".*q_proj", r"model\.layers\.1.*", "(?i).*UP_PROJ", "q_proj", ""])
def test_a_full_match_is_that_of_re(source: str) -> None:
    pattern = fullmatch_pattern(source)
    assert set(match_names([pattern], NAMES)[pattern]) == {name for name in NAMES if re.fullmatch(source, name)}


def test_a_suffix_begins_after_a_dot() -> None:
    pattern, other = suffix_pattern("q_proj"), suffix_pattern("proj")
    matched = match_names([pattern, other], NAMES)
    assert set(matched[pattern]) == set(NAMES[:2])
    assert not matched[other]


@pytest.mark.parametrize("source", ["layers", "l[a-z]+s"])
def test_a_layer_pattern_gives_the_index_behind_it(source: str) -> None:
    pattern = layer_pattern(source)
    assert list(match_names([pattern], NAMES)[pattern].values()) == ["0", "1", "10"]


def test_names_are_plain_and_all_that_can_backtrack_is_not() -> None:
    plain = ["q_proj", "self_attn.q_proj", r"^model\.layers\.0\.mlp\.up_proj$", "a-b"]
    assert all(fullmatch_pattern(source).is_plain for source in plain)
    assert not any(
        fullmatch_pattern(source).is_plain for source in ["a*", "(|)", "a?", "a{3}", "[a]", r"\d", "x" * 300]
    )


@pytest.mark.parametrize("source", ["(", "a**", "[z-a]", "(?P<idx>a)(?P<idx>b)", "x{99999999999999999999}", "(" * 5000])
def test_an_expression_that_does_not_compile_is_named(source: str) -> None:
    bad = fullmatch_pattern(source)
    with pytest.raises(PatternError) as caught:
        match_names([fullmatch_pattern("lm_head"), bad], NAMES)
    assert caught.value.suspects == [bad]


def test_catastrophic_backtracking_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_matcher, "TIME_LIMIT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(PatternError, match="takes more than"):
        match_names([fullmatch_pattern(r"([\w.]+)+X")], NAMES)
    assert time.monotonic() - start < 5


def test_there_is_a_limit_to_the_number_of_expressions() -> None:
    with pytest.raises(PatternError, match="more than"):
        match_names([fullmatch_pattern(f"n{index}") for index in range(5001)], NAMES)


def test_names_beyond_the_plain_limit_match_all_the_same() -> None:
    patterns = [suffix_pattern(f"layers.{index}.self_attn.q_proj") for index in range(300)]
    matched = match_names(patterns, (*NAMES, "model.layers.299.self_attn.q_proj"))
    assert [pattern for pattern in patterns if matched[pattern]] == [patterns[0], patterns[1], patterns[299]]
