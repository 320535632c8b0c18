from typing import Any

import pytest
from driver import CoreDriver
from fake_executor import POISON, VOCAB_SIZE, text_of

from ray_lora.errors import InvalidRequestError, NotFoundError, NumericsError


def test_a_request_gets_its_tokens_and_its_text() -> None:
    driver = CoreDriver()
    group = driver.add("HELLO", max_tokens=12)
    driver.run()
    driver.check_output(group)
    output = driver.outputs[group]
    assert output.prompt_token_ids == [24, 21, 28, 28, 31]
    assert (output.adapter_version, output.outputs[0].stop_reason) == (None, None)
    driver.check_idle()


def test_text_and_token_ids_are_the_same_prompt() -> None:
    driver = CoreDriver()
    groups = [driver.add("HELLO", max_tokens=5), driver.add([24, 21, 28, 28, 31], max_tokens=5)]
    driver.run()
    assert driver.tokens(groups[0]) == driver.tokens(groups[1])


def test_adapters_and_the_base_share_steps_and_keep_apart() -> None:
    driver = CoreDriver(max_num_seqs=8, max_num_batched_tokens=64)
    driver.register("a")
    driver.register("b", rank=32)
    groups = [driver.add("ABCDEFGHI", name, max_tokens=10) for name in ["a", None, "b", "a", None, "b"]]
    driver.run()
    for group in groups:
        driver.check_output(group)
    assert [driver.outputs[group].adapter_version for group in groups] == ["a", None, "b", "a", None, "b"]
    assert len({tuple(driver.tokens(group)) for group in groups}) == 3
    driver.check_idle()


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 16, 64])
@pytest.mark.parametrize("num_blocks", [8, 9, 12, 40])
def test_outputs_do_not_depend_on_the_budget_or_on_the_blocks(budget: int, num_blocks: int) -> None:
    driver = CoreDriver(num_blocks=num_blocks, max_num_batched_tokens=budget, max_loras=1)
    driver.register("a")
    driver.register("b")
    prompts = [(("ABCDEFGHIJKLMNOPQ"[: 3 + 4 * (i % 4)]), ["a", "b", None][i % 3]) for i in range(9)]
    groups = [driver.add(prompt, name, max_tokens=3 + i, prompt_logprobs=2) for i, (prompt, name) in enumerate(prompts)]
    driver.run()
    for group in groups:
        driver.check_output(group)
    driver.check_idle()


def test_completions_of_one_prompt_share_its_prefix_and_end_by_themselves() -> None:
    driver = CoreDriver(max_num_seqs=2)
    group = driver.add("ABCDEFGHI", n=5, max_tokens=4, temperature=1)
    driver.run()
    driver.check_output(group)
    assert len({tuple(driver.tokens(group, index)) for index in range(5)}) == 5
    assert driver.core.stats().prefix_cache_hits > 0
    driver.check_idle()


def test_completions_of_a_seeded_request_have_seeds_of_their_own_and_unseeded_ones_differ_too() -> None:
    driver = CoreDriver(max_num_seqs=8)
    seeded, unseeded = driver.add("A", n=3, seed=40, temperature=1), driver.add("A", n=3, temperature=1)
    driver.step()
    seeds = [start.seed for start in driver.executor.plans[0].starts]
    assert seeds[:3] == [40, 41, 42]
    assert len(set(seeds)) == 6
    driver.run()
    driver.check_output(seeded)
    driver.check_output(unseeded)


def test_unseeded_requests_repeat_with_the_seed_of_the_engine() -> None:
    def seeds(**config: Any) -> list[int]:
        driver = CoreDriver(**config)
        driver.add("A", n=3)
        driver.step()
        return [start.seed for start in driver.executor.plans[0].starts]

    assert seeds(seed=1) == seeds(seed=1) != seeds(seed=2)


def test_a_prompt_is_told_of_once_and_its_cached_part_counted() -> None:
    driver = CoreDriver()
    first = driver.add("ABCDEFGHI", max_tokens=3)
    driver.run()
    second = driver.add("ABCDEFGHIJ", max_tokens=3)
    driver.run()
    assert (driver.outputs[first].num_cached_tokens, driver.outputs[second].num_cached_tokens) == (0, 8)


