"""When a plan is made again: for better times, and where steps take other times than it says."""

from __future__ import annotations

from forebay.offload import rescue
from forebay.offload.review import DRIFT_SHARE, REVIEW_STEPS, TIMED_STEPS, Review
from forebay.offload.runner import StepFacts
from forebay.offload.tracing.points import BEGINS, ENDS


def followed(review: Review, step_s: float = 1.0, *, watched: bool = False) -> int:
    """How many steps until it is due."""
    for count in range(1, 1000):
        review.at(BEGINS, 0.0)
        review.at(ENDS, 0.0)
        if review.is_due(StepFacts(step_s=step_s, watched=watched)):
            return count
    raise AssertionError("never")


def test_a_profilers_times_are_replaced_soon_and_a_good_plan_is_left_alone() -> None:
    review = Review(None)
    review.begin(profiled=True)
    assert followed(review) == TIMED_STEPS
    seconds = review.look(100.0)  # whatever was predicted
    assert seconds is not None
    assert set(seconds) == {BEGINS}
    review.begin(profiled=False)
    for _ in range(3):
        assert followed(review) == REVIEW_STEPS
        assert review.look(1.0 + DRIFT_SHARE / 2) is None
        assert not review.has_drifted


def test_times_of_watched_steps_are_replaced_once_no_step_is_watched() -> None:
    """The mode that watches operators costs small kernels a quarter of a step, and the prediction had it."""
    review = Review(None)
    review.begin(profiled=True)
    followed(review, watched=True)
    assert review.look(1.0) is not None
    review.begin(profiled=False)
    for _ in range(rescue.STEPS):
        assert not review.is_due(StepFacts(step_s=1.3, watched=True))
    assert followed(review) == TIMED_STEPS
    assert review.look(1.3) is not None
    assert not review.has_drifted
    review.begin(profiled=False)
    followed(review)
    assert review.look(1.0) is None


def test_where_every_step_is_watched_their_times_are_the_truth() -> None:
    review = Review(None)
    review.begin(profiled=True)
    followed(review, watched=True)
    assert review.look(1.0) is not None
    review.begin(profiled=False)
    for _ in range(3):
        followed(review, watched=True)
        assert review.look(1.0) is None


def test_a_plan_whose_steps_drift_is_made_again_after_longer_and_longer() -> None:
    review = Review(None)
    review.begin(profiled=True)
    followed(review)
    assert review.look(1.0) is not None
    due = REVIEW_STEPS
    for _ in range(3):
        review.begin(profiled=False)
        assert followed(review, 1.0 + 2 * DRIFT_SHARE) == due
        assert review.look(1.0) is not None
        assert review.has_drifted
        due *= 2


def test_one_slow_step_is_no_drift() -> None:
    review = Review(None)
    review.begin(profiled=True)
    followed(review)
    review.look(1.0)
    review.begin(profiled=False)
    for step in range(REVIEW_STEPS):
        review.is_due(StepFacts(step_s=50.0 if step in (0, 5) else 1.0))
    assert review.look(1.0) is None
