"""What may have been sent: kept from the moment in which it may leave until nothing of it can arrive any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.machines import sent_bodies
from forebay.core.machines.sent_bodies import Sent

LATE_S = 100.0


def test_what_left_is_ours_until_a_later_flush_was_answered_and_nothing_can_arrive():
    sent = sent_bodies.left(Sent(), "a")
    assert sent.digests == ("a",)
    sent = sent_bodies.answered(sent, 990.0, 1000.0, LATE_S)  # its successor is there: it may land all the same
    assert sent.digests == ("a",)
    sent = sent_bodies.answered(
        sent, 1000.0 + LATE_S - 1, 2000.0, LATE_S
    )  # it may have landed while the answer was on its way
    assert sent.digests == ("a",)
    assert sent_bodies.answered(sent, 1000.0 + LATE_S, 3000.0, LATE_S) == Sent()


def test_without_an_answer_no_time_is_long_enough():
    """What landed unnoticed is met whenever the backend is reached again."""
    sent = sent_bodies.answered(sent_bodies.left(Sent(), "a"), 1000.0, 1000.0, LATE_S)
    sent = sent_bodies.left(sent, "b")
    assert set(sent.digests) == {"a", "b"}, "time alone takes nothing: there was no answer since"
    sent = sent_bodies.answered(sent, 1_000_000.0, 1_000_000.0, LATE_S)
    assert sent == Sent((), (("b", 1_000_000.0 + LATE_S),))


def test_what_is_sent_again_counts_anew():
    sent = sent_bodies.left(sent_bodies.answered(sent_bodies.left(Sent(), "a"), 0.0, 0.0, LATE_S), "a")
    assert sent == Sent(("a",))
    assert sent_bodies.left(sent, "a") == sent


def test_nothing_is_dropped_for_being_many():
    sent = Sent()
    for number in range(1000):
        sent = sent_bodies.left(sent, str(number))
    assert len(sent.digests) == 1000
    assert sent.digests[0] == "0"


def test_a_body_that_was_never_sent_waits_for_a_word_of_the_backend_where_many_are_without_an_answer():
    sent = Sent()
    for number in range(limits.UNANSWERED_MAX):
        assert not sent_bodies.asks_first(sent, "new")
        sent = sent_bodies.left(sent, str(number))
    assert sent_bodies.asks_first(sent, "new")
    assert not sent_bodies.asks_first(sent, "0"), "sent before: it makes none more"
    assert not sent_bodies.asks_first(sent_bodies.answered(sent, 0.0, 0.0), "new")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("left"), st.sampled_from("abcd")),
            st.tuples(st.just("answered"), st.integers(1, 120)),
        )
    )
)
def test_it_is_what_a_dumb_model_says(steps):
    """The model: of each digest, when it left last, and every moment at which a flush was answered."""
    sent, now_s = Sent(), 0.0
    left_at: dict[str, int] = {}
    answers: list[tuple[int, float]] = []
    for at, (what, value) in enumerate(steps):
        if what == "left":
            sent = sent_bodies.left(sent, value)
            left_at[value] = at
        else:
            now_s += value
            sent = sent_bodies.answered(sent, now_s, now_s, LATE_S)
            answers.append((at, now_s))
        kept = set()
        for digest, since in left_at.items():
            after = [time_s for when, time_s in answers if when > since]
            if not after or after[-1] < after[0] + LATE_S:
                kept.add(digest)
        assert set(sent.digests) == kept
        assert len(sent.digests) == len(kept)
