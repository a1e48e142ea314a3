"""Disk row of offloading: how fast a disk tier writes and reads, beside fio on the same disk.

Theory. A tier's threads ought to be as quick as the disk. What the disk can do is asked of fio in the same run: one
file of the same size in the same directory, allocated ahead as the tier's is, direct I/O in blocks of a piece, the same
bytes. fio asks in two ways, by threads that block (`psync`, as many as the tier has in one direction) and by io_uring
with a few depths, so that the same run also says whether threads or io_uring would be the better way here.

What the tier does beside is its price and is in its number: Python, a checksum for each piece, and, where the memory is
not aligned as the disk wants it, a copy through a bounce buffer. So it is measured from memory that begins at a page
(as pinned buffers do) and at 64 bytes past one (as torch's tensors do), as one large tensor and as many small ones that
are under way together. Small tensors are a block each, half a piece, while fio keeps to pieces.

The sides are compared where they stand side by side in time: each round runs one kind of ours (write, then read), one
of fio's, and so on, in the other order every second round. Before the first round each side goes once for nothing: the
first write to an extent that was only allocated costs more. Loads go to other memory than stores came from, which is
compared once: a load that did nothing would be quick. Judged is the ratio to that side of fio whose median is best,
round by round; the best of each round would be the luckiest of four.

fio's blocks are random bytes as ours are, made when it starts and scrambled a little for each write
(`--scramble_buffers`): disks that compress or share have nothing to gain, and filling each block anew
(`--refill_buffers`) takes half a core here instead of a sixth. Reads are asked for as a mixture that is all reads: else
fio has not touched its memory when it starts the clock, and making those pages took a fifth of the time of a read of
this size (16 blocks under way).
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import load
from bench.parts import Lab
from bench.report import Result, number, quantity
from bench.row import MIB, Row
from bench.servers import find_program
from bench.stats import compared

TOTAL_BYTES, QUICK_TOTAL_BYTES = 256 * MIB, 64 * MIB
SMALL_BYTES = 4 * MIB  # of each of many tensors
DEPTHS = (4, 8, 16)  # of io_uring
PAGE_BYTES, TORCH_ALIGN_BYTES = 4096, 64
FIO_TIMEOUT_S = 120.0

Rates = dict[str, list[float]]  # by direction, of each round


def _offload(name: str) -> Any:
    """A module of `forebay.offload`, parts of which want numpy."""
    return importlib.import_module(f"forebay.offload.{name}")


# --- ours ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """One way to ask the tier: how many tensors, and where their memory begins past a page."""

    count: int
    past_page_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        memory = "unaligned" if self.past_page_bytes else "aligned"
        return f"{self.count} × {self.total_bytes // self.count // MIB} MiB, {memory}"

    def tensors(self, memory: Any) -> list[Any]:
        """The memory in so many parts."""
        size = self.total_bytes // self.count
        begins = range(self.past_page_bytes, self.past_page_bytes + self.total_bytes, size)
        return [memory[begin : begin + size] for begin in begins]


def through(tier: Any, sources: list[Any], intos: list[Any]) -> tuple[float, float]:
    """Bytes a second of storing all of `sources` at once, and of loading them into `intos`."""
    total = sum(map(len, sources))
    slots = [tier.reserve(len(source)) for source in sources]
    try:
        begun_s = time.perf_counter()
        for ticket in [tier.store(slot, source) for slot, source in zip(slots, sources, strict=True)]:
            ticket.wait()
        stored_s = time.perf_counter()
        for ticket in [tier.load(slot, into) for slot, into in zip(slots, intos, strict=True)]:
            ticket.wait()
        loaded_s = time.perf_counter()
    finally:
        for slot in slots:
            tier.release(slot)
    return total / (stored_s - begun_s), total / (loaded_s - stored_s)


# --- fio -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Engine:
    """One way in which fio asks: by `threads` that block, or by io_uring with `depth` blocks under way."""

    threads: int = 0
    depth: int = 0

    def __str__(self) -> str:
        return f"fio io_uring {self.depth}" if self.depth else f"fio psync × {self.threads}"

    def options(self, total_bytes: int) -> list[str]:
        if self.depth:
            return ["--ioengine=io_uring", f"--iodepth={self.depth}", f"--size={total_bytes}"]
        share = total_bytes // self.threads
        return ["--ioengine=psync", f"--numjobs={self.threads}", f"--offset_increment={share}", f"--size={share}"]


def fio(file: Path, direction: str, engine: Engine, total_bytes: int, block_bytes: int) -> float:
    """Bytes a second of fio going through the file once. `LoadFailed` with the end of what it said."""
    command = [find_program("fio"), "--name=offload", f"--filename={file}", f"--bs={block_bytes}"]
    command += ["--rw=write"] if direction == "write" else ["--rw=rw", "--rwmixread=100"]  # see the header
    command += ["--direct=1", "--thread", "--group_reporting", "--overwrite=1", "--fallocate=none"]
    command += ["--scramble_buffers=1", "--output-format=json", *engine.options(total_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_TIMEOUT_S, check=False)
    if done.returncode or "{" not in done.stdout:
        raise load.LoadFailed(f"{engine} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if told["error"] or told[direction]["io_bytes"] != total_bytes:
        moved = told[direction]["io_bytes"]
        raise load.LoadFailed(f"{engine} moved {moved} of {total_bytes} bytes, error {told['error']}")
    return float(told[direction]["bw_bytes"])


def allocated(file: Path, total_bytes: int) -> Path:
    """An empty file with its room, as the tier's is made."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, total_bytes)
    finally:
        os.close(fd)
    return file


