"""Whoever applies what a mirror tells holds the state, whatever is heard twice, cut off, compacted or taken back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.cluster.mirror import Change, Entry, Mirror


@given(seed=st.integers(0, 2**32))
def test_any_mix_of_listings_and_events_ends_in_the_state(seed: int) -> None:
    chance = random.Random(seed)
    entries: dict[str, Entry] = {}
    history: list[Change] = []  # since the last time that the store was taken back
    revision, saved = 1, ({}, 1)
    mirror, copy, told = Mirror(), dict[str, Entry](), 0

    def apply(changes: list[Change]) -> None:
        nonlocal told
        for change in changes:
            told += 1
            if change.value is None:
                assert copy.pop(change.key, None), "what was not there does not go"
            else:
                copy[change.key] = Entry(change.key, change.value, change.revision)

    def look() -> bool:
        newest = max((entry.revision for entry in entries.values()), default=0)
        return mirror.agrees(len(entries), newest, revision)

    apply(mirror.listed(entries.values(), revision))
    for _ in range(40):
        revision += 1
        for key in chance.sample("abcd", chance.randint(1, 2)):
            if chance.random() < 0.4 and key in entries:
                del entries[key]
                history.append(Change(key, None, revision))
            else:
                entries[key] = Entry(key, b"%d" % revision, revision)
                history.append(Change(*entries[key]))
        if chance.random() < 0.05:
            saved = dict(entries), revision
        if chance.random() < 0.3:  # a stream that begins somewhere before, and has all of it since
            first = chance.randint(0, mirror.revision + 1)
            apply(mirror.heard([change for change in history if change.revision >= first]))
            assert copy == entries
        elif chance.random() < 0.2:
            apply(mirror.listed(entries.values(), revision))
            assert copy == entries
        if chance.random() < 0.03 and saved[1] < mirror.revision:
            entries, revision = dict(saved[0]), saved[1]
            history = [change for change in history if change.revision <= revision]
            assert not look(), "it was taken back"
            apply(mirror.listed(entries.values(), revision))
        assert look() == (copy == entries)
    before = told
    apply(mirror.heard(history))
    assert copy == entries
    assert mirror.listed(entries.values(), revision) == []
    assert told - before <= len(history)
