"""The resume row: every loader's job is killed at a random batch and goes on with other workers and ranks.

Theory. Samples are numbered, and a job notes the number of each sample that it gives out and saves its loader's state
at every batch (`resume_job.py`, the same loop for all sides). For each shape that a job had before (ranks × workers)
there are two runs: one is left alone, which gives the order of the epoch; the other is killed with SIGKILL, at a batch
that is drawn at random, the same for every loader, before or after it saved its state. From what the killed run left,
files, cache, state, and shared memory alike, the rest of the epoch is read in every shape that comes after. Counted
are the samples that came twice, those that never came, and whether the order is that of the run left alone.

The data are as kind to everybody as they can be: a count that all batches, ranks and workers divide, and as many shards
as they could want, so that no loader has to fill up or cut off an epoch. With two ranks each takes half the batch.

Invariants. (1) What was given out after the last state that all ranks saved does not count: the model is rolled back
too. (2) Every run has a time limit, a session of its own, and is gone with all its processes before the next begins.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench import resume_job
from bench.load import LoadFailed
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import Objects, Row
from bench.rows.loader import peers_python
from bench.stats import Measure

SEED, BATCH, SHARDS = 20261121, 16, 8
TIMEOUT_S = 90.0  # a run takes five seconds
ENDING_S = 15.0  # that workers have to see that their parent is gone; torch's look every five seconds
ATTEMPTS = 5
OURS = "forebay"
NO_MATTER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)  # what a rank says because another failed

Steps = list[list[int]]  # for each step, the samples of all ranks, in the order of ranks


class Shape(NamedTuple):
    """How a job runs."""

    ranks: int
    workers: int

    def __str__(self) -> str:
        return f"{self.workers} workers" if self.ranks == 1 else f"{self.ranks} ranks × {self.workers}"


class Case(NamedTuple):
    """Killed in one shape, resumed in the other."""

    before: Shape
    after: Shape

    def __str__(self) -> str:
        if self.before.ranks == self.after.ranks == 1:
            return f"{self.before.workers} → {self.after.workers}"
        return f"{self.before.ranks} → {self.after.ranks} ranks"


CASES = (
    Case(Shape(1, 0), Shape(1, 0)),
    Case(Shape(1, 0), Shape(1, 2)),
    Case(Shape(1, 2), Shape(1, 2)),
    Case(Shape(1, 2), Shape(1, 0)),
    Case(Shape(1, 2), Shape(1, 1)),
    Case(Shape(1, 2), Shape(1, 4)),
    Case(Shape(1, 2), Shape(2, 2)),
    Case(Shape(2, 2), Shape(1, 2)),
)
QUICK_CASES = CASES[2:4]


class Found(NamedTuple):
    """What became of one case. `order`: "same"; "same batches" if only within batches of all ranks it differs; "other";
    "none" if two runs from the start already differ. `failed`: what it said instead of going on."""

    repeated: int = 0
    lost: int = 0
    order: str = "same"
    failed: str = ""
    hung: bool = False

    @property
    def exact(self) -> bool:
        return self == Found()

    def __str__(self) -> str:
        if self.hung:
            return "hangs"
        if self.failed:
            return "fails"
        if self.exact:
            return "exact"
        counts = f"{self.repeated} twice, {self.lost} lost" if self.repeated or self.lost else "each once"
        orders = {"same": "", "same batches": ", same batches", "other": ", other order", "none": ", no fixed order"}
        return counts + orders[self.order]


class Left(NamedTuple):
    """What was there after the kills, when their processes had had time to end. `failures`: what starts from nothing
    said that failed without being killed."""

    processes: int
    shared_memory: int
    failures: tuple[str, ...] = ()


# --- the account -----------------------------------------------------------------------------------------------------
def account(reference: Steps, taken: Steps, rest: Steps) -> Found:
    """`reference`: an epoch left alone; `taken`: what counts of the killed one; `rest`: what the resumed one gave."""
    whole, every = flat([*taken, *rest]), set(flat(reference))
    expected = reference[len(taken) :]
    if flat(reference[: len(taken)]) != flat(taken):
        order = "none"
    elif flat(rest) == flat(expected):
        order = "same"
    elif [sorted(step) for step in rest] == [sorted(step) for step in expected]:
        order = "same batches"
    else:
        order = "other"
    return Found(len(whole) - len(set(whole)), len(every - set(whole)), order)


def flat(steps: Steps) -> list[int]:
    return list(itertools.chain.from_iterable(steps))


def read_steps(folder: Path, ranks: int) -> Steps:
    """What all ranks noted, step by step. A line that was cut by the kill does not count."""
    notes = []
    for rank in range(ranks):
        path = folder / f"notes-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        notes.append([json.loads(line) for line in lines if line.endswith("]")])
    return [flat(list(step)) for step in itertools.zip_longest(*notes, fillvalue=[])]


def saved_step(folder: Path, ranks: int) -> int:
    """The last step whose state is there from every rank; 0: none."""
    steps = []
    for rank in range(ranks):
        numbers = [path.name.rpartition("-")[2] for path in folder.glob(f"state-{rank}-*")]
        steps.append({int(number) for number in numbers if number.isdigit()})  # not those that were being written
    return max(set.intersection(*steps), default=0)


# --- runs ------------------------------------------------------------------------------------------------------------
class Run(NamedTuple):
    """How the processes of one start ended."""

    codes: list[int | None]
    hung: bool
    said: str  # the last line of the first rank that failed by itself
    processes_left: int


class Side:
    """One loader: the interpreter that has it, its environment, and what its job is told."""

    def __init__(self, name: str, folder: Path, work: dict[str, Any], env: dict[str, str]) -> None:
        self.name, self.folder, self._env = name, folder, env
        self.cache = folder / "cache"
        self._work = {**work, "cache": str(self.cache), "seed": SEED}
        (folder / "tmp").mkdir(parents=True)
        self.cache.mkdir()
        self.left = 0  # processes that the newest start from nothing left behind
        script = ["-m", "bench.resume_job"] if name == OURS else [resume_job.__file__]
        self._command = [sys.executable if name == OURS else peers_python(), *script, name]

    def run(
        self, folder: Path, shape: Shape, state: Callable[[int], Path] | None, dies_at: tuple[int, int, str] | None
    ) -> Run:
        """Start all ranks and wait for their end. `state`: the file for a rank to begin with."""
        folder.mkdir()
        ranks = []
        for rank in range(shape.ranks):
            work = {
                **self._work,
                "folder": str(folder),
                "rank": rank,
                "world": shape.ranks,
                "workers": shape.workers,
                "batch": BATCH // shape.ranks,
                "state": str(state(rank)) if state else "",
                "dies_at": dies_at,
            }
            ranks.append(self._start(folder, work))
        hung = _wait(ranks, TIMEOUT_S)
        left = _end_sessions([process.pid for process in ranks], ENDING_S)
        codes: list[int | None] = [process.wait() for process in ranks]
        return Run(codes, hung, _said(folder, codes), left)

    def begin(self, name: str, shape: Shape, dies_at: tuple[int, int, str] | None, failures: list[str]) -> Path:
        """A job from the start with an empty cache, alone or killed; its folder. One that fails by itself is started
        again. `LoadFailed` if it never comes through."""
        for attempt in range(ATTEMPTS):
            folder = self.folder / f"{name}-{attempt}"
            _fresh(self.cache)
            run = self.run(folder, shape, None, dies_at)
            self.left = run.processes_left
            killed = -signal.SIGKILL in run.codes and saved_step(folder, shape.ranks)
            if not run.hung and (killed if dies_at else not any(run.codes)):
                return folder
            failures.append("it hangs" if run.hung else run.said or f"exit status {run.codes}")
        raise LoadFailed(f"{self.name} with {shape} does not come through an epoch: {failures[-1]}")

    def _start(self, folder: Path, work: dict[str, Any]) -> subprocess.Popen[str]:
        rank, world = str(work["rank"]), str(work["world"])
        env = {**os.environ, **self._env, "TMPDIR": str(self.folder / "tmp"), "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}  # as torchrun does
        with (folder / f"said-{rank}").open("w") as said:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
                env=env,
                start_new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(work))
            process.stdin.close()
        return process


def _wait(ranks: Sequence[subprocess.Popen[str]], limit_s: float) -> bool:
    """Until all ended, or one failed: then the others have a moment to fail too. True if the limit came first."""
    deadline_s = time.monotonic() + limit_s
    while any(process.poll() is None for process in ranks):
        if any(process.returncode for process in ranks):
            deadline_s = min(deadline_s, time.monotonic() + 5.0)
        if time.monotonic() >= deadline_s:
            return not any(process.returncode for process in ranks)
        time.sleep(0.05)
    return False


def _end_sessions(sessions: Iterable[int], grace_s: float) -> int:
    """Wait until nobody is left in these sessions, whose leaders have ended or are killed now. How many had to be
    killed."""
    for leader in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)
    deadline_s = time.monotonic() + grace_s
    while (left := [pid for session in sessions for pid in members(session)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def members(session: int) -> list[int]:
    """Processes of a session, without those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def _said(folder: Path, codes: Sequence[int | None]) -> str:
    """The error of a rank that failed, rather not of one that failed since another did."""
    last = []
    for rank, code in enumerate(codes):
        if code not in (0, -signal.SIGKILL):
            last += [error_in((folder / f"said-{rank}").read_text(errors="replace"))]
    own = [line for line in last if not any(word in line for word in NO_MATTER)]
    return (own or last or [""])[0]