# --- the row ---------------------------------------------------------------------------------------------------------
class Course:
    """The tier, fio's file and all sides of one run. A context manager."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        disk_tier, tiers = _offload("tiers.disk_tier"), _offload("tiers.tiers")
        np = importlib.import_module("numpy")
        self.total_bytes, self.piece_bytes = total_bytes, tiers.PIECE_BYTES
        self.threads = disk_tier.THREADS
        assert total_bytes % (self.piece_bytes * self.threads) == 0, "each of fio's threads has whole blocks"
        self.tier = disk_tier.DiskTier([folder], total_bytes, threads=self.threads)
        self.memory = [tiers.page_aligned(total_bytes + PAGE_BYTES) for _ in range(2)]  # sources, and where loads go
        self.memory[0][:] = np.random.default_rng(0).integers(0, 256, len(self.memory[0]), np.uint8)
        self.memory[1][:] = 0  # pages that nobody has touched would be made while the tier loads
        self.file = allocated(folder / "fio", total_bytes)
        counts = (1, total_bytes // SMALL_BYTES)
        self.kinds = [Kind(count, past, total_bytes) for past in (0, TORCH_ALIGN_BYTES) for count in counts]
        self.engines = [Engine(threads=self.threads), *(Engine(depth=depth) for depth in DEPTHS)]
        self.refused: list[str] = []
        self.rates: dict[Kind | Engine, Rates] = {}

    def __enter__(self) -> Course:
        self.tier.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()
        self.file.unlink()

    def warm_up(self) -> None:
        """Each side once for nothing. Ways of fio that this machine refuses are left out, but threads."""
        if self.tier.mode != "O_DIRECT":
            raise load.LoadFailed(f"{self.tier.name} has no direct I/O: put the temporary directory (TMPDIR) on a disk")
        np = importlib.import_module("numpy")
        for kind in self.kinds:
            self.memory[1][:] = 0
            self.go(kind)
            if not all(map(np.array_equal, kind.tensors(self.memory[0]), kind.tensors(self.memory[1]))):
                raise load.LoadFailed(f"the tier gave other bytes than it took ({kind})")
        for engine in list(self.engines):
            try:
                self.go(engine)
            except load.LoadFailed as error:
                if not engine.depth:
                    raise
                self.engines.remove(engine)
                self.refused.append(str(error).splitlines()[0])

    def round(self, turn: int) -> None:
        """All sides once, ours and fio's by turns."""
        sides: list[Kind | Engine] = []
        for at in range(max(len(self.kinds), len(self.engines))):
            sides += [*self.kinds[at : at + 1], *self.engines[at : at + 1]]
        for side in sides[:: -1 if turn % 2 else 1]:
            written, read = self.go(side)
            rates = self.rates.setdefault(side, {"write": [], "read": []})
            rates["write"].append(written)
            rates["read"].append(read)

    def go(self, side: Kind | Engine) -> tuple[float, float]:
        """Bytes a second of writing and of reading."""
        if isinstance(side, Kind):
            return through(self.tier, side.tensors(self.memory[0]), side.tensors(self.memory[1]))
        written, read = (fio(self.file, how, side, self.total_bytes, self.piece_bytes) for how in ("write", "read"))
        return written, read

    def best(self, direction: str) -> Engine:
        """The side of fio with the best median."""
        return max(self.engines, key=lambda engine: statistics.median(self.rates[engine][direction]))


