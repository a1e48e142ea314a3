"""Results as a table for people and as JSON for whoever compares runs.

The table is Markdown, because it is read in a terminal and pasted into `docs/benchmarks.md` alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.row import Row
from bench.stats import Measure


@dataclass(frozen=True)
class Result:
    """What a row gave. `error` is set when it could not be measured: that is printed as a loss, not left out."""

    row: Row
    measures: tuple[Measure, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: str = ""
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.error and all(measure.verdict != "MISSED" for measure in self.measures)


def timed(result: Result, seconds: float) -> Result:
    """The result with how long the row took."""
    return replace(result, seconds=seconds)


HEAD = ("row", "what", "measure", "Forebay", "peer", "result", "spread", "goal", "verdict")


def table(results: Sequence[Result]) -> str:
    """One line per measure, columns aligned."""
    lines: list[tuple[str, ...]] = [HEAD]
    for result in results:
        row = result.row
        if result.error:
            lines.append((row.name, row.what, "", "", row.peer, "", "", "", f"FAILED: {result.error}"))
        for measure in result.measures:
            lines.append((row.name, row.what, *_cells(row, measure)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    rendered = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [rendered[0], rule, *rendered[1:]])


def notes(results: Sequence[Result]) -> str:
    """What rows say besides their measures, each below its name."""
    return "\n".join(f"\n{result.row.name}:\n" + "\n".join(result.notes) for result in results if result.notes)


def _cells(row: Row, measure: Measure) -> tuple[str, ...]:
    low, high = measure.spread
    ours = quantity(statistics.median(measure.ours), measure.unit)
    theirs = (
        f"{measure.peer or row.peer} {quantity(statistics.median(measure.theirs), measure.unit)}"
        if measure.theirs
        else "–"
    )
    spread = f"{number(low)}–{number(high)}" if len(measure.ratios) > 1 else "–"
    return (measure.name, ours, theirs, number(measure.value), spread, str(measure.goal), measure.verdict)


def number(value: float) -> str:
    """Three significant digits, no exponent; thousands are spaced."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    digits = 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def quantity(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"
    if unit == "s":
        return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"
    return f"{number(value)} {unit}".rstrip()


def machine() -> dict[str, object]:
    """What was measured on: enough to judge whether two runs may be compared."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def as_json(results: Sequence[Result], *, quick: bool, wall_s: float) -> str:
    document = {
        "machine": machine(),
        "quick": quick,
        "unix_s": round(wall_s),
        "rows": [
            {
                "row": result.row.name,
                "what": result.row.what,
                "peer": result.row.peer,
                "link": str(result.row.link),
                "seconds": round(result.seconds, 1),
                "error": result.error,
                "notes": list(result.notes),
                "extra": result.extra,
                "measures": [
                    {**asdict(measure), "goal": str(measure.goal), "median": measure.value, "verdict": measure.verdict}
                    for measure in result.measures
                ],
            }
            for result in results
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


def summary(results: Sequence[Result]) -> str:
    measures = [measure for result in results for measure in result.measures]
    said = {word: sum(measure.verdict == word for measure in measures) for word in ("reached", "MISSED", "reported")}
    failed = sum(bool(result.error) for result in results)
    return f"{said['reached']} reached, {said['MISSED']} missed, {said['reported']} reported, {failed} could not run"
