"""What is refused when, with a clock that stands still unless it is set."""

from contextlib import ExitStack
from typing import Any

import pytest
from test_token_bucket import Clock

from ray_lora.config import EngineConfig
from ray_lora.engine.engine_metrics import OTHER
from ray_lora.errors import CapacityError, OverloadedError, RateLimitError
from ray_lora.request import CompletionDelta, GenerateChunk, GenerateRequest, SamplingParams
from ray_lora.serve.admission import Admission, Ticket
from ray_lora.tenant import ANYONE, ApiKey, Limits, Tenant


class Desk:
    """An admission, and those that it has let in."""

    def __init__(self, **args: Any) -> None:
        self.clock = Clock()
        self.admission = Admission(EngineConfig.parse({"model": "/m/base"} | args), self.clock)
        self._open: list[tuple[ExitStack, Ticket]] = []

    def start(self, tenant: Tenant = ANYONE, adapter: str | None = None, n: int = 1, num_prompt_tokens: int = 1) -> int:
        """Let a request in; its number, from 0 on."""
        request = GenerateRequest(prompt=[1] * num_prompt_tokens, adapter=adapter, sampling_params=SamplingParams(n=n))
        stack = ExitStack()
        self._open.append((stack, stack.enter_context(self.admission.enter(tenant, request))))
        return len(self._open) - 1

    def refusal(self, *args: Any, **fields: Any) -> CapacityError:
        with pytest.raises(CapacityError) as caught:
            self.start(*args, **fields)
        return caught.value

    def tell(self, index: int, num_tokens: int) -> None:
        self._open[index][1].count(GenerateChunk("r", (CompletionDelta(0, "", (7,) * num_tokens),)))

    def begin_again(self, index: int) -> None:
        self._open[index][1].begin_again()

    def level(self, tenant: Tenant) -> float:
        """Tokens left to a key."""
        (usage,) = [usage for (_, limits), usage in self.admission._usages.items() if limits == tenant.limits]
        assert usage.bucket is not None
        return usage.bucket._level

    def end(self, index: int) -> None:
        self._open[index][0].close()

    @property
    def num_remembered(self) -> int:
        return len(self.admission._usages)


def key(name: str = "acme", **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=("0" * 64,), limits=Limits.model_validate(limits))


def test_without_limits_everything_is_let_in_and_nothing_is_remembered() -> None:
    desk = Desk(max_queued_requests=None)
    for _ in range(5000):
        desk.start(key(), "a")
    assert desk.num_remembered == 0


def test_a_key_has_as_many_requests_at_once_as_it_may_and_another_as_soon_as_one_ends() -> None:
    desk, acme = Desk(), key(max_concurrent_requests=2)
    first = desk.start(acme, "a")
    desk.start(acme, "b")
    error = desk.refusal(acme)
    assert (type(error), str(error)) == (RateLimitError, "The API key 'acme' is limited to 2 requests at once.")
    assert error.retry_after is not None
    desk.start(key("other", max_concurrent_requests=2))
    desk.start()
    desk.tell(first, 1)
    desk.refusal(acme)
    desk.end(first)
    desk.start(acme)
    desk.refusal(acme)


def test_completions_count_and_not_calls() -> None:
    desk, acme = Desk(), key(max_concurrent_requests=4)
    desk.start(acme, n=3)
    assert str(desk.refusal(acme, n=2)).endswith("limited to 4 requests at once; this asks for 2.")
    desk.start(acme)
    with pytest.raises(RateLimitError):
        desk.admission.check(acme, None, 1)


def test_a_refused_request_counts_for_nobody() -> None:
    desk, acme = Desk(adapter_limits={"a": {"max_concurrent_requests": 1}}), key(max_concurrent_requests=2)
    desk.start(acme, "a")
    for _ in range(3):
        assert "The model 'a'" in str(desk.refusal(acme, "a"))
    desk.start(acme, "b")


def test_who_has_its_first_token_waits_no_more() -> None:
    desk, acme = Desk(), key(max_queued_requests=1)
    first = desk.start(acme)
    assert str(desk.refusal(acme)) == "The API key 'acme' is limited to 1 waiting requests."
    desk.tell(first, 1)
    second = desk.start(acme)
    desk.refusal(acme)
    desk.end(second)
    desk.start(acme)


def test_an_adapter_has_limits_of_its_own_whoever_calls() -> None:
    limits = {"a": {"max_concurrent_requests": 2}, "*": {"max_concurrent_requests": 1}}
    desk = Desk(adapter_limits=limits)
    desk.start(key("x"), "a")
    desk.start(ANYONE, "a")
    assert str(desk.refusal(key("y"), "a")) == "The model 'a' is limited to 2 requests at once."
    for adapter in ("b", "c"):
        desk.start(adapter=adapter)
        desk.refusal(adapter=adapter)
    for _ in range(5):
        desk.start()