def disk(lab: Lab, row: Row) -> Result:
    """A disk tier, one large tensor and many small ones, aligned and not, beside the best of fio's sides."""
    with Course(lab.dir, QUICK_TOTAL_BYTES if lab.quick else TOTAL_BYTES) as course:
        course.warm_up()
        for turn in range(2 if lab.quick else row.rounds):
            course.round(turn)
            told = ", ".join(f"{side} {_both(course.rates[side], -1)}" for side in course.rates)
            print(f"[bench]   round {turn + 1}: {told}", file=sys.stderr, flush=True)
        measures = []
        for direction in ("write", "read"):
            best = course.best(direction)
            for kind in course.kinds:
                ours, theirs = course.rates[kind][direction], course.rates[best][direction]
                measures.append(compared(f"{direction}, {kind}", "B/s", row.goals[direction], ours, theirs, str(best)))
        extra = {str(side): rates for side, rates in course.rates.items()}
        return Result(row, tuple(measures), notes=_notes(course, lab.dir), extra={"bytes_s": extra})


def _both(rates: Rates, at: int) -> str:
    return "/".join(f"{rates[direction][at] / 1e9:.2f}" for direction in ("write", "read"))


# --- what is said beside ---------------------------------------------------------------------------------------------
def _notes(course: Course, folder: Path) -> tuple[str, ...]:
    """How the tier went, what fio's other sides did, threads beside io_uring, and the price of a checksum."""
    path = getattr(course.tier, "path", course.tier.mode)
    file = _offload("tiers.swapfile").SwapFile(str(folder), course.piece_bytes, direct=True)
    align = file.align_bytes
    file.close()
    way = "as it lies" if align <= TORCH_ALIGN_BYTES else "through bounce buffers"
    notes = [
        f"the tier: {path}, {course.threads} threads for each direction, pieces of {course.piece_bytes // MIB} MiB",
        f"this disk takes addresses that are multiples of {align}: memory as torch gives it goes {way}",
    ]
    for engine in course.engines:
        medians = {how: statistics.median(rates) for how, rates in course.rates[engine].items()}
        notes.append(f"{engine}: writes {quantity(medians['write'], 'B/s')}, reads {quantity(medians['read'], 'B/s')}")
    notes += [*(_threads_or_uring(course, how) for how in ("write", "read")), *course.refused]
    piece_s = checksum_s(course.piece_bytes)
    told = f"{piece_s * 1e3:.2f} ms of a core, {quantity(course.piece_bytes / piece_s, 'B/s')}"
    return (*notes, f"the checksum (xxh3) of a piece, which is in our numbers and not in fio's: {told}")


def _threads_or_uring(course: Course, direction: str) -> str:
    threads, *rings = course.engines
    if not rings:
        return f"{direction}: io_uring could not be asked"
    ring = max(rings, key=lambda engine: statistics.median(course.rates[engine][direction]))
    pairs = zip(course.rates[threads][direction], course.rates[ring][direction], strict=True)
    ratios = [one / other for one, other in pairs]
    spread = f"{number(min(ratios))} to {number(max(ratios))}"
    return f"{direction}: {threads} / {ring}: {number(statistics.median(ratios))} ({spread})"


def checksum_s(size_bytes: int) -> float:
    """Seconds for a checksum over so many bytes of memory that is not in the processor's caches: median of ten."""
    xxhash = importlib.import_module("xxhash")
    memory = _offload("tiers.tiers").page_aligned(10 * size_bytes)
    memory[:] = 1
    times = []
    for begin in range(0, len(memory), size_bytes):
        began_s = time.perf_counter()
        xxhash.xxh3_64_intdigest(memory[begin : begin + size_bytes])
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)
