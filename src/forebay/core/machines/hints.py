"""Who needs which block when: the exact future of jobs that told it.

Theory. A loader computes its order, so it can tell the node what it will read. A *job* gives its future as *accesses*,
each some blocks of one object of its listing. An access is one or more *uses*, one for each block. Uses are numbered
in order (`core/machines/foretold.py`), and nothing is sorted or searched.

Several jobs. Time is counted in uses passed by all jobs together. If a job makes a third of them, it reaches its
hundredth use from now when three hundred have passed. The job's *share* converts its numbers in this way, and a block
is *due* at the soonest next use among all jobs. Shares follow what the jobs do. With one job everything is exact.

A block without a use in the known future is due `NEVER`. A job that tells at least one epoch ahead lets the cache keep
the best blocks possible (Belady's choice).

Prefetch. `wanted` goes once over the uses ahead of the position and returns what is not here. It stops while the bytes
it returned and that are still unused fill a window.

A sample may be much smaller than its block. So jobs tell how many bytes of a block a use reads (`use_bytes`), and
`pays` says whether enough of a block is read before it leaves again. If not, whoever fetched the whole of it would
fetch more than the reads themselves, each time. A block may need the room of several that are smaller. So it pays if it
outlasts the last of these; or, in a window of few blocks, if it is read so densely that what leaves meanwhile is less.

A loader reads some batches ahead of where it says it is. Reads of blocks that are here make no difference. A range that
is read by itself, since its block is not here, is over (`read_apart`): else the block would be fetched for reads that
nobody makes any more.

A job ends with `close`, or HINT_TTL_S after its last call.

Rejected: a heap of next uses for each job (the evictor has one for what is here, which is less); wall time for shares
(a stalled job would have to be told from a slow one).

Invariants. (1) A unit (a block that is here) belongs to at most one place in each dataset. (2) Same events, same
answers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.machines.foreseen import Stay
from forebay.core.machines.foretold import NONE, Dataset, Job

NEVER = inf
TRIPLE_BYTES = 12  # an access on the wire: object, first block, end block, u32 each, little-endian
SHARE_WEIGHT = 0.3  # of the newest report in a job's share
SHARE_MIN = 0.001
PAYING_USES = 4096  # of a block: so many small requests cost more than the block, whatever they read
OVERFETCH_MAX = 1.1  # times what is read of a block, if it is to be fetched whole: headers of members lie between
DENSE = 4  # of a job's reads in a window of a few blocks, at least one in so many is of each
RUN_BLOCKS_MAX = 4  # blocks of one object that are fetched ahead in one request
SCAN_USES_MAX = 8192  # uses scanned in one call of `wanted`
JOBS_MAX = 64
JOB_NAME_CHARS_MAX = 64


# --- how hints are told ----------------------------------------------------------------------------------------------
class HintsCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """From access `start` on, the job reads `accesses`: u32 triples (object's number in the listing, first block, end
    block). They replace what it told before about `start` and later. The first call creates the job. `use_bytes`: how
    many bytes of a block they read on average; 0: all of it. `identity` is who tells, as the front knows it: each has
    jobs of their own."""

    job: str
    bucket: str
    prefix: str
    listing: str
    start: int
    accesses: bytes
    identity: str = ""
    use_bytes: int = 0


class HintsAtCall(msgspec.Struct, frozen=True):
    """The job has consumed the accesses before `position`."""

    job: str
    position: int
    identity: str = ""


class HintsNamed(msgspec.Struct, frozen=True):
    job: str
    identity: str = ""


class HintsState(msgspec.Struct, frozen=True):
    """`known`: the job's future is known up to this access. `ahead`: missing blocks were requested up to this
    access."""

    job: str
    bucket: str
    prefix: str
    listing: str
    position: int
    known: int
    ahead: int


def check_job_name(job: str) -> str:
    """Return `job` if it is a valid job name, else raise `Invalid`."""
    if not 0 < len(job) <= JOB_NAME_CHARS_MAX or not job.isprintable() or "/" in job:
        raise Invalid(f"a job's name has 1 to {JOB_NAME_CHARS_MAX} printable characters and no '/': choose another")
    return job


class Wanted(NamedTuple):
    """Blocks [first, end) of an object that are not here, in the dataset `blocks`; use number `use`, at time `due`,
    needs them first."""

    object: int
    first: int
    end: int
    size_bytes: int
    use: int
    due: float
    blocks: range


class Hints:
    """All jobs and what they need. Not thread-safe."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.passed = 0  # uses of all jobs together: the clock
        self._datasets: dict[int, Dataset] = {}
        self._units: dict[int, tuple[tuple[int, int], ...]] = {}  # unit -> (dataset's number, block's number), …

    # --- events ------------------------------------------------------------------------------------------------------
    def begin(self, name: str, dataset: Dataset, start: int, now_s: float) -> list[int]:
        """Create a job over `dataset` whose next access is number `start`; it replaces a job of the same name. Returns
        the units that no longer have hints. `Invalid` when there are too many jobs."""
        old = self.jobs.pop(name, None)
        if len(self.jobs) >= JOBS_MAX:
            raise Invalid(f"{JOBS_MAX} jobs give hints already: end one (DELETE /-/v1/hints/JOB), or go on without")
        job = self.jobs[name] = Job(name, dataset, start, 1 / (len(self.jobs) + 1))
        job.heard_s, job.passed_before = now_s, self.passed
        self._datasets[dataset.number] = dataset
        dataset.jobs.append(job)
        return self._end(old) if old is not None else []

    def extend(self, name: str, start: int, accesses: array[int], now_s: float, use_bytes: int = 0) -> bool:
        """Add `accesses` (object, first block, end block, …) from number `start` on, which read `use_bytes` of each
        block (0: all). Returns True if they replace accesses told before. `Invalid`, with nothing changed, for blocks
        that the listing does not have, for a gap, and beyond HINT_ACCESSES_MAX uses."""
        job = self._job(name)
        job.heard_s = now_s
        if start > job.known and job.use_ends:
            raise Invalid(f"the future of {name} is known up to access {job.known}: go on from there, not from {start}")
        kept = job.end_of(start) - job.use if job.position <= start <= job.known else 0
        self._check_accesses(job.dataset, accesses, kept)
        again = start != job.known
        if again:
            self._cut(job, start)
        job.sized(use_bytes)
        starts = job.dataset.starts
        for at in range(0, len(accesses), 3):
            number, first, end = accesses[at : at + 3]
            job.add(starts[number] + first, end - first)
        return again

    def _check_accesses(self, dataset: Dataset, accesses: array[int], uses: int) -> None:
        starts, objects = dataset.starts, dataset.objects
        for at in range(0, len(accesses), 3):
            number, first, end = accesses[at : at + 3]
            if number >= objects or first >= end or starts[number] + end > starts[number + 1]:
                raise Invalid(f"access {at // 3} is of blocks {first} to {end} of object {number}, which are not there")
            uses += end - first
        if uses > limits.HINT_ACCESSES_MAX:
            raise Invalid(f"more than {limits.HINT_ACCESSES_MAX} uses ahead: tell the rest when the job is further on")

    def _cut(self, job: Job, start: int) -> None:
        """Forget the accesses from number `start` on."""
        bounds = [(job.end_of(at), job.end_of(at + 1)) for at in range(job.position, min(start, job.known))]
        kept = [(job.uses[first - job.use_base], end - first) for first, end in bounds]
        sizes, before = job.sizes, job.use
        job.reset(job.position if kept else start)
        job.sizes = [(max(0, use - before), use_bytes) for use, use_bytes in sizes] if kept else []
        for first, count in kept:
            job.add(first, count)

    def at(self, name: str, position: int, now_s: float) -> list[int]:
        """Note that the job consumed the accesses before `position`. Returns the units whose next use moved (some maybe
        twice). A job cannot go back: an earlier position only shows that it lives. A position beyond what is known
        passes all of it."""
        job = self._job(name)
        job.heard_s = now_s
        target = min(position, job.known)
        if target <= job.position:
            return []
        end, base = job.end_of(target), job.use_base
        units, uses, chain, head = job.dataset.units, job.uses, job.next, job.head
        moved = []
        for use in range(job.use, end):
            block = uses[use - base]
            if head[block] == use:
                head[block] = chain[use - base]
                job.apart.pop(block, None)
            if units[block]:
                moved.append(units[block] - 1)
        self._count(job, end - job.use)
        job.use, job.position = end, target
        job.ahead = max(job.ahead, end)
        while job.fetched and job.fetched[0][0] < end:
            job.fetched_bytes -= job.fetched.popleft()[1]
        job.trim()
        return moved

    def _count(self, job: Job, uses: int) -> None:
        self.passed += uses
        share = uses / (self.passed - job.passed_before)
        job.share = max(SHARE_MIN, job.share + SHARE_WEIGHT * (share - job.share)) if len(self.jobs) > 1 else 1.0
        job.passed_before = self.passed

    def read_apart(self, dataset: Dataset, block: int, size_bytes: int) -> None:
        """Note that so many bytes of a block that is not here were read by themselves: the soonest use that reads them
        is over."""
        reads = [job for job in dataset.jobs if job.head[block] != NONE]
        if reads:
            job = min(reads, key=lambda job: self._time_of(job, job.head[block]))
            job.read_apart(block, size_bytes, dataset.size_of_number(block) / OVERFETCH_MAX)

    def close(self, name: str) -> list[int]:
        """Forget a job; return the units that no longer have hints."""
        job = self.jobs.pop(name, None)
        return self._end(job) if job is not None else []

    def _end(self, job: Job) -> list[int]:
        dataset = job.dataset
        dataset.jobs.remove(job)
        if dataset.jobs:
            return []
        del self._datasets[dataset.number]
        dataset.units = array("Q", bytes(8 * len(dataset.units)))
        freed = []
        for unit, places in list(self._units.items()):
            left = tuple(place for place in places if place[0] != dataset.number)
            if not left:
                del self._units[unit]
                freed.append(unit)
            elif left != places:
                self._units[unit] = left
        return freed

    def expired(self, now_s: float) -> list[str]:
        """Jobs that were silent for HINT_TTL_S: close them."""
        return [name for name, job in self.jobs.items() if now_s - job.heard_s > limits.HINT_TTL_S]

    # --- what is here ------------------------------------------------------------------------------------------------
    def landed(self, unit: int, dataset: Dataset, block: int) -> None:
        """Block number `block` of a dataset is here, as `unit`."""
        if dataset.number not in self._datasets:
            return  # its last job has ended
        place = (dataset.number, block)
        places = self._units.get(unit, ())
        if place not in places:
            self._units[unit] = (*places, place)
        dataset.units[block] = unit + 1

    def gone(self, unit: int) -> None:
        """A unit left."""
        for number, block in self._units.pop(unit, ()):
            self._datasets[number].units[block] = 0

    def knows(self, unit: int) -> bool:
        """Whether some job has this unit in its listing."""
        return unit in self._units

    # --- questions ---------------------------------------------------------------------------------------------------
    def job(self, name: str) -> HintsState:
        """Where a job is, without its bucket and listing, which only the caller knows."""
        job = self._job(name)
        ends = job.use_ends
        ahead = job.access_base + bisect_right(ends, job.ahead)
        return HintsState(name, "", "", "", job.position, job.known, max(ahead, job.position))

    def uses_ahead(self, name: str) -> int:
        """How many uses of blocks are known that the job has not passed."""
        job = self._job(name)
        return job.end_of(job.known) - job.use

    def due(self, unit: int) -> float:
        """When a unit is needed next, in uses passed; NEVER if in no known use; -1.0 for a unit without hints."""
        places = self._units.get(unit)
        if places is None:
            return -1.0
        return min(self._due(self._datasets[number], block) for number, block in places)

    def _due(self, dataset: Dataset, block: int) -> float:
        soonest = NEVER
        for job in dataset.jobs:
            use = job.head[block]
            if use != NONE:
                soonest = min(soonest, self._time_of(job, use))
        return soonest

    def pays(self, dataset: Dataset, blocks: Iterable[int], stay: Stay, holds_bytes: float = inf) -> bool:
        """Whether to fetch these blocks whole (by number, none of them here), if they `stay` so long: jobs read at
        least 1/OVERFETCH_MAX of their bytes before they leave, or one of them PAYING_USES times. Also if that is a
        good part (1/DENSE) of all they read until then, whatever else leaves. Also if what leaves for them is nobody's
        who told, and was idle for longer than anybody told. A node that `holds_bytes` in all may have room now, and not
        for long: a use counts no more if its job reads as much as that between the use before it and this one."""
        if not stay.hinted and all(
            stay.until >= self._time_of(job, job.last_use)
            and (stay.until < inf or self._between(job, job.use, job.last_use) <= holds_bytes)
            for job in dataset.jobs
        ):
            return True
        sizes = {block: dataset.size_of_number(block) for block in blocks}
        if self._read_before(dataset, sizes, stay.until, holds_bytes):
            return True
        uses = [
            size_bytes / (job.use_bytes(job.use) or size_bytes) for job in dataset.jobs for size_bytes in sizes.values()
        ]
        return self._read_before(dataset, sizes, min(stay.first, self.passed + DENSE * sum(uses)), holds_bytes)

    def _read_before(self, dataset: Dataset, sizes: dict[int, int], until: float, holds_bytes: float) -> bool:
        """Whether jobs read enough of blocks of these sizes before that."""
        left_bytes = sum(sizes.values()) / OVERFETCH_MAX
        for job in dataset.jobs:
            for block, size_bytes in sizes.items():
                use, uses, before = job.head[block], 0, job.use
                while use != NONE and self._time_of(job, use) < until:
                    if self._between(job, before, use) > holds_bytes:
                        break
                    left_bytes -= min(size_bytes, job.use_bytes(use) or size_bytes)
                    uses += 1
                    if left_bytes <= 0 or uses >= PAYING_USES:
                        return True
                    before, use = use, job.next[use - job.use_base]
        return left_bytes <= 0

    def _between(self, job: Job, first: int, end: int) -> float:
        """About how many bytes a job reads with these uses."""
        return (end - first) * (job.use_bytes(first) or job.dataset.block_bytes)

    def _time_of(self, job: Job, use: int) -> float:
        return self.passed + (use - job.use) / job.share

    def wanted(self, name: str, window_bytes: int) -> Wanted | None:
        """The next blocks ahead of the job that are not here. None if the window has none, or if the next SCAN_USES_MAX
        uses have none (`is_ahead` tells which). Consecutive blocks of one object come together."""
        job = self._job(name)
        dataset, uses, base = job.dataset, job.uses, job.use_base
        here, last = dataset.units, min(job.last_use, job.ahead + SCAN_USES_MAX)
        while job.ahead < last and (here[uses[job.ahead - base]] or job.head[uses[job.ahead - base]] != job.ahead):
            job.ahead += 1  # here, or returned for an earlier use, or over
        if job.ahead >= last or job.fetched_bytes >= window_bytes:
            return None
        use = job.ahead
        number = uses[use - base]
        which, first = dataset.place(number)
        end, size_bytes = first, 0
        while use + end - first < job.last_use and end - first < RUN_BLOCKS_MAX:
            beside = uses[use + end - first - base]
            if beside != number + end - first or beside >= dataset.starts[which + 1] or here[beside]:
                break
            size_bytes += dataset.size_of(which, end)
            end += 1
        blocks = range(number, number + end - first)
        return Wanted(which, first, end, size_bytes, use, self._time_of(job, use), blocks)

    def fetching(self, name: str, wanted: Wanted) -> None:
        """Note that what `wanted` returned is being fetched: `wanted` does not return it again."""
        job = self._job(name)
        job.ahead = wanted.use + wanted.end - wanted.first
        job.fetched.append((wanted.use, wanted.size_bytes))
        job.fetched_bytes += wanted.size_bytes

    def is_ahead(self, name: str, window_bytes: int) -> bool:
        """Whether `wanted` has looked at all that is known, or the window is full."""
        job = self._job(name)
        return job.ahead >= job.last_use or job.fetched_bytes >= window_bytes

    def _job(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None:
            raise NotFound(f"there are no hints of a job {name!r} here: tell its future (again)", code="NoSuchHints")
        return job

    def check(self) -> None:
        """Assert the books against a full recount. Slow: for tests."""
        for job in self.jobs.values():
            first: dict[int, int] = {}
            for use in range(job.last_use - 1, job.use - 1, -1):
                block = job.uses[use - job.use_base]
                assert job.next[use - job.use_base] == first.get(block, NONE), (job.name, use)
                first[block] = use
            for block, use in enumerate(job.head):
                left = first.get(block, NONE)
                while left != use and left != NONE:
                    left = job.next[left - job.use_base]  # it was read apart
                assert left == use, (job.name, block, use)
            assert job.fetched_bytes == sum(size for _, size in job.fetched)
            assert job.end_of(job.position) == job.use
        for dataset in self._datasets.values():
            here = {block for places in self._units.values() for number, block in places if number == dataset.number}
            assert here == {block for block, unit in enumerate(dataset.units) if unit}
