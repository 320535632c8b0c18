"""Timing, a table on the terminal, and the same as JSON."""

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODEL = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `bar` is what it should reach, in the same unit; None where there is none."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    at_least: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        is_met = self.value >= self.bar if self.at_least else self.value <= self.bar
        return "ok" if is_met else "MISSED"


def seconds(function: Callable[[], object], repeats: int = 2) -> float:
    """The shortest of some runs: the machine may be shared, and only delays are added."""
    return min(_once(function) for _ in range(repeats))


def report(benchmark: str, rows: list[Row], **facts: Any) -> None:
    """Print a table and write `results/<benchmark>.json`."""
    print(f"\n{benchmark}")
    for row in rows:
        bar = "" if row.bar is None else f"{'>=' if row.at_least else '<='} {row.bar:g}"
        print(f"  {row.name:<52} {row.value:>10.3f} {row.unit:<8} {bar:<9} {row.verdict:<7} {row.note}")
    RESULTS.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    content = {"benchmark": benchmark, "machine": machine, **facts, "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{benchmark}.json").write_text(json.dumps(content, indent=1))


def _once(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
