"""Deliveries against a dumb backend: answers lost before and after they took effect, late requests, strangers between
two requests, stops that leave only the note. The oracle keeps every version that ever was, and who made it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.machines import sent_bodies
from forebay.core.machines.delivery import COPIES_MAX, ROUNDS_MAX, Delivery, Terms, drop
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
from forebay.core.machines.sent_bodies import ABSENT, Ours, Sent, Whose, judge
from forebay.core.types import ObjectInfo

KEY, SMALL, LARGE = "k", 10, 2 * limits.MULTIPART_BYTES_MIN
US, THEM = "us", "them"
# What becomes of one request that changes something. "stop": as "lost", and the process ends.
# "repeated": it took effect, was made again, and that was refused. "unheard": as that, but it never took effect.
FATES = ("fine", "lost", "repeated", "late", "stop", "theirs", "gone", "rewritten")
MORE_FATES = (*FATES, "dropped", "unheard", "busy")


class Bucket:
    """One bucket. `past` has everything that ever was: (key, version, body, who)."""

    def __init__(self, *, conditions: bool = True, tags: bool = True) -> None:
        self.conditions, self.tags = conditions, tags
        self.there: dict[str, tuple[str, str, str]] = {}  # key: version, body, who
        self.past: list[tuple[str, str, str, str]] = []
        self.uploads: dict[str, tuple[str, dict[int, str]]] = {}
        self.waiting: list[tuple[str, str, str | None]] = []  # requests that land later: key, body, expect
        self.may_replace = False  # whether ours may replace a stranger's object
        self.base = ""
        self.strangers = 0

    def write(self, key: str, body: str, who: str, expect: str | None = None) -> bool:
        """False if refused. "" deletes."""
        version, _, whose = self.there.get(key, ("", "", ""))
        if expect is not None and expect != version:
            return False
        if who == US and whose == THEM and version != self.base:
            assert self.may_replace, "a stranger's object was replaced"
        self.strangers += who == THEM
        made = f"v{len(self.past)}"
        self.past.append((key, made if body else "", body, who))
        if body:
            self.there[key] = made, body, who
        else:
            self.there.pop(key, None)
        return True

    def info(self, key: str) -> ObjectInfo | None:
        if key not in self.there:
            return None
        version, body, _ = self.there[key]
        return ObjectInfo(key, LARGE if body.startswith("large") else SMALL, version, "", 0.0)

    def had(self, key: str, body: str) -> bool:
        return any(each[0] == key and each[2] == body for each in self.past)


class Flushes:
    """A node that owes KEY, its notes, and the fates of its requests."""

    def __init__(self, bucket: Bucket, fates: Iterable[str], policy: str, bodies: list[str], base: str | None) -> None:
        self.bucket, self.policy, self.base = bucket, policy, base
        self.fates: Iterator[str] = iter(fates)
        self.bodies = bodies  # what is written, one after the other: "" deletes
        self.upload: Upload | None = None
        self.stale: tuple[tuple[str, str], ...] = ()
        self.sent, self.left = Sent(), False
        self.heard: set[str] = set()
        self.reported = 0
        self.requests = 0
        self.delivering = ""
        self.theirs_at_base = bucket.strangers

    @property
    def body(self) -> str:
        return self.bodies[0]

    def rewrite(self) -> None:
        """The key owes its next body: as `notes.succeeding` says."""
        if len(self.bodies) > 1:
            if self.left:
                self.sent = sent_bodies.left(self.sent, self.body or ABSENT)
            if self.upload is not None:
                self.stale = (*self.stale, (self.upload.key, self.upload.upload_id))
            self.upload, self.left = None, False
            self.bodies.pop(0)

    def run(self) -> Delivered | Yielded:
        for _ in range(40):
            outcome = self.attempt()
            if not isinstance(outcome, Fail):
                return outcome
        raise AssertionError("it does not end")

    def terms(self) -> Terms:
        size = LARGE if self.body.startswith("large") else SMALL
        ours = Ours(size if self.body else -1, digest=self.body, earlier=self.sent.digests)
        return Terms(
            KEY,
            ours,
            1,
            self.base,
            self.policy,
            is_delete=not self.body,
            asks_first=bool(self.body) and sent_bodies.asks_first(self.sent, self.body, 2),
            copy_name=lambda copy: f"copy-{copy}",
        )

    def attempt(self) -> Delivered | Yielded | Fail:
        delivery = Delivery(self.terms(), self.upload, self.stale)
        self.delivering = self.body
        event: Event = Started()
        rewritten = False
        while True:
            *before, last = delivery.step(event)
            for effect in before:
                self.carry_out(effect)
            if isinstance(last, Delivered | Yielded | Fail):
                if rewritten and isinstance(last, Delivered):  # the flusher bases the newer write on this one
                    assert last.seen is None or last.seen.version
                    self.base = last.seen.version if last.seen is not None else ""
                    self.theirs_at_base = self.bucket.strangers
                    self.rewrite()
                    return Fail()
                return last
            answer = self.ask(last)
            if isinstance(answer, str):
                if answer == "stop":
                    return Fail()
                if answer == "rewritten":
                    rewritten, answer = True, self.ask(last, "fine")
            assert not isinstance(answer, str)
            event = answer

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Keep(upload):
                if self.delivering == self.body:  # else another note stands by now
                    self.upload = upload
            case Abort(_, upload_id):
                assert upload_id in self.heard, "nobody knows whose it is"
                self.bucket.uploads.pop(upload_id, None)
            case Leave():
                self.reported += 1
            case Swept():
                self.stale = ()
            case _:
                raise AssertionError(effect)

    def ask(self, effect: Effect, fate: str = "") -> Event | str:
        self.requests += 1
        assert self.requests < 400
        match effect:
            case Look(key):
                return Saw(self.bucket.info(key))
            case Read(seen):
                now = self.bucket.there.get(seen.key)
                return WasRead(now[1]) if now is not None and now[0] == seen.version else Refused()
            case List(upload):
                parts = self.bucket.uploads.get(upload.upload_id)
                if parts is None:
                    return Forgotten()
                length = upload.part_bytes
                return Listed(tuple((n, f"t{n}", min(length, LARGE - (n - 1) * length)) for n in parts[1]))
        fate = fate or next(self.fates, "fine")
        match effect:
            case Begin(key):
                if fate == "busy":
                    return Failed(True)
                if fate != "dropped":
                    upload_id = f"u{len(self.bucket.uploads)}-{self.requests}"
                    self.bucket.uploads[upload_id] = key, {}
                    if fate not in ("lost", "late", "stop"):
                        self.heard.add(upload_id)
                        if fate == "rewritten":
                            self.rewrite()
                        return Begun(upload_id, wanted=fate != "rewritten")
                return "stop" if fate == "stop" else Failed(False)
            case Fill(upload, missing):
                kept = self.bucket.uploads.get(upload.upload_id)
                assert self.upload == upload, "its id was not noted"
                if kept is None:
                    return Forgotten()
                if fate in ("fine", "theirs", "gone"):
                    kept[1].update({number: f"t{number}" for number, _, _ in missing})
                    return Filled(tuple((number, f"t{number}") for number, _, _ in missing))
                kept[1][missing[0][0]] = "t"
                if fate == "rewritten":
                    self.rewrite()
                return "stop" if fate in ("stop", "rewritten") else Failed(False)
        return self.change(effect, fate)

    def change(self, effect: Effect, fate: str) -> Event | str:
        assert isinstance(effect, Put | Complete | Delete)
        key = effect.upload.key if isinstance(effect, Complete) else effect.key
        expect, body = effect.expect, "" if isinstance(effect, Delete) else self.body
        if fate == "rewritten":  # during a request that cannot be called back
            return "rewritten" if len(self.bodies) > 1 else self.change(effect, "fine")
        if fate in ("theirs", "gone"):
            self.bucket.write(key, f"theirs-{self.requests}" if fate == "theirs" else "", THEM)
        if expect is not None and not self.bucket.conditions:
            return Unsupported()
        if isinstance(effect, Put) and effect.tags and not self.bucket.tags:
            return Unsupported()
        if fate == "busy":
            return Failed(True)
        assert expect is not None or not (self.policy and body and self.bucket.conditions), "it may land late"
        self.left = self.left or key == KEY
        if fate in ("dropped", "theirs later"):
            if fate == "theirs later":
                self.bucket.write(KEY, f"theirs-{self.requests}", THEM)
            return Failed(False)
        if fate == "unheard" and not isinstance(effect, Complete):
            return Refused()
        if fate == "late" and not isinstance(effect, Complete):
            self.bucket.waiting.append((key, body, expect))
            return Failed(False)
        if isinstance(effect, Complete) and self.bucket.uploads.get(effect.upload.upload_id) is None:
            return Forgotten()
        for late in [each for each in self.bucket.waiting if each[0] == key]:
            self.bucket.waiting.remove(late)
            self.bucket.write(late[0], late[1], US, late[2])
        if isinstance(effect, Delete) and expect and key not in self.bucket.there:
            return Made(None)
        if not self.bucket.write(key, body, US, expect):
            return "stop" if fate == "stop" else Refused()
        if isinstance(effect, Complete):
            del self.bucket.uploads[effect.upload.upload_id]
        if fate in ("lost", "late", "stop"):
            return "stop" if fate == "stop" else Failed(False)
        if fate == "repeated":
            return Forgotten() if isinstance(effect, Complete) else Refused()
        return Made(self.bucket.info(key))

    def check(self, outcome: Delivered | Yielded) -> None:
        bucket = self.bucket
        strange = bucket.strangers > self.theirs_at_base
        if isinstance(outcome, Delivered):
            if outcome.seen is not None:
                made = [each for each in bucket.past if each[1] == outcome.seen.version]
                assert made == [(KEY, outcome.seen.version, self.body, US)]
            else:
                assert not self.body
        else:
            assert outcome.policy == self.policy
            if outcome.kept_as:
                assert bucket.there[outcome.kept_as][1] == self.body
        if outcome.policy:
            assert strange, "a conflict with ourselves"
        for upload_id, (key, _) in bucket.uploads.items():
            assert upload_id not in self.heard, "an upload of ours is left"
            assert self.reported, f"an upload of {key} is left, and nobody was told"


def play(fates: Iterable[str], policy: str, bodies: Iterable[str], base: str, *, conditions: bool = True) -> None:
    bucket = Bucket(conditions=conditions)
    based_on: str | None = None
    if base == "old":
        bucket.write(KEY, "old", THEM)
        based_on = bucket.base = bucket.there[KEY][0]
    elif base == "none":
        based_on = ""
    bucket.may_replace = policy == "ours" or based_on is None
    flushes = Flushes(bucket, fates, policy, list(bodies), based_on)
    flushes.check(flushes.run())


BODIES = (["small"], ["large"], [""], ["small", "small-2"], ["large", "large-2"], ["small", ""], ["", "small"])
BASES = ("old", "none", "any")


@pytest.mark.parametrize("policy", ["keep-both", "ours", "theirs"])
def test_every_short_misfortune_ends_with_the_object_there_or_an_honest_conflict(policy: str) -> None:
    for bodies, base in itertools.product(BODIES, BASES):
        for fates in itertools.product(FATES, repeat=3):
            try:
                play(fates, policy, bodies, base)
            except AssertionError as error:
                raise AssertionError(f"{fates} {policy} {bodies} {base}: {error}") from error


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(MORE_FATES), max_size=14),
    st.sampled_from(["keep-both", "ours", "theirs"]),
    st.sampled_from(BODIES),
    st.sampled_from(BASES),
)
def test_long_misfortunes_end_too(fates: list[str], policy: str, bodies: list[str], base: str) -> None:
    play(fates, policy, bodies, base)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["fine", "dropped", "lost", "busy", "stop", "theirs later"]), max_size=8),
    st.sampled_from(["keep-both", "ours", "theirs"]),
    st.sampled_from(BODIES),
    st.sampled_from(BASES),
)
def test_without_conditions_it_looks_before_each_request(
    fates: list[str], policy: str, bodies: list[str], base: str
) -> None:
    play(fates, policy, bodies, base, conditions=False)


# --- written through: a refusal is the client's answer ----------------------------------------------------------------
THROUGH = ("fine", "dropped", "lost", "repeated", "busy", "theirs", "given up")


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("expect", [None, ""])
def test_a_write_through_is_answered_once_and_leaves_no_upload(size: int, expect: str | None) -> None:
    for fates in itertools.product(THROUGH, repeat=4):
        bucket = Bucket()
        bucket.may_replace = expect is None
        flushes = Flushes(bucket, (), "", ["large" if size == LARGE else "small"], expect)
        flushes.delivering = flushes.body
        delivery = Delivery(Terms(KEY, Ours(size), 1, expect))
        effects, at = delivery.step(Started()), iter(fates)
        outcome: Effect | None = None
        while outcome is None:
            asked: Effect | None = None
            for effect in effects:
                if isinstance(effect, Delivered | Fail):
                    outcome = effect
                elif isinstance(effect, Keep | Abort | Leave):
                    flushes.carry_out(effect)
                else:
                    asked = effect
            if outcome is not None:
                break
            assert not isinstance(asked, Look), "a write through asks nobody"
            fate = next(at, "fine")
            if fate == "given up":
                effects = delivery.step(GaveUp())
                if asked is not None and isinstance(asked, Begin):
                    assert effects == [], "it cannot be interrupted"
                    answer = flushes.ask(asked, next(at, "fine").replace("given up", "fine"))
                    assert not isinstance(answer, str)
                    effects = delivery.step(answer)
                continue
            assert asked is not None
            answer = flushes.ask(asked, fate)
            assert not isinstance(answer, str)
            effects = delivery.step(answer)
        had = bucket.had(KEY, flushes.body)
        assert had or isinstance(outcome, Fail), fates
        assert not had or isinstance(outcome, Delivered) or {"lost", "repeated"} & set(fates), fates
        assert flushes.upload is None, "the note says that one is left"
        for upload_id in bucket.uploads:
            assert upload_id not in flushes.heard
            assert flushes.reported


# --- one conversation at a time ---------------------------------------------------------------------------------------
def last(delivery: Delivery, *events: Event) -> list[Effect]:
    """The effects after the last of these events."""
    effects: list[Effect] = []
    for event in events:
        effects = delivery.step(event)
    return effects


def seen(version: str, etag: str = "", size: int = SMALL, headers: tuple[tuple[str, str], ...] = ()) -> ObjectInfo:
    return ObjectInfo(KEY, size, version, etag, 0.0, headers)


def flush(base: str | None = "v1", size: int = SMALL, **more: object) -> Delivery:
    return Delivery(Terms(KEY, Ours(size, md5="m", digest="d"), 1, base, "keep-both", **more))  # type: ignore[arg-type]


def test_an_upload_is_noted_before_it_begins_and_with_its_id_before_its_parts() -> None:
    delivery = flush(size=LARGE)
    noted, begin = delivery.step(Started())
    assert isinstance(noted, Keep)
    assert noted.upload is not None
    assert noted.upload.upload_id == BEGINNING
    assert begin == Begin(KEY, False)
    known, fill = delivery.step(Begun("u"))
    assert known == Keep(noted.upload._replace(upload_id="u"))
    assert isinstance(fill, Fill)
    assert [part[1:] for part in fill.missing][-1][1] == LARGE


def test_an_upload_whose_id_was_not_heard_is_reported_and_never_aborted() -> None:
    upload = Upload(KEY, BEGINNING, 1)
    delivery = Delivery(Terms(KEY, Ours(LARGE, digest="d"), 1, None, "ours"), upload)
    assert delivery.step(Started())[0] == Leave(KEY)
    assert drop([(KEY, BEGINNING), (KEY, "u")]) == [Leave(KEY), Abort(KEY, "u")]


def test_a_resumed_upload_sends_what_the_backend_lacks() -> None:
    part_bytes = LARGE // 2
    delivery = Delivery(Terms(KEY, Ours(LARGE, digest="d"), 1, "v1", "ours"), Upload(KEY, "u", part_bytes))
    assert delivery.step(Started()) == [List(Upload(KEY, "u", part_bytes))]
    (fill,) = delivery.step(Listed(((1, "t1", part_bytes), (2, "t2", 3))))
    assert fill == Fill(Upload(KEY, "u", part_bytes), ((2, part_bytes, LARGE),))
    (complete,) = delivery.step(Filled(((2, "t"),)))
    assert complete == Complete(Upload(KEY, "u", part_bytes), ((1, "t1"), (2, "t")), "v1")


@pytest.mark.parametrize("forgotten_at", ["parts", "completion"])
def test_an_upload_that_vanished_was_perhaps_completed_so_it_looks(forgotten_at: str) -> None:
    before: list[Event] = [Started(), Begun("u")]
    delivery = flush(size=LARGE)
    (fill,) = last(delivery, *before)[1:]
    assert isinstance(fill, Fill)
    if forgotten_at == "completion":
        delivery.step(Filled(tuple((part[0], "t") for part in fill.missing)))
    assert delivery.step(Forgotten()) == [Look(KEY)]
    assert delivery.step(Saw(seen("v2", size=LARGE))) == [Read(seen("v2", size=LARGE))]
    assert delivery.step(WasRead("another")) == [Keep(None), Fail(Why.FORGOTTEN)]


def test_an_object_with_our_bytes_and_other_headers_is_not_this_body_however_we_came_to_ask() -> None:
    """Only one of the twins looked at headers: a completion without an answer did not."""
    ours, other = seen("v2", "m", LARGE, (("content-type", "a"),)), seen("v2", "m", LARGE, (("content-type", "b"),))
    for there, whole in itertools.product((ours, other), (True, False)):
        delivery = flush(size=SMALL if whole else LARGE, headers=ours.headers)
        if whole:
            effects = last(delivery, Started(), Refused(), Saw(there))
            assert effects == ([Delivered(there)] if there is ours else [Put(KEY, "v2", False)])
        else:
            effects = last(delivery, Started(), Begun("u"), Forgotten(), Saw(there))
            assert effects == ([Delivered(there)] if there is ours else [Keep(None), Fail(Why.FORGOTTEN)])


def test_a_delete_of_which_nobody_knows_whether_it_happened_is_not_done() -> None:
    """Without a condition it once counted as done."""
    delivery = Delivery(Terms(KEY, Ours(-1), 1, None, "ours", is_delete=True))
    assert last(delivery, Started(), Saw(seen(""))) == [Delete(KEY, None)]
    assert delivery.step(Refused()) == [Look(KEY)]
    assert delivery.step(Saw(None)) == [Delivered(None)]


def test_a_conflict_that_theirs_wins_leaves_no_upload() -> None:
    delivery = Delivery(Terms(KEY, Ours(LARGE, digest="d"), 1, "v1", "theirs"), Upload(KEY, "u", LARGE))
    assert last(delivery, Started(), Listed(((1, "t", LARGE),)), Refused(), Saw(seen("v2"))) == [
        Abort(KEY, "u"),
        Yielded("theirs"),
    ]


def test_what_the_backend_does_not_support_is_left_out() -> None:
    delivery = flush(tags=True)
    assert delivery.step(Started()) == [Put(KEY, "v1", True)]
    assert delivery.step(Unsupported()) == [Look(KEY)]
    assert delivery.step(Saw(seen("v1"))) == [Put(KEY, None, True)]
    assert delivery.step(Unsupported()) == [Put(KEY, "v1", False)], "it was the tags"
    assert delivery.step(Unsupported()) == [Look(KEY)], "it was both"
    assert delivery.step(Saw(seen("v1"))) == [Put(KEY, None, False)]
    assert delivery.step(Unsupported()) == [Fail()]


def test_an_object_without_a_version_is_not_nothing() -> None:
    """Where there are neither conditions nor versions, a stranger's object once counted as the nothing expected."""
    delivery = flush(base="")
    assert last(delivery, Started(), Unsupported()) == [Look(KEY)]
    assert delivery.step(Saw(seen("", size=1))) == [Look("1")], "beside it"
    assert delivery.step(Saw(None)) == [Put("1", None, False)]


