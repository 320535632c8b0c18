"""Those who ask a server for completions, in every way, and look at what they get."""

import json
import random
from functools import partial
from typing import Any

import aiohttp

from tests.soak.answer_check import Answer, AnswerCheck
from tests.soak.ledger import Ledger, WrongAnswerError
from tests.soak.reference import BASE, NUM_TOKENS, Prompt, Reference
from tests.soak.served_api import VERSION_HEADER, ServedApi

STOPS = ("e", "th", "s.", "1", " a", "qu")
SEEDS = (1, 2, 5)


class Callers:
    """Each method is one request, at random."""

    def __init__(
        self, api: ServedApi, ledger: Ledger, reference: Reference, versions: dict[str, str], rng: random.Random
    ) -> None:
        """
        Args:
            versions: of all contents.
        """
        self.check = AnswerCheck(reference)
        self._api, self._ledger, self._reference, self._versions, self._rng = api, ledger, reference, versions, rng

    async def ask_all(self) -> None:
        """Ask every name, and the base, one thing."""
        for name in (BASE, *self._ledger.names):
            ask = partial(self._ask_one, "operator", name, self._any_prompt(), {"max_tokens": 8, "temperature": 0})
            await self._ledger.watch(ask)

    async def ask(self) -> None:
        await self._ask_one("operator", self._any_name(), self._any_prompt(), self._any_params())

    async def ask_within_limits(self) -> None:
        """With a key that may use few adapters, or little."""
        key = self._rng.choice(["acme", "busy", "poor"])
        await self._ask_one(key, self._any_name(), self._any_prompt(), self._any_params())

    async def leave(self) -> None:
        """Go away in the middle of an answer."""
        params = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "n": self._rng.choice([1, 1, 2])}
        after = self._rng.choice([0, 1, 3, 10])
        await self._ask_one("operator", self._any_name(), self._any_prompt(), params, stream=True, leave_after=after)

    async def ask_many(self) -> None:
        """Several prompts in one body."""
        texts = [prompt for prompt in self._reference.prompts if isinstance(prompt.content, str)]
        prompts = self._rng.sample(texts, 3)
        await self._ask_one("operator", self._any_name(), prompts[0], self._any_params(), others=prompts[1:])

    async def ask_badly(self) -> None:
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
        got, said = await self._api.post("operator", "v1/completions", **body)
        self._ledger.judge("bad request", got, {status, 503}, f"{body} {said}")

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
        begin = 0 if name == BASE else self._ledger.begin(name)
        path = "chat/completions" if is_chat else "completions"
        answer = await self._complete(key, path, body, leave_after)
        self._check(key, name, begin, prompts, body, answer, has_left=leave_after is not None)

    async def _complete(self, key: str, path: str, body: dict[str, Any], leave_after: int | None) -> Answer:
        answer = Answer()
        num_events = 0
        try:
            async with self._api.request("POST", key, f"v1/{path}", body) as response:
                answer.status = response.status
                answer.versions = [each for each in response.headers.get(VERSION_HEADER, "").split(", ") if each]
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
        possible = [BASE] if name == BASE else self._ledger.names[name].versions[begin:]
        tally = self._ledger.tally[kind]
        is_foreign = key == "acme" and name != BASE and not name.startswith("a")
        is_unknown = answer.status == 404 or (answer.error or "").endswith("does not exist.")
        if is_unknown and (None in possible or is_foreign):
            tally["404 as it should be"] += 1
        elif answer.status == 429 and key in ("busy", "poor"):
            tally["429 as it should be"] += 1
        elif answer.status != 200 or answer.error is not None:
            self._ledger.failed(kind, answer.status, answer.has_begun, about)
        elif is_foreign or not set(answer.versions or [BASE]) <= set(possible):
            raise WrongAnswerError(f"the version cannot be: {[str(each)[:8] for each in possible]}: {about}")
        else:
            told = possible if body["stream"] and len(prompts) > 1 else answer.versions or [BASE]
            contents = [content for content in (BASE, *self._versions) if self._versions.get(content, BASE) in told]
            fault = self.check.fault(contents, prompts, body, answer, has_left)
            if fault is not None:
                raise WrongAnswerError(f"{fault}: {about}")
            tally["right"] += 1

    def _any_name(self) -> str:
        return self._rng.choice([BASE, *self._ledger.names, *self._ledger.names])

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
