"""Completions that must match a grammar, on fake ranks: each keeps to its own, whatever shares the steps."""

import asyncio
from typing import Any

import pytest
from driver import CoreDriver, make_config, make_executor
from fake_executor import POISON, FakeTokenizer, text_of

from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.engine.completion import RequestGroup
from ray_lora.errors import InvalidRequestError
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.structured_outputs import StructuredOutputsParams

EOS = 3
WORDS = ["ABCABCABC", "ABD", "B", "CCCCCCCCCCCC"]


def choose(driver: CoreDriver, words: list[str], prompt: str = "HELLO", **params: Any) -> RequestGroup:
    wanted = StructuredOutputsParams(choice=words)
    grammar = driver.core.compile_grammar(wanted)
    return driver.add(prompt, grammar=grammar, max_tokens=20, structured_outputs=wanted, **params)


def text(driver: CoreDriver, group: RequestGroup, index: int = 0) -> str:
    return text_of(driver.tokens(group, index)[:-1])


def test_a_completion_keeps_to_its_grammar_and_ends_with_it() -> None:
    driver = CoreDriver(eos=(EOS,))
    group = choose(driver, WORDS)
    driver.run()
    output = driver.outputs[group].outputs[0]
    assert text(driver, group) in WORDS
    assert (output.token_ids[-1], output.finish_reason) == (EOS, "stop")
    driver.check_idle()


def test_completions_of_one_request_go_through_the_grammar_each_by_itself() -> None:
    driver = CoreDriver(eos=(EOS,), num_blocks=32)
    group = choose(driver, WORDS, n=6, temperature=1)
    driver.run()
    texts = {text(driver, group, index) for index in range(6)}
    assert texts <= set(WORDS)
    assert len(texts) > 1


def test_one_without_a_grammar_gets_what_it_would_get_alone() -> None:
    driver = CoreDriver(eos=(EOS,))
    free, bound = driver.add("ABCDEF", max_tokens=9), choose(driver, WORDS)
    driver.run()
    driver.check_output(free)
    assert text(driver, bound) in WORDS


@pytest.mark.parametrize("budget", [1, 4, 16])
def test_chunks_and_preemption_do_not_lose_the_place_in_the_grammar(budget: int) -> None:
    driver = CoreDriver(eos=(EOS,), num_blocks=8, max_num_batched_tokens=budget)
    groups = [choose(driver, [10 * word], f"PROMPT{word}") for word in "ABD"]
    driver.run()
    assert [text(driver, group) for group in groups] == [10 * "A", 10 * "B", 10 * "D"]
    if budget > 1:
        assert driver.core.stats().num_preemptions > 0
    driver.check_idle()


def test_only_rows_that_sample_carry_what_is_allowed() -> None:
    driver = CoreDriver(eos=(EOS,), max_num_batched_tokens=4)
    choose(driver, WORDS, "ABCDEFGHIJ")
    driver.run()
    planned = [sequence for plan in driver.executor.plans for sequence in plan.sequences]
    assert any(not sequence.sample for sequence in planned)
    assert all((sequence.allowed is not None) == sequence.sample for sequence in planned)


def test_a_grammar_that_gets_too_complex_ends_its_own_request_alone() -> None:
    driver = CoreDriver(eos=(EOS,))
    complex_word = text_of([17, 17, POISON, 17])
    bad, good = choose(driver, [complex_word]), choose(driver, WORDS)
    driver.run()
    error = driver.errors[bad]
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structured_outputs"
    assert text(driver, good) in WORDS
    driver.check_idle()


def test_a_model_without_an_end_of_sequence_token_can_keep_to_none() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence") as caught:
        CoreDriver().core.compile_grammar(StructuredOutputsParams(choice=WORDS))
    assert caught.value.param == "structured_outputs"


def test_the_engine_compiles_before_it_admits_and_counts_what_it_refuses() -> None:
    async def main() -> None:
        config = make_config()
        engine = AsyncEngine(config, make_executor(config, eos=(EOS,)), FakeTokenizer())
        with pytest.raises(InvalidRequestError, match="choices alone"):
            await generate(engine, StructuredOutputsParams(regex="a"))
        assert engine.stats().all.refused["InvalidRequestError"] == 1
        assert text_of((await generate(engine, StructuredOutputsParams(choice=WORDS)))[:-1]) in WORDS
        await engine.shutdown()

    asyncio.run(main())


async def generate(engine: AsyncEngine, wanted: StructuredOutputsParams) -> list[int]:
    params = SamplingParams(max_tokens=20, structured_outputs=wanted)
    tokens: list[int] = []
    async for chunk in engine.generate(GenerateRequest(prompt="HELLO", sampling_params=params)):
        tokens += chunk.outputs[0].token_ids
    return tokens


BAD: list[dict[str, Any]] = [
    {},
    {"json": "{}", "regex": "a"},
    {"regex": ""},
    {"regex": 7},
    {"choice": []},
    {"choice": "ab"},
    {"choice": ["a", ""]},
    {"choice": ["a", 1]},
    {"json": 7},
    {"json_object": False},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_what_is_no_structure_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**fields)
    assert (caught.value.param or "").startswith("structured_outputs")


@pytest.mark.parametrize(("name", "value"), [("min_tokens", 2), ("ignore_eos", True)])
def test_what_would_go_on_after_the_grammars_end_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), **{name: value})
    assert caught.value.param == name
