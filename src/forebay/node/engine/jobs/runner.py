"""Runs jobs: a plan of units, an action for each, progress, cancel, and a record that survives a restart.

Theory. All jobs have the same form. A *plan* (an async iterator) gives keys with sizes, and an *action* runs for each,
several at once. Actions are idempotent, so a job that was cut off starts again from its record and passes quickly over
finished units. A failed unit is counted, and the first errors are kept. A job fails only if its plan fails, or if
FAILURES_MAX units fail in a row (the backend is away, and going on would only make noise).

Invariants. (1) A unit counts as done or failed, once. (2) At most `parallel` units are at work. (3) A job's record is
in the metadata store exactly while it is running. (4) How many jobs one identity starts changes nothing for those of
another: how many it may have under way, and how many that ended are known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec

from forebay.core.errors import Busy, ForebayError
from forebay.core.formats.manifest import Span
from forebay.core.messages.calls import JobCall, JobState, JobVerb, no_such_job
from forebay.meta.seam import MetaStore
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.jobs")

PARALLEL = 8
FAILURES_MAX = 100
ERRORS_SHOWN_MAX = 5
JOBS_KEPT_MAX = 100  # finished jobs of one identity, for `forebay job ls`
JOBS_KEPT_IN_ALL_MAX = 10_000  # an issuer may vouch for any number of people
JOBS_RUNNING_MAX = 256  # of one identity
PREFIX = "jobs/"


class JobUnit(NamedTuple):
    """One object to work on, or `spans` of it, of `size_bytes` together."""

    key: str
    size_bytes: int
    spans: tuple[Span, ...] = ()


class _Kept(msgspec.Struct):
    """A running job in the metadata store."""

    verb: JobVerb
    call: JobCall
    started_s: float


Moved = Callable[[int, int], None]  # so many bytes of the unit were handled so far, of so many


class Work(NamedTuple):
    """What a job does. `finish` runs once after the last unit of a job that was not cancelled."""

    plan: Callable[[], AsyncIterator[JobUnit]]
    action: Callable[[JobUnit, Moved], Awaitable[int]]  # returns the bytes it handled
    finish: Callable[[], Awaitable[None]] | None = None
    parallel: int = PARALLEL


class _Job:
    def __init__(self, state: JobState) -> None:
        self.state = state
        self.task: asyncio.Task[None] | None = None
        self.failures_in_a_row = 0
        self.learned_bytes = 0  # more than the plan said, by units whose size came out later

    def change(self, **values: object) -> None:
        self.state = msgspec.structs.replace(self.state, **values)


class Jobs:
    """See the module's header. `make` gives the work of a verb; it raises for an invalid call."""

    def __init__(
        self, meta: MetaStore, clock: Clock, chance: Chance, make: Callable[[JobVerb, JobCall], Awaitable[Work]]
    ) -> None:
        self._meta = meta
        self._clock = clock
        self._chance = chance
        self._make = make
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    async def resume(self) -> None:
        """Start jobs again that a restart cut off."""
        entries, _ = await self._meta.range(PREFIX)
        for entry in entries:
            job_id = entry.key.removeprefix(PREFIX)
            try:
                kept = msgspec.msgpack.decode(entry.value, type=_Kept)
                work = await self._make(kept.verb, kept.call)
            except (ForebayError, msgspec.MsgspecError) as error:
                log.warning("job %s cannot go on: %s", job_id, error)
                await self._meta.delete(entry.key)
                continue
            self._begin(job_id, kept.verb, kept.call, kept.started_s, work)

    async def start(self, verb: JobVerb, call: JobCall) -> JobState:
        """Begin a job; returns its state so far. With `dry_run` only the plan runs: its totals say what the job would
        do. `Busy` if the identity has too many under way."""
        theirs = [job.state for job in self._jobs.values() if job.state.identity == call.identity]
        if sum(state.state == "running" for state in theirs) >= JOBS_RUNNING_MAX:
            raise Busy(
                f"{JOBS_RUNNING_MAX} of your jobs are under way: wait for some, or cancel some (`forebay job ls`)",
                code="TooManyRequests",
                retry_after_s=5.0,
            )
        work = await self._make(verb, call)
        job_id = self._chance.token_hex(4)
        started_s = self._clock.wall_s()
        if not call.dry_run:
            await self._meta.put(PREFIX + job_id, msgspec.msgpack.encode(_Kept(verb, call, started_s)))
        return self._begin(job_id, verb, call, started_s, work).state

    def _begin(self, job_id: str, verb: JobVerb, call: JobCall, started_s: float, work: Work) -> _Job:
        job = _Job(JobState(job_id, verb, call.bucket, call.prefix, started_s=started_s, identity=call.identity))
        self._jobs[job_id] = job
        job.task = asyncio.create_task(self._run(job, work, call.dry_run))
        self._forget_old(call.identity)
        return job

    def get(self, job_id: str) -> JobState:
        """`NotFound` for a job that never existed, or was forgotten."""
        return self._job(job_id).state

    def all(self) -> list[JobState]:
        """Newest first."""
        return [job.state for job in reversed(self._jobs.values())]

    @property
    def running(self) -> int:
        return sum(job.state.state == "running" for job in self._jobs.values())

    async def cancel(self, job_id: str) -> JobState:
        """Stop a job; finished units stay done. A job that has ended is left as it is."""
        job = self._job(job_id)
        if job.task is not None and job.state.state == "running":
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        return job.state

    async def forget(self, bucket: str) -> None:
        """End the jobs of a bucket that is gone, and know nothing of them: a bucket of that name may be another's."""
        for job_id, job in list(self._jobs.items()):
            if job.state.bucket == bucket:
                await self.cancel(job_id)
                self._jobs.pop(job_id, None)

    async def aclose(self) -> None:
        """Stop working. Running jobs keep their records, for the next start."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for job in self._jobs.values():
            if job.task is not None and job.state.state == "running":
                job.change(state="cancelled")  # so that the task leaves the record alone
                job.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _job(self, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is None:
            raise no_such_job(job_id)
        return job

    def _forget_old(self, identity: str) -> None:
        ended = {job_id: job.state.identity for job_id, job in self._jobs.items() if job.state.state != "running"}
        theirs = [job_id for job_id, whose in ended.items() if whose == identity]
        for job_id in theirs[: max(0, len(theirs) - JOBS_KEPT_MAX)]:
            del self._jobs[job_id], ended[job_id]
        for job_id in list(ended)[: max(0, len(ended) - JOBS_KEPT_IN_ALL_MAX)]:
            del self._jobs[job_id]

    async def _run(self, job: _Job, work: Work, dry_run: bool) -> None:
        ended = "done"
        try:
            if dry_run:
                await self._walk(job, work)
            else:
                await self._work_off(job, work)
                if work.finish is not None:
                    await work.finish()
        except asyncio.CancelledError:
            if job.state.state != "running":
                return  # the engine stops: the job goes on after the next start
            ended = "cancelled"
        except ForebayError as error:
            ended = "failed"
            self._note(job, str(error))
        except Exception as error:
            log.exception("job %s broke", job.state.job)
            ended = "failed"
            first = _flat(error)[0] if isinstance(error, BaseExceptionGroup) else error
            self._note(job, f"Bug: {first!r}; the node's log has more")
        job.change(state=ended, ended_s=self._clock.wall_s())
        if not dry_run:
            await self._meta.delete(PREFIX + job.state.job)

    async def _walk(self, job: _Job, work: Work) -> None:
        units = size_bytes = 0
        async for unit in work.plan():
            units, size_bytes = units + 1, size_bytes + unit.size_bytes
        job.change(units_total=units, bytes_total=size_bytes)

    async def _work_off(self, job: _Job, work: Work) -> None:
        """Plan a few pages ahead of the workers, so that totals are known early but memory stays small."""
        queue: asyncio.Queue[JobUnit | None] = asyncio.Queue(maxsize=4096)

        async def plan() -> None:
            units = size_bytes = 0
            async for unit in work.plan():
                units, size_bytes = units + 1, size_bytes + unit.size_bytes
                await queue.put(unit)
            job.change(units_total=units, bytes_total=size_bytes + job.learned_bytes)
            for _ in range(work.parallel):
                await queue.put(None)

        async def worker() -> None:
            while (unit := await queue.get()) is not None:
                await self._unit(job, work, unit)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(plan())
                for _ in range(work.parallel):
                    group.create_task(worker())
        except* ForebayError as errors:
            first = next(error for error in _flat(errors) if isinstance(error, ForebayError))
            raise first from None

    async def _unit(self, job: _Job, work: Work, unit: JobUnit) -> None:
        counted_bytes, size_bytes = 0, unit.size_bytes

        def moved(so_far_bytes: int, of_bytes: int) -> None:
            nonlocal counted_bytes, size_bytes
            total = job.state.bytes_total
            more, size_bytes = of_bytes - size_bytes, of_bytes
            job.learned_bytes += more
            done = job.state.bytes_done + so_far_bytes - counted_bytes
            job.change(bytes_done=done, bytes_total=None if total is None else total + more)
            counted_bytes = so_far_bytes

        try:
            done_bytes = await work.action(unit, moved)
        except ForebayError as error:
            job.failures_in_a_row += 1
            job.change(units_failed=job.state.units_failed + 1, bytes_done=job.state.bytes_done - counted_bytes)
            self._note(job, f"{unit.key}: {error}" if unit.key else str(error))
            if job.failures_in_a_row >= FAILURES_MAX:
                raise
        else:
            job.failures_in_a_row = 0
            done = job.state.bytes_done - counted_bytes + done_bytes
            job.change(units_done=job.state.units_done + 1, bytes_done=done)

    def _note(self, job: _Job, error: str) -> None:
        if len(job.state.errors) < ERRORS_SHOWN_MAX:
            job.change(errors=[*job.state.errors, error])


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
