"""How long a confirmation of a version holds."""

import pytest

from forebay.core.freshness import fresh_until_s, is_fresh
from forebay.core.types import FRESH_IMMUTABLE, parse_freshness

NOW = 1_800_000_000.0


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
    assert is_fresh(NOW - checked_ago_s, parse_freshness(setting), NOW) == fresh


def test_a_version_not_confirmed_since_the_machine_stopped_is_fresh_nowhere():
    assert not is_fresh(0.0, 1e12, 10.0)
    assert not is_fresh(0.0, FRESH_IMMUTABLE, NOW), "it may have been deleted through the node just before"
    assert is_fresh(1.0, FRESH_IMMUTABLE, NOW)


def test_the_end_of_a_confirmation():
    assert fresh_until_s(NOW, 60.0) == NOW + 60
    assert fresh_until_s(NOW, FRESH_IMMUTABLE) == FRESH_IMMUTABLE
