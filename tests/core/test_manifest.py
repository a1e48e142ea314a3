"""What a cluster leaves behind: parts of several nodes as one, what was used last first, and never too large."""

from __future__ import annotations

import itertools
import random

import pytest

from forebay.core.errors import Invalid
from forebay.core.formats import manifest
from forebay.core.formats.manifest import FORMAT, Manifest, Warm, joined, merged, without_secrets
from forebay.core.limits import MANIFEST_BYTES_MAX
from forebay.core.types import Bucket


def of(warm: list[Warm], left_out: int = 0) -> Manifest:
    return Manifest(FORMAT, "training", "1", 0.0, [], [], {}, warm, left_out)


def test_what_several_nodes_have_of_an_object_is_one_object() -> None:
    one = [Warm("a", "x", 100, 5, ((0, 10), (40, 50))), Warm("a", "y", 10, 9), Warm("a", "old", 30, 4, ((0, 20),))]
    two = [Warm("a", "x", 100, 7, ((10, 20), (45, 60))), Warm("a", "y", 10, 2, ((0, 5),)), Warm("a", "old", 40, 3)]
    assert merged([one, two]) == [
        Warm("a", "y", 10, 9),
        Warm("a", "x", 100, 7, ((0, 20), (40, 60))),
        Warm("a", "old", 30, 4, ((0, 20),)),  # the other is of a version that was used before
    ]
    assert merged([[Warm("a", "x", 20, 1, ((0, 10),))], [Warm("a", "x", 20, 1, ((10, 20),))]]) == [
        Warm("a", "x", 20, 1)
    ]


def test_spans_that_touch_are_one_against_a_set_of_bytes() -> None:
    chance = random.Random(7)
    for _ in range(500):
        spans = sorted((start, start + chance.randint(1, 9)) for start in (chance.randint(0, 40) for _ in range(5)))
        found = list(joined(spans))
        assert {at for span in found for at in range(*span)} == {at for span in spans for at in range(*span)}
        assert all(one[1] < two[0] for one, two in itertools.pairwise(found))


def test_what_finds_no_room_is_counted() -> None:
    warm = [Warm("bucket", f"{number:06}" + "k" * 1000, 1, -number) for number in range(6000)]
    data = manifest.encode(of(warm, 3))
    assert len(data) <= MANIFEST_BYTES_MAX
    found = manifest.decode(data, "it")
    assert found.warm == warm[: len(found.warm)]
    assert len(found.warm) + found.left_out == 6003
    assert len(data) > MANIFEST_BYTES_MAX - 3000, "as much as there is room for"


def test_secrets_stay_where_they_are() -> None:
    kept, hidden = without_secrets([Bucket("one", "s3://one", options={"region": "x", "secret_access_key": "***"})])
    assert kept == [Bucket("one", "s3://one", options={"region": "x"})]
    assert hidden == {"one": ["secret_access_key"]}


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"format": "forebay manifest 1"}', b'{"a": 1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(Invalid, match="is no manifest"):
        manifest.decode(data, "s3://bucket/it")


def test_a_later_form_is_refused_with_its_name() -> None:
    later = manifest.encode(of([])).replace(b"manifest 1", b"manifest 2")
    with pytest.raises(Invalid, match="use the release that wrote it"):
        manifest.decode(later, "s3://bucket/it")
