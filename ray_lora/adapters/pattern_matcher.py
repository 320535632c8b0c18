"""Regular expressions from an adapter's configuration, matched without trusting them.

A hostile or careless expression can backtrack for hours, and `re` holds the interpreter's lock meanwhile. So anything
but a plain name is compiled and matched in a child process with a time limit. The child runs this file as a script:
standard library only.
"""

import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

TIME_LIMIT_S = 10.0
MAX_PATTERNS = 5000
MAX_PLAIN_PATTERNS = 200
"""Names beyond this number are matched in the child as well, because even they add up."""
_PLAIN = re.compile(r"\^?(?:\w|-|\\?\.){0,200}\$?")


class Pattern(NamedTuple):
    """One expression: `re.fullmatch(regex, name)` if `full`, else `re.match(regex, name)`."""

    regex: str
    full: bool
    is_plain: bool
    """Whether the user's part is a mere name, which cannot backtrack and is matched in this process."""


class PatternError(Exception):
    """One of `suspects` does not compile, or all of them together take too long."""

    def __init__(self, suspects: Sequence[Pattern], message: str) -> None:
        super().__init__(suspects, message)
        self.suspects = suspects
        self.message = message


def fullmatch_pattern(source: str) -> Pattern:
    """As PEFT matches `target_modules` and `exclude_modules` that are strings."""
    return Pattern(source, True, bool(_PLAIN.fullmatch(source)))


def suffix_pattern(source: str) -> Pattern:
    """As PEFT matches the keys of `rank_pattern` and `alpha_pattern`."""
    return Pattern(rf"(.*\.)?({source})$", False, bool(_PLAIN.fullmatch(source)))


def layer_pattern(source: str) -> Pattern:
    """As PEFT finds the layer index behind a name of `layers_pattern`; the index is the group `idx`."""
    return Pattern(rf"(?:^|.*?\.){source}\.(?P<idx>\d+)\.", False, bool(_PLAIN.fullmatch(source)))


def is_plain_name(name: str) -> bool:
    """Whether a name holds nothing but letters, digits, underscores and dots, and something at all."""
    return re.fullmatch(r"[\w.]{1,200}", name) is not None


def match_names(patterns: Sequence[Pattern], names: Sequence[str]) -> dict[Pattern, dict[str, str]]:
    """For each pattern, the names that it matches, each with the text of the group `idx` (empty if it has none).

    Raises:
        PatternError: one of them does not compile, all together take more than `TIME_LIMIT_S`, or there are too many.
    """
    unique = tuple(dict.fromkeys(patterns))
    if len(unique) > MAX_PATTERNS:
        raise PatternError(unique, f"is one of {len(unique)}, more than the {MAX_PATTERNS} that are accepted")
    plain = tuple(pattern for pattern in unique if pattern.is_plain)[:MAX_PLAIN_PATTERNS]
    other = tuple(sorted(set(unique).difference(plain)))
    outcomes = [*_match(plain, names), *_match_in_child(other, tuple(names))]
    matched = {}
    for pattern, outcome in zip((*plain, *other), outcomes, strict=True):
        if isinstance(outcome, str):
            raise PatternError([pattern], outcome)
        matched[pattern] = outcome
    return matched


def _match(patterns: Sequence[Pattern], names: Sequence[str]) -> list[dict[str, str] | str]:
    """By pattern: the matches by name, or the reason why it does not compile."""
    outcomes: list[dict[str, str] | str] = []
    for regex, full, _ in patterns:
        try:
            compiled = re.compile(regex)
        except (re.error, ValueError, OverflowError, RecursionError, MemoryError, Warning) as error:
            outcomes.append(str(error) or type(error).__name__)
            continue
        found = {name: (compiled.fullmatch if full else compiled.match)(name) for name in names}
        outcomes.append({name: match.groupdict().get("idx") or "" for name, match in found.items() if match})
    return outcomes


@functools.lru_cache(maxsize=32)
def _match_in_child(patterns: tuple[Pattern, ...], names: tuple[str, ...]) -> list[dict[str, str] | str]:
    if not patterns:
        return []
    command = [sys.executable, "-I", "-S", "-W", "ignore", __file__]
    try:
        child = subprocess.run(
            command, input=json.dumps([patterns, names]), capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise PatternError(patterns, f"takes more than {TIME_LIMIT_S:g} s to match") from None
    if child.returncode != 0:
        raise PatternError(patterns, f"the matcher ended with {child.returncode}: {child.stderr[-200:]}")
    outcomes: list[dict[str, str] | str] = json.loads(child.stdout)
    return outcomes


if __name__ == "__main__":
    given_patterns, given_names = json.load(sys.stdin)
    json.dump(_match([Pattern(*given) for given in given_patterns], given_names), sys.stdout)