def test_it_gives_up_on_an_object_that_changes_at_every_look() -> None:
    delivery = Delivery(Terms(KEY, Ours(SMALL, digest="d"), 1, "v0", "ours"))
    effects = delivery.step(Started())
    for number in range(1, ROUNDS_MAX + 1):
        assert isinstance(effects[0], Put)
        effects = last(delivery, Refused(), Saw(seen(f"v{number}", size=SMALL + 1)))
    assert effects == [Fail(Why.CHANGING)]


def test_it_gives_up_when_all_names_for_the_copy_are_taken() -> None:
    delivery = flush(copy_name=str)
    effects = last(delivery, Started(), Refused(), Saw(seen("v2", size=1)))
    for _ in range(COPIES_MAX):
        assert isinstance(effects[-1], Put)
        effects = last(delivery, Refused(), Saw(seen("v2", size=1)))
    assert effects == [Fail(Why.NAMES)]


def test_an_object_that_changes_while_it_is_read_is_looked_at_again() -> None:
    there = seen("v2")
    delivery = flush()
    assert last(delivery, Started(), Refused(), Saw(there)) == [Read(there)]
    assert delivery.step(Refused()) == [Look(KEY)]


def test_an_upload_that_begins_when_its_write_is_superseded_is_aborted() -> None:
    delivery = flush(size=LARGE)
    assert last(delivery, Started(), Begun("u", wanted=False)) == [Abort(KEY, "u"), Fail(Why.UNWANTED)]
    delivery = flush(size=LARGE)
    assert last(delivery, Started(), GaveUp()) == [], "it cannot be interrupted"
    kept, fail = delivery.step(Begun("u"))
    assert isinstance(kept, Keep), "the next start goes on with it"
    assert kept.upload is not None
    assert kept.upload.upload_id == "u"
    assert fail == Fail(Why.UNWANTED)


