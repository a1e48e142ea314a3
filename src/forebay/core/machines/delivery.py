"""How one object gets to its backend: whole or in parts, under which condition, and whose is what is there.

Theory. A delivery is a conversation. It asks for one request at a time and is told how that ended (`step`). The shell
(`node/engine/delivery.py`) makes the requests.

With a conflict policy (a flush) the delivery *insists*. Its requests are conditional on the version that the write
replaced. If the backend refuses, it has another version, and that may be ours: the answer to an earlier request may
have been lost, in this process or in one before it. So the delivery looks, and `judge` says whose the object is. Only a
stranger's object is a conflict, and then the policy decides. Anything else is replaced, on the condition that it is
still there. A delivery without a base version is conditional on the version found, so that no body lands late on top of
its successor. Without a policy (written through) a refusal is the client's answer.

Large bodies go as uploads: the intention is noted, then the upload's id, then parts are sent. An insisting delivery
that fails keeps its upload, and the next one goes on with it. Any other aborts it. Where an upload vanished, it may
have been completed without an answer, and an insisting delivery looks.

A backend that does not support conditions is looked at before each request; tags that it does not support stay away.

Rejected: marking objects with metadata of ours (users would see it); trusting the time of modification; aborting the
uploads of the key that have no parts (a stranger's has none either, for a moment).

Invariants. (1) Every request of an insisting delivery is conditional, or follows a look. (2) A stranger's object is
replaced only if the policy is `ours` or there was no base version. (3) `Begin` comes after `Keep`, and parts go only to
an upload whose id was kept. (4) Only an upload whose id was heard is aborted. (5) A delivery ends after a bounded
number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.machines.delivery_events import (
    BEGINNING,
    Abort,
    Begin,
    Begun,
    Complete,
    Delete,
    Delivered,
    Effect,
    Event,
    Fail,
    Failed,
    Fill,
    Filled,
    Forgotten,
    GaveUp,
    Keep,
    Leave,
    List,
    Listed,
    Look,
    Made,
    Put,
    Read,
    Refused,
    Saw,
    Started,
    Swept,
    Unsupported,
    Upload,
    WasRead,
    Why,
    Yielded,
)
from forebay.core.machines.sent_bodies import Ours, Whose, judge
from forebay.core.s3rules.keeping import without_keeping
from forebay.core.types import Headers, ObjectInfo

ROUNDS_MAX = 4  # give up for now on an object that changes at the backend at every look
COPIES_MAX = 100  # names tried for the copy of one conflict


# --- what is delivered -----------------------------------------------------------------------------------------------
class Terms(NamedTuple):
    """What is delivered, and what a refusal means.

    `part_bytes_min`: of the backend, 0 if it has no uploads. `base`: the version that must be there ("" for none, None
    for any). `policy`: the bucket's conflict policy; "" for a delivery that does not insist. `asks_first`: look before
    anything is sent. `headers`: those that the object must have. `copy_name`: the key for the copy of a conflict, by
    its number from 1. `parts`: (number, start, end, MD5) of an upload that a client filled; if it vanished, the body
    goes as any other if it `is_here`.
    """

    key: str
    ours: Ours
    part_bytes_min: int = 0
    base: str | None = None
    policy: str = ""
    is_delete: bool = False
    tags: bool = False
    asks_first: bool = False
    headers: Headers = ()
    copy_name: Callable[[int], str] = str
    parts: tuple[tuple[int, int, int, str], ...] = ()
    is_here: bool = True


def part_size(size_bytes: int, part_bytes_min: int) -> int:
    """The size of an upload's parts: whole blocks, and at most PARTS_MAX parts."""
    least = max(limits.FLUSH_PART_BYTES, part_bytes_min, -(-size_bytes // limits.PARTS_MAX))
    return -(-least // limits.BLOCK_BYTES) * limits.BLOCK_BYTES


class _For(Enum):
    """What a look is for."""

    REFUSED = 0  # whose is it that is there?
    CONDITION = 1  # is there what is expected?
    FORGOTTEN = 2  # was the upload completed?


class Delivery(msgspec.Struct):
    """See the module's header. `upload` is the one that an earlier delivery noted, or that a client filled. If it is of
    another key, a conflict was decided before. `stale`: uploads that nobody needs, as in `drop`.

    `step` returns effects in order. The last one before the outcome (`Delivered`, `Yielded`, `Fail`) is answered by an
    event; the others, and those after the outcome, are just carried out.
    """

    terms: Terms
    upload: Upload | None = None
    stale: tuple[tuple[str, str], ...] = ()
    key: str = ""
    expect: str | None = None
    ended: bool = False
    _policy: str = ""
    _copy: int = 0  # of a conflict; 0: under its own key
    _rounds: int = 0
    _plain: bool = False  # without conditions
    _untagged: bool = False
    _guessed: bool = False  # whether it was the condition that is not supported is a guess
    tokens: dict[int, str] = msgspec.field(default_factory=dict)  # of parts that the upload has, as far as is known
    _listed: bool = False  # the upload has nothing that is not in `tokens`
    _beginning: bool = False
    _given_up: bool = False
    _client: bool = False  # the upload is a client's
    _reason: _For = _For.REFUSED
    _seen: ObjectInfo | None = None
    _reading: bool = False

    def __post_init__(self) -> None:
        terms = self.terms
        self.key, self._client = terms.key, bool(terms.parts)
        self.expect = terms.base or "" if self.insists and not terms.is_delete else terms.base
        if self.upload is not None and self.upload.key != self.key:
            self._policy, self._copy, self.key, self.expect = "keep-both", 1, self.upload.key, ""

    @property
    def insists(self) -> bool:
        return bool(self.terms.policy)

    @property
    def _part_bytes(self) -> int:
        """The size of parts; 0: the body goes whole."""
        size_bytes, least = self.terms.ours.size_bytes, self.terms.part_bytes_min
        return part_size(size_bytes, least) if least and size_bytes >= limits.MULTIPART_BYTES_MIN else 0

    @property
    def _tagged(self) -> bool:
        return self.terms.tags and not self._untagged

    # --- what happens ------------------------------------------------------------------------------------------------
    def step(self, event: Event) -> list[Effect]:
        """What to do after `event`."""
        assert not self.ended or isinstance(event, GaveUp), event
        if self._beginning and isinstance(event, Begun | Failed | Unsupported):
            return self._began(event)
        match event:
            case Started():
                first = [*drop(self.stale), Swept()] if self.stale else []
                return [*first, *self._first()]
            case GaveUp():
                return self._give_up()
            case Made(seen):
                return self._done(seen)
            case Refused():
                return self._refused()
            case Unsupported():
                return self._unsupported()
            case Forgotten():
                return self._look(_For.FORGOTTEN) if self.insists or self._client else self._fail(Why.FORGOTTEN)
            case Listed(parts):
                fits = {number: (end - start, md5) for number, start, end, md5 in self._parts()}
                self._listed = True
                for number, token, size_bytes in parts:
                    length, md5 = fits.get(number, (-1, ""))
                    if size_bytes == length and md5 in ("", token.strip('"')):
                        self.tokens.setdefault(number, token)
                return self._send()
            case Filled(tokens):
                self.tokens.update(tokens)
                return self._send()
            case Saw(seen):
                return self._saw(seen)
            case WasRead(digest):
                self._reading = False
                return self._settle(self._seen, judge(self._seen, self.terms.ours, digest))
            case Failed():
                return self._fail()
        raise TypeError(event)

    def _first(self) -> list[Effect]:
        if self.terms.is_delete and not self.expect:
            return self._look(_For.REFUSED)  # where there was nothing, or no way to say what
        if self.terms.asks_first and not self._copy:
            return self._look(_For.REFUSED)
        return self._send()

    # --- sending -----------------------------------------------------------------------------------------------------
    def _send(self) -> list[Effect]:
        """Send what is missing, then make the object."""
        effects: list[Effect] = []
        upload = self.upload
        if upload is not None and not self._client and self._is_useless(upload):
            effects = self._drop_upload()
        if self.upload is None and not self._part_bytes:
            return [*effects, *([Keep(None)] if effects else []), *self._request()]
        if self.upload is None:
            self.upload, self.tokens = Upload(self.key, BEGINNING, self._part_bytes), {}
            self._listed = self._beginning = True
            return [*effects, Keep(self.upload), Begin(self.key, self._tagged)]
        missing = tuple(part[:3] for part in self._parts() if part[0] not in self.tokens)
        if missing and not self._listed:
            return [List(self.upload)]
        return [Fill(self.upload, missing)] if missing else self._request()

    def _is_useless(self, upload: Upload) -> bool:
        """It is for another key, or has no id, or the backend has no uploads any more."""
        return not self._part_bytes or upload.key != self.key or upload.upload_id == BEGINNING

    def _parts(self) -> tuple[tuple[int, int, int, str], ...]:
        """(number, start, end, MD5 or "") of the upload's parts."""
        if self._client:
            return self.terms.parts
        assert self.upload is not None
        length, size_bytes = self.upload.part_bytes, self.terms.ours.size_bytes
        starts = enumerate(range(0, size_bytes, length), 1)
        return tuple((number, start, min(start + length, size_bytes), "") for number, start in starts)

    def _request(self, *, looked: bool = False) -> list[Effect]:
        """The request that makes it so. It cannot be taken back."""
        if self.expect is not None and self._plain and not looked:
            return self._look(_For.CONDITION)
        expect = None if self._plain else self.expect
        if self.terms.is_delete:
            return [Delete(self.key, expect)]
        if self.upload is not None:
            parts = tuple((part[0], self.tokens[part[0]]) for part in self._parts())
            return [Complete(self.upload, parts, expect)]
        return [Put(self.key, expect, self._tagged)]

    def _unsupported(self) -> list[Effect]:
        if not self.insists:
            return self._fail()
        sends_tags = self._tagged and self.upload is None and not self.terms.is_delete
        if self.expect is not None and not self._plain:
            self._plain, self._guessed = True, sends_tags  # the tags may be what it does not support
        elif sends_tags:
            self._untagged = True
            self._plain, self._guessed = self._plain and not self._guessed, False
        else:
            return self._fail()
        return self._request()

    def _began(self, event: Begun | Failed | Unsupported) -> list[Effect]:
        """`Begin` ended. The upload may be there, whoever wants it."""
        assert self.upload is not None
        if isinstance(event, Unsupported) and self.insists and self._tagged and not self._given_up:
            self._untagged = True
            return [Begin(self.key, False)]
        self._beginning = False
        if isinstance(event, Begun):
            self.upload = self.upload._replace(upload_id=event.upload_id)
            if self.insists and not event.wanted:  # the note of its successor does not know the id
                return [*self._drop_upload(), *self._end(Fail(Why.UNWANTED))]
            if self._given_up:
                return [Keep(self.upload), *self._fail(Why.UNWANTED)] if self.insists else self._fail(Why.UNWANTED)
            return [Keep(self.upload), *self._send()]
        if isinstance(event, Unsupported) or event.did_nothing:
            self.upload = None
            return [Keep(None), *self._fail()]
        return self._fail()

    # --- looking -----------------------------------------------------------------------------------------------------
    def _refused(self) -> list[Effect]:
        if self._reading:  # it changed before it was read
            self._reading = False
            self._rounds += bool(self._copy) or self._reason is not _For.REFUSED
            return self._end(Fail(Why.CHANGING)) if self._rounds >= ROUNDS_MAX else self._look(self._reason)
        return self._look(_For.REFUSED) if self.insists else self._fail()

    def _look(self, reason: _For) -> list[Effect]:
        self._reason = reason
        self._rounds += reason is _For.REFUSED and not self._copy
        return [Look(self.key)]

    def _saw(self, seen: ObjectInfo | None) -> list[Effect]:
        self._seen = seen
        there = _version(seen)
        if self._reason is _For.CONDITION:
            if there == self.expect:
                return self._request(looked=True)
            self._look(_For.REFUSED)  # as if it had been refused
        if self._reason is _For.REFUSED and not self._copy:
            if self.terms.is_delete and seen is None:
                return self._done(None)
            if self.terms.base is None or there == self.expect:
                return self._again(there)
        whose = judge(seen, self.terms.ours)
        if whose is None and seen is not None:
            self._reading = True
            return [Read(seen)]
        return self._settle(seen, whose)

    def _settle(self, seen: ObjectInfo | None, whose: Whose | None) -> list[Effect]:
        """`seen` was judged."""
        assert whose is not None, "its bytes were read"
        is_this = (
            whose is Whose.THIS and seen is not None and set(without_keeping(self.terms.headers)) <= set(seen.headers)
        )
        if is_this or (self._copy and whose is Whose.THIS):  # a copy's name says whose it is
            gone = self._client or self._reason is _For.FORGOTTEN
            return [*([] if gone else self._drop_upload()), *self._done(seen)]
        if self._reason is _For.FORGOTTEN:
            return self._vanished()
        if self._copy:
            return self._next_copy()
        if whose is Whose.STRANGER:
            self._policy = self.terms.policy
            if self._policy == "theirs" or (self._policy != "ours" and self.terms.is_delete):
                return [*self._drop_upload(), *self._end(Yielded(self._policy))]
            if self._policy == "keep-both":
                return self._next_copy()
        return self._again(_version(seen))

    def _vanished(self) -> list[Effect]:
        """The upload is gone, and the object is not this body."""
        resumed, self.upload = not self._listed, None
        if self._client and not self.terms.is_here:
            return self._end(Fail(Why.FORGOTTEN))
        if self._client or resumed:
            self._client = False
            return self._send()
        return [Keep(None), *self._end(Fail(Why.FORGOTTEN))]

    def _again(self, there: str | None) -> list[Effect]:
        """Replace what is there."""
        if self._rounds >= ROUNDS_MAX:
            return self._end(Fail(Why.CHANGING))
        self.expect = there
        return self._request(looked=True) if self.terms.is_delete else self._send()

    def _next_copy(self) -> list[Effect]:
        """Put ours beside theirs, under the next name."""
        effects = self._drop_upload()
        self._copy += 1
        if self._copy > COPIES_MAX:
            return [*effects, *([Keep(None)] if effects else []), *self._end(Fail(Why.NAMES))]
        self.key, self.expect = self.terms.copy_name(self._copy), ""
        sends = self._send()
        return [*effects, *([Keep(None)] if effects and not isinstance(sends[0], Keep) else []), *sends]

    # --- the end -----------------------------------------------------------------------------------------------------
    def _drop_upload(self) -> list[Effect]:
        """Leave nothing of the upload; its note still stands."""
        upload, self.upload, self.tokens, self._listed = self.upload, None, {}, False
        return [] if upload is None else [*drop([(upload.key, upload.upload_id)])]

    def _give_up(self) -> list[Effect]:
        self._given_up = True
        return [] if self._beginning or self.ended else self._fail(Why.UNWANTED)

    def _done(self, seen: ObjectInfo | None) -> list[Effect]:
        kept = self.upload is not None and not self.insists and not self._client
        outcome = Yielded("keep-both", self.key) if self._copy else Delivered(seen, self._policy)
        return [*self._end(outcome), *([Keep(None)] if kept else [])]

    def _fail(self, why: Why = Why.ERROR) -> list[Effect]:
        effects = self._end(Fail(why))
        if self.upload is not None and not self.insists and not self._client:
            effects += [*self._drop_upload(), Keep(None)]
        return effects

    def _end(self, outcome: Delivered | Yielded | Fail) -> list[Effect]:
        self.ended = True
        return [outcome]


def drop(uploads: Iterable[tuple[str, str]]) -> list[Abort | Leave]:
    """End uploads (key, id) that nobody needs: an id that was not heard may be any upload of the key."""
    return [Leave(key) if upload_id == BEGINNING else Abort(key, upload_id) for key, upload_id in uploads]


def _version(seen: ObjectInfo | None) -> str | None:
    """What to expect where `seen` is; None where the backend names no version."""
    return "" if seen is None else seen.version or None