def test_a_cached_prefix_is_shared_within_a_key_and_a_salt_only() -> None:
    driver = CoreDriver(num_blocks=64)
    driver.register("acme")

    def num_cached(**whose: Any) -> int:
        group = driver.add("ABCDEFGHI", max_tokens=1, **whose)
        driver.run()
        driver.check_output(group)
        return driver.outputs[group].num_cached_tokens

    callers: list[dict[str, Any]] = [
        {},
        {"key_name": "acme"},
        {"cache_salt": "acme"},
        {"adapter": "acme"},
        {"key_name": "acme", "cache_salt": "acme"},
        {"key_name": "acme", "adapter": "acme"},
        {"key_name": "other", "cache_salt": "acme"},
    ]
    assert [num_cached(**whose) for whose in callers] == [0] * len(callers)
    assert [num_cached(**whose) for whose in callers] == [8] * len(callers)


# Ends


def test_an_end_of_sequence_token_ends_a_request_unless_ignored() -> None:
    free = CoreDriver()
    group = free.add("ABC", max_tokens=9)
    free.run()
    eos = free.tokens(group)[3]
    driver = CoreDriver(eos=(eos,))
    ended, ignored, shown = (
        driver.add("ABC", max_tokens=9),
        driver.add("ABC", max_tokens=9, ignore_eos=True),
        driver.add("ABC", max_tokens=9, include_stop_str_in_output=True),
    )
    driver.run()
    for group in (ended, ignored, shown):
        driver.check_output(group)
    assert len(driver.tokens(ended)) == 4
    assert len(driver.tokens(ignored)) == 9
    assert driver.outputs[ended].outputs[0].stop_reason is None
    assert len(driver.outputs[shown].outputs[0].text) == 4


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 4, 9])
def test_stop_tokens_wait_for_min_tokens(min_tokens: int) -> None:
    stops = tuple(range(0, POISON, 2))
    driver = CoreDriver()
    group = driver.add("ABC", max_tokens=9, stop_token_ids=list(stops), min_tokens=min_tokens)
    driver.run()
    driver.check_output(group)
    tokens = driver.tokens(group)
    assert len(tokens) >= min_tokens
    assert not set(tokens[:min_tokens]) & set(stops)


def test_a_stop_string_ends_a_request_and_frees_what_it_held() -> None:
    free = CoreDriver()
    group = free.add("ABC", max_tokens=12)
    free.run()
    tokens = free.tokens(group)
    stop = text_of(tokens[4:7])
    driver = CoreDriver()
    group = driver.add("ABC", max_tokens=12, stop=[stop])
    driver.run()
    (output,) = driver.outputs[group].outputs
    assert (output.text, output.token_ids) == (text_of(tokens[:4]), tokens[:7])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    driver.check_idle()
    driver.add("A", max_tokens=1)
    driver.step()
    assert len(driver.executor.plans[-1].finished) == 1


def test_one_completion_stops_while_the_others_go_on() -> None:
    driver = CoreDriver(num_blocks=30, max_num_seqs=8)
    group = driver.add("ABC", n=8, max_tokens=20, temperature=1, seed=5, stop_token_ids=[1, 2, 3, 4, 5, 6])
    driver.run()
    driver.check_output(group)
    assert {output.finish_reason for output in driver.outputs[group].outputs} == {"stop", "length"}
    driver.check_idle()


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(None, 22), (50, 22), (22, 22), (21, 21)])
def test_max_tokens_is_cut_to_the_room_that_the_prompt_leaves(max_tokens: int | None, num_tokens: int) -> None:
    driver = CoreDriver(max_model_len=32)
    group = driver.add([5] * 10, max_tokens=max_tokens, min_tokens=max_tokens or 0)
    driver.run()
    driver.check_output(group)
    assert len(driver.tokens(group)) == num_tokens


# Faults


