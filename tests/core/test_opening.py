"""Openings: every combination of bucket, reader, what is here and what the backend says, against the manual.

The oracle is written from "Freshness" in docs/semantics.md, not from the machine. A small shell below drives the
machine as the engine does; the two must end alike.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.machines.opening import (
    ANY,
    CLOCK_SLACK_S,
    DOWN_FOR_S,
    MISSED,
    Absent,
    Held,
    Said,
    Terms,
    Then,
    Verdict,
    Windows,
    fresh_until_s,
    judge,
    may_serve,
    may_share,
    spares,
    take,
    terms_of,
    tolerates,
)
from forebay.core.record import State
from forebay.core.types import FRESH_IMMUTABLE, parse_freshness

NOW = 1_800_000_000.0
HERE, ALIAS, OTHER, NEW = "here", "~1", "another", "new"


# --- every combination -----------------------------------------------------------------------------------------------
class Case(NamedTuple):
    """`was_silent`: the backend did not answer somebody a moment ago. `answered_since`: it has answered somebody since
    the write began that left what is here in doubt."""

    freshness: str
    written: bool  # the bucket can be written through the node
    revalidate: bool
    named: str  # the version that the reader wants; "": any
    here: str  # nothing, deleted, owned, confirmed, overdue, future, doubted, missed
    backend: str  # same, new, gone, silent
    was_silent: bool
    answered_since: bool


CASES = [
    Case(*each)
    for each in itertools.product(
        ["always", "60s", "immutable"],
        [True, False],
        [False, True],
        ["", HERE, ALIAS, OTHER, NEW],
        ["nothing", "deleted", "owned", "confirmed", "overdue", "future", "doubted", "missed"],
        ["same", "new", "gone", "silent"],
        [False, True],
        [False, True],
    )
]
CHECKED_S = {
    "owned": NOW - 1e6,
    "confirmed": NOW - 30,
    "overdue": NOW - 90,
    "future": NOW + 90,
    "doubted": 0.0,
    "missed": MISSED,
}


def expected(case: Case) -> tuple[str, str]:
    """What the reader gets, and whether the backend is asked, sentence by sentence."""
    never = "unasked"
    match case.here, case.named:
        case "nothing", _:
            return fetched(case), "asked"
        case "deleted", "":
            return "404", never  # "a delete is the truth"
        case "deleted", _:
            return "412", never
        case _, "here" | "~1":
            return "old", never  # "every response is made of one version"
        case "owned", "":
            return "old", never  # "what the node owes is the truth"
        case "owned", _:
            return "412", never
    # `immutable`: "never asks again about a version it has seen". A time: "for that long after the backend last
    # confirmed a version, the node serves it without asking". `always`: "asks the backend on every open".
    is_settled = case.here in ("confirmed", "overdue", "future")
    if not case.revalidate and is_settled:
        is_fresh = {"always": False, "60s": case.here == "confirmed", "immutable": True}[case.freshness]
        if is_fresh:
            return ("412" if case.named else "old"), never
    # "The node still serves what it has while the backend does not answer, except with `always`." What a stop brought
    # back: "reads of it fail while the backend does not answer. A bucket whose backend takes no writes has no older
    # versions to bring back: there the node serves what it has." For what is in doubt "the backend's first answer of
    # any kind ends that".
    is_missed = case.here == "missed" or (case.here == "doubted" and case.answered_since)
    may_be_old = case.freshness != "always" and not case.revalidate and not (is_missed and case.written)
    old = "412" if case.named else "old"
    if may_be_old and case.was_silent:
        return old, never
    match case.backend:
        case "same":
            return old, "asked"
        case "new" | "gone":
            return fetched(case), "asked"
        case _:
            return (old if may_be_old else "503"), "asked"


def fetched(case: Case) -> str:
    """What a reader gets of whom the backend is asked, and who has no use for what is here."""
    has = {"same": HERE, "new": NEW, "gone": "", "silent": "?"}[case.backend]
    if case.backend == "silent":
        return "503"
    if not has:
        return "404"
    if case.named not in ("", has):
        return "412"
    return "new" if has == NEW else "old"


def driven(case: Case) -> tuple[str, str]:
    """The same by the machine, carried out as simply as can be."""
    held = held_of(case)
    terms = terms_of(
        parse_freshness(case.freshness),
        NOW,
        version=case.named,
        revalidate=case.revalidate,
        is_written=case.written,
    )
    silent_until_s = DOWN_FOR_S if case.was_silent else 0.0
    asked = "unasked"
    for _ in range(3):
        match judge(held, terms, NOW):
            case Verdict.SERVE:
                return "old", asked
            case Verdict.CHANGED:
                return "412", asked
            case Verdict.NO_KEY:
                return "404", asked
        if not isinstance(held, Held):
            return fetched(case), "asked"
        if spares(held, terms, silent_until_s, 1.0):
            terms = terms._replace(since_s=ANY)
            continue
        asked = "asked"
        said = {"same": Said.SAME, "new": Said.OTHER, "gone": Said.GONE, "silent": Said.NOTHING}[case.backend]
        taken = take(said, held, terms, version=NEW)
        assert taken.drop == (case.backend in ("new", "gone"))
        assert taken.confirm == (case.backend == "same")
        match taken.then:
            case Then.JUDGE:
                terms, held = terms.confirmed(NOW), held._replace(checked_s=NOW)
            case Then.STALE:
                assert taken.hush
                terms = terms._replace(since_s=ANY)
            case Then.FETCH:
                return "new", asked
            case Then.CHANGED:
                return "412", asked
            case Then.FAIL:
                return ("404" if case.backend == "gone" else "503"), asked
    raise AssertionError(f"asked for ever: {case}")


def held_of(case: Case) -> Held | Absent:
    if case.here == "nothing":
        return Absent.UNKNOWN
    if case.here == "deleted":
        return Absent.DELETED
    windows, name = Windows(), ("bucket", "key")
    windows.open(name, HERE, NOW, answers=7)
    windows.close(name, in_doubt=True)
    checked_s = windows.checked_s(name, HERE, CHECKED_S[case.here], 8 if case.answered_since else 7)
    return Held(HERE, ALIAS, case.here == "owned", checked_s)


def test_every_combination_ends_as_the_manual_says():
    wrong = [(case, driven(case), expected(case)) for case in CASES if driven(case) != expected(case)]
    assert not wrong, f"{len(wrong)} of {len(CASES)}, the first: {wrong[0]}"


def test_what_a_front_serves_the_engine_would_serve():
    """And of plain reads the other way round: a front sends to the engine only what that cannot answer at once."""
    for case in CASES:
        held = held_of(case)
        if case.revalidate or case.named or not isinstance(held, Held):
            continue
        freshness_s = parse_freshness(case.freshness)
        state = int(State.DIRTY) if held.is_owned else 0
        front = may_serve(state, held.checked_s, freshness_s, NOW)
        assert front == (judge(held, terms_of(freshness_s, NOW), NOW) is Verdict.SERVE), case
        assert not may_serve(state | State.UNVERIFIED, held.checked_s, freshness_s, NOW)
        assert not front or fresh_until_s(state, held.checked_s, freshness_s) > NOW


@given(st.floats(-5.0, 200.0), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_front_and_engine_agree_at_any_moment(checked_s, freshness_s, now_s):
    if may_serve(0, checked_s, freshness_s, now_s):
        held = Held(HERE, ALIAS, False, checked_s)
        # up to a rounding of the last bit: one subtracts where the other adds
        assert judge(held, terms_of(freshness_s + 1e-9, now_s), now_s) is Verdict.SERVE


# --- single rules ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "setting, checked_ago_s, fresh",
    [
        ("immutable", 1e9, True),
        ("immutable", -1e9, True),
        ("always", 0.0, False),
        ("60s", 0.0, True),
        ("60s", 59.9, True),
        ("60s", 60.0, False),
        ("1d", 86_000.0, True),
        ("60s", -0.5, True),  # two processes' clocks, read a moment apart
        ("60s", -100.0, False),  # the clock was set back: nobody knows how old this is
    ],
)
def test_a_confirmation_holds_as_long_as_the_bucket_says(setting, checked_ago_s, fresh):
    assert may_serve(0, NOW - checked_ago_s, parse_freshness(setting), NOW) == fresh


def test_what_is_in_doubt_is_fresh_nowhere():
    assert not may_serve(0, 0.0, 1e12, 10.0)
    assert not may_serve(0, 0.0, FRESH_IMMUTABLE, NOW), "it may have been deleted through the node just before"
    assert not may_serve(0, MISSED, FRESH_IMMUTABLE, NOW)
    assert may_serve(0, 1.0, FRESH_IMMUTABLE, NOW)


def test_the_end_of_a_confirmation():
    assert fresh_until_s(0, NOW, 60.0) == NOW + 60
    assert fresh_until_s(0, NOW, FRESH_IMMUTABLE) == FRESH_IMMUTABLE
    assert fresh_until_s(int(State.LOCAL), 0.0, 0.0) == FRESH_IMMUTABLE


def test_a_confirmation_counts_though_the_clock_went_back_after_the_question():
    terms = terms_of(0.0, NOW).confirmed(NOW - 100)
    assert judge(Held(HERE, ALIAS, False, NOW - 100), terms, NOW - 100) is Verdict.SERVE


def test_a_clock_that_is_off_by_more_than_a_moment_confirms_nothing():
    terms = terms_of(60.0, NOW)
    assert judge(Held(HERE, ALIAS, False, NOW + CLOCK_SLACK_S), terms, NOW) is Verdict.SERVE
    assert judge(Held(HERE, ALIAS, False, NOW + CLOCK_SLACK_S + 0.1), terms, NOW) is Verdict.ASK


def test_silence_ends_and_only_then_is_the_backend_asked_again():
    held, terms = Held(HERE, ALIAS, False, NOW - 90), terms_of(60.0, NOW)
    assert spares(held, terms, DOWN_FOR_S, DOWN_FOR_S - 0.1)
    assert not spares(held, terms, DOWN_FOR_S, DOWN_FOR_S)


def test_who_may_share_a_question():
    terms = Terms(10.0)
    assert may_share(terms, 10.0)
    assert not may_share(terms, 9.9), "it was asked before this reader came"
    assert may_share(terms, 10.0, stale=True, answers=3, answers_before=3)
    assert not may_share(terms, 10.0, stale=True, answers=4, answers_before=3), "it answered somebody meanwhile"
    assert may_share(terms._replace(since_s=ANY), 0.0)


def test_an_overtaken_answer_confirms_nothing_on_record():
    held, terms = Held(HERE, ALIAS, False, NOW), terms_of(0.0, NOW)
    assert take(Said.SAME, held, terms).confirm
    assert not take(Said.SAME, held, terms, overtaken=True).confirm
    assert take(Said.SAME, held, terms, overtaken=True).then is Then.JUDGE, "who waited gets it"


def test_nobody_gets_what_was_missed_unless_nothing_is_written_here():
    missed = Held(HERE, ALIAS, False, MISSED)
    for written in (True, False):
        terms = terms_of(60.0, NOW, is_written=written)
        assert tolerates(missed, terms) != written
        assert tolerates(missed._replace(checked_s=0.0), terms), "an outcome that nobody knows is another matter"


# --- windows ---------------------------------------------------------------------------------------------------------
SIGNS = ["open", "close", "list", "list elsewhere", "show v1", "show v2", "show ", "ask", "answer", "answer", "land"]


class Sign(NamedTuple):
    """What happened to the one key that the story is about."""

    at: int
    what: str  # open, close, list, show


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_confirmation_is_recorded_that_a_write_may_have_outlived(data):
    """Writes, listings and questions of a key in any order. The oracle looks at the whole history each time: an answer
    may be recorded if no write was under way when it came, and none ended or was shown while it was on its way."""
    windows, name = Windows(), ("bucket", "a/key")
    signs: list[Sign] = []
    asked: list[tuple[int, object]] = []
    open_since = held = None
    holds = ""  # the version that reads go by
    for now in range(1, data.draw(st.integers(1, 30)) + 1):
        what = data.draw(st.sampled_from(SIGNS))
        if what == "open" and open_since is None:
            windows.open(name, "v1", float(held or 0))
            open_since, held, holds = now, held or 0, "v1"
        elif what == "close" and open_since is not None:
            windows.close(name)
            signs.append(Sign(now, what))
            open_since = held = None
        elif what == "list":
            listed = windows.listed("bucket", "a/", "", "")
            assert listed == (["a/key"] if open_since is not None else [])
            if open_since is not None:
                signs.append(Sign(now, what))
                held, holds = 0, ""
        elif what.startswith("show"):
            version = what.removeprefix("show ")
            counts_no_more = open_since is not None and (not version or version != holds)
            assert windows.shown(name, version) == counts_no_more
            if counts_no_more:
                signs.append(Sign(now, "show"))
                held, holds = 0, ""
        elif what == "list elsewhere":
            assert windows.listed("bucket", "b/", "", "") == []
            assert windows.listed("bucket", "a/", "a/key", "") == []
            assert windows.listed("bucket", "a/", "", "a/ke") == []
            assert windows.listed("other", "", "", "") == []
            assert not windows.shown(("bucket", "a/ke"), "v2")
        elif what == "ask":
            asked.append((now, windows.ask(name)))
        elif what == "answer" and asked:
            began, question = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
            windows.answered(name, question)
            overtaken = any(began < sign.at for sign in signs)
            assert question.overtaken == overtaken
            if not overtaken:
                assert windows.may_record(name, "v1", float(began)) == (open_since is None)
                held, holds = (None, "") if open_since is None else (max(held, began), "v1")
        elif what == "land" and open_since is not None:
            assert not windows.may_record(name, "v1", float(now)), "it holds for reads alone"
            held, holds = now, "v1"
        fresh_s = windows.checked_s(name, "v1", 0.0)
        assert fresh_s == (held or 0 if open_since is not None else 0)
        assert windows.checked_s(name, "v2", 0.0) == 0.0, "of another version nothing is said"
    for _, question in asked:
        windows.answered(name, question)
    assert not windows._questions


def test_a_doubt_counts_from_when_its_write_began():
    windows, name = Windows(), ("bucket", "key")
    assert windows.checked_s(name, "v1", 0.0, 0) == 0.0, "left by an earlier life; nobody has heard anything"
    assert windows.checked_s(name, "v1", 0.0, 1) == MISSED
    windows.open(name, "v1", 5.0, answers=3)
    assert windows.checked_s(name, "v1", 0.0, 9) == 5.0, "held for reads"
    windows.listed("bucket", "", "", "")
    assert windows.checked_s(name, "v1", 0.0, 4) == MISSED
    windows.close(name, in_doubt=True)
    assert windows.checked_s(name, "v1", 0.0, 3) == 0.0
    assert windows.checked_s(name, "v1", 0.0, 4) == MISSED
    windows.open(name, "v1", 0.0, answers=6)
    windows.close(name, in_doubt=True)
    assert windows.checked_s(name, "v1", 0.0, 6) == MISSED, "the first write may have been seen since"
    assert windows.may_record(name, "v1", 10.0)
    windows.open(name, "v1", 10.0, answers=6)
    windows.close(name, in_doubt=True)
    assert windows.checked_s(name, "v1", 0.0, 6) == 0.0
    windows.open(name, "v2", 10.0, answers=7)
    windows.close(name)
    assert not windows._doubted, "what is settled is forgotten"


def test_doubts_that_are_too_many_to_remember_are_older_than_every_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forebay.core.machines.opening.DOUBTS_MAX", 3)
    windows = Windows()
    for number in range(9):
        windows.open(("bucket", str(number)), "v1", 5.0, answers=2)
        windows.close(("bucket", str(number)), in_doubt=True)
    found = [windows.checked_s(("bucket", str(number)), "v1", 0.0, 2) for number in range(9)]
    assert found == [MISSED] * 6 + [0.0] * 3


def test_a_refused_write_gives_the_confirmation_back():
    windows, name = Windows(), ("bucket", "key")
    windows.open(name, "v1", 5.0)
    assert windows.refused(name) == ("v1", 5.0)
    assert not windows.may_record(name, "v1", 7.0)
    assert windows.refused(name) == ("v1", 7.0)
    windows.listed("bucket", "", "", "")
    assert windows.refused(name) is None, "the listing may have shown another version"
    assert not windows.may_record(name, "v2", 8.0)
    assert not windows.shown(name, "v2"), "that is the one which is held"
    assert windows.refused(name) == ("v2", 8.0)
    assert windows.shown(name, "v3")
    assert windows.refused(name) is None
    windows.close(name)
    windows.open(name, "", 0.0)
    assert windows.refused(name) is None