def test_the_base_model_is_limited_by_its_name() -> None:
    desk = Desk(adapter_limits={"base": {"max_concurrent_requests": 1}})
    desk.start()
    assert "The model 'base'" in str(desk.refusal())
    desk.start(adapter="a")


def test_a_full_server_refuses_everybody_as_overloaded() -> None:
    desk = Desk(max_queued_requests=3)
    first = desk.start(key("x"), n=2)
    desk.start(adapter="a")
    for tenant in (ANYONE, key("y", max_concurrent_requests=9)):
        error = desk.refusal(tenant)
        assert (type(error), error.retry_after) == (OverloadedError, 1.0)
    desk.tell(first, 1)
    desk.start(n=2)
    desk.refusal()


def test_the_prompt_is_paid_at_once_and_the_answer_as_it_comes() -> None:
    desk, acme = Desk(), key(tokens_per_minute=60)
    first = desk.start(acme, num_prompt_tokens=40)
    desk.tell(first, 10)
    second = desk.start(acme, num_prompt_tokens=9)
    desk.tell(second, 11)
    error = desk.refusal(acme)
    assert isinstance(error, RateLimitError)
    assert (error.kind, error.retry_after) == ("tokens", pytest.approx(11))
    assert str(error) == "The API key 'acme' is limited to 60 tokens per minute; try again in 11.0 s."
    desk.clock.now += 10.9
    desk.refusal(acme)
    desk.clock.now += 0.2
    desk.start(acme)


def test_a_request_that_came_to_nothing_has_used_no_tokens() -> None:
    desk, acme = Desk(), key(tokens_per_minute=60)
    lost = desk.start(acme, num_prompt_tokens=500)
    desk.refusal(acme)
    desk.end(lost)
    answered = desk.start(acme, num_prompt_tokens=60)
    desk.tell(answered, 1)
    desk.end(answered)
    desk.refusal(acme)


def test_tokens_of_a_key_and_of_an_adapter_are_counted_apart() -> None:
    desk = Desk(adapter_limits={"a": {"tokens_per_minute": 100}})
    desk.tell(desk.start(key("x", tokens_per_minute=60), "a", num_prompt_tokens=30), 40)
    assert "The API key 'x'" in str(desk.refusal(key("x", tokens_per_minute=60), "b"))
    desk.tell(desk.start(key("y", tokens_per_minute=60), "a", num_prompt_tokens=29), 1)
    assert "The model 'a'" in str(desk.refusal(key("z", tokens_per_minute=60), "a"))
    desk.start(key("z", tokens_per_minute=60), "b")


def test_who_is_idle_and_owes_nothing_is_forgotten() -> None:
    desk = Desk(adapter_limits={"*": {"max_concurrent_requests": 3, "tokens_per_minute": 60}})
    for index in range(100):
        desk.end(desk.start(key(f"k{index}", max_concurrent_requests=1), f"nobody-{index}", num_prompt_tokens=90))
    assert desk.num_remembered == 0
    answered = desk.start(adapter="a")
    desk.tell(answered, 59)
    desk.end(answered)
    assert desk.num_remembered == 1
    desk.refusal(adapter="a")
    desk.clock.now += 60
    desk.end(desk.start(adapter="a"))
    assert desk.num_remembered == 0


def test_other_limits_of_a_key_hold_at_once() -> None:
    desk = Desk()
    desk.start(key(max_concurrent_requests=1))
    desk.refusal(key(max_concurrent_requests=1))
    desk.start(key(max_concurrent_requests=2))


def test_refusals_are_counted_by_adapter_and_reason_as_far_as_there_are_labels() -> None:
    desk = Desk(max_adapter_labels=1, max_queued_requests=1, adapter_limits={"*": {"max_concurrent_requests": 1}})
    for name in "abc":
        desk.refusal(adapter=name, n=2)
    desk.refusal(adapter="a", n=2)
    desk.refusal(n=2)
    assert desk.admission.refusals == {
        ("a", "RateLimitError"): 2,
        (OTHER, "RateLimitError"): 2,
        ("base", "OverloadedError"): 1,
    }


def test_a_request_that_begins_again_waits_again_and_pays_for_what_it_got_alone() -> None:
    desk, acme = Desk(), key(max_queued_requests=1, tokens_per_minute=100)
    first = desk.start(acme, num_prompt_tokens=10)
    desk.tell(first, 80)
    desk.begin_again(first)
    assert "waiting requests" in str(desk.refusal(acme))
    desk.tell(first, 20)
    desk.end(first)
    assert desk.level(acme) == 70
    again = desk.start(acme, num_prompt_tokens=10)
    desk.tell(again, 5)
    desk.begin_again(again)
    desk.end(again)
    assert desk.level(acme) == 70
