"""What an engine did and why, for people: a report of its steps, and the story of one tensor or kind.

Theory. The report reads the trace, the plan, its replay, and the facts of each step. Steps that differed from the
profiled one, and the first one under the plan (it begins with everything here), are counted and left out of the
medians.

Writing wears disks out. Bytes per step over the time of a step give bytes per year, to compare with the disk's rated
TBW (terabytes written).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.offload.planning.choose import Choice
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.trace import KINDS, Trace
from forebay.offload.runner import StepFacts

YEAR_S = 365.25 * 86_400
MIB = 1 << 20


@dataclass(frozen=True)
class Report:
    """Medians over the steps that followed the plan; `str` of it is for people. Bytes and seconds are of one step."""

    steps: int
    unlike: int  # steps that were not like the profiled one
    need_bytes: int
    budget_bytes: int
    most_bytes: int  # lived at once, as the trace counts
    over_bytes: int
    policy: str
    moves: int
    predicted_s: float
    step_s: float
    missing_s: float
    memory_s: float
    written_bytes: int
    read_bytes: int
    unplanned: int
    written_a_year_bytes: float
    failures: tuple[str, ...]
    refused: str = ""  # why steps go on without a plan, though there was one

    def __str__(self) -> str:
        if self.refused:
            return (
                f"steps go on without a plan, slowly, and are within the budget as far as operators are: {self.refused}"
            )
        if not self.steps:
            return f"no step has followed a plan yet; {self.unlike} were unlike the one that was profiled"
        over = f", {_mib(self.over_bytes)} over" if self.over_bytes else ""
        waited = f"{self.missing_s:.3g} s waiting for tensors and {self.memory_s:.3g} s for memory"
        moved = f"{_mib(self.written_bytes)} written and {_mib(self.read_bytes)} read"
        year = f"{self.written_a_year_bytes / 1e12:.3g} TB"
        lines = [
            f"{self.steps} steps by plan '{self.policy}', {self.unlike} unlike the one that was profiled",
            f"needs {_mib(self.need_bytes)}, budget {_mib(self.budget_bytes)}, at once {_mib(self.most_bytes)}{over}",
            f"a step takes {self.step_s:.4g} s (predicted {self.predicted_s:.4g} s), of which {waited}",
            f"{self.moves} moves planned, {self.unplanned} unplanned; {moved}",
            f"at this rate {year} are written in a year: compare with the disks' TBW",
        ]
        return "\n".join([*lines, *(f"failed: {failure}" for failure in self.failures)])


def report_of(
    trace: Trace | None,
    choice: Choice | None,
    steps: Sequence[StepFacts],
    budget_bytes: int,
    failures: Sequence[Any],
    refused: str = "",
) -> Report:
    """The report of an engine."""
    like = [step for step in steps[1:] if not step.lost]
    step_s = _median([step.step_s for step in like])
    written = _median([step.written_bytes for step in like])
    return Report(
        steps=len(like),
        unlike=sum(step.lost for step in steps),
        need_bytes=int(trace.need_bytes().max()) if trace else 0,
        budget_bytes=budget_bytes,
        most_bytes=max((step.most_bytes for step in like), default=0),
        over_bytes=max((step.over_bytes for step in like), default=0),
        policy=choice.plan.rank if choice else "none",
        moves=len(choice.plan.moves) if choice else 0,
        predicted_s=choice.replayed.step_s if choice else 0.0,
        step_s=step_s,
        missing_s=_median([step.missing_s for step in like]),
        memory_s=_median([step.memory_s for step in like]),
        written_bytes=int(written),
        read_bytes=int(_median([step.read_bytes for step in like])),
        unplanned=int(_median([step.unplanned for step in like])),
        written_a_year_bytes=written / step_s * YEAR_S if step_s else 0.0,
        failures=tuple(str(failure) for failure in failures),
        refused=refused,
    )


def explain(trace: Trace, choice: Choice, what: str) -> str:
    """Why a tensor (its name) or all of a kind moves, or stays."""
    if what in KINDS:
        return _explain_kind(trace, choice, what)
    if what not in trace.tensors:
        some = ", ".join(trace.tensors[:4])
        return f"there is no tensor or kind {what!r}: kinds are {', '.join(KINDS)}; tensors are named like {some}"
    tensor = trace.tensors.index(what)
    kind = KINDS[int(trace.kinds[tensor])]
    uses = ", ".join(trace.operators[at] for at in trace.uses(tensor).tolist()[:8])
    lines = [f"{what}: {kind} of {_mib(int(trace.sizes_bytes[tensor]))}, used by {uses}"]
    for move in choice.plan.moves:
        if move.tensor == tensor:
            where = "disk" if move.tier is Tier.DISK else "host memory"
            how = "is stored to" if move.stores else "leaves, with a copy that is still good, for"
            lines.append(
                f"  after {trace.operators[move.last_use]} it {how} {where}, and is fetched "
                f"{move.need - move.load} operators before {trace.operators[move.need % trace.operator_count]} needs it"
            )
    if len(lines) == 1:
        lines.append(f"  it stays: {_why_it_stays(trace, choice, tensor)}")
    return "\n".join(lines)


def _why_it_stays(trace: Trace, choice: Choice, tensor: int) -> str:
    if KINDS[int(trace.kinds[tensor])] == "temporary":
        return "nobody can move it, it belongs to whoever made it"
    if choice.plan.is_idle:
        return "the step fits as it is"
    if trace.sizes_bytes[tensor] < choice.plan.size_bytes_min:
        return f"it is smaller than {choice.plan.size_bytes_min:,} bytes, and the step fits without its leaving"
    over = trace.need_bytes() > choice.plan.hardware.target_bytes
    if not over[trace.births[tensor] : trace.deaths[tensor] + 1].any():
        return "it does not live where memory is short"
    return "others relieve more for what they cost, or no time between its uses is long enough"


def _explain_kind(trace: Trace, choice: Choice, kind: str) -> str:
    these = trace.kinds == KINDS.index(kind)
    moves = [move for move in choice.plan.moves if these[move.tensor]]
    moved = {move.tensor for move in moves}
    total = int(trace.sizes_bytes[these].sum())
    size = int(sum(trace.sizes_bytes[tensor] for tensor in moved))
    stored = sum(move.stores for move in moves)
    return (
        f"{kind}: {int(these.sum())} tensors of {_mib(total)}; {len(moved)} of them, {_mib(size)}, leave {len(moves)} "
        f"times in a step and are stored {stored} times"
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"
