"""The rows of a job that begins: what counts as a first batch, and our side of it. The peers' side needs their own
environment."""

from __future__ import annotations

import dataclasses
import http.client
from typing import Any

import pytest

from bench import load, peers
from bench.parts import BUCKET, Lab
from bench.row import Objects
from bench.rows import start

SOME = Objects("some", 100, 300)
WORK = {"samples": 300, "batch": 4, "objects": "some/", "size_bytes": 100}


def body(index: int, name: str = "some") -> bytes:
    return peers.many_body(peers.many_key(name, index), 100)


def test_a_batch_of_shuffled_samples_counts() -> None:
    peers.check_first([body(7), body(3), body(299), body(0)], 300, WORK)
    peers.check_first([body(0), body(1), body(2), body(3)], 300, WORK, shuffled=False)


@pytest.mark.parametrize(
    "batch, samples, said",
    [
        ([body(7), body(3), body(1), body(0)], 301, "301 samples, not 300"),
        ([body(7), body(3), body(1)], 300, "3 different samples"),
        ([body(7), body(3), body(1), body(7)], 300, "3 different samples"),
        ([body(7), body(3), body(1), body(300)], 300, "is not"),
        ([body(7), body(3), body(1), body(0)[:-1]], 300, "is not"),
        ([body(7), body(3), body(1), body(0, "other")], 300, "is not"),
        ([body(0), body(1), body(2), body(3)], 300, "not shuffled"),
    ],
)
def test_anything_else_is_an_error(batch: list[Any], samples: int, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        peers.check_first(batch, samples, WORK)


def test_a_million_objects_lie_in_a_hundred_folders() -> None:
    keys = [peers.many_key("many", index) for index in range(0, 1_000_000, 100)]
    assert (keys[0], keys[-1]) == ("many/0000/000000.bin", "many/0099/999900.bin")
    assert len({key.rpartition("/")[0] for key in keys}) == 100


@pytest.mark.real
def test_our_first_batch_is_timed_and_one_of_another_data_set_is_refused() -> None:
    with Lab(quick=True) as lab:
        start.upload(lab, SOME)
        start.upload(lab, dataclasses.replace(SOME, count=10**9))  # nothing: these were uploaded
        with load.Reader(lab.weed.endpoint) as reader:
            for index in (0, 299):
                got = bytearray()
                reader.get(f"/{BUCKET}/{peers.many_key('some', index)}", into=got)
                assert got == body(index)
        assert all(seconds > 0 for seconds in start.ours(lab, SOME, lab.weed.endpoint))
        assert start.listing_alone(lab.weed.endpoint, SOME) > 0
        more = dataclasses.replace(SOME, count=301)
        with pytest.raises(load.LoadFailed, match="300 keys, not 301"):
            start.listing_alone(lab.weed.endpoint, more)
        with pytest.raises(load.LoadFailed, match="300 samples, not 301"):
            start.ours(lab, more, lab.weed.endpoint)
        start._remove(lab, peers.many_key("some", 0))
        start._remove(lab, "some/never-there")
        asked = http.client.HTTPConnection("127.0.0.1", lab.weed.port, timeout=30)
        asked.request("HEAD", f"/{BUCKET}/{peers.many_key('some', 0)}")
        assert asked.getresponse().status == 404
        asked.close()


@pytest.mark.real
def test_an_upload_that_is_refused_is_an_error() -> None:
    with Lab(quick=True) as lab, pytest.raises(load.LoadFailed, match="to the upload of"):
        start.upload(lab, Objects("no%zzname", 100, 40))
