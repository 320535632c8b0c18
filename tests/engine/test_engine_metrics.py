"""What the engine counts, against what was asked of it."""

import pytest
from driver import CoreDriver
from fake_executor import POISON

from ray_lora.engine.engine_metrics import OTHER, EngineMetrics
from ray_lora.errors import AdapterExistsError, InvalidRequestError, NotFoundError
from ray_lora.stats import AdapterStats, Histogram


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def test_every_token_is_counted_for_its_adapter_and_for_all() -> None:
    driver = CoreDriver()
    driver.register("a")
    groups = [driver.add([1, 2, 3], name, max_tokens=tokens) for name, tokens in (("a", 5), (None, 3), ("a", 1))]
    driver.run()
    stats = driver.core.stats()
    of_a, of_base = stats.by_adapter["a"], stats.by_adapter["fake"]
    assert (of_a.generation_tokens, of_base.generation_tokens, stats.generation_tokens) == (6, 3, 9)
    assert (of_a.prompt_tokens, of_base.prompt_tokens, stats.prompt_tokens) == (6, 3, 9)
    for each, requests, tokens in ((of_a, 2, 6), (of_base, 1, 3), (stats.all, 3, 9)):
        assert count(each.time_to_first_token) == count(each.queue_time) == requests
        assert count(each.inter_token_latency) == tokens - requests
        assert each.finished == {"stop": 0, "length": requests, "abort": 0, "error": 0}
    assert count(stats.requests.e2e_latency) == count(stats.requests.decode_time) == 3
    assert stats.requests.prompt_tokens.total == 9
    assert stats.requests.generation_tokens.total == 9
    assert all(driver.outputs[group].metrics is not None for group in groups)


def test_the_last_chunk_tells_where_the_time_went() -> None:
    driver = CoreDriver()
    group = driver.add([1, 2, 3], max_tokens=6, n=2)
    timelines = [completion.timeline for completion in group.completions]
    for timeline in timelines:
        timeline.arrived_at -= 4.0
    while not group.finished:
        assert driver.outputs[group].metrics is None
        driver.step()
    metrics = driver.outputs[group].metrics
    assert metrics is not None
    assert metrics.load_wait_s == pytest.approx(4.0)
    assert metrics.queue_s == timelines[0].scheduled_at - timelines[0].queued_at > 0
    assert metrics.time_to_first_token_s == pytest.approx(timelines[0].first_token_at - timelines[0].arrived_at)
    assert metrics.e2e_s == pytest.approx(max(t.last_token_at for t in timelines) - timelines[0].arrived_at)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (3, 12)
    assert metrics.time_per_output_token_s == metrics.decode_s / 11


def test_a_preempted_request_has_one_first_token() -> None:
    driver = CoreDriver(num_blocks=6)
    for first in range(3):
        driver.add([first, 1, 2, 3], max_tokens=12)
    driver.run()
    stats = driver.core.stats()
    assert stats.num_preemptions > 0
    assert count(stats.all.time_to_first_token) == 3
    assert count(stats.all.inter_token_latency) == 3 * 11


def test_requests_that_do_not_come_to_their_end_are_told_by_reason() -> None:
    driver = CoreDriver()
    driver.add([1, POISON, 2], max_tokens=4)
    leaving = driver.add([1, 2, 3], max_tokens=20, n=2)
    driver.step()
    driver.cancel(leaving)
    driver.cancel(leaving)
    driver.run()
    stats = driver.core.stats()
    assert stats.all.finished == {"stop": 0, "length": 0, "abort": 2, "error": 1}
    assert stats.requests_succeeded == {}
    assert count(stats.requests.e2e_latency) == 0


def test_what_is_not_accepted_is_told_by_reason_and_makes_no_label() -> None:
    driver = CoreDriver()
    driver.register("a")
    with pytest.raises(InvalidRequestError):
        driver.add([], "a")
    with pytest.raises(NotFoundError):
        driver.add([1], "nobody")
    stats = driver.core.stats()
    assert stats.by_adapter["a"].refused["InvalidRequestError"] == 1
    assert stats.by_adapter[OTHER].refused["NotFoundError"] == 1
    assert sum(stats.all.refused.values()) == 2
    assert stats.prompt_tokens == 0
    assert "nobody" not in stats.by_adapter


def test_labels_are_limited_and_the_rest_share_one() -> None:
    driver = CoreDriver(max_adapter_labels=2)
    for name in "abcd":
        driver.register(name)
        driver.add([1, 2], name, max_tokens=2)
        driver.run()
    stats = driver.core.stats()
    assert set(stats.by_adapter) == {"fake", "a", "b", OTHER}
    assert stats.by_adapter[OTHER].generation_tokens == 4
    assert (stats.num_adapter_labels, stats.max_adapter_labels) == (2, 2)
    assert stats.num_adapters == {"disk": 0, "host": 2, "device": 2}


def test_an_unloaded_adapter_gives_up_its_label_to_the_next_and_stays_in_the_sum() -> None:
    driver = CoreDriver(max_adapter_labels=1)
    driver.register("a")
    driver.add([1, 2], "a", max_tokens=2)
    driver.run()
    driver.register("b")
    running = driver.add([1, 2], "b", max_tokens=3)
    assert set(driver.core.stats().by_adapter) == {"fake", "a", OTHER}
    driver.unregister("a")
    driver.add([1, 2], "b", max_tokens=4)
    driver.run()
    stats = driver.core.stats()
    assert set(stats.by_adapter) == {"fake", "b", OTHER}
    assert stats.by_adapter["b"].generation_tokens == 4
    assert running.stats is stats.by_adapter[OTHER]
    assert stats.generation_tokens == 9


def test_without_labels_adapters_are_one_and_the_base_is_apart() -> None:
    metrics = EngineMetrics("base", 0, lambda _: True)
    assert metrics.of("a") is metrics.of("b") is metrics.by_adapter[OTHER]
    assert metrics.of(None) is metrics.by_adapter["base"] is not metrics.of("a")


def test_loads_and_evictions_are_told_by_stage_and_tier() -> None:
    metrics = EngineMetrics("base", 1, lambda name: name != "gone")
    metrics.loaded("a", {"parse": 1.0, "commit": 0.5})
    metrics.loaded("a", {"fetch": 3.0, "parse": 2.0})
    metrics.evicted("a", "device")
    metrics.evicted(None, "host")
    with pytest.raises(AdapterExistsError), metrics.counting_failed_loads():
        raise AdapterExistsError("taken", "lora_name")
    assert metrics.of("a").loads == {
        "fetch": (2, 3.0),
        "parse": (2, 3.0),
        "stage": (2, 0.0),
        "barrier": (2, 0.0),
        "commit": (2, 0.5),
    }
    assert AdapterStats().loads == {}
    assert metrics.of("a").evictions == {"host": 0, "device": 1}
    assert metrics.all.evictions == {"host": 1, "device": 1}
    assert metrics.load_failures["InvalidRequestError"] == 1


def test_adapters_that_give_way_are_told_by_name() -> None:
    driver = CoreDriver(max_loras=1)
    for name in "ab":
        driver.register(name)
    for name in "aba":
        driver.add([1, 2], name, max_tokens=2)
        driver.run()
    assert driver.core.adapters.take_idle("ab") == "b"
    stats = driver.core.stats()
    assert stats.by_adapter["a"].evictions == {"host": 0, "device": 1}
    assert stats.by_adapter["b"].evictions == {"host": 1, "device": 1}


def test_a_histogram_counts_a_bound_in_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 8.0)
