"""What becomes of dirty objects: flushed once and whole, in order, however often they change on the way."""

from __future__ import annotations

import asyncio
import random

import pytest

from forebay.backends.lost_answers import Unheard
from forebay.core import limits
from forebay.core.errors import Denied, NotSupported, Unavailable
from forebay.core.record import State
from forebay.node.engine.flush.key_flush import CUT_OFF_S, conflict_key
from tests.flush.conftest import Node, Remote, until

MIB = limits.MIB
LARGE = limits.MULTIPART_BYTES_MIN + 5 * MIB  # two parts and a piece


def large(seed: int) -> bytes:
    return random.Random(seed).randbytes(MIB) * (LARGE // MIB)


# --- the way of a write ----------------------------------------------------------------------------------------------
def test_what_was_written_reaches_the_backend_and_is_clean_then(story):
    async def tell(node: Node) -> None:
        headers = (("content-type", "text/plain"), ("x-amz-meta-who", "me"))
        await node.write("small", b"hello", headers, tags="a=1")
        await node.write("file", b"x" * MIB)
        await node.write("empty", b"")
        await node.settle()
        assert [node.remote.data(key) for key in ("small", "file", "empty")] == [b"hello", b"x" * MIB, b""]
        assert (await node.remote.head("small")).headers == headers
        assert node.remote.tags == {"small": "a=1"}
        record = node.shelf.lookup("b", "small")
        assert record is not None
        assert record.state == State.CLEAN
        assert record.version == (await node.remote.head("small")).version
        assert sorted(node.cleaned) == ["empty", "file", "small"]

    story(tell)


def test_what_comes_into_view_later_replaces_what_the_key_owed_before(story):
    """The disk was full when it was durable already; the flush of the earlier one failed for ever."""

    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"first")
        await node.write("a", b"second", tell=False)
        for owed in node.shelf.owed():
            node.flusher.take_up(owed)
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("a") == b"second"

    story(tell)


def test_checksum_headers_of_the_client_stay_here(story):
    async def tell(node: Node) -> None:
        await node.write("a", b"x", (("x-amz-checksum-crc32", "AAAAAA=="), ("content-type", "a/b")))
        await node.settle()
        assert (await node.remote.head("a")).headers == (("content-type", "a/b"),)

    story(tell)


def test_a_large_object_goes_in_parts_several_at_once(story):
    async def tell(node: Node) -> None:
        data = large(1)
        node.remote.open.clear()
        await node.write("big", data, (("x-amz-meta-who", "me"),))
        node.remote.open.set()
        await until(lambda: node.remote.count("begin"))
        await node.settle()
        assert node.remote.data("big") == data
        assert (await node.remote.head("big")).headers == (("x-amz-meta-who", "me"),)
        assert [node.remote.count(verb) for verb in ("begin", "part", "complete", "put")] == [1, 3, 1, 0]
        assert node.remote.busiest >= 2
        assert await node.remote.list_uploads("") == []

    story(tell)


def test_a_backend_without_uploads_gets_a_large_object_whole(story):
    class Plain(Remote):
        part_bytes_min = 0

    async def tell(node: Node) -> None:
        await node.write("big", large(1))
        await node.settle()
        assert node.remote.asked == [("put", "big")]

    story(tell, Plain)


def test_an_object_written_again_during_its_flush_is_flushed_again_on_top_of_it(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"one")
        await until(lambda: node.remote.busy)
        await node.write("a", b"two")
        await node.write("a", b"three")
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("a") == b"three"
        assert node.remote.count("put") == 2
        assert not node.conflicts

    story(tell)


def test_a_file_overwritten_before_it_was_opened_is_no_failure_of_the_newer_one(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"1" * MIB)
        await until(lambda: node.remote.busy)  # its file goes with the next write
        await node.write("a", b"2" * MIB)
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("a") == b"2" * MIB
        assert not node.conflicts

    story(tell)


def test_a_large_object_overwritten_halfway_is_given_up_and_leaves_no_upload(story):
    async def tell(node: Node) -> None:
        await node.write("big", large(1))
        await until(lambda: node.remote.count("part"))
        node.remote.open.clear()
        await node.write("big", b"small now")
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("big") == b"small now"
        assert node.remote.count("complete") == 0
        assert await node.remote.list_uploads("") == []
        assert not node.conflicts

    story(tell)