def test_a_row_that_is_not_finite_ends_only_its_request() -> None:
    driver = CoreDriver(max_num_seqs=8, max_num_batched_tokens=64)
    driver.register("a")
    good = driver.add("ABCDEFGHI", "a", max_tokens=8)
    broken = driver.add([*range(17, 26), POISON], "a", n=2)
    other = driver.add("ABCDEFGHI", max_tokens=8)
    driver.run()
    assert isinstance(driver.errors.pop(broken), NumericsError)
    assert driver.errors == {}
    assert driver.outputs[broken].outputs == []
    driver.check_output(good)
    driver.check_output(other)
    driver.check_idle()
    again = driver.add([*range(17, 26)], "a", max_tokens=8)
    driver.run()
    driver.check_output(again)


def test_a_broken_request_is_told_its_error_once_and_nothing_else() -> None:
    driver = CoreDriver(max_num_seqs=8)
    broken = driver.add([1, POISON], n=3)
    assert driver.step() == [broken]
    assert not driver.core.has_work
    assert driver.step() == []


def test_the_other_completions_of_a_broken_request_end_with_it() -> None:
    driver = CoreDriver(max_num_seqs=1)
    broken, good = driver.add([1, POISON], n=3), driver.add("ABC", max_tokens=3)
    assert driver.step() == [broken]
    driver.run()
    assert list(driver.errors) == [broken]
    driver.check_output(good)
    driver.check_idle()