def test_a_clients_upload_is_completed_from_its_parts_and_put_whole_if_it_vanished() -> None:
    parts = ((3, 0, 6, "aa"), (7, 6, SMALL, "bb"))
    terms = Terms(KEY, Ours(SMALL, parts_etag="e-2"), 1, "v1", parts=parts)
    upload = Upload(KEY, "u", 0)
    delivery = Delivery(terms, upload, tokens={3: "known"})
    assert delivery.step(Started()) == [List(upload)]
    assert delivery.step(Listed(((3, "aa", 6), (7, "other", 4)))) == [Fill(upload, ((7, 6, SMALL),))]
    assert delivery.step(Filled(((7, "bb"),))) == [Complete(upload, ((3, "known"), (7, "bb")), "v1")]
    assert delivery.step(Forgotten()) == [Look(KEY)]
    assert delivery.step(Saw(seen("v2", "e-2"))) == [Delivered(seen("v2", "e-2"))]
    for is_here, end in ((True, Put(KEY, "v1", False)), (False, Fail(Why.FORGOTTEN))):
        delivery = Delivery(terms._replace(is_here=is_here), upload)
        assert last(delivery, Started(), Forgotten(), Saw(seen("v2", "f-2"))) == [end]
    delivery = Delivery(terms, upload, tokens={3: "a", 7: "b"})
    assert last(delivery, Started(), Failed(False)) == [Fail()], "the client may complete it again"


def test_what_an_object_is_known_by() -> None:
    ours = Ours(SMALL, md5="m", digest="d", parts_etag="p", earlier=("e", ABSENT))
    assert judge(seen("v", "m", 1), ours) is Whose.THIS
    assert judge(seen("v", "p", 1), ours) is Whose.THIS
    assert judge(None, ours) is Whose.EARLIER
    assert judge(None, Ours(SMALL)) is Whose.STRANGER
    assert judge(seen("v"), ours) is None, "only its bytes tell"
    assert judge(seen("v"), ours, "d") is Whose.THIS
    assert judge(seen("v", size=1), ours, "d") is Whose.STRANGER
    assert judge(seen("v", size=1), ours, "e") is Whose.EARLIER
    assert judge(seen("v", size=1), Ours(SMALL, digest="d", earlier=(ABSENT,))) is Whose.STRANGER
    assert judge(seen("v"), Ours(SMALL)) is Whose.STRANGER, "nothing is known of ours"
