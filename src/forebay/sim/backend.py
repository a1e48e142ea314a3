"""An object storage that fails in the ways object storages do, and remembers what was true when.

Theory. It holds every version of every object that ever was and since when, so that any answer a reader gets can be
judged afterwards. Requests take time; they may be refused (503), be slow, end early, or find another version than they
asked for. A listing may be of an earlier moment. Everything counts requests, so that load can be judged as well.

Invariant. A body that is delivered without an error is a prefix of exactly the version and range asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.errors import Busy, ForebayError, NotFound, Precondition, Unavailable
from forebay.sim.schedule import Schedule

Name = tuple[str, str]  # bucket, key
LATE_S = 0.4  # many writes and flushes long


@dataclass(slots=True)
class Weather:
    """How the backend behaves now. Probabilities per request, or per chunk for `break_off`."""

    refuse: float = 0.0
    busy: float = 0.0
    break_off: float = 0.0
    lose: float = 0.0  # answers to changes, after they were made
    hang: float = 0.0  # changes that time out, and land up to LATE_S later if their condition holds then
    latency_us: int = 2_000
    chunk_us: int = 300


@dataclass(frozen=True, slots=True)
class Moment:
    """From `since_us` on, the object was this; `version` is empty while there was none."""

    since_us: int
    version: str
    data: bytes = b""


@dataclass(slots=True)
class Body:
    """A body under way: call `next` with what to do with the chunk that comes, or the error."""

    backend: SimBackend
    data: bytes
    at: int = 0

    def next(self, chunk: Callable[[bytes], None], failed: Callable[[ForebayError], None]) -> None:
        """Deliver the next chunk later. An empty chunk is the end."""
        schedule, weather = self.backend.schedule, self.backend.weather
        delay = schedule.delay_us(weather.chunk_us)
        if self.at < len(self.data) and schedule.happens(weather.break_off):
            schedule.after(delay, failed, Unavailable("the connection was reset: try again"))
            return
        size = schedule.between(1, 40)
        part = self.data[self.at : self.at + size]
        self.at += len(part)
        schedule.after(delay, chunk, part)


@dataclass(slots=True)
class SimBackend:
    """All buckets of one object storage."""

    schedule: Schedule
    weather: Weather = field(default_factory=Weather)
    history: dict[Name, list[Moment]] = field(default_factory=dict)
    requests: int = 0
    succeeded: int = 0
    changing: dict[int, Callable[[], None]] = field(default_factory=dict)  # on their way, by number
    may_land: Callable[[Name, int], bool] = lambda name, since_us: True  # what hangs since then
    landed: int = 0

    # --- the world outside changes it --------------------------------------------------------------------------------
    def put(self, name: Name, version: str, data: bytes) -> None:
        self.history.setdefault(name, []).append(Moment(self.schedule.now_us, version, data))

    def delete(self, name: Name) -> None:
        self.history.setdefault(name, []).append(Moment(self.schedule.now_us, ""))

    # --- requests ----------------------------------------------------------------------------------------------------
    def head(self, name: Name, done: Callable[[str, int], None], failed: Callable[[ForebayError], None]) -> None:
        """Later: the version and size now, or why not."""

        def answer() -> None:
            now = self._now(name)
            if not now.version:
                failed(NotFound("there is no such object: check the key", code="NoSuchKey"))
            else:
                self.succeeded += 1
                done(now.version, len(now.data))

        self._request(answer, failed)

    def fetch(
        self,
        name: Name,
        version: str,
        start: int,
        end: int,
        done: Callable[[Body], None],
        failed: Callable[[ForebayError], None],
    ) -> None:
        """Later: the bytes [start, end) of this version, as a body, or why not."""

        def answer() -> None:
            now = self._now(name)
            if now.version != version:
                failed(Precondition("the object changed: open it again"))
            else:
                self.succeeded += 1
                done(Body(self, now.data[start:end]))

        self._request(answer, failed)

    def change(
        self,
        name: Name,
        data: bytes | None,
        expect: str | None,
        done: Callable[[str], None],
        failed: Callable[[ForebayError], None],
    ) -> None:
        """Later: put (or, for None, delete) the object if it is at version `expect` (None: any); its version then. The
        answer may be lost though it was done."""

        number = self.requests

        def answer() -> None:
            if self.changing.pop(number, None) is None:
                return  # the asker's machine or process died before
            if self.schedule.happens(self.weather.hang):
                hangs_us = self.schedule.between(0, int(LATE_S * 1e6))
                self.schedule.after(hangs_us, self._land, name, data, expect, self.schedule.now_us)
                failed(Unavailable("no answer in time: try again"))
                return
            version = self._make(name, data, expect)
            if version is None:
                failed(Precondition("the object changed: look at it"))
            elif self.schedule.happens(self.weather.lose):
                failed(Unavailable("the answer was lost: try again"))
            else:
                done(version)

        def refused(error: ForebayError) -> None:
            if self.changing.pop(number, None) is not None:
                failed(error)

        self.changing[number] = answer
        self._request(answer, refused)

    def _make(self, name: Name, data: bytes | None, expect: str | None) -> str | None:
        """Put or delete; the version then, or None where the condition does not hold."""
        now = self._now(name)
        if expect is not None and now.version != expect:
            return None
        if data is not None:
            version = f"b{len(self.history.get(name, ()))}-{self.schedule.now_us}"
            self.put(name, version, data)
            return version
        if now.version:
            self.delete(name)
        return ""

    def _land(self, name: Name, data: bytes | None, expect: str | None, since_us: int) -> None:
        """What hung arrives, although who asked may be gone."""
        if self.may_land(name, since_us) and self._make(name, data, expect) is not None:
            self.landed += 1
            self.schedule.log("backend", "late", f"{name[0]}/{name[1]}", "nothing" if data is None else data[:4].hex())

    def hang_up(self) -> None:
        """Who asked is gone: what was on its way was taken at the last moment, or never will be."""
        for number, answer in list(self.changing.items()):
            if self.schedule.happens(0.5):
                answer()
            self.changing.pop(number, None)

    def look(self, name: Name, done: Callable[[str, bytes], None], failed: Callable[[ForebayError], None]) -> None:
        """Later: version and bytes now, or why not."""

        def answer() -> None:
            now = self._now(name)
            if now.version:
                done(now.version, now.data)
            else:
                failed(NotFound("there is no such object: check the key", code="NoSuchKey"))

        self._request(answer, failed)

    def list_keys(self, bucket: str) -> list[str]:
        """The keys of a bucket, as of now or, as some storages have it, of a while ago."""
        at_us = self.schedule.now_us - (self.schedule.between(0, 200_000) if self.schedule.happens(0.3) else 0)
        return [key for (owner, key) in self.history if owner == bucket and self._at((owner, key), at_us).version]

    def _request(self, answer: Callable[[], None], failed: Callable[[ForebayError], None]) -> None:
        self.requests += 1
        delay = self.schedule.delay_us(self.weather.latency_us)
        if self.schedule.happens(self.weather.refuse):
            self.schedule.after(delay, failed, Unavailable("503: try again"))
        elif self.schedule.happens(self.weather.busy):
            after_s = self.schedule.between(0, 50) / 1000
            self.schedule.after(delay, failed, Busy("503 Slow Down: try again later", retry_after_s=after_s))
        else:
            self.schedule.after(delay, answer)

    # --- what was true when ------------------------------------------------------------------------------------------
    def _now(self, name: Name) -> Moment:
        moments = self.history.get(name)
        return moments[-1] if moments else Moment(0, "")

    def _at(self, name: Name, at_us: int) -> Moment:
        known = [moment for moment in self.history.get(name, ()) if moment.since_us <= at_us]
        return known[-1] if known else Moment(0, "")

    def present(self, name: Name) -> tuple[str, bytes | None]:
        """Version and bytes now; ("", None) if there is no such object."""
        now = self._now(name)
        return now.version, now.data if now.version else None

    def ever_held(self, name: Name, data: bytes) -> bool:
        return any(moment.version and moment.data == data for moment in self.history.get(name, ()))

    def all_of(self, bucket: str) -> list[tuple[str, bytes]]:
        """Key and bytes of every object that a bucket has now."""
        return [(n[1], self._now(n).data) for n in self.history if n[0] == bucket and self._now(n).version]

    def bytes_of(self, name: Name, version: str) -> bytes:
        """What this version is, for ever."""
        return next(moment.data for moment in self.history[name] if moment.version == version)

    def was_current(self, name: Name, version: str, from_us: int, to_us: int) -> bool:
        """Whether the object was at `version` (empty: absent) at any time in [from_us, to_us]."""
        moments = self.history.get(name, [])
        if not version and (not moments or moments[0].since_us > from_us):
            return True
        for at, moment in enumerate(moments):
            until_us = moments[at + 1].since_us if at + 1 < len(moments) else to_us + 1
            if moment.version == version and moment.since_us <= to_us and until_us >= from_us:
                return True
        return False
