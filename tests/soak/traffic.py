"""Callers of a server, all that they may do, and whether what they get is right."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from tests.soak.reference import BASE, NUM_TOKENS, Expected, Prompt, Reference

VERSION_HEADER = "x-adapter-version"
LOGPROB_TOLERANCE = 2e-3
STOPS = ("e", "th", "s.", "1", " a", "qu")
SEEDS = (1, 2, 5)
OUTAGE_S = 8.0
"""How long after the server is whole again callers may still hear that it was not."""
STALE_S = 3.0
"""How long after that a new replica may have missed a change."""


class WrongAnswerError(Exception):
    """The server has said what is not so."""


@dataclass(slots=True)
class Name:
    """An adapter's name: what it has pointed to, and since when it can only be the later of those."""

    name: str
    versions: list[str | None] = field(default_factory=lambda: [None])
    first: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def possible(self) -> list[str | None]:
        return self.versions[self.first :]

    @asynccontextmanager
    async def becoming(self, version: str | None) -> AsyncIterator[Callable[[bool], None]]:
        """A change under way: requests may see it or not, until it is said whether it has happened."""
        before, was_certain = self.versions[-1], self.first == len(self.versions) - 1
        self.versions.append(version)

        def settle(has_happened: bool) -> None:
            if not has_happened:
                self.versions.append(before)
            if has_happened or was_certain:
                self.first = len(self.versions) - 1

        yield settle


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """What an answer, or an event of a stream, has about it."""
        said = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or said.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.logprobs += [each["logprob"] for each in logprobs.get("content") or []]
        self.logprobs += logprobs.get("token_logprobs") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason


@dataclass(slots=True)
class Answer:
    status: int = 0
    versions: list[str] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def has_begun(self) -> bool:
        return any(choice.token_ids for choice in self.choices.values())

    def add(self, data: dict[str, Any]) -> None:
        if "error" in data:
            self.error = str(data["error"]["message"])
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices", ()):
            self.choices[choice["index"]].add(choice)


