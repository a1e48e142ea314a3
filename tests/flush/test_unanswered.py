"""Puts whose answers are lost, and those that land long after they were given up: what is met is known to be ours."""

from __future__ import annotations

from forebay.core import limits
from forebay.core.errors import Denied
from tests.flush.conftest import Node, until


async def _lose(node: Node, key: str, data: bytes) -> None:
    """The backend gets it, and nobody here hears of it."""
    node.remote.lose.add("put")
    await node.write(key, data)
    await until(lambda: node.flusher.totals("b").error)


def test_more_overwrites_than_anybody_remembers_make_no_stranger_of_what_was_sent(story):
    """What was a conflict once, and took an acknowledged write from its readers: the first was sent, and then cut from
    the end of a list of 64 by others that never left."""

    async def tell(node: Node) -> None:
        await _lose(node, "a", b"0")
        node.remote.away = True
        for number in range(1, 200):
            await node.write("a", b"%d" % number)
        note = node.flusher.find("b", "a")
        assert note is not None
        assert len(note.sent.digests) <= 2, "what was never sent is not remembered"
        node.remote.away = False
        await node.settle()
        assert node.remote.data("a") == b"199"
        assert not node.conflicts

    story(tell)


def test_a_kill_in_between_changes_nothing_of_that(story):
    async def tell(node: Node) -> None:
        await _lose(node, "a", b"0")
        node.remote.away = True
        for number in range(1, 100):
            await node.write("a", b"%d" % number)
            if number % 33 == 0:
                await node.crash()
        node.remote.away = False
        await node.settle()
        assert node.remote.data("a") == b"99"
        assert not node.conflicts

    story(tell)


def test_while_nothing_is_answered_only_so_many_bodies_leave(story):
    async def tell(node: Node) -> None:
        node.remote.hang = 1000
        for number in range(limits.UNANSWERED_MAX):
            await node.write("a", b"%d" % number)
            await node.fail("a")
        note = node.flusher.find("b", "a")
        assert note is not None
        assert len(note.sent.digests) >= limits.UNANSWERED_MAX - 1
        node.remote.away = True  # not even a question is answered
        left = node.remote.count("put")
        for number in range(20):
            await node.write("a", b"late %d" % number)
            await node.fail("a")
        assert node.remote.count("put") <= left + 1
        node.remote.away, node.remote.hang = False, 0
        await node.settle()
        assert node.remote.data("a") == b"late 19"
        await node.remote.land()
        assert node.remote.data("a") == b"late 19", "what landed late was refused: each was conditional"
        assert not node.conflicts

    story(tell)


def test_a_create_that_lands_after_the_delete_that_followed_it_is_ours(story):
    async def tell(node: Node) -> None:
        node.remote.hang = 1
        await node.write("a", b"one")
        await until(lambda: node.remote.hanging)
        await node.delete("a")
        await node.settle()
        assert node.remote.names() == []
        node.remote.open.clear()
        await node.write("a", b"two")
        await until(lambda: node.remote.busy)
        assert await node.remote.land() == [True]  # there was nothing: the condition held
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("a") == b"two"
        assert node.remote.names() == ["a"]
        assert not node.conflicts

    story(tell)


def test_what_is_late_is_known_by_a_newer_write_that_waited_meanwhile(story):
    """The delete's flush is answered while the next write waits already: its note takes over what may still land."""

    async def tell(node: Node) -> None:
        node.remote.hang = 1
        await node.write("a", b"one")
        await until(lambda: node.remote.hanging)
        await node.delete("a")
        node.remote.away = True
        await node.fail("a")
        node.remote.away = False
        before = node.flusher._of["b"].counts.flushes
        node.remote.place("a", b"one")  # the first attempt landed
        node.remote.hanging.clear()
        node.remote.hang = 0
        node.remote.open.clear()
        node.clock.ahead_s += 60.0
        node.flusher.ask("b", "a")
        await until(lambda: node.remote.busy)
        await node.write("a", b"two")
        node.remote.open.set()
        await until(lambda: node.flusher._of["b"].counts.flushes > before)
        await node.settle()
        assert node.remote.data("a") == b"two"
        assert node.remote.names() == ["a"]
        assert not node.conflicts

    story(tell)


def test_after_its_time_what_is_met_is_a_strangers(story):
    async def tell(node: Node) -> None:
        node.remote.hang = 1
        await node.write("a", b"one")
        await until(lambda: node.remote.hanging)
        await node.delete("a")
        await node.settle()
        assert node.flusher.sent("b", "a").digests
        node.clock.ahead_s += limits.LATE_S + 1.0
        await node.write("other", b"x")
        await node.delete("other")
        await node.settle()
        assert not node.flusher.sent("b", "a").digests

    story(tell)


def test_a_write_that_is_based_on_nothing_known_cannot_land_on_top_of_its_successor(story):
    async def tell(node: Node) -> None:
        node.remote.hang = 1
        await node.write("a", b"one", based_on=None)
        await until(lambda: node.remote.hanging)
        await node.write("a", b"two", based_on=None)
        await node.settle()
        assert await node.remote.land() == [False]
        assert node.remote.data("a") == b"two"
        assert not node.conflicts

    story(tell)


def test_a_write_that_is_based_on_nothing_known_replaces_what_is_there(story):
    async def tell(node: Node) -> None:
        node.remote.place("a", b"theirs")
        await node.write("a", b"ours", based_on=None)
        await node.settle()
        assert node.remote.data("a") == b"ours"
        assert node.remote.names() == ["a"]
        assert not node.conflicts

    story(tell)


def test_a_body_that_the_backend_refused_in_so_many_words_was_not_sent(story):
    async def tell(node: Node) -> None:
        for number in range(5):
            node.remote.fail.append(Denied("no: ask for the right to write"))
            await node.write("a", b"%d" % number)
            await node.fail("a")
        await node.write("a", b"last")
        note = node.flusher.find("b", "a")
        assert note is not None
        assert note.sent.digests == ()
        await node.settle()
        assert node.remote.data("a") == b"last"

    story(tell)
