"""Which bodies of a key may have been sent to the backend, so that the node recognises its own objects there.

Theory. A put's answer may be lost while its body reaches the backend anyway: at once, or later, when some proxy lets go
of it. So each key has a `Sent`: the digests of bodies that may have left with a request ("" for a delete). An
unexpected object at the backend is compared with them before it counts as a stranger's.

A body counts from the moment a request with it may leave (`left`), not from its acknowledgement: a body that was
overwritten before it was sent can never arrive. It counts until a later flush was answered *and* it can no longer
arrive. An answered flush alone is not enough, since a put that hung for minutes may land after its successor. So
`answered` turns *tried* digests into *late* ones, for `late_s` more. Late digests whose time ended before this flush
began are dropped: if one landed, this flush replaced it.

No digest is dropped because there are many. Instead the *sending* is bounded: with UNANSWERED_MAX bodies unanswered,
the backend must say what it has before another leaves (`asks_first`). A backend that is away does not answer, so
nothing more is sent. One that answers lets the flush go on.

`judge` says whose an object at the backend is: the one place that decides it. An ETag that is the MD5 tells at a
glance, and so does another size. Otherwise the object is read and its digest compared.

Rejected: keeping the last N digests (the one that landed may be the first of N + 1); all that was ever acknowledged
(most was never sent, and each write would carry it); times of sending (they are known only in memory: a note would have
to be written at the end of each request).

Invariants. (1) A digest is never in a `Sent` twice. (2) Only `answered` removes a digest.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from forebay.core import limits
from forebay.core.types import ObjectInfo

ABSENT: Final = ""  # stands for the digest of a delete


class Sent(NamedTuple):
    """Digests that the backend may have or may still receive, besides the version it is known to have. `tried`: no
    flush was answered since. `late`: a flush was answered since, but they may still arrive until the given Unix
    time."""

    tried: tuple[str, ...] = ()
    late: tuple[tuple[str, float], ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """All digests; an object at the backend with one of them is ours."""
        return (*self.tried, *(digest for digest, _ in self.late))


def left(sent: Sent, digest: str | None) -> Sent:
    """`sent`, after a request that carries `digest` may have left. None: the body has no known digest."""
    if digest is None or digest in sent.tried:
        return sent
    return Sent((*sent.tried, digest), tuple(each for each in sent.late if each[0] != digest))


def answered(sent: Sent, began_s: float, ended_s: float, late_s: float = limits.LATE_S) -> Sent:
    """`sent`, after a flush that began at `began_s` was answered by `ended_s`; all of `sent` left before that. A digest
    that could still arrive at `began_s` stays, since it may have landed after this flush took effect, however late the
    answer came."""
    late = tuple(each for each in sent.late if each[1] > began_s)
    return Sent((), (*late, *((digest, ended_s + late_s) for digest in sent.tried)))


def asks_first(sent: Sent, digest: str, bound: int = limits.UNANSWERED_MAX) -> bool:
    """Whether the backend must answer a question before a body that was never sent may leave."""
    return digest not in sent.tried and len(sent.tried) >= bound


class Whose(Enum):
    STRANGER = 0
    EARLIER = 1  # ours, of an earlier write
    THIS = 2


class Ours(NamedTuple):
    """How the backend's object is recognised as ours; "" where that is not known. `md5`: of the bytes. `parts_etag`:
    what S3 calls the parts it went in. `digest`: to be compared with a digest of what is there, made in the same way.
    `earlier`: the same of earlier bodies, ABSENT for a delete."""

    size_bytes: int
    md5: str = ""
    digest: str = ""
    parts_etag: str = ""
    earlier: tuple[str, ...] = ()


def judge(seen: ObjectInfo | None, ours: Ours, digest: str = "") -> Whose | None:
    """Whose the object is; None if its bytes must be read to tell: then ask again with their `digest`."""
    if seen is None:
        return Whose.EARLIER if ABSENT in ours.earlier else Whose.STRANGER
    if seen.etag and seen.etag in (ours.md5, ours.parts_etag):
        return Whose.THIS
    may_be_this = bool(ours.digest) and seen.size_bytes == ours.size_bytes
    if not may_be_this and not any(ours.earlier):
        return Whose.STRANGER
    if not digest:
        return None
    if may_be_this and digest == ours.digest:
        return Whose.THIS
    return Whose.EARLIER if digest in ours.earlier else Whose.STRANGER