class Traffic:
    """One caller after another, `num_callers` at a time, and `num_writers` who change the adapters."""

    def __init__(
        self, url: str, keys: dict[str, str], reference: Reference, names: list[str], session: aiohttp.ClientSession
    ) -> None:
        self.names = {name: Name(name) for name in names}
        self.tally: dict[str, Counter[str]] = defaultdict(Counter)
        """By kind of request, how often it ended how."""
        self.wrong: list[str] = []
        self.num_checked = 0
        self.versions: dict[str, str] = {}
        """By content."""
        self.is_broken, self.whole_at = False, -OUTAGE_S
        self._url, self._keys, self._reference, self._session = url, keys, reference, session
        self._rng = random.Random(7)
        self._seeded: dict[tuple[str, int, int], list[int]] = {}

    async def run(self, seconds: float, num_callers: int = 12, num_writers: int = 3) -> None:
        until = time.monotonic() + seconds

        async def repeat(actions: dict[Callable[[], Awaitable[None]], int]) -> None:
            while time.monotonic() < until:
                (action,) = self._rng.choices(list(actions), list(actions.values()))
                await self._watched(action)

        reads = {self._ask: 12, self._leave: 3, self._ask_many: 1, self._ask_badly: 1, self._ask_within_limits: 3}
        changes = {self._point: 8, self._unload: 3, self._pin: 2, self._look: 2, self._validate: 1, self._load_badly: 1}
        callers = [repeat(reads) for _ in range(num_callers)]
        await asyncio.gather(*callers, *[repeat(changes) for _ in range(num_writers)])

    async def learn_versions(self) -> None:
        """What the server calls each content; also those that it will not name before they are loaded."""
        for content, path in self._reference.contents.items():
            _, found = await self._post("operator", "validate_lora_adapter", lora_path=str(path))
            assert found["valid"], (content, found)
            self.versions[content] = found["version"]
        assert len(set(self.versions.values())) == len(self.versions)

    async def check_all(self) -> None:
        """Ask every name, and the base, one thing; nobody else may be calling."""
        for name in (BASE, *self.names):
            prompt = self._rng.choice(self._reference.prompts)
            await self._watched(partial(self._ask_one, "operator", name, prompt, {"max_tokens": 8, "temperature": 0}))

    async def unload_all(self) -> None:
        status, listed = await self._call("GET", "operator", "adapters")
        assert status == 200, listed
        for info in listed["data"]:
            status, said = await self._post("operator", "unload_lora_adapter", lora_name=info["name"])
            assert status == 200, said

    async def _watched(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        except WrongAnswerError as error:
            self.wrong.append(f"{time.strftime('%T')} {error}")

    # Requests for completions.

    async def _ask(self) -> None:
        await self._ask_one("operator", self._any_name(), self._any_prompt(), self._any_params())

    async def _ask_within_limits(self) -> None:
        """With a key that may use few adapters, or little."""
        key = self._rng.choice(["acme", "busy", "poor"])
        await self._ask_one(key, self._any_name(), self._any_prompt(), self._any_params())

    async def _leave(self) -> None:
        """Go away in the middle of an answer."""
        params = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "n": self._rng.choice([1, 1, 2])}
        after = self._rng.choice([0, 1, 3, 10])
        await self._ask_one("operator", self._any_name(), self._any_prompt(), params, stream=True, leave_after=after)

    async def _ask_many(self) -> None:
        """Several prompts in one body."""
        texts = [prompt for prompt in self._reference.prompts if isinstance(prompt.content, str)]
        prompts = self._rng.sample(texts, 3)
        await self._ask_one("operator", self._any_name(), prompts[0], self._any_params(), others=prompts[1:])

    async def _ask_badly(self) -> None:
        text = {"prompt": "x"}
        status, body = self._rng.choice(
            [
                (400, text | {"temperature": -1}),
                (400, text | {"max_tokens": 0}),
                (400, text | {"n": 1000}),
                (400, text | {"logprobs": 99}),
                (400, {"prompt": "a " * 400}),
                (400, {"prompt": [319, 320]}),
                (400, {"prompt": ""}),
                (400, text | {"stream_options": {"include_usage": True}}),
                (400, text | {"no_such_field": 1}),
                (404, text | {"model": "no-such-adapter"}),
            ]
        )
        got, said = await self._post("operator", "completions", **body)
        self._judge("bad request", got, {status, 503}, f"{body} {said}")

    async def _ask_one(
        self,
        key: str,
        name: str,
        prompt: Prompt,
        params: dict[str, Any],
        others: list[Prompt] = [],  # noqa: B006  never changed
        stream: bool | None = None,
        leave_after: int | None = None,
    ) -> None:
        prompts = [prompt, *others]
        is_chat = isinstance(prompt.content, list)
        body = params | {"model": name, "return_token_ids": True}
        body |= {"stream": self._rng.random() < 0.5 if stream is None else stream}
        if body["stream"] and self._rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if is_chat:
            body["messages"] = prompt.content
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        else:
            body["prompt"] = prompt.content if not others else [each.content for each in prompts]
        begin = self._begin(name)
        path = "chat/completions" if is_chat else "completions"
        answer = await self._complete(key, path, body, leave_after)
        self._check(key, name, begin, prompts, body, answer, has_left=leave_after is not None)

    async def _complete(self, key: str, path: str, body: dict[str, Any], leave_after: int | None) -> Answer:
        answer = Answer()
        num_events = 0
        try:
            async with self._session.post(f"{self._url}/v1/{path}", json=body, headers=self._head(key)) as response:
                answer.status = response.status
                answer.versions = (
                    response.headers[VERSION_HEADER].split(", ") if VERSION_HEADER in response.headers else []
                )
                if not (body["stream"] and response.status == 200):
                    answer.add(await response.json())
                    return answer
                async for line in response.content:
                    if num_events == leave_after:
                        return answer
                    if line.startswith(b"data: {"):
                        num_events += 1
                        answer.add(json.loads(line[6:]))
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    def _check(
        self,
        key: str,
        name: str,
        begin: int,
        prompts: list[Prompt],
        body: dict[str, Any],
        answer: Answer,
        has_left: bool,
    ) -> None:
        kind = ("left" if has_left else "stream" if body["stream"] else "whole") + f" as {key}"
        about = f"{kind} {name} {json.dumps(body)} -> {answer}"
        possible = [BASE] if name == BASE else self.names[name].versions[0 if self._is_outage(STALE_S) else begin :]
        is_foreign = key == "acme" and name != BASE and not name.startswith("a")
        is_unknown = answer.status == 404 or (answer.error or "").endswith("does not exist.")
        if is_unknown and (None in possible or is_foreign):
            self.tally[kind]["404 as it should be"] += 1
        elif answer.status == 429 and key in ("busy", "poor"):
            self.tally[kind]["429 as it should be"] += 1
        elif answer.status != 200 or answer.error is not None:
            self._failed(kind, answer, about)
        elif is_foreign or not set(answer.versions or [BASE]) <= set(possible):
            raise WrongAnswerError(f"the version cannot be: {[str(each)[:8] for each in possible]}: {about}")
        else:
            told = possible if body["stream"] and len(prompts) > 1 else answer.versions or [BASE]
            contents = [content for content in (BASE, *self.versions) if self.versions.get(content, BASE) in told]
            self._check_choices(contents, prompts, body, answer, has_left, about)
            self.tally[kind]["right"] += 1

    def _check_choices(
        self,
        contents: list[str],
        prompts: list[Prompt],
        body: dict[str, Any],
        answer: Answer,
        has_left: bool,
        about: str,
    ) -> None:
        """Of several prompts each is right for one of the contents."""
        n = body.get("n", 1)
        if not has_left and sorted(answer.choices) != list(range(n * len(prompts))):
            raise WrongAnswerError(f"not all choices: {about}")
        for index, choice in answer.choices.items():
            prompt = prompts[index // n]
            faults = []
            for content in contents:
                if "seed" in body and len(contents) > 1:
                    faults.append(None)  # whose it is cannot be said
                elif "seed" in body:
                    faults.append(self._repeat_fault(content, prompt, body["seed"] + index % n, choice))
                else:
                    faults.append(self._fault(content, prompt, body, choice, has_left))
            if None not in faults:
                raise WrongAnswerError(f"{contents}: {faults}: {about}")
        num_tokens = sum(len(choice.token_ids) for choice in answer.choices.values())
        if answer.usage is not None and answer.usage["completion_tokens"] != num_tokens:
            raise WrongAnswerError(f"usage: {about}")

    def _fault(self, content: str, prompt: Prompt, body: dict[str, Any], choice: Choice, has_left: bool) -> str | None:
        """What is not as PEFT has it."""
        continuation = self._reference.continuation(content, prompt)
        certain = continuation.num_certain
        if choice.token_ids[:certain] != continuation.token_ids[: len(choice.token_ids)][:certain]:
            return f"not {continuation.token_ids}"
        for mine, right in zip(choice.logprobs[:certain], continuation.logprobs, strict=False):
            if abs(mine - right) > LOGPROB_TOLERANCE:
                return f"not {continuation.logprobs}"
        expected = self._reference.expected(content, prompt, body)
        if has_left or expected is None:
            return None
        self.num_checked += 1
        found = Expected(choice.token_ids, choice.text.rstrip("\ufffd"), choice.finish_reason, choice.stop_reason)
        return None if found == expected else f"not {expected}"

    def _repeat_fault(self, content: str, prompt: Prompt, seed: int, choice: Choice) -> str | None:
        """What was sampled with a seed is what was sampled with it before; `n` completions have as many seeds."""
        key = (content, self._reference.prompts.index(prompt), seed)
        known = self._seeded.get(key, choice.token_ids)
        shared = min(len(known), len(choice.token_ids))
        if known[:shared] != choice.token_ids[:shared]:
            return f"sampled {known} before"
        self._seeded[key] = max(known, choice.token_ids, key=len)
        return None

    # Changes of adapters.

    async def _point(self) -> None:
        """Load a name, new or known, with any content."""
        name = self._rng.choice(list(self.names.values()))
        content = self._rng.choice(list(self.versions))
        version = self.versions[content]
        async with name.lock, name.becoming(version) as settle:
            body: dict[str, Any] = {"lora_name": name.name, "lora_path": str(self._reference.contents[content])}
            status, said = await self._post("operator", "load_lora_adapter", load_inplace=True, **body)
            if status < 500:
                settle(status == 200)
            if status == 200 and said != version:
                raise WrongAnswerError(f"loading {content} as {name.name} gave {said}, not {version}")
        self._judge("load", status, {200, 429}, f"{name.name} {content} {said}")

    async def _unload(self) -> None:
        name = self._rng.choice(list(self.names.values()))
        async with name.lock:
            before = name.possible
            async with name.becoming(None) as settle:
                status, said = await self._post("operator", "unload_lora_adapter", lora_name=name.name)
                if status < 500:
                    settle(status in (200, 404))
        right = {404 if each is None else 200 for each in before}
        self._judge("unload", status, right, f"{name.name} {before} {said}")

    async def _pin(self) -> None:
        name = self._rng.choice(list(self.names.values()))
        verb = self._rng.choice(["pin", "unpin", "unpin", "weight"])
        async with name.lock:
            right = {404 if each is None else 200 for each in name.possible}
            if verb == "pin":
                right |= {429}
            body = {"weight": 2.0} if verb == "weight" else {}
            status, said = await self._post("operator", f"adapters/{name.name}/{verb}", **body)
        self._judge(verb, status, right, f"{name.name} {said}")

    async def _look(self) -> None:
        """The list has each name that must be there, at a version that it may have."""
        begins = {name: 0 if self._is_outage(STALE_S) else self._begin(name) for name in self.names}
        status, listed = await self._call("GET", "operator", "adapters")
        self._judge("list", status, {200}, str(listed))
        if status == 200:
            found = {info["name"]: info["version"] for info in listed["data"]}
            for name, begin in begins.items():
                if found.get(name) not in self.names[name].versions[begin:]:
                    possible = self.names[name].versions[begin:]
                    raise WrongAnswerError(f"listed: {name} as {found.get(name)}, which may be {possible}")

    async def _validate(self) -> None:
        content = self._rng.choice(list(self.versions))
        path = str(self._reference.contents[content])
        status, said = await self._post("operator", "validate_lora_adapter", lora_path=path)
        self._judge("validate", status, {200, 429}, f"{content} {said}")
        if status == 200 and said["version"] != self.versions[content]:
            raise WrongAnswerError(f"validating {content} gave {said}, not {self.versions[content]}")

    async def _load_badly(self) -> None:
        good = str(self._reference.contents["plain"])
        status, key, body = self._rng.choice(
            [
                (404, "operator", {"lora_name": "bad", "lora_path": "/no/such/directory"}),
                (400, "operator", {"lora_name": "bad", "lora_path": str(self._reference.model)}),
                (400, "operator", {"lora_name": "bad"}),
                (403, "acme", {"lora_name": "bad", "lora_path": good}),
                (403, "busy", {"lora_name": "bad", "lora_path": good}),
                (401, "nobody", {"lora_name": "bad", "lora_path": good}),
            ]
        )
        got, said = await self._post(key, "load_lora_adapter", **body)
        self._judge("bad load", got, {status}, f"{key} {body} {said}")

    # What they have in common.

    async def _post(self, key: str, path: str, **body: Any) -> tuple[int, Any]:
        return await self._call("POST", key, path, body)

    async def _call(self, method: str, key: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; of a load the version. 599 if there was no answer."""
        try:
            async with self._session.request(
                method, f"{self._url}/v1/{path}", json=body, headers=self._head(key)
            ) as response:
                said = await response.text()
                if response.content_type == "application/json":
                    said = json.loads(said)
                return response.status, response.headers.get(VERSION_HEADER, said)
        except (aiohttp.ClientError, TimeoutError) as error:
            return 599, f"{type(error).__name__}: {error}"

    def _judge(self, kind: str, status: int, right: set[int], about: str) -> None:
        if status in right:
            self.tally[kind][f"{status} as it should be"] += 1
        else:
            self._failed(kind, Answer(status, error=about), f"{kind}: {status}, not {right}: {about}")

    def _failed(self, kind: str, answer: Answer, about: str) -> None:
        """Which is allowed while a rank is lost, and never harms more than the request."""
        if not self._is_outage(OUTAGE_S) or answer.status not in (0, 200, 503, 504, 599):
            raise WrongAnswerError(f"a failure without a cause: {about}")
        self.tally[kind]["broke off" if answer.has_begun else "failed before its first token"] += 1

    def _is_outage(self, after_s: float) -> bool:
        return self.is_broken or time.monotonic() < self.whole_at + after_s

    def _begin(self, name: str) -> int:
        return 0 if name == BASE else self.names[name].first

    def _any_name(self) -> str:
        return self._rng.choice([BASE, *self.names, *self.names])

    def _any_prompt(self) -> Prompt:
        return self._rng.choice(self._reference.prompts)

    def _any_params(self) -> dict[str, Any]:
        rng = self._rng
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 24, NUM_TOKENS]), "n": rng.choice([1, 1, 1, 2, 3])}
        params["ignore_eos"] = rng.random() < 0.5
        if rng.random() < 0.25:
            return params | {"temperature": 0.8, "seed": rng.choice(SEEDS)}
        if rng.random() < 0.3:
            params["stop"] = rng.sample(STOPS, 2)
        if rng.random() < 0.3:
            params["logprobs"] = rng.randrange(4)
        return params | {"temperature": 0}

    def _head(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys.get(key, key)}"}
