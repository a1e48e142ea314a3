"""Opening: may what is here of a key be served, must the backend be asked, and what does its answer change?

Theory. A bucket says how long a confirmation holds (`Bucket.freshness_s`): for ever (immutable), not at all (always
ask) or some seconds. A record says when the backend last confirmed its version. So every reader *needs* a confirmation
from no earlier than some moment: its arrival (`always`, `revalidate`), its arrival less the bucket's freshness, or any
time (`immutable`). A reader that names its version, as a later part of one response does, needs none for that version.
All moments are wall-clock seconds, and wall clocks step: a confirmation from the future is none, since nothing says how
far the clock is off.

What the node owes its backend is the truth, however old. What is *in doubt* (`checked_s` 0) is asked about once,
whatever the bucket says: a write of it has no outcome. What a machine stop brought back, or a volume from a time when
the node went on without it, is *missed* (`MISSED`): a write or delete that was acknowledged may have replaced it. It is
asked about too, and served by no bucket that can be written through this node before the backend confirmed it.

When the backend does not answer, `always` and `revalidate` fail. A bucket with a freshness time serves the version it
has, because that time already prefers an old answer to none. For DOWN_FOR_S nobody else waits. A version in doubt is
served so only until the backend answers anything, counted from when it was asked to do the write: that answer, say a
listing, may have shown another version, and later readers must not get the old one. From then on it counts as missed.

A question is asked once for all who wait, and counts from the moment it was asked. A reader may share it if that is
late enough for its terms.

*Windows*. A write through changes the backend first and the record after it. If the engine is killed in between, the
next one would find a record that calls the old version confirmed, and an `immutable` bucket would never ask again. So
before the backend is asked to change a key, the cached version becomes unconfirmed in the index, which survives the
process. It stays so until the write has its outcome. That time is the key's window.

    window opens | record 0, committed | backend asked ... answers | record of the outcome | window closes

Inside a window no confirmation is recorded: the backend may have given it before the write took effect. It still counts
for reads meanwhile, so memory holds it, with what the record said before; a slow write makes no reader ask more often.
A question that is under way when a window closes is *overtaken*: its answer may be older than the write, so it is not
recorded either. A listing, or the answer to another question about the key, may already show the effect of a write
under way. Then the confirmations held for its key no longer count, and earlier questions are overtaken.

Rejected: the backend's own Cache-Control (few set it, most set it for browsers); dropping the record when a window
opens (most writes succeed, but those that do not would cost the bytes); windows only where the bucket is `immutable`
(it may become so later).

Invariants. (1) `always` serves nothing unasked but what is owned; `immutable` asks about nothing that was confirmed
once. (2) No recorded confirmation is of a version that a write of this node may have replaced since. (3) A version
confirmed inside a window is fresh inside it, until somebody was shown another. (4) What a front serves, the engine
would.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from forebay.core.record import State
from forebay.core.types import FRESH_IMMUTABLE

IN_DOUBT = 0.0  # `checked_s` of what a write without an outcome may have replaced
MISSED = -1.0  # and of what a machine stop or its volume brought back
DOUBTS_MAX = 65_536  # remembered: of one that was forgotten any answer counts, also an earlier one
CLOCK_SLACK_S = 1.0  # processes of one host may disagree by a scheduling delay, not more
CHECK_TIMEOUT_S = 3.0  # how long a stale version waits for its confirmation before it is served all the same
DOWN_FOR_S = 5.0  # after a failed confirmation: nobody else waits for one this long
ANY = float("-inf")  # no confirmation is needed
ONCE = 0.0  # one is needed, however old
_OWNED, _UNVERIFIED = int(State.OWNED), int(State.UNVERIFIED)
_OWNED_OR_UNVERIFIED = _OWNED | _UNVERIFIED


# --- what a front asks -----------------------------------------------------------------------------------------------
def may_serve(state: int, checked_s: float, freshness_s: float, now_s: float) -> bool:
    """Whether a record may be served without asking anybody: it is verified, and either owned or fresh."""
    if state & _OWNED_OR_UNVERIFIED:
        return not state & _UNVERIFIED
    if checked_s <= 0 or freshness_s <= 0:
        return False
    return freshness_s >= FRESH_IMMUTABLE or -CLOCK_SLACK_S <= now_s - checked_s < freshness_s


def fresh_until_s(state: int, checked_s: float, freshness_s: float) -> float:
    """Until when a record may be served without asking (Unix time); FRESH_IMMUTABLE for ever."""
    return FRESH_IMMUTABLE if state & _OWNED or freshness_s >= FRESH_IMMUTABLE else checked_s + freshness_s


# --- what is here, and what a reader needs ---------------------------------------------------------------------------
class Held(NamedTuple):
    """The version that is here. `alias`: the name that it had before its flush, if it was written here. `checked_s`:
    when the backend last confirmed it."""

    version: str
    alias: str
    is_owned: bool
    checked_s: float

    def is_called(self, version: str) -> bool:
        """Whether that is a name of this version."""
        return version in (self.version, self.alias)


class Absent(Enum):
    """Why no version is here."""

    UNKNOWN = 0
    DELETED = 1  # here, and the backend does not know yet


class Terms(NamedTuple):
    """What a reader needs of a version: to be confirmed at `since_s` or later, or to be `version` ("": any).
    `tolerant`: an unconfirmed version is better than an error. `is_written`: the bucket can be written through the
    node, so a missed version may be a wrong one."""

    since_s: float
    version: str = ""
    tolerant: bool = True
    is_written: bool = True

    def confirmed(self, asked_s: float) -> Terms:
        """The terms after the backend confirmed the version when asked at `asked_s`. (If the clock went back meanwhile,
        what was asked still counts.)"""
        return self._replace(since_s=min(self.since_s, asked_s))


def terms_of(
    freshness_s: float, arrived_s: float, *, version: str = "", revalidate: bool = False, is_written: bool = True
) -> Terms:
    """The terms of a reader that came at `arrived_s`."""
    if revalidate or freshness_s <= 0:
        return Terms(arrived_s, version, False, is_written)
    return Terms(ONCE if freshness_s >= FRESH_IMMUTABLE else arrived_s - freshness_s, version, True, is_written)


class Verdict(Enum):
    """What to do for a reader."""

    SERVE = 0
    ASK = 1  # the backend
    CHANGED = 2  # refuse: there is another version than the one it names
    NO_KEY = 3  # refuse: there is no object


def judge(held: Held | Absent, terms: Terms, now_s: float) -> Verdict:
    """What to do for a reader with that terms, before the backend is asked."""
    if held is Absent.DELETED:
        return Verdict.CHANGED if terms.version else Verdict.NO_KEY
    if not isinstance(held, Held):
        return Verdict.ASK
    if terms.version and held.is_called(terms.version):
        return Verdict.SERVE
    if not held.is_owned and not _suffices(held, terms, now_s):
        return Verdict.ASK
    return Verdict.CHANGED if terms.version else Verdict.SERVE


def _suffices(held: Held, terms: Terms, now_s: float) -> bool:
    if terms.since_s == ANY:
        return not _may_be_wrong(held, terms)
    checked_s = held.checked_s
    return checked_s > 0 and (terms.since_s == ONCE or terms.since_s <= checked_s <= now_s + CLOCK_SLACK_S)


def _may_be_wrong(held: Held, terms: Terms) -> bool:
    return held.checked_s == MISSED and terms.is_written


def tolerates(held: Held, terms: Terms) -> bool:
    """Whether this version, unconfirmed, is better than an error."""
    return terms.tolerant and not _may_be_wrong(held, terms)


# --- the backend -----------------------------------------------------------------------------------------------------
def spares(held: Held, terms: Terms, silent_until_s: float, now_s: float) -> bool:
    """Whether to serve what is here at once instead of asking a backend that did not answer a moment ago (until then,
    monotonic, nobody waits for it if what is here will do)."""
    return now_s < silent_until_s and tolerates(held, terms)


class Said(Enum):
    """What the backend said when it was asked whether a version is its current one."""

    SAME = 0
    OTHER = 1
    GONE = 2
    NOTHING = 3  # no answer


class Then(Enum):
    """How an answer goes on."""

    JUDGE = 0  # each reader anew, on the terms `Terms.confirmed`
    STALE = 1  # as JUDGE, but on the terms ANY
    FETCH = 2  # the new version
    CHANGED = 3  # refuse: there is another version than the one the reader names
    FAIL = 4  # with the backend's error


class Taken(NamedTuple):
    """What an answer changes: whether the version here is `confirmed` on record, or served no more (`drop`), and
    whether the backend counts as silent for a while (`hush`)."""

    then: Then
    confirm: bool = False
    drop: bool = False
    hush: bool = False


def take(said: Said, held: Held, terms: Terms, *, version: str = "", overtaken: bool = False) -> Taken:
    """What the backend's answer about `held` changes. `version`: the one it has, if OTHER. `overtaken`: a write of the
    key ended, or was shown, since the question was asked."""
    match said:
        case Said.SAME:
            return Taken(Then.JUDGE, confirm=not overtaken)
        case Said.OTHER:
            return Taken(Then.FETCH if terms.version in ("", version) else Then.CHANGED, drop=True)
        case Said.GONE:
            return Taken(Then.FAIL, drop=True)
        case Said.NOTHING:
            return Taken(Then.STALE, hush=True) if tolerates(held, terms) else Taken(Then.FAIL)


def may_share(terms: Terms, asked_s: float, *, stale: bool = False, answers: int = 0, answers_before: int = 0) -> bool:
    """Whether a reader that came while a question was under way may take its outcome. `stale`: the backend did not
    answer, which counts only if it answered nobody else between the question (`answers_before`) and the reader's coming
    (`answers`)."""
    return asked_s >= terms.since_s and not (stale and answers_before < answers)


# --- windows ---------------------------------------------------------------------------------------------------------
class Question:
    """One question to the backend about one key. `overtaken`: a write of the key ended, or was shown, since it was
    asked."""

    __slots__ = ("overtaken",)

    def __init__(self) -> None:
        self.overtaken = False


Name = tuple[str, str]


class Windows:
    """The keys that are being written or in doubt, and the questions about keys; see the module's header. `answers`:
    how many answers the backend has given in the life of this engine."""

    def __init__(self) -> None:
        self._open: dict[Name, tuple[str, float]] = {}  # the version that reads go by, and when it was confirmed
        self._doubted: dict[Name, int] = {}  # of what may be in doubt: the answers given when its write began
        self._questions: dict[Name, set[Question]] = {}

    def open(self, name: Name, version: str, checked_s: float, answers: int = 0) -> None:
        """A write of the key is about to ask the backend. The record had this version ("": none), confirmed then."""
        self._open[name] = (version, checked_s)
        self._doubted.setdefault(name, answers)

    def refused(self, name: Name) -> tuple[str, float] | None:
        """The backend refused the write: the confirmation to record again, if any."""
        version, checked_s = self._open[name]
        return (version, checked_s) if checked_s > 0 else None

    def close(self, name: Name, *, in_doubt: bool = False) -> None:
        """The write has its outcome, or never will have: then what is here is `in_doubt`."""
        self._open.pop(name, None)
        if not in_doubt:
            self._doubted.pop(name, None)
        elif len(self._doubted) > DOUBTS_MAX:
            del self._doubted[next(iter(self._doubted))]
        self._overtake(name)

    def listed(self, bucket: str, prefix: str, after: str, upto: str) -> list[str]:
        """The backend listed its keys under `prefix` from `after` to `upto` ("": to their end). Returns those that are
        being written: what is held of them counts no more."""
        written = [
            key
            for of_bucket, key in self._open
            if of_bucket == bucket and key.startswith(prefix) and after < key and (not upto or key <= upto)
        ]
        for key in written:
            self.forsake((bucket, key))
        return written

    def shown(self, name: Name, version: str) -> bool:
        """The backend showed somebody that it has this version of the key ("": none, or another than was asked about).
        Returns whether what is held of the key counts no more: it is being written, and another version was held."""
        held = self._open.get(name)
        if held is None or held[0] == version != "":
            return False
        self.forsake(name)
        return True

    def forsake(self, name: Name) -> None:
        """Others may change the key from now on, and tell nobody here: nothing counts that was confirmed or asked."""
        if name in self._open:
            self._open[name] = ("", 0.0)
        self._overtake(name)

    def asked(self) -> set[Name]:
        """The keys about which a question is under way."""
        return set(self._questions)

    def ask(self, name: Name) -> Question:
        """A question about the key begins. `answered` ends it."""
        question = Question()
        self._questions.setdefault(name, set()).add(question)
        return question

    def answered(self, name: Name, question: Question) -> None:
        """The question has its answer, or never will."""
        asked = self._questions[name]
        asked.discard(question)
        if not asked:
            del self._questions[name]

    def may_record(self, name: Name, version: str, checked_s: float) -> bool:
        """Whether a confirmation of this version may be recorded now. If not, it is held for reads."""
        held = self._open.get(name)
        if held is None:
            self._doubted.pop(name, None)
            return True
        if held[0] != version or checked_s > held[1]:
            self._open[name] = (version, checked_s)
        return False

    def checked_s(self, name: Name, version: str, checked_s: float, answers: int = 0) -> float:
        """When this version was confirmed, if its record or flight says `checked_s`. A doubt that is older than the
        last answer makes it MISSED; a doubt of an earlier life is older than all answers."""
        held = self._open.get(name)
        if held is not None and held[0] == version:
            checked_s = max(checked_s, held[1])
        if checked_s == IN_DOUBT and answers != self._doubted.get(name, 0):
            return MISSED
        return checked_s

    def _overtake(self, name: Name) -> None:
        for question in self._questions.get(name, ()):
            question.overtaken = True
