"""Answers as they come, whole or in events, and whether they are what PEFT says."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.soak.reference import Expected, Prompt, Reference

LOGPROB_TOLERANCE = 2e-3


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


class AnswerCheck:
    """Greedy answers are compared with the reference; sampled ones with those of the same seed before."""

    def __init__(self, reference: Reference) -> None:
        self.num_whole = 0
        """Completions of which everything was compared."""
        self._reference = reference
        self._seeded: dict[tuple[str, int, int], list[int]] = {}

    def fault(
        self, contents: list[str], prompts: list[Prompt], body: dict[str, Any], answer: Answer, has_left: bool
    ) -> str | None:
        """What is wrong with an answer that one of the contents has given to each prompt; None is nothing."""
        n = body.get("n", 1)
        if not has_left and sorted(answer.choices) != list(range(n * len(prompts))):
            return "not all choices"
        for index, choice in answer.choices.items():
            prompt = prompts[index // n]
            faults: list[str | None] = []
            for content in contents:
                if "seed" in body and len(contents) > 1:
                    faults.append(None)  # whose it is cannot be said
                elif "seed" in body:
                    faults.append(self._repeat_fault(content, prompt, body["seed"] + index % n, choice))
                else:
                    faults.append(self._greedy_fault(content, prompt, body, choice, has_left))
            if None not in faults:
                return f"{contents}: {faults}"
        num_tokens = sum(len(choice.token_ids) for choice in answer.choices.values())
        if answer.usage is not None and answer.usage["completion_tokens"] != num_tokens:
            return "usage"
        return None

    def _greedy_fault(
        self, content: str, prompt: Prompt, body: dict[str, Any], choice: Choice, has_left: bool
    ) -> str | None:
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
        self.num_whole += 1
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
