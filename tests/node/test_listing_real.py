"""One listing for a job, asked of a running node by its clients."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay.aio
from forebay import connect
from forebay.core.errors import Invalid, NotFound, Precondition
from forebay.core.formats.listing import Listing
from tests.node.conftest import MIB, NodeProcess, pattern, until


@pytest.mark.real
def test_a_job_lists_its_bucket_once_and_knows_it_again(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    data = tmp_path / "data"
    for n in range(2300):
        folder = data / f"class-{n % 23:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n:06d}.jpg").write_bytes(b"x" * (n % 7))
    one = node()
    one.add_bucket("photos", f"file://{data}")
    found: list[Listing] = []

    def worker() -> None:
        with connect(one.endpoint) as client:
            found.append(client.listing("photos"))

    workers = [threading.Thread(target=worker) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    listing = found[0]
    assert len(found) == 4
    assert len({each.id for each in found}) == 1
    assert listing.keys() == sorted(f"class-{n % 23:02d}/{n:06d}.jpg" for n in range(2300))
    number = listing.find("class-03/000003.jpg")
    assert number is not None
    assert listing.sizes[number] == 3

    status, body = one.ask("GET", f"/-/v1/listing/photos?id={listing.id}")
    assert (status, body) == (200, bytes(listing.data))
    status, body = one.ask("GET", "/-/v1/listing/photos", {"If-None-Match": f'"{listing.id}"'})
    assert (status, body) == (304, b"")
    status, body = one.ask("HEAD", "/-/v1/listing/photos")
    assert (status, body) == (200, b"")

    (data / "class-00" / "new.jpg").write_bytes(b"new")
    with connect(one.endpoint) as client:
        assert client.listing("photos").id == listing.id, "immutable: not looked at again unless asked to"
        heard: list[int] = []
        assert len(client.listing("photos", refresh=True, progress=heard.append)) == 2301
        assert len(client.listing("photos", "class-00/")) == 101
        with pytest.raises(Precondition, match=r"1 object was added \(class-00/new.jpg\)"):
            client.listing("photos", id=listing.id)
        with pytest.raises(NotFound):
            client.listing("nobody-has-it")

    async def again() -> Listing:
        async with forebay.aio.connect(one.endpoint) as client:
            return await client.listing("photos", "class-22/")

    assert len(asyncio.run(again())) == 100


@pytest.mark.real
def test_a_job_that_tells_its_order_finds_what_it_reads(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    """Half of the data fits. Whatever the job reads next is there before it asks, and is fetched about as often as a
    cache that knows the future must."""
    data = tmp_path / "data"
    data.mkdir()
    bodies = [pattern(MIB, n) for n in range(60)]
    for n, body in enumerate(bodies):
        (data / f"{n:03d}").write_bytes(body)
    one = node("--capacity", "30MiB", "--fronts", "1")
    one.add_bucket("photos", f"file://{data}")
    chance = random.Random(4)
    order: list[int] = []
    for _ in range(3):
        order += chance.sample(range(60), 60)
    with connect(one.endpoint) as client:
        listing = client.listing("photos")
        with client.hints("a job", listing) as hints:
            hints.future([(n, 0, 1) for n in order[:100]])
            said = hints.future(array("I", [number for n in order[100:] for number in (n, 0, 1)]))
            assert (said.position, said.known) == (0, 180)
            for at, n in enumerate(order):
                until(lambda at=at: hints.state().ahead > at)
                assert client.get("photos", listing.key(n)) == bodies[n]
                hints.at(at + 1)
            assert hints.state().position == 180
        with pytest.raises(NotFound):
            hints.at(3)
    must = fetched_by_belady(order, 29)
    assert one.metric("forebay_backend_read_bytes_total") <= MIB * (180 - 0.9 * (180 - must))
    assert one.metric("forebay_hint_hits_total") > 20
    assert one.metric("forebay_hint_jobs") == 0


def fetched_by_belady(order: list[int], fit: int) -> int:
    """How many of these reads a cache of `fit` objects must fetch."""
    kept: set[int] = set()
    fetched = 0
    for at, n in enumerate(order):
        if n not in kept:
            fetched += 1
            kept.add(n)
        if len(kept) > fit:
            later = order[at + 1 :]
            kept.discard(max(kept, key=lambda each: later.index(each) if each in later else len(order)))
    return fetched


@pytest.mark.real
def test_hints_that_make_no_sense_are_refused(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "k").write_bytes(b"x")
    one = node()
    one.add_bucket("photos", f"file://{tmp_path / 'data'}")
    with connect(one.endpoint) as client:
        listing = client.listing("photos")
        for wrong in ([(1, 0, 1)], [(0, 0, 9)]):
            with pytest.raises(Invalid):
                client.hints("job", listing).future(wrong)
        with pytest.raises(Invalid):
            client.hints("job", listing).future(array("B", b"1234567"))
        client.hints("nobody", listing).close()
    for target, body in (("hints/job", b"no future"), ("hints/other", b"\x80")):
        status, _ = one.ask("POST", f"/-/v1/{target}", {"Content-Type": "application/msgpack"}, body)
        assert status == 400
    assert one.ask("PUT", "/-/v1/hints/job?position=many")[0] == 400
    assert one.ask("GET", "/-/v1/hints/unheard")[0] == 404
