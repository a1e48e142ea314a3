"""Which bodies of a key may have been sent to the backend, so that what is met there is known to be ours.

Theory. The answer to a put may be lost, and what it carried may be at the backend all the same: at once, or late, when
some proxy lets go of it. So each key has a `Sent`: the digests of bodies that may have left with a request ("" for a
delete). Who meets something unexpected at the backend compares it with them before it calls it a stranger's.

A body counts from the moment in which a request with it may leave (`left`), not from its acknowledgement: what was
overwritten before it was sent can never be met. It counts until a later flush was answered *and* nothing of it can
still arrive. An answered flush alone does not end it: a put that hung for minutes may land after its successor. So
`answered` makes of *tried* digests *late* ones, for `late_s` more; those whose time was over before this flush began
go, since whatever landed of them it has replaced.

Nothing is dropped for being many, and so that there are not many, the *sending* is bounded: where UNANSWERED_MAX bodies
are without an answer, the backend is asked what it has before one more leaves (`asks_first`). A backend that is away
does not answer that, so nothing more is sent; one that does answer lets the flush go on.

Rejected: keeping the last N digests (the one that landed may be the first of N + 1); all that was ever acknowledged
(most was never sent, and each write would carry it); times of sending (they are known only in memory: a note would have
to be written at the end of each request).

Invariants. (1) A digest is never in a `Sent` twice. (2) Nothing but `answered` takes a digest away.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from forebay.core import limits

ABSENT: Final = ""  # stands for the digest of a delete


class Sent(NamedTuple):
    """What may be at the backend, or on its way there, besides what is known to be. `tried`: digests that no answered
    flush came after. `late`: digests that one did come after, and until when (Unix time) they may still arrive."""

    tried: tuple[str, ...] = ()
    late: tuple[tuple[str, float], ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """Of all that is ours if it is met."""
        return (*self.tried, *(digest for digest, _ in self.late))


def left(sent: Sent, digest: str | None) -> Sent:
    """A request that carries `digest` may leave from now on. None: nothing is known to tell it by."""
    if digest is None or digest in sent.tried:
        return sent
    return Sent((*sent.tried, digest), tuple(each for each in sent.late if each[0] != digest))


def answered(sent: Sent, began_s: float, ended_s: float, late_s: float = limits.LATE_S) -> Sent:
    """A flush that was begun at `began_s` was answered by `ended_s`, and all of `sent` left before that. What could
    still arrive when it was begun may have landed after it took effect, however late its answer was heard."""
    late = tuple(each for each in sent.late if each[1] > began_s)
    return Sent((), (*late, *((digest, ended_s + late_s) for digest in sent.tried)))


def asks_first(sent: Sent, digest: str, bound: int = limits.UNANSWERED_MAX) -> bool:
    """Whether the backend must answer a question before a body that was never sent may leave."""
    return digest not in sent.tried and len(sent.tried) >= bound
