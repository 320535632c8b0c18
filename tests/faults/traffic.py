"""Clients that keep asking while something goes wrong, and what became of all that they asked.

with Traffic(url, learn(url, ["base", "a0"], prompts, max_tokens=32)) as traffic:
    traffic.wait_for_answers(8)
    traffic.mark_fault()
    os.kill(...)
    traffic.wait_until_steady(timeout_s=60)
print(traffic.report)
assert traffic.report.num_wrong == 0
"""

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

PAUSE_AFTER_FAILURE_S = 0.2
LOST_AFTER_S = 120.0
"""An answer that has not ended by then will not come."""


@dataclass(frozen=True)
class Question:
    """A prompt for a model, and the greedy tokens that are the only right answer."""

    model: str
    prompt: list[int]
    tokens: list[int]


Outcome = Literal["answered", "refused", "broken", "lost"]
"""`refused`: an error of ours with a status, before anything else. `broken`: an error event, or a stream's error of
another kind, after the answer had begun. `lost`: no answer and no error of ours."""


@dataclass(eq=False)
class Request:
    """One question, once asked. Times are of `time.monotonic`."""

    question: Question
    stream: bool
    sent_at: float
    ended_at: float = 0.0
    outcome: Outcome = "lost"
    reason: str = "did not end"
    tokens: list[int] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        """Whether any token came that is not the right one, or a whole answer that is too short."""
        expected = self.question.tokens
        return self.tokens != (expected if self.outcome == "answered" else expected[: len(self.tokens)])

    @property
    def failed_unstreamed(self) -> bool:
        """It failed before its caller had seen a token, so that it could have been tried again."""
        return self.outcome != "answered" and not self.tokens


@dataclass(frozen=True)
class Report:
    """What became of all requests; the seconds are counted from the fault, and None if it never came to that."""

    num_sent: int
    num_answered: int
    num_wrong: int
    num_lost: int
    num_failed_unstreamed: int
    num_broken: int
    failures: dict[str, int]
    """How many ended with which error: `refused 503 ServiceUnavailableError`."""
    first_good_s: float | None
    """Until the first right answer to a request that was sent after the fault."""
    steady_s: float | None
    """Until the first right answer after which nothing failed."""
    longest_s: float
    """The longest that anybody waited for a whole answer, from when it was asked."""
    last_message: str | None
    """Of the last failure."""

    def __str__(self) -> str:
        times = [
            f"{name} {'never' if value is None else f'{value:.1f} s'}"
            for name, value in (("first good answer", self.first_good_s), ("steady", self.steady_s))
        ]
        counts = (
            f"{self.num_sent} sent, {self.num_answered} answered, {self.num_lost} lost, {self.num_wrong} wrong, "
            f"{self.num_broken} broken while streamed, {self.num_failed_unstreamed} failed while unstreamed"
        )
        times.append(f"longest answer {self.longest_s:.1f} s")
        return "; ".join([counts, *times, *(f"{count} x {reason}" for reason, count in self.failures.items())])


