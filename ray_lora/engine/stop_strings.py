"""Finding stop strings in text that arrives in pieces, without letting out the beginning of one."""


class StopStrings:
    """Holds back as much text as could still become a stop string.

    Example: with stop `"END"`, pushing `"abE"` lets out `"a"` (two characters may begin `END`), and pushing `"ND!"`
    then finds the stop and lets out `"b"`.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = stops
        self._include_in_output = include_in_output
        self._num_held = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; returns what may be let out and the stop string that was found.

        Of several the one that ends first counts, then the longest: what is found does not depend on how the text is
        cut into pieces. With `may_stop` false (before `min_tokens`) nothing is searched and everything is let out.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        if not may_stop:
            self._held = ""
            return pending, None
        found = [(pending.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in pending]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return pending[: end if self._include_in_output else end - len(stop)], stop
        cut = max(0, len(pending) - self._num_held)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held
