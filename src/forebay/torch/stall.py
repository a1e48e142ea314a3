"""Measures how long steps waited for data, and why.

Theory. A step waits from the moment it asks for a batch until it has it. The time that the batch itself took gives the
reasons: bytes that were not at the node, or shards not looked into yet (`cold`), a node that was busy or away (`busy`),
bytes read past a node that is gone (`direct`), decoding (`decode`), and the rest (`read`). Batches made ahead hide most
of that. Only the visible wait is counted, and divided in proportion. It costs about 2 µs a step.

Invariant. The reasons add up to the wait.
"""

from __future__ import annotations

from typing import Any

from forebay.torch.source import Facts

REASONS = ("cold", "busy", "direct", "decode", "read")


class StallMeter:
    """Counts since it was made or `reset`. `seconds` by reason; `last` are those of the newest step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.steps = self.samples = self.size_bytes = self.items = self.cold_items = self.direct_items = (
            self.skipped
        ) = 0
        self.waited_s = self.worst_s = self.elapsed_s = 0.0
        self.seconds = dict.fromkeys(REASONS, 0.0)
        self.last = dict.fromkeys(REASONS, 0.0)
        self.skipped_names: list[str] = []

    def add(self, waited_s: float, elapsed_s: float, samples: int, facts: Facts) -> None:
        """A step that waited `waited_s` of the `elapsed_s` since the one before."""
        self.steps += 1
        self.samples += samples
        self.size_bytes += facts.size_bytes
        self.items += facts.items
        self.cold_items += facts.cold
        self.direct_items += facts.direct
        self.waited_s += waited_s
        self.elapsed_s += elapsed_s
        self.worst_s = max(self.worst_s, waited_s)
        if facts.skipped:
            self.skipped += len(facts.skipped)
            self.skipped_names = (self.skipped_names + facts.skipped)[:10]
        direct_s = facts.read_s if facts.direct else 0.0
        cold_s = facts.index_s + (facts.read_s if facts.cold and not facts.direct else 0.0)
        whole_s = facts.index_s + facts.read_s + facts.busy_s + facts.decode_s
        share = waited_s / whole_s if whole_s > 0 else 0.0
        others = (cold_s, facts.busy_s, direct_s, facts.decode_s)
        for reason, spent_s in zip(
            REASONS, (*(each_s * share for each_s in others), waited_s - share * sum(others)), strict=True
        ):
            self.last[reason] = spent_s
            self.seconds[reason] += spent_s

    def report(self) -> dict[str, Any]:
        """All of it, as plain values. `stalled` is the share of the time that steps waited."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "size_bytes": self.size_bytes,
            "items": self.items,
            "cold_items": self.cold_items,
            "direct_items": self.direct_items,
            "skipped": self.skipped,
            "skipped_names": list(self.skipped_names),
            "waited_s": self.waited_s,
            "worst_s": self.worst_s,
            "stalled": self.waited_s / self.elapsed_s if self.elapsed_s else 0.0,
            "seconds": dict(self.seconds),
        }

    def __str__(self) -> str:
        """One line for a log."""
        if not self.steps:
            return "no steps yet"
        reasons = ", ".join(f"{reason} {spent_s:.2f} s" for reason, spent_s in self.seconds.items() if spent_s >= 0.005)
        rate = self.samples / self.elapsed_s if self.elapsed_s else 0.0
        line = (
            f"{self.steps} steps, {rate:.0f} samples/s, waited {self.waited_s:.2f} s for data "
            f"({self.report()['stalled']:.1%}; worst {self.worst_s * 1000:.0f} ms)"
        )
        line += f": {reasons}" if reasons else ""
        return line + (f"; skipped {self.skipped}, first {self.skipped_names[0]}" if self.skipped else "")