class Traffic:
    """A bounded number of clients, each of which asks its next question once the last one has ended.

    A context manager: leaving it sends no more and waits for what is under way.

    Args:
        questions: asked in turn, streamed and not.
    """

    def __init__(self, url: str, questions: Sequence[Question], num_clients: int = 8) -> None:
        self._url = url
        self._num_clients = num_clients
        turns = itertools.product((True, False), questions)
        self._turns = itertools.cycle([(question, stream) for stream, question in turns])
        self._requests: list[Request] = []
        """Those that have ended."""
        self._under_way: list[Request] = []
        self._lock = threading.Lock()
        self._fault_at: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic", daemon=True)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def mark_fault(self) -> None:
        """Count the report's seconds from now."""
        self._fault_at = time.monotonic()

    def wait_for_answers(self, number: int, timeout_s: float = 60) -> None:
        """Until so many more requests have been answered."""
        target = self._num_answered(0.0) + number
        self._wait(lambda: self._num_answered(0.0) >= target, timeout_s, f"{number} answers")

    def wait_for_streams(self, number: int = 1, timeout_s: float = 60) -> None:
        """Until so many streams are in their first half."""

        def num_begun() -> int:
            with self._lock:
                return sum(0 < len(each.tokens) < len(each.question.tokens) / 2 for each in self._under_way)

        self._wait(lambda: num_begun() >= number, timeout_s, f"{number} streams")

    def wait_until_steady(self, timeout_s: float, num_answers: int | None = None) -> None:
        """Until so many requests in a row that were sent after the fault are answered; by default two by client."""
        number = num_answers or 2 * self._num_clients
        self._wait(lambda: self._num_answered(self._last_failure_at()) >= number, timeout_s, "steady answers")

    @property
    def report(self) -> Report:
        with self._lock:
            requests = list(self._requests)
        failed = [each for each in requests if each.outcome != "answered"]
        answered = [each for each in requests if each.outcome == "answered"]
        fault_at = self._fault_at
        good = sorted(
            each.ended_at for each in requests if each.outcome == "answered" and not each.is_wrong and each.ended_at
        )
        first = [
            each.ended_at
            for each in requests
            if fault_at is not None and each.sent_at >= fault_at and each.outcome == "answered" and not each.is_wrong
        ]
        last_failure_at = max((each.ended_at for each in failed), default=fault_at or 0.0)
        steady = [at for at in good if at >= max(last_failure_at, fault_at or 0.0)]
        return Report(
            num_sent=len(requests),
            num_answered=len(answered),
            num_wrong=sum(each.is_wrong for each in requests),
            num_lost=sum(each.outcome == "lost" for each in requests),
            num_failed_unstreamed=sum(each.failed_unstreamed for each in requests),
            num_broken=sum(each.outcome == "broken" for each in requests),
            failures=dict(Counter(_kind(each) for each in failed)),
            first_good_s=None if fault_at is None or not first else min(first) - fault_at,
            steady_s=None if fault_at is None or not steady else steady[0] - fault_at,
            longest_s=max(
                (each.ended_at - each.sent_at for each in requests if each.outcome == "answered"), default=0.0
            ),
            last_message=failed[-1].reason if failed else None,
        )

    def _num_answered(self, since: float) -> int:
        with self._lock:
            return sum(each.outcome == "answered" and each.sent_at >= since for each in self._requests)

    def _last_failure_at(self) -> float:
        with self._lock:
            times = [each.ended_at for each in self._requests if each.outcome != "answered"]
        return max([self._fault_at or 0.0, *times])

    def _wait(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout_s:.0f} s: {self.report}")
            time.sleep(0.02)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=LOST_AFTER_S)
        connector = aiohttp.TCPConnector(limit=self._num_clients)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._be_client(session) for _ in range(self._num_clients)))

    async def _be_client(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set():
            question, stream = next(self._turns)
            request = Request(question, stream, time.monotonic())
            with self._lock:
                self._under_way.append(request)
            await ask(session, self._url, request)
            with self._lock:
                self._under_way.remove(request)
                self._requests.append(request)
            if request.outcome != "answered":
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)


async def ask(session: aiohttp.ClientSession, url: str, request: Request) -> None:
    """Send it, and note what comes of it; raises nothing."""
    question = request.question
    body = {
        "model": question.model,
        "prompt": question.prompt,
        "max_tokens": len(question.tokens),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": request.stream,
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                _note_refusal(request, response.status, await response.text())
            elif request.stream:
                await _read_stream(request, response)
            else:
                request.tokens = (await response.json())["choices"][0]["token_ids"]
                request.outcome, request.reason = "answered", ""
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        request.outcome, request.reason = "lost", f"{type(error).__name__}: {error}"
    request.ended_at = time.monotonic()


def learn(url: str, models: Sequence[str], prompts: Sequence[list[int]], max_tokens: int) -> list[Question]:
    """Every model with every prompt, and the answers that an undisturbed server gives one by one."""

    async def run() -> list[Question]:
        async with aiohttp.ClientSession() as session:
            questions = []
            for model, prompt in itertools.product(models, prompts):
                request = Request(Question(model, prompt, [0] * max_tokens), stream=False, sent_at=0.0)
                await ask(session, url, request)
                assert request.outcome == "answered", f"{model}: {request.reason}"
                questions.append(Question(model, prompt, request.tokens))
            return questions

    return asyncio.run(run())


async def _read_stream(request: Request, response: aiohttp.ClientResponse) -> None:
    reason = "the stream ended without an error and without its end"
    async for event in _events(response):
        if event is None:  # `[DONE]`
            request.outcome, request.reason = ("answered", "") if reason == "finished" else ("broken", reason)
            return
        if "error" in event:
            reason = f"{event['error']['code']} {event['error']['type']}: {event['error']['message']}"
        for choice in event.get("choices", ()):
            request.tokens += choice.get("token_ids") or ()
            if choice["finish_reason"] is not None:
                reason = "finished"
    request.reason = reason


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield None if data == b"[DONE]" else json.loads(data)


def _note_refusal(request: Request, status: int, text: str) -> None:
    try:
        error: dict[str, Any] = json.loads(text)["error"]
        request.outcome, request.reason = "refused", f"{status} {error['type']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        request.outcome, request.reason = "lost", f"{status} without an error of ours: {text[:200]}"


def _kind(request: Request) -> str:
    """An outcome and its error's type, without the words."""
    return f"{request.outcome} {request.reason.split(':')[0]}"
