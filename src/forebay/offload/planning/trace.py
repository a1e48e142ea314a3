"""What one training step does with memory, as a value.

Theory. A trace holds operators in order with their times, the *points* between them at which an engine can act, and
tensors with the operators that use them. Everything else follows: the memory that each operator needs, and when a
tensor waits. Traces come from a run, from fake tensors or from a file. Nothing here needs torch.

A tensor is a storage. It lives from `births` to `deaths`, both operators included. A *persistent* one lives always, and
its uses go round: the last use of this step is followed by the first of the next. A use may write. A tensor that was
not written since its store has a good copy.

Invariants (checked when a trace is made; `Invalid` names the broken one). (1) Uses of a tensor rise and lie within its
life. (2) Points rise, and the first is before the first operator. (3) Sizes and times are not negative, and a step has
at most OPERATORS_MAX operators and TENSORS_MAX tensors.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from forebay.core.errors import Invalid

Kind = Literal["parameter", "gradient", "optimizer state", "activation", "temporary"]
KINDS: tuple[Kind, ...] = ("parameter", "gradient", "optimizer state", "activation", "temporary")
OPERATORS_MAX = 4_000_000  # sixty times what a 70B model's step has; planning is quadratic in the worst case
TENSORS_MAX = 2_000_000
FILE_BYTES_MAX = 1 << 30  # of JSON, unpacked: a trace of 60,000 operators is some 10 MB
FORMAT = 1

Ints = Any  # numpy arrays of int64, float64 and bool: numpy is not followed by the type checker
Floats = Any
Flags = Any


@dataclass(frozen=True)
class Trace:
    """One step. Operator k takes `times_s[k]` and needs `workspace_bytes[k]` beside its tensors.

    Point p is before operator `points[p]` (the number of operators: after the last). Tensor t has `sizes_bytes[t]` and
    the kind `KINDS[kinds[t]]`; its uses are `use_operators[use_ends[t-1]:use_ends[t]]`, and `use_writes` tells which
    of them change it.
    """

    name: str
    operators: tuple[str, ...]
    times_s: Floats
    workspace_bytes: Ints
    point_names: tuple[str, ...]
    points: Ints
    tensors: tuple[str, ...]
    kinds: Ints
    sizes_bytes: Ints
    persistent: Flags
    births: Ints
    deaths: Ints
    use_ends: Ints
    use_operators: Ints
    use_writes: Flags
    about: dict[str, str] = field(default_factory=dict)  # what it is of: model, batch, machine; for people
    known: dict[int, object] = field(init=False, default_factory=dict, repr=False, compare=False)  # `stretches_of`

    def __post_init__(self) -> None:
        _check(self)

    @property
    def operator_count(self) -> int:
        return len(self.times_s)

    @property
    def tensor_count(self) -> int:
        return len(self.sizes_bytes)

    @property
    def compute_s(self) -> float:
        """How long the step takes if nothing ever waits."""
        return float(self.times_s.sum())

    def uses(self, tensor: int) -> Ints:
        """The operators that use a tensor."""
        return self.use_operators[self.use_ends[tensor - 1] if tensor else 0 : self.use_ends[tensor]]

    def users(self) -> Ints:
        """For each use, whose it is."""
        counts = np.diff(self.use_ends, prepend=0)
        return np.repeat(np.arange(self.tensor_count), counts)

    def need_bytes(self) -> Ints:
        """For each operator: all tensors that live there, and its workspace."""
        return self.living_bytes(np.ones(self.tensor_count, bool)) + self.workspace_bytes

    def living_bytes(self, which: Flags) -> Ints:
        """For each operator: the bytes of those tensors that live there."""
        change: Ints = np.zeros(self.operator_count + 1, np.int64)
        np.add.at(change, self.births[which], self.sizes_bytes[which])
        np.add.at(change, self.deaths[which] + 1, -self.sizes_bytes[which])
        return np.cumsum(change[:-1])

    def active_bytes(self) -> Ints:
        """For each operator: the tensors that it uses, and its workspace. Less memory than that no plan can do with."""
        active = self.workspace_bytes.copy()
        np.add.at(active, self.use_operators, self.sizes_bytes[self.users()])
        return active

    # --- files -------------------------------------------------------------------------------------------------------
    def save(self, path: str | Path) -> None:
        """As JSON, packed if the name ends in .gz. Written whole or not at all."""
        path = Path(path)
        data = msgspec.json.encode(self._document())
        if path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        new = path.with_name(path.name + ".new")
        new.write_bytes(data)
        new.replace(path)

    def _document(self) -> dict[str, Any]:
        ends = self.use_ends.tolist()
        begins = [0, *ends[:-1]]
        operators, writes = self.use_operators.tolist(), self.use_writes.tolist()
        columns = zip(
            self.tensors,
            self.kinds.tolist(),
            self.sizes_bytes.tolist(),
            self.persistent.tolist(),
            self.births.tolist(),
            self.deaths.tolist(),
            strict=True,
        )
        return {
            "forebay_trace": FORMAT,
            "name": self.name,
            "about": self.about,
            "operators": [
                list(row) for row in zip(self.operators, self.times_s.tolist(), self.workspace_bytes.tolist())
            ],
            "points": [list(row) for row in zip(self.point_names, self.points.tolist())],
            "tensors": [
                {
                    "name": name,
                    "kind": KINDS[kind],
                    "size_bytes": size,
                    "persistent": persistent,
                    "life": [birth, death],
                    "uses": operators[begin:end],
                    "writes": [at for at, write in zip(operators[begin:end], writes[begin:end]) if write],
                }
                for (name, kind, size, persistent, birth, death), begin, end in zip(columns, begins, ends)
            ],
        }


class TensorSaid(msgspec.Struct):
    """A tensor, as a file or a profiler says it."""

    name: str
    kind: Kind
    size_bytes: int
    uses: list[int]
    writes: list[int] = []
    persistent: bool = False
    life: tuple[int, int] | None = None  # by default from its first to its last use, or always


class _File(msgspec.Struct):
    forebay_trace: int
    name: str
    operators: list[tuple[str, float, int]]
    points: list[tuple[str, int]]
    tensors: list[TensorSaid]
    about: dict[str, str] = {}


def load(path: str | Path) -> Trace:
    """A trace from a file that `save` or another profiler wrote. `Invalid` says what is wrong with it."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise Invalid(f"{path} has more than {FILE_BYTES_MAX} bytes: is it a trace of one step?")
        said = msgspec.json.decode(data, type=_File)
    except (OSError, EOFError, msgspec.MsgspecError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise Invalid(f"{path} is no trace ({error}): make one with forebay.offload.tracing.profile") from None
    if said.forebay_trace != FORMAT:
        raise Invalid(f"{path} is a trace of format {said.forebay_trace}, this version reads {FORMAT}: update forebay")
    return build(said.name, said.operators, said.points, said.tensors, said.about)


def build(
    name: str,
    operators: list[tuple[str, float, int]],
    points: list[tuple[str, int]],
    tensors: list[TensorSaid],
    about: dict[str, str] | None = None,
) -> Trace:
    """A trace from rows: operators are (name, seconds, workspace bytes), points (name, before which operator)."""
    count = len(operators)
    births, deaths, ends, uses, writes = [], [], [], [], []
    for tensor in tensors:
        life = tensor.life or ((0, count - 1) if tensor.persistent else (min(tensor.uses), max(tensor.uses)))
        births.append(life[0])
        deaths.append(life[1])
        uses += tensor.uses
        written = set(tensor.writes)
        if not written.issubset(tensor.uses):
            raise Invalid(f"tensor {tensor.name!r} is written by an operator that does not use it: list it in both")
        writes += [at in written for at in tensor.uses]
        ends.append(len(uses))
    return Trace(
        name,
        tuple(row[0] for row in operators),
        np.array([row[1] for row in operators], np.float64),
        np.array([row[2] for row in operators], np.int64),
        tuple(row[0] for row in points),
        np.array([row[1] for row in points], np.int64),
        tuple(tensor.name for tensor in tensors),
        np.array([KINDS.index(tensor.kind) for tensor in tensors], np.uint8),
        np.array([tensor.size_bytes for tensor in tensors], np.int64),
        np.array([tensor.persistent for tensor in tensors], bool),
        np.array(births, np.int64),
        np.array(deaths, np.int64),
        np.array(ends, np.int64),
        np.array(uses, np.int64),
        np.array(writes, bool),
        about or {},
    )


def _check(trace: Trace) -> None:
    """The invariants of the module's header."""
    operators, tensors = trace.operator_count, trace.tensor_count
    if not 1 <= operators <= OPERATORS_MAX or not 1 <= tensors <= TENSORS_MAX:
        raise Invalid(
            f"a trace of {operators} operators and {tensors} tensors: from 1 to {OPERATORS_MAX} and {TENSORS_MAX} work"
        )
    _check_columns(trace)
    if (trace.points[:1] != 0).any() or not len(trace.points) or (np.diff(trace.points) < 0).any():
        raise Invalid("points do not rise from operator 0: the first point is the start of the step")
    if trace.points[-1] > operators:
        raise Invalid(f"the last point is before operator {trace.points[-1]}, of {operators}")
    users, uses = trace.users(), trace.use_operators
    wrong = (uses < trace.births[users]) | (uses > trace.deaths[users]) | (uses < 0) | (uses >= operators)
    _refuse(trace, users[wrong], "is used outside its life")
    _refuse(trace, users[1:][(np.diff(uses) <= 0) & (np.diff(users) == 0)], "has uses that do not rise")
    _refuse(trace, np.flatnonzero((trace.births > trace.deaths) | (trace.births < 0)), "dies before it is born")
    whole = (trace.births == 0) & (trace.deaths == operators - 1)
    _refuse(trace, np.flatnonzero(trace.persistent & ~whole), "is persistent but does not live all the step")
    _refuse(trace, np.flatnonzero(trace.sizes_bytes < 0), "has a negative size")


def _check_columns(trace: Trace) -> None:
    """Lengths, and numbers that make sense."""
    if not len(trace.operators) == len(trace.workspace_bytes) == trace.operator_count:
        raise Invalid("operators, their times and their workspaces are not equally many")
    columns = (trace.tensors, trace.kinds, trace.persistent, trace.births, trace.deaths, trace.use_ends)
    if any(len(column) != trace.tensor_count for column in columns) or len(trace.points) != len(trace.point_names):
        raise Invalid("the columns of a trace are not equally long")
    if (np.diff(trace.use_ends, prepend=0) < 1).any():
        raise Invalid(
            "a tensor without a use: leave it out, or add it to the workspace of the operators that it is there"
        )
    if trace.use_ends[-1] != len(trace.use_operators) or len(trace.use_writes) != len(trace.use_operators):
        raise Invalid("the uses are not as many as they end")
    if not (np.isfinite(trace.times_s) & (trace.times_s >= 0)).all() or (trace.workspace_bytes < 0).any():
        raise Invalid("an operator takes less than no time or memory, or an infinite time: profile again")


def _refuse(trace: Trace, tensors: Ints, why: str) -> None:
    if tensors.size:
        raise Invalid(f"tensor {trace.tensors[int(tensors[0])]!r} {why}: profile again, or mend the file")


def unmoved(trace: Trace, kind: Kind) -> Trace:
    """The trace with all of a kind left where it is."""
    kinds = trace.kinds.copy()
    kinds[kinds == KINDS.index(kind)] = KINDS.index("temporary")
    return replace(trace, kinds=kinds)