def test_a_request_of_which_one_completion_is_broken_is_told_the_error_alone() -> None:
    driver = CoreDriver()
    driver.executor.is_broken = lambda start: start.seed == 5
    broken, good = driver.add("ABC", n=3, seed=4, max_tokens=3), driver.add("ABC", max_tokens=3)
    driver.run()
    assert list(driver.errors) == [broken]
    assert driver.outputs[broken].outputs == []
    driver.check_output(good)
    driver.check_idle()


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"prompt": [1], "priority": "high"}, "priority"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 32}, "prompt"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": ["1"]}, "prompt"),
        ({"prompt": [1], "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"prompt": [1], "logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_field_and_leaves_no_trace(
    request_fields: dict[str, Any], param: str
) -> None:
    driver = CoreDriver()
    driver.register("a")
    with pytest.raises(InvalidRequestError) as caught:
        driver.add(adapter="a", **request_fields)
    assert caught.value.param == param
    assert not driver.core.has_work
    driver.unregister("a")
    driver.check_idle()


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    driver = CoreDriver(max_model_len=32)
    group = driver.add([1] * 31, max_tokens=8)
    driver.run()
    driver.check_output(group)
    assert len(driver.tokens(group)) == 1


def test_an_unknown_adapter_is_not_found() -> None:
    driver = CoreDriver()
    with pytest.raises(NotFoundError, match="'nobody'") as caught:
        driver.add("A", "nobody")
    assert caught.value.param == "lora_name"


# Cancelling


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_request_can_be_cancelled_at_any_time(num_steps: int) -> None:
    driver = CoreDriver(max_num_seqs=2)
    driver.register("a")
    group, other = driver.add([1] * 20, "a", n=3, max_tokens=9, temperature=1), driver.add("ABC", max_tokens=9)
    for _ in range(num_steps):
        driver.step()
    driver.cancel(group)
    driver.cancel(group)
    driver.run()
    driver.check_output(other)
    driver.check_idle()
    assert driver.core.adapters.get("a").num_requests == 0


def test_a_finished_request_can_be_cancelled() -> None:
    driver = CoreDriver()
    group = driver.add("ABC", max_tokens=2)
    driver.run()
    driver.cancel(group)
    driver.check_output(group)
    assert driver.core.stats().requests_succeeded == {"length": 1}


# Adapters that come and go


def test_requests_finish_on_the_version_that_they_began_with() -> None:
    driver = CoreDriver()
    driver.register("a", "v1")
    old = driver.add("ABCDEFGH", "a", max_tokens=10)
    driver.step()
    driver.step()
    driver.register("a", "v2", load_inplace=True)
    new = driver.add("ABCDEFGH", "a", max_tokens=10)
    driver.run()
    driver.check_output(old)
    driver.check_output(new)
    assert (driver.outputs[old].adapter_version, driver.outputs[new].adapter_version) == ("v1", "v2")
    assert driver.tokens(old) != driver.tokens(new)
    assert ("drop", "v1") in driver.executor.calls
    driver.check_idle()


def test_a_waiting_request_keeps_the_version_of_the_moment_it_came() -> None:
    driver = CoreDriver(max_num_seqs=1)
    driver.register("a", "v1")
    driver.add("ABC", max_tokens=5)
    waiting = driver.add("ABC", "a", max_tokens=5)
    driver.register("a", "v2", load_inplace=True)
    driver.unregister("a")
    driver.run()
    driver.check_output(waiting)
    assert driver.outputs[waiting].adapter_version == "v1"
    driver.check_idle()


def test_the_base_is_the_same_with_and_without_adapters_beside_it() -> None:
    alone, mixed = CoreDriver(max_loras=0), CoreDriver(max_loras=1)
    mixed.register("a")
    expected = alone.add("ABCDEFGH", max_tokens=10)
    mixed.add("ABCDEFGH", "a", max_tokens=10)
    group = mixed.add("ABCDEFGH", max_tokens=10)
    alone.run()
    mixed.run()
    assert mixed.tokens(group) == alone.tokens(expected)


def test_hundreds_of_adapters_share_two_pages() -> None:
    driver = CoreDriver(max_loras=2, max_lora_rank=16, max_cpu_loras=200)
    groups = []
    for index in range(200):
        driver.register(f"a{index}")
        groups.append(driver.add("ABCD", f"a{index}", max_tokens=2))
    driver.run()
    for group in groups:
        driver.check_output(group)
    assert len({driver.outputs[group].adapter_version for group in groups}) == 200


def test_the_host_forgets_a_thousand_adapters_that_came_and_went() -> None:
    driver = CoreDriver(max_loras=2, max_cpu_loras=2)
    for index in range(1000):
        driver.register("a", f"v{index}", load_inplace=True)
        group = driver.add("ABCD", "a", max_tokens=1)
        driver.step()
        driver.check_output(group)
        assert set(driver.executor.staged) == {f"v{index}"}
    driver.check_idle()


# Counters


def test_the_counters_tell_what_was_done() -> None:
    driver = CoreDriver(max_num_seqs=1, max_loras=1)
    driver.register("a")
    driver.register("b", rank=32)
    driver.register("idle")
    driver.add("ABCDE", "a", max_tokens=3)
    driver.add("ABCDE", "b", max_tokens=2)
    driver.step()
    stats = driver.core.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert (stats.running_adapters, stats.waiting_adapters, stats.resident_adapters) == (("a",), ("b",), ("a",))
    assert stats.kv_cache_usage == 2 / 16
    assert (stats.num_lora_pages, stats.num_free_lora_pages) == (2, 1)
    driver.run()
    stats = driver.core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (10, 5)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 0)
    assert stats.requests_succeeded == {"length": 2}
    assert (stats.running_adapters, stats.waiting_adapters) == ((), ())
    assert stats.resident_adapters == ("b",), "an idle adapter that is resident stays visible"


def test_requests_get_an_id_only_if_they_bring_none() -> None:
    driver = CoreDriver()
    group = driver.add("A")
    assert group.request.request_id.startswith("req-")
    driver.run()
    assert driver.outputs[group].request_id == group.request.request_id


@pytest.mark.parametrize("num_before", range(9))
@pytest.mark.parametrize("max_num_seqs", [2, 3])
def test_the_prompt_is_told_whole_whichever_completion_comes_first(num_before: int, max_num_seqs: int) -> None:
    settings = {"max_model_len": 16, "block_size": 2, "num_blocks": 8, "enable_prefix_caching": False}
    driver = CoreDriver(max_num_seqs=max_num_seqs, max_num_batched_tokens=5, **settings)
    for index in range(num_before):
        driver.add([1] * (1 + index % 5), max_tokens=3)
    group = driver.add([1] * 9, n=2, prompt_logprobs=0, max_tokens=3)
    driver.run()
    driver.check_output(group)
    driver.check_idle()