def test_an_object_deleted_during_its_flush_is_gone_at_the_backend(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"one")
        await until(lambda: node.remote.busy)
        await node.delete("a")
        assert node.flusher.find("b", "a").is_delete
        node.remote.open.set()
        await node.settle()
        assert node.remote.names() == []
        assert not node.conflicts

    story(tell)


def test_deletes_are_flushed_and_the_same_key_may_come_back(story):
    async def tell(node: Node) -> None:
        await node.write("a", b"one")
        await node.settle()
        await node.delete("a")
        await node.write("b", b"x")
        await node.settle()
        assert node.remote.names() == ["b"]
        await node.write("a", b"two")
        await node.settle()
        assert node.remote.data("a") == b"two"
        await node.write("c", b"never seen")
        await node.delete("c")  # created and deleted here: the backend may never have heard of it
        await node.settle()
        assert node.remote.names() == ["a", "b"]
        assert not node.conflicts

    story(tell)


def test_listings_see_what_is_owed_in_order_of_bytes(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        for key in ("b/2", "a", "b/10", "b/é", "c"):
            await node.write(key, b"x")
        await node.delete("b/3")
        assert [key for key, _ in node.flusher.window("b", "b/", "", 10)] == ["b/10", "b/2", "b/3", "b/é"]
        assert [key for key, _ in node.flusher.window("b", "b/", "b/10", 2)] == ["b/2", "b/3"]
        assert node.flusher.window("other", "", "", 10) == []
        totals = node.flusher.totals("b")
        assert (totals.bytes, totals.objects, totals.flushing) == (5, 6, 6)
        assert totals.since_s is not None
        node.remote.open.set()
        await node.settle()

    story(tell)


# --- what fails ------------------------------------------------------------------------------------------------------
def test_a_failure_is_shown_counted_and_tried_again(story):
    async def tell(node: Node) -> None:
        node.remote.fail.append(Unavailable("the backend answered 500: try again"))
        await node.write("a", b"one")
        await until(lambda: node.flusher.totals("b").error)
        assert "500" in node.flusher.totals("b").error
        assert node.owes() == ["a"]
        node.clock.ahead_s += 2
        await node.settle()
        assert node.flusher.totals("b").error == ""
        assert node.flusher.metrics()['forebay_flush_failures_total{bucket="b",kind="Unavailable"}'] == 1

    story(tell)


def test_a_backend_that_refuses_keeps_nothing_from_being_owed(story):
    async def tell(node: Node) -> None:
        await node.write("a", b"one")
        with pytest.raises(NotSupported, match="give the bucket a backend that can"):
            await node.flusher.flush("b")
        assert node.owes() == ["a"]
        assert "cannot be written to" in node.flusher.totals("b").error
        node.remote.read_only = False
        await node.settle()

    class ReadOnly(Remote):
        read_only = True

    story(tell, ReadOnly)


def test_bytes_that_rotted_on_the_disk_are_not_sent(story):
    async def tell(node: Node) -> None:
        await node.write("a", b"x" * MIB, tell=False)
        record = node.shelf.lookup("b", "a")
        with open(node.shelf.data_path(record), "r+b") as file:
            file.write(b"y")
        node.flusher.add(node.shelf.notes["b", "a"])
        await until(lambda: node.flusher.totals("b").error)
        assert "do not match their checksums" in node.flusher.totals("b").error
        assert node.remote.names() == []
        assert node.owes() == ["a"]

    story(tell)


def test_an_answer_that_was_lost_is_no_conflict(story):
    async def tell(node: Node) -> None:
        node.remote.lose.add("put")
        await node.write("a", b"one")
        await until(lambda: node.flusher.totals("b").error)
        await node.settle()
        assert node.remote.data("a") == b"one"
        assert not node.conflicts
        node.remote.lose.add("put")
        await node.write("a", b"two")
        await until(lambda: node.flusher.totals("b").error)
        await node.write("a", b"three")  # the backend has "two", and nobody has noted it
        await node.settle()
        assert node.remote.data("a") == b"three"
        node.remote.lose.add("delete")
        await node.delete("a")
        await until(lambda: node.flusher.totals("b").error)
        await node.write("a", b"four")
        await node.settle()
        assert node.remote.names() == ["a"]
        assert not node.conflicts

    story(tell)


def test_a_delete_is_done_when_the_backend_says_so_and_not_when_nobody_knows(story):
    """It has no condition, an answer to it was lost, and the repetition was refused: the object may be there."""

    async def tell(node: Node) -> None:
        node.remote.place("k", b"theirs")
        refusal = Denied("the keys were changed meanwhile: give it new ones")
        node.remote.fail.extend([NotSupported("this service knows no conditions"), Unheard(refusal)])
        await node.delete("k")
        await node.settle()
        assert node.remote.names() == []

    story(tell, conflict="ours")


def test_new_headers_of_the_same_bytes_are_not_taken_for_done(story):
    async def tell(node: Node) -> None:
        node.remote.lose.add("put")
        await node.write("a", b"one", (("content-type", "a/b"),))
        await until(lambda: node.flusher.totals("b").error)
        await node.write("a", b"one", (("content-type", "c/d"),))
        await node.settle()
        assert (await node.remote.head("a")).headers == (("content-type", "c/d"),)
        assert not node.conflicts

    story(tell)


def test_a_completion_whose_answer_was_lost_is_found_to_have_been_ours(story):
    async def tell(node: Node) -> None:
        node.remote.lose.add("complete")
        await node.write("big", large(3))
        await until(lambda: node.flusher.totals("b").error)
        await node.settle()
        assert node.remote.data("big") == large(3)
        assert node.remote.count("part") == 3
        assert not node.conflicts

    story(tell)


# --- restarts --------------------------------------------------------------------------------------------------------
def test_what_was_owed_when_the_node_was_killed_is_flushed_by_the_next(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"one")
        await node.write("b", b"two", tell=False)
        await node.crash()
        assert node.owes() == ["a", "b"]
        node.remote.open.set()
        await node.settle()
        assert [node.remote.data(key) for key in "ab"] == [b"one", b"two"]

    story(tell)


def test_an_upload_goes_on_after_a_kill_with_the_parts_that_are_missing(story):
    async def tell(node: Node) -> None:
        data = large(2)
        await node.write("big", data)
        await until(lambda: node.remote.count("part"))
        node.remote.fail.extend([Unavailable("500: try again"), Unavailable("500: try again")])
        await until(lambda: node.flusher.totals("b").error)
        [upload] = await node.remote.list_uploads("")
        there = len(await node.remote.list_parts("big", upload.upload_id))
        before = node.remote.count("part")
        await node.crash()
        node.remote.fail.clear()
        await node.settle()
        assert node.remote.data("big") == data
        assert node.remote.count("part") - before == 3 - there
        assert node.remote.count("begin") == 1

    story(tell)


def test_an_upload_begun_right_before_a_kill_is_told_and_left_since_it_may_be_anothers(story):
    async def tell(node: Node) -> None:
        node.remote.lose.add("begin")  # it is there, and its id never came
        await node.write("big", large(2))
        await until(lambda: node.flusher.totals("b").error)
        assert len(await node.remote.list_uploads("")) == 1
        stranger = await node.remote.begin_upload("big")
        await node.crash()
        await node.settle()
        assert stranger in [seen.upload_id for seen in await node.remote.list_uploads("")]
        assert node.left == ["big"]
        assert node.remote.data("big") == large(2)

    story(tell)


def test_an_upload_that_the_backend_refused_to_begin_is_nobodys_to_look_for(story):
    async def tell(node: Node) -> None:
        node.remote.fail.append(Denied("no: ask for the right to write"))
        await node.write("big", large(2))
        await until(lambda: node.flusher.totals("b").error)
        await node.crash()
        await node.settle()
        assert node.left == []
        assert node.remote.data("big") == large(2)

    story(tell)


def test_a_large_object_overwritten_after_a_kill_leaves_no_upload_either(story):
    async def tell(node: Node) -> None:
        await node.write("big", large(2))
        await until(lambda: node.remote.count("part"))
        node.remote.open.clear()
        await until(lambda: node.remote.busy)
        await node.flusher.aclose(flush=False)
        await node.write("big", b"other", tell=False)
        node.remote.open.set()
        node.boot()
        await node.settle()
        assert await node.remote.list_uploads("") == []
        assert node.remote.data("big") == b"other"
        assert not node.conflicts

    story(tell)


def test_a_put_that_arrived_before_a_kill_and_was_overwritten_after_it_is_no_conflict(story):
    async def tell(node: Node) -> None:
        node.remote.lose.add("put")
        await node.write("a", b"one")
        await until(lambda: node.flusher.totals("b").error)
        await node.flusher.aclose(flush=False)
        await node.write("a", b"two", tell=False)
        await node.delete("a", tell=False)
        await node.write("a", b"three", tell=False)
        node.boot()
        await node.settle()
        assert node.remote.names() == ["a"]
        assert node.remote.data("a") == b"three"
        assert not node.conflicts

    story(tell)


# --- conflicts -------------------------------------------------------------------------------------------------------
async def _meet(node: Node, data: bytes = b"ours") -> None:
    """Ours is based on a version that a stranger has replaced."""
    await node.write("k", b"base")
    await node.settle()
    node.remote.place("k", b"theirs")
    await node.write("k", data)
    await node.settle()


def test_both_are_kept_when_a_stranger_came_first(story):
    async def tell(node: Node) -> None:
        await _meet(node)
        [kept] = [key for key in node.remote.names() if key != "k"]
        assert kept.startswith("k.conflict-node1-")
        assert (node.remote.data("k"), node.remote.data(kept)) == (b"theirs", b"ours")
        assert node.shelf.lookup("b", "k") is None  # a read finds theirs
        assert node.flusher.totals("b").conflicts == 1
        assert node.flusher.metrics()['forebay_flush_conflicts_total{bucket="b",policy="keep-both"}'] == 1
        await node.write("k", b"later")  # nothing is left of the quarrel
        await node.settle()

    story(tell)


def test_ours_wins_if_the_bucket_says_so(story):
    async def tell(node: Node) -> None:
        await _meet(node)
        assert node.remote.names() == ["k"]
        assert node.remote.data("k") == b"ours"
        assert node.conflicts == {"ours": 1}

    story(tell, conflict="ours")


def test_theirs_wins_if_the_bucket_says_so(story):
    async def tell(node: Node) -> None:
        await _meet(node)
        assert node.remote.data("k") == b"theirs"
        assert node.shelf.lookup("b", "k") is None
        assert node.conflicts == {"theirs": 1}

    story(tell, conflict="theirs")


def test_a_large_loser_of_which_nothing_is_kept_leaves_no_upload(story):
    async def tell(node: Node) -> None:
        await _meet(node, large(6))
        assert node.remote.data("k") == b"theirs"
        assert node.conflicts == {"theirs": 1}
        assert await node.remote.list_uploads("") == []

    story(tell, conflict="theirs")


def test_a_large_loser_is_kept_whole_too(story):
    async def tell(node: Node) -> None:
        await _meet(node, large(5))
        [kept] = [key for key in node.remote.names() if key != "k"]
        assert node.remote.data(kept) == large(5)
        assert node.remote.data("k") == b"theirs"
        assert await node.remote.list_uploads("") == []

    story(tell)


def test_a_copy_is_made_once_though_the_node_is_killed_in_between(story):
    async def tell(node: Node) -> None:
        await node.write("k", b"base")
        await node.settle()
        node.remote.place("k", b"theirs")
        node.remote.lose.add("put")
        node.remote.fail.append(Unavailable("500: try again"))
        await node.write("k", b"ours")
        await until(lambda: node.flusher.totals("b").error)
        await node.crash()
        await until(lambda: len(node.remote.names()) == 2)
        await node.crash()
        await node.settle()
        assert len(node.remote.names()) == 2

    story(tell)


def test_names_for_copies_do_not_collide(story):
    async def tell(node: Node) -> None:
        await node.write("k", b"base")
        await node.settle()
        node.remote.place("k", b"theirs")
        node.remote.open.clear()
        await node.write("k", b"ours")
        note = node.flusher.find("b", "k")
        name = conflict_key("k", "node1", note.since_s, 1)
        node.remote.place(name, b"somebody else's")
        node.remote.open.set()
        await node.settle()
        assert node.remote.data(name) == b"somebody else's"
        assert node.remote.data(f"{name}-2") == b"ours"
        assert len(conflict_key("é" * 512, "n", 0.0, 2).encode()) <= limits.KEY_BYTES_MAX

    story(tell)


@pytest.mark.parametrize("policy", ["keep-both", "ours", "theirs"])
def test_a_delete_does_not_take_a_strangers_object_unless_ours_wins(story, policy):
    async def tell(node: Node) -> None:
        await node.write("k", b"base")
        await node.settle()
        node.remote.place("k", b"theirs")
        await node.delete("k")
        await node.settle()
        assert node.remote.data("k") == (None if policy == "ours" else b"theirs")
        assert node.conflicts == {policy: 1}

    story(tell, conflict=policy)


def test_a_stranger_who_deleted_what_we_change_is_a_conflict_too(story):
    async def tell(node: Node) -> None:
        await node.write("k", b"base")
        await node.settle()
        node.remote.remove("k")
        await node.write("k", b"ours")
        await node.settle()
        assert [key.startswith("k.conflict-") for key in node.remote.names()] == [True]

    story(tell)


def test_who_lost_its_place_while_it_was_flushing_leaves_no_copy_of_a_conflict(story):
    """What it finds there is from the node that took over. It forgets what it owed as soon as it hears of that."""

    async def tell(node: Node) -> None:
        await node.write("k", b"base")
        await node.settle()
        node.remote.place("k", b"of the node that took over")
        before, refused = node.remote.count("put"), []

        def may_send(bucket: str, under_way: bool) -> None:
            if node.remote.count("put") > before:
                refused.append(bucket)
                raise Unavailable("this node lost its place")

        node.flusher.may_send = may_send
        await node.write("k", b"ours")
        await until(lambda: refused or len(node.remote.names()) > 1)
        assert node.remote.names() == ["k"]
        assert node.remote.data("k") == b"of the node that took over"

    story(tell)


@pytest.mark.parametrize("under_way", [True, False])
def test_what_a_node_sends_is_cut_off_when_others_may_soon_act_in_its_place(story, under_way: bool):
    """Not while it stands aside for them: that waits for what is under way."""

    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("k", b"ours")
        await until(lambda: node.remote.count("put"))

        def may_send(bucket: str, is_under_way: bool) -> None:
            if is_under_way == under_way:
                raise Unavailable("this node lost its place")

        node.flusher.may_send = may_send
        if under_way:
            await until(lambda: not node.remote.busy)
            node.flusher.may_send = lambda bucket, is_under_way: None
        else:
            await asyncio.sleep(3 * CUT_OFF_S)
            assert node.remote.busy == 1
        node.remote.open.set()
        await node.settle()
        assert node.remote.data("k") == b"ours"
        assert node.remote.count("put") == (2 if under_way else 1)

    story(tell)


def test_a_backend_without_conditions_is_asked_before_it_is_written_to(story):
    async def tell(node: Node) -> None:
        node.remote.knows_conditions = False
        node.remote.knows_tags = False
        await _meet(node)
        assert node.remote.data("k") == b"theirs"
        assert node.conflicts == {"keep-both": 1}
        await node.write("t", b"x", tags="a=1")
        await node.write("t2", b"x")
        await node.settle()
        await node.delete("t2")
        await node.settle()
        assert node.remote.data("t") == b"x"
        assert node.remote.data("t2") is None

    story(tell)


def test_a_backend_that_only_lacks_tags_keeps_its_conditions(story):
    async def tell(node: Node) -> None:
        node.remote.knows_tags = False
        node.remote.place("k", b"theirs")
        await node.write("k", b"ours", tags="a=1")
        await node.settle()
        assert node.remote.data("k") == b"theirs"
        assert node.conflicts == {"keep-both": 1}

    story(tell)


# --- on demand, and the end ------------------------------------------------------------------------------------------
def test_an_order_to_flush_waits_for_what_was_owed_then_and_tells_of_each(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        for key in ("p/1", "p/2", "q"):
            await node.write(key, b"x" * 10)
        told: list[tuple[str, int]] = []
        order = asyncio.create_task(node.flusher.flush("b", "p/", progress=lambda key, size: told.append((key, size))))
        await asyncio.sleep(0.01)
        assert not order.done()
        node.remote.open.set()
        await order
        assert sorted(told) == [("p/1", 10), ("p/2", 10)]
        await node.flusher.flush("b", keys=["q", "unknown"])
        assert node.owes() == []

    story(tell)


def test_an_order_to_flush_says_what_could_not_be_and_flushes_the_rest(story):
    async def tell(node: Node) -> None:
        node.remote.fail.append(Denied("the credentials may not write: fix them"))
        await node.write("a", b"x")
        await node.write("c", b"x")
        with pytest.raises(Denied):
            await node.flusher.flush("b")
        assert node.owes() in (["a"], ["c"])
        await node.settle()

    story(tell)


def test_a_key_can_be_stopped_under_its_lock(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"one")
        await until(lambda: node.remote.busy)

        async def write_through() -> None:
            async with node.lock("b", "a"):
                await node.flusher.stop_key("b", "a")
                assert not node.remote.busy
                node.remote.place("a", b"through")
                node.shelf.notes.pop(("b", "a"))
                node.flusher.forget("b", "a")

        writer = asyncio.create_task(write_through())
        await asyncio.sleep(0.01)
        assert not writer.done(), "a put under way cannot be called back"
        node.remote.open.set()
        await writer
        await node.settle()
        assert node.remote.data("a") == b"through"

    story(tell)


def test_a_key_that_was_stopped_for_a_write_that_failed_is_flushed_after_all(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"one")
        async with node.lock("b", "a"):
            node.remote.open.set()
            await node.flusher.stop_key("b", "a")
            node.flusher.ask("b", "a")
            await asyncio.sleep(0.01)
        await node.settle()
        assert node.remote.data("a") == b"one"

    story(tell)


def test_a_stopped_upload_is_aborted_when_the_key_owes_nothing_any_more(story):
    async def tell(node: Node) -> None:
        node.remote.hold_from = "part"
        await node.write("big", large(1))
        await until(lambda: node.remote.count("part"))
        assert not node.remote.count("complete")
        node.shelf.notes.pop(("b", "big"))
        node.flusher.forget("b", "big")
        node.remote.open.set()
        await until(lambda: not node.flusher.totals("b").flushing)
        assert await node.remote.list_uploads("") == []
        assert node.remote.names() == []

    story(tell)


def test_before_it_ends_a_node_flushes_what_it_owes(story):
    async def tell(node: Node) -> None:
        for number in range(50):
            await node.write(f"k{number}", b"x")
        await node.flusher.aclose(flush=True)
        assert len(node.remote.names()) == 50
        assert not node.shelf.notes

    story(tell)


def test_the_last_flush_ends_when_told_or_when_its_time_is_up_and_nothing_is_lost(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"x")
        await node.flusher.aclose(flush=True, patience_s=0.1)
        assert list(node.shelf.notes) == [("b", "a")]
        node.boot()
        skips = iter([False, False, True])
        await node.flusher.aclose(flush=True, skip=lambda: next(skips))
        assert list(node.shelf.notes) == [("b", "a")]
        node.remote.open.set()
        node.boot()
        await node.settle()

    story(tell)


def test_the_last_flush_does_not_wait_for_backends_that_are_ill(story):
    async def tell(node: Node) -> None:
        node.remote.fail.extend(Unavailable("500: try again") for _ in range(1000))
        for number in range(40):
            await node.write(f"k{number}", b"x")
        began_s = node.clock.monotonic_s()
        ending = asyncio.create_task(node.flusher.aclose(flush=True, patience_s=100_000.0))
        while not ending.done():
            node.clock.ahead_s += 1.0
            await asyncio.sleep(0.02)
        assert (await ending).objects == 40
        assert node.clock.monotonic_s() - began_s < 300

    story(tell)


def test_at_most_so_many_bodies_are_under_way_at_once(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        for number in range(3 * limits.FLUSHES_MAX):
            await node.write(f"k{number:03}", b"x")
        await until(lambda: node.remote.busy == limits.FLUSHES_MAX)
        node.remote.open.set()
        await node.settle()
        assert node.remote.busiest == limits.FLUSHES_MAX
        first = [key for _, key in node.remote.asked[: limits.FLUSHES_MAX]]
        assert sorted(first) == [f"k{number:03}" for number in range(limits.FLUSHES_MAX)], "the oldest go first"

    story(tell)