def error_in(text: str) -> str:
    """The last error in what a program printed; of an assertion that says nothing, the line that it stands in."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip("~^ ")]
    for index in range(len(lines) - 1, -1, -1):
        name, _, message = lines[index].partition(":")
        if re.fullmatch(r"[\w.]*(Error|Exception|Precondition|NotFound)", name):
            return lines[index] if message or not index else f"{name}: {lines[index - 1]}"
    return lines[-1] if lines else ""


# --- one loader ------------------------------------------------------------------------------------------------------
def resume(side: Side, cases: Sequence[Case], steps: int) -> tuple[dict[Case, Found], Left]:
    """All cases of one loader. `steps`: how many there are in an epoch."""
    found: dict[Case, Found] = {}
    failures: list[str] = []
    processes = memory = 0
    for number, before in enumerate(dict.fromkeys(case.before for case in cases)):
        after = [case for case in cases if case.before == before]
        alone = side.begin(f"alone-{number}", before, None, failures)
        reference = read_steps(alone, before.ranks)
        chance = random.Random(f"{SEED} {before}")
        moment = chance.choice(["before saving", "after saving"])
        dies_at = (chance.randrange(before.ranks), chance.randint(steps // 5, steps * 7 // 10), moment)
        killed = side.begin(f"killed-{number}", before, dies_at, failures)
        step = saved_step(killed, before.ranks)
        names = [Path(name) for name in json.loads((killed / "shared-memory.json").read_text())]
        processes, memory = processes + side.left, memory + sum(name.exists() for name in names)
        shutil.copytree(side.cache, kept := side.folder / f"cache-{number}", symlinks=True)
        taken = read_steps(killed, before.ranks)[:step]
        state = functools.partial(_state, killed, before.ranks, step)
        for turn, case in enumerate(after):
            _fresh(side.cache, kept)
            folder = side.folder / f"resumed-{number}-{turn}"
            run = side.run(folder, case.after, state, None)
            found[case] = _judge(run, reference, taken, read_steps(folder, case.after.ranks))
        _fresh(side.cache)
        for name in names:
            name.unlink(missing_ok=True)  # ours by its name: the killed run had it in memory
    return found, Left(processes, memory, tuple(failures))


def _judge(run: Run, reference: Steps, taken: Steps, rest: Steps) -> Found:
    if run.hung:
        return Found(hung=True)
    if any(run.codes):
        return Found(failed=run.said or f"exit status {run.codes}")
    return account(reference, taken, rest)


def _state(folder: Path, ranks: int, step: int, rank: int) -> Path:
    """Of a rank that was not there before, that of the first."""
    return folder / f"state-{rank if rank < ranks else 0}-{step}"


def _fresh(cache: Path, kept: Path | None = None) -> None:
    """An empty cache, or a copy of one."""
    shutil.rmtree(cache)
    if kept:
        shutil.copytree(kept, cache, symlinks=True)
    else:
        cache.mkdir()


# --- the row ---------------------------------------------------------------------------------------------------------
def make_samples(folder: Path, objects: Objects) -> list[str]:
    """Numbered samples below `folder`: each a file in `files`, and all in tar shards in `tar`, whose names it gives."""
    (folder / "files").mkdir(parents=True)
    (folder / "tar").mkdir()
    chance, each = random.Random(objects.name), objects.count // SHARDS
    assert each * SHARDS == objects.count, "shards are even"
    names = []
    for shard in range(SHARDS):
        names.append(f"{shard:03d}.tar")
        with tarfile.open(folder / "tar" / names[-1], "w") as tar:
            for number in range(shard * each, (shard + 1) * each):
                path = folder / "files" / f"{number:07d}.bin"
                path.write_bytes(b"%08d" % number + chance.randbytes(objects.size_bytes - 8))
                tar.add(path, arcname=path.name)
    return names


def rows(lab: Lab, row: Row) -> Result:
    """Every loader in every case; the table is in the notes, everything in `extra`."""
    (objects,) = row.quick if lab.quick else row.objects
    cases = QUICK_CASES if lab.quick else CASES
    root = lab.files / objects.name
    shards = make_samples(root, objects)
    each = objects.count // SHARDS
    told = {form: str(root / form) for form in ("files", "mds", "lit")}
    told |= {"shard_samples": each, "shard_bytes": each * (objects.size_bytes + 16) + 4096}  # type: ignore[dict-item]
    told["versions"] = str(lab.dir / "versions.json")
    command = [peers_python(), resume_job.__file__, "prepare"]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise LoadFailed(f"the samples could not be prepared: {done.stderr.strip().splitlines()[-1:]}")
    lab.upload_files([str(path.relative_to(lab.files)) for path in sorted(root.rglob("*")) if path.is_file()])
    endpoint = lab.weed.endpoint
    env = {"S3_ENDPOINT_URL": endpoint, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    env |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    with lab.node(core=None) as node, ThreadPoolExecutor(2) as pool:
        node.add_bucket(BUCKET, lab, endpoint)
        work = {
            "endpoint": endpoint,
            "bucket": BUCKET,
            "shards": [f"{objects.name}/tar/{name}" for name in shards],
            "mds": f"{objects.name}/mds",
            "lit": f"{objects.name}/lit",
            "objects": f"{objects.name}/files/",
            "url": node.endpoint,
            "place": f"{BUCKET}/{objects.name}/tar/",
        }
        sides = [Side(name, lab.dir / f"resume-{name}", work, env) for name in resume_job.LOADERS]
        steps = objects.count // BATCH
        results = dict(zip(resume_job.LOADERS, pool.map(lambda side: resume(side, cases, steps), sides), strict=True))
    versions = json.loads(Path(told["versions"]).read_text())
    return Result(row, _measures(row, results), notes=table(results, cases, versions), extra=_extra(results, versions))


Results = dict[str, tuple[dict[Case, Found], Left]]
COUNTS: dict[str, Callable[[Found], int]] = {
    "samples twice": lambda found: found.repeated,
    "samples lost": lambda found: found.lost,
    "cases not exact": lambda found: not found.exact,
}


def _measures(row: Row, results: Results) -> tuple[Measure, ...]:
    """Our counts, and beside each that of the peer that has the fewest cases that are not exact."""
    total = {
        name: {what: sum(map(count, found.values())) for what, count in COUNTS.items()}
        for name, (found, _) in results.items()
    }
    best = min((name for name in total if name != OURS), key=lambda name: total[name]["cases not exact"])
    measures = []
    for what in COUNTS:
        ours, theirs = float(total[OURS][what]), float(total[best][what])
        measures.append(Measure(what, "", row.goals[what], (ours,), (theirs,), (ours,), best))
    return tuple(measures)


def table(results: Results, cases: Sequence[Case], versions: dict[str, str]) -> tuple[str, ...]:
    """Markdown: a line for each loader, a column for each case; then what was said by those that failed."""
    head = ["loader", *map(str, cases), "left after a kill"]
    lines = [head, ["---"] * len(head)]
    said: dict[str, list[str]] = {}
    for name, (found, left) in results.items():
        version = f" {versions[name]}" if name in versions else ""
        lines.append([f"{name}{version}", *(str(found[case]) for case in cases), _left(left)])
        for case in cases:
            if found[case].failed:
                said.setdefault(f"{name}: `{found[case].failed[:200]}`", []).append(str(case))
    lines_of_table = ["| " + " | ".join(line) + " |" for line in lines]
    words = [f"* {', '.join(which)}: {what}" for what, which in said.items()]
    for name, (_, left) in results.items():
        for what, times in Counter(one[:200] for one in left.failures).items():
            words.append(f"* {times} more starts that failed without being killed: {name}: `{what}`")
    return (*lines_of_table, *([""] if words else []), *words)


def _left(left: Left) -> str:
    words = [f"{left.processes} processes"] if left.processes else []
    words += [f"{left.shared_memory} pieces of shared memory"] if left.shared_memory else []
    return ", ".join(words) or "nothing"


def _extra(results: Results, versions: dict[str, str]) -> dict[str, object]:
    told = {
        name: {**{str(case): one._asdict() for case, one in found.items()}, "left": left._asdict()}
        for name, (found, left) in results.items()
    }
    return {"cases": told, "versions": versions, "batch": BATCH, "seed": SEED}
