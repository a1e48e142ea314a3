"""Samples of each kind: what they are, one request for a batch, and what is done about damage."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
import zipfile
import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import Corrupt, Denied, Invalid, NotFound, Precondition
from forebay.torch import DataLoader, ObjectDataset, ShardDataset, TokenDataset
from forebay.torch.source import Facts
from tests.core.archives import tar_of
from tests.torch.memory_source import MemorySource, tokens

Image = pytest.importorskip("PIL.Image")


# --- objects ---------------------------------------------------------------------------------------------------------
def test_a_sample_is_an_object_and_a_batch_one_request(numbers: MemorySource):
    dataset = ObjectDataset("b-1/numbers/", source=numbers)
    assert len(dataset) == 100
    assert dataset[7] == b"7"
    assert dataset[-1] == b"99"
    assert dataset.key(3) == "numbers/00003"
    numbers.batches.clear()
    assert dataset.__getitems__([5, 3, 5]) == [b"5", b"3", b"5"]
    assert numbers.batches == [3]
    assert list(dataset)[:2] == [b"0", b"1"], "the end of an iteration is an IndexError"
    with pytest.raises(IndexError):
        dataset[100]


def test_it_is_listed_once_and_decoded_by_the_caller(numbers: MemorySource):
    numbers.objects["numbers/readme.md"] = b"not a number"
    dataset = ObjectDataset(
        "s3://b-1/numbers", decode=lambda key, data: (key[-1], int(bytes(data))), suffixes=["0"], source=numbers
    )
    assert len(dataset) == 10
    assert dataset[4] == ("0", 40)
    assert numbers.listed == 1


@pytest.mark.parametrize("place", ["", "/x", "http://b/x", "B!/x"])
def test_a_place_is_a_bucket_and_a_prefix(place: str, numbers: MemorySource):
    with pytest.raises(Invalid):
        ObjectDataset(place, source=numbers)


def test_an_empty_bucket_says_so(numbers: MemorySource):
    with pytest.raises(NotFound, match=r"no objects under 'b-1/none'.*forebay ls"):
        ObjectDataset("b-1/none", source=numbers)
    with pytest.raises(NotFound, match=r"that end in \.jpg"):
        ObjectDataset("b-1/numbers", suffixes=[".jpg"], source=numbers)


def test_one_sample_and_an_empty_object(numbers: MemorySource):
    numbers.objects = {"one": b""}
    assert ObjectDataset("b-1", source=numbers)[0] == b""


def test_a_sample_that_cannot_be_decoded_is_raised_or_skipped_and_counted(numbers: MemorySource):
    numbers.objects["numbers/00003"] = b"three"
    with pytest.raises(Corrupt, match=r"b-1/numbers/00003 cannot be decoded \(ValueError.*on_error='skip'") as raised:
        ObjectDataset("b-1/numbers", decode=to_int, source=numbers).__getitems__([2, 3])
    assert isinstance(raised.value.__cause__, ValueError)
    skipping = ObjectDataset("b-1/numbers", decode=to_int, source=numbers, on_error="skip")
    facts = Facts()
    assert skipping.fetch([2, 3, 4], facts) == [2, 4]
    assert facts.skipped == ["b-1/numbers/00003"]
    with pytest.raises(Corrupt, match="none of the 1 samples"):
        skipping[3]


def to_int(_key: str, data: bytes | memoryview) -> int:
    return int(bytes(data))


def test_what_is_missing_can_be_skipped_but_no_refusal_and_no_change(numbers: MemorySource):
    dataset = ObjectDataset("b-1/numbers", source=numbers, on_error="skip")
    del numbers.objects["numbers/00001"]
    assert dataset.__getitems__([0, 1]) == [b"0"]
    numbers.objects["numbers/00002"] = b"another two"
    with pytest.raises(Precondition, match="b-1/numbers/00002 changed since the dataset was listed"):
        dataset.__getitems__([0, 2])
    numbers.fail = lambda item: Denied("you may not: ask for a token")
    with pytest.raises(Denied):
        dataset.__getitems__([0, 3])


def test_a_fault_of_the_decoder_is_never_skipped(numbers: MemorySource):
    def faulty(_key: str, data: bytes | memoryview) -> int:
        return len(data) + nowhere  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(NameError) as raised:
        ObjectDataset("b-1/numbers", decode=faulty, source=numbers, on_error="skip")[3]
    assert "b-1/numbers/00003" in "".join(raised.value.__notes__)


FAULTS = [
    *(TypeError(), AttributeError(), KeyError("cat"), IndexError(), LookupError("no such encoding"), RecursionError()),
    *(ZeroDivisionError(), AssertionError(), NotImplementedError(), ImportError(), MemoryError()),
    *(torch.OutOfMemoryError(), FileNotFoundError(2, "no such file"), OSError(24, "too many open files")),
]
DAMAGE = [
    *(ValueError(), UnicodeDecodeError("utf-8", b"", 0, 1, ""), EOFError(), struct.error(), zlib.error()),
    *(pickle.UnpicklingError(), OSError("image file is truncated"), SyntaxError("broken PNG file")),
    *(OverflowError(), StopIteration(), RuntimeError("not a JPEG"), Exception()),
]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_what_a_bug_of_the_caller_raises_comes_through_whatever_the_policy(
    shards: MemorySource, error: Exception, policy: Any
):
    def faulty(sample: Any) -> Any:
        if sample["cls"] == 3:
            raise error
        return sample["cls"]

    dataset = ShardDataset("b-1/train", source=shards, on_error=policy, transform=faulty)
    with pytest.raises(type(error)) as raised:
        dataset.__getitems__(range(10))
    assert raised.value is error
    assert re.search(r"sample '000003' of b-1/train/1\.tar: .* raise a ValueError", error.__notes__[-1])
    partly = ShardDataset("b-1/train", source=shards, on_error=policy, decode={"cls": partial(raising, error)})
    with pytest.raises(type(error)) as raised:
        partly[3]
    assert "the cls of sample '000003'" in raised.value.__notes__[-1]


def raising(error: Exception, _data: Any) -> Any:
    raise error


@pytest.mark.parametrize("error", DAMAGE, ids=lambda error: type(error).__name__)
def test_what_damage_raises_in_a_decoder_names_the_sample_and_may_be_skipped(shards: MemorySource, error: Exception):
    def careful(data: Any) -> int:
        if bytes(data) == b"3":
            raise error
        return int(bytes(data))

    with pytest.raises(Corrupt, match=r"the cls of sample '000003' of b-1/train/1\.tar cannot be decoded") as raised:
        ShardDataset("b-1/train", source=shards, decode={"cls": careful}).__getitems__(range(10))
    assert raised.value.__cause__ is error
    skipping = ShardDataset("b-1/train", source=shards, decode={"cls": careful}, on_error="skip")
    assert [sample["cls"] for sample in skipping.__getitems__(range(5))] == [0, 1, 2, 4]


@pytest.mark.parametrize("error", [KeyError(7), IndexError(), TypeError(), NotImplementedError()])
def test_a_decoder_of_ours_is_sound_and_what_it_stumbles_over_is_damage(shards: MemorySource, error: Exception):
    """As pillow has it with some damaged pictures, and a table of types with a number that is none."""

    def stumbling(data: Any) -> int:
        if bytes(data) == b"3":
            raise error
        return 0

    stumbling.__module__ = "forebay.torch.decoders"
    skipping = ShardDataset("b-1/train", source=shards, decode={"cls": partial(stumbling)}, on_error="skip")
    assert len(skipping.__getitems__(range(10))) == 9


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bug_in_a_worker_still_names_the_sample(shards: MemorySource, workers: int):
    def tabled(sample: Any) -> int:
        return {number: 0 for number in range(100) if number != 42}[sample["cls"]]

    dataset = ShardDataset("b-1/train", source=shards, transform=tabled, on_error="skip")
    with DataLoader(dataset, 10, workers=workers) as loader, pytest.raises(KeyError) as raised:
        list(loader)
    assert "sample '000042'" in str(raised.value) + "".join(getattr(raised.value, "__notes__", []))


def test_what_is_often_written_differently_gets_a_sentence(numbers: MemorySource):
    places: Any = ["b-1/numbers", "b-1/more"]
    for kind in (ObjectDataset, ShardDataset):
        with pytest.raises(Invalid, match=r"one 'bucket/prefix'.*Mixture\(datasets, repeats="):
            kind(places, source=numbers)
    with pytest.raises(Invalid, match=r"write parts=\['jpg'\]"):
        ShardDataset("b-1", parts="jpg", source=numbers)
    dataset = ObjectDataset("b-1/numbers", suffixes="7", source=numbers)
    assert len(dataset) == 10
    with pytest.raises(Invalid, match="batch_size=1"):
        DataLoader(dataset, batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no argument 'num_workers'; did you mean workers"):
        DataLoader(dataset, num_workers=2)  # type: ignore[call-arg]


def test_keys_choose_objects_and_leave_new_ones_out(numbers: MemorySource):
    before = ObjectDataset("b-1/numbers", decode=to_int, source=numbers)
    numbers.objects["numbers/00000-new"] = b"1000"
    after = ObjectDataset("b-1/numbers", decode=to_int, source=numbers, keys=before.keys)
    assert len(after) == 100
    assert [after[n] for n in (0, 1, 99)] == [0, 1, 99]
    assert after.fingerprint.id == before.fingerprint.id
    assert after.accesses(np.array([1])).rows.tolist() == [[2, 0, 1]], "the node counts the new one"
    some = ObjectDataset("b-1/numbers", decode=to_int, source=numbers, keys=["numbers/00007", "numbers/00003"])
    assert [some[n] for n in range(2)] == [3, 7]
    with pytest.raises(NotFound, match=r"1 of the 2 keys= are not there, 'numbers/gone'"):
        ObjectDataset("b-1/numbers", source=numbers, keys=["numbers/00003", "numbers/gone"])
    with pytest.raises(Invalid, match="write keys="):
        ObjectDataset("b-1/numbers", source=numbers, keys="numbers/00003")


def test_a_listing_chooses_objects_and_says_if_they_are_not_what_they_were(numbers: MemorySource):
    numbers.objects |= {"numbers/": b"", "numbers/a.txt": b"no number"}
    before = ObjectDataset("b-1/numbers", decode=to_int, source=numbers, suffixes=["5"])
    listing = numbers.listing("b-1", "numbers")
    numbers.objects["numbers/000-5"] = b"1000"
    for said in (listing, bytes(listing.data)):
        after = ObjectDataset("b-1/numbers", decode=to_int, source=numbers, suffixes=["5"], listing=said)
        assert [after[n] for n in range(10)] == [before[n] for n in range(10)] == list(range(5, 100, 10))
        assert after.fingerprint.id == before.fingerprint.id
    numbers.objects["numbers/00005"] = b"five"
    with pytest.raises(Precondition, match=r"is not what listing= says .*'numbers/00005'"):
        ObjectDataset("b-1/numbers", source=numbers, suffixes=["5"], listing=listing)
    del numbers.objects["numbers/00005"]
    with pytest.raises(NotFound, match="'numbers/00005'"):
        ObjectDataset("b-1/numbers", source=numbers, listing=listing)
    with pytest.raises(Corrupt, match="not a whole listing"):
        ObjectDataset("b-1/numbers", source=numbers, listing=b"{}")
    with pytest.raises(Invalid, match="one of them"):
        ObjectDataset("b-1/numbers", source=numbers, listing=listing, keys=["numbers/00003"])


def test_an_unknown_policy_is_refused(numbers: MemorySource):
    with pytest.raises(Invalid, match="'raise' or 'skip'"):
        ObjectDataset("b-1/numbers", source=numbers, on_error="ignore")  # type: ignore[arg-type]


# --- shards ----------------------------------------------------------------------------------------------------------
def test_samples_are_members_with_one_name_in_any_order(shards: MemorySource):
    dataset = ShardDataset("b-1/train", source=shards)
    assert len(dataset) == 100
    shards.batches.clear()
    found = dataset.__getitems__([99, 0, 50])
    assert shards.batches == [3], "parts that lie side by side are one range"
    assert [sample["cls"] for sample in found] == [99, 0, 50]
    assert found[0] == {"__key__": "000099", "__shard__": "train/4.tar", "bin": bytes([99]) * 99, "cls": 99}
    assert [dataset[n]["cls"] for n in range(100)] == list(range(100))
    assert dataset.key(99) == "train/4.tar/000099"


def test_parts_that_are_not_wanted_are_not_read(shards: MemorySource):
    dataset = ShardDataset("b-1/train", parts=["cls"], source=shards)
    facts = Facts()
    assert [s["cls"] for s in dataset.fetch([3, 4], facts)] == [3, 4]
    assert "bin" not in dataset[3]
    assert facts.size_bytes == 2


def images() -> dict[str, bytes]:
    found = {}
    for form in ("png", "jpeg"):
        file = io.BytesIO()
        Image.new("RGB", (4, 3), (250, 0, 0)).save(file, form)
        found[form] = file.getvalue()
    return found


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_parts_are_decoded_by_their_extension():
    pictures = images()
    parts = {
        "jpg": pictures["jpeg"], "seg.png": pictures["png"], "json": json.dumps({"a": [1, math.inf]}).encode(),
        "txt": "ä".encode(), "cls": b" 12\n", "npy": npy(np.arange(3)), "other": b"\0\1", "empty": b"",
    }  # fmt: skip
    source = MemorySource({"x.tar": tar_of((f"dir.v1/one.{name}", data) for name, data in parts.items())})
    found = ShardDataset("b-1", source=source)[0]
    assert found["__key__"] == "dir.v1/one"
    assert found["jpg"].shape == (3, 3, 4)
    assert found["seg.png"].dtype == torch.uint8
    assert found["seg.png"][:, 0, 0].tolist() == [250, 0, 0]
    assert (found["json"], found["txt"], found["cls"], found["other"], found["empty"]) == (
        {"a": [1, math.inf]},
        "ä",
        12,
        b"\0\1",
        b"",
    )
    assert found["npy"].tolist() == [0, 1, 2]
    raw = ShardDataset("b-1", source=source, decode={})[0]
    assert raw["cls"] == b" 12\n"
    decode = {"seg.png": len, "jpg": lambda data: Image.open(io.BytesIO(data))}
    own = ShardDataset("b-1", source=source, decode=decode, transform=lambda s: (s["seg.png"], s["jpg"]))
    size, image = own[0]
    assert size == len(pictures["png"])
    assert isinstance(image, Image.Image)


def test_pickles_are_refused_unless_the_caller_decodes_them():
    file = io.BytesIO()
    torch.save(torch.arange(3), file)
    source = MemorySource({"x.tar": tar_of([("a.pt", file.getvalue()), ("b.npy", npy(np.array([{}], object)))])})
    for policy in ("raise", "skip"):
        with pytest.raises(Invalid, match="a pickle can run any code"):
            ShardDataset("b-1", source=source, on_error=policy)[0]  # type: ignore[arg-type]
    with pytest.raises(Corrupt, match="allow_pickle"):
        ShardDataset("b-1", source=source)[1]
    own = ShardDataset(
        "b-1", source=source, decode={"pt": lambda data: torch.load(io.BytesIO(data), weights_only=True)}
    )
    assert own[0]["pt"].tolist() == [0, 1, 2]


def test_names_are_read_as_webdataset_reads_them():
    members = [
        ("a.jpg.txt", b"1"), ("noextension", b"2"), (".hidden", b"3"), ("d/.x.txt", b"4"), ("b.TXT", b"5"),
        ("c.txt", b"first"), ("z.txt", b"6"), ("c.cls", b"7"), ("c.txt", b"last"),
    ]  # fmt: skip
    dataset = ShardDataset("b-1", source=MemorySource({"x.tar": tar_of(members)}))
    assert [sample["__key__"] for sample in dataset] == ["a", "b", "c", "z"]
    assert dataset[0]["jpg.txt"] == "1"
    assert dataset[1]["txt"] == "5"
    assert (dataset[2]["txt"], dataset[2]["cls"]) == ("last", 7), "of two with one name the last counts"


def test_members_of_a_deflated_zip_are_asked_for_by_name():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one.txt", "x" * 500)
        archive.writestr("one.cls", "3")
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("two.txt", "y" * 5)
    source = MemorySource({"a.zip": file.getvalue(), "b.zip": stored.getvalue()})
    dataset = ShardDataset("b-1", source=source)
    assert [(sample["__key__"], sample["txt"][:2]) for sample in dataset] == [("one", "xx"), ("two", "yy")]


def test_a_shard_that_is_cut_short_is_an_error_or_has_no_samples(shards: MemorySource):
    shards.objects["train/2.tar"] = shards.objects["train/2.tar"][:8492]  # in the head of a member
    with pytest.raises(Corrupt, match=r"b-1/train/2\.tar"):
        ShardDataset("b-1/train", source=shards, index_first=True)
    with pytest.raises(Corrupt, match=r"b-1/train/2\.tar"):
        len(ShardDataset("b-1/train", source=shards))
    dataset = ShardDataset("b-1/train", source=shards, on_error="skip")
    assert len(dataset) == 80
    assert list(dataset.damaged) == ["train/2.tar"]
    assert dataset[10]["cls"] == 30
    shards.objects = {"a.tar": b"no tar at all" * 100}
    with pytest.raises(NotFound, match="hold no samples"):
        ShardDataset("b-1", source=shards, on_error="skip", index_first=True)
    with (
        pytest.raises(NotFound, match="hold no samples"),
        DataLoader(ShardDataset("b-1", source=shards, on_error="skip")) as loader,
    ):
        next(iter(loader))


def test_a_corrupt_member_and_a_missing_part():
    source = MemorySource({"x.tar": tar_of([("a.cls", b"1"), ("b.cls", b"one"), ("c.txt", b"3"), ("d.cls", b"4")])})
    with pytest.raises(Corrupt, match=r"the cls of sample 'b' of b-1/x\.tar cannot be decoded"):
        ShardDataset("b-1", source=source)[1]
    facts = Facts()
    skipping = ShardDataset("b-1", source=source, on_error="skip")
    assert [s["__key__"] for s in skipping.fetch([0, 1, 2, 3], facts)] == ["a", "c", "d"]
    assert facts.skipped == ["sample 'b' of b-1/x.tar"]
    both = MemorySource({"x.tar": tar_of([("a.cls", b"1"), ("a.txt", b"1"), ("b.cls", b"2")])})
    with pytest.raises(Corrupt, match="has no txt"):
        ShardDataset("b-1", source=both, parts=[".txt", "cls"])[1]


def test_layouts_are_forgotten_when_they_are_many(shards: MemorySource, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forebay.torch.shards.LAYOUTS_BYTES_MAX", 1)
    dataset = ShardDataset("b-1/train", source=shards)
    assert [dataset[n]["cls"] for n in (99, 0, 50, 99)] == [99, 0, 50, 99]
    assert len(dataset._layouts) == 1


# --- tokens ----------------------------------------------------------------------------------------------------------
def test_windows_stay_within_files(text: MemorySource):
    dataset = TokenDataset("b-1/text", 50, source=text)
    assert len(dataset) == 20 + 1 + 2
    assert dataset[1].tolist() == list(range(50, 100))
    assert dataset[20].tolist() == list(range(50))
    assert dataset[22].tolist() == list(range(5050, 5100))
    assert dataset[0].dtype == torch.int64


def test_windows_may_overlap_for_targets(text: MemorySource):
    dataset = TokenDataset("b-1/text/0", 5, stride=4, source=text)
    assert dataset[1].tolist() == [4, 5, 6, 7, 8]
    assert len(dataset) == 249
    assert dataset[248].tolist()[-1] == 996


def test_windows_over_files_when_asked(text: MemorySource):
    whole = [*range(1000), *range(95), *range(5000, 5100)]
    dataset = TokenDataset("b-1/text", 90, stride=70, straddle=True, source=text)
    assert len(dataset) == (len(whole) - 90) // 70 + 1
    for number, window in enumerate(dataset):
        assert window.tolist() == whole[number * 70 : number * 70 + 90]
    longer = TokenDataset("b-1/text", 1195, straddle=True, source=text)
    assert longer[0].tolist() == whole


def test_a_batch_is_one_tensor_without_another_copy(text: MemorySource):
    rows = TokenDataset("b-1/text", 50, source=text, raw=True).__getitems__([3, 1])
    assert rows.tensor.dtype == torch.uint16
    assert rows.tensor.shape == (2, 50)
    assert rows[1].data_ptr() == rows.tensor.data_ptr() + 100
    assert torch.stack(list(rows)).tolist() == rows.tensor.tolist()


def test_headers_and_four_byte_tokens():
    source = MemorySource({"a.bin": b"h" * 8 + tokens(10, 70_000, "<u4"), "b.idx": b"x"})
    dataset = TokenDataset("b-1", 4, dtype="uint32", header_bytes=8, suffixes=[".bin"], source=source)
    assert [window.tolist() for window in dataset][1] == [n % 65536 for n in range(70_004, 70_008)]


def test_files_that_are_not_tokens_are_refused(text: MemorySource):
    text.objects["text/1"] = b"odd"
    with pytest.raises(Invalid, match=r"'text/1' has 3 bytes.*suffixes"):
        TokenDataset("b-1/text", 5, source=text)
    with pytest.raises(NotFound, match="5000 tokens"):
        TokenDataset("b-1/text/0", 5000, source=text)
    for window, more in ((0, {}), (5, {"stride": 0}), (5, {"dtype": "int8"}), (5, {"header_bytes": -1})):
        with pytest.raises(Invalid):
            TokenDataset("b-1/text/0", window, source=text, **more)  # type: ignore[arg-type]


def test_a_window_that_is_missing_is_skipped(text: MemorySource):
    dataset = TokenDataset("b-1/text", 50, source=text, on_error="skip")
    del text.objects["text/1"]
    facts = Facts()
    assert [row.tolist()[0] for row in dataset.fetch([0, 20, 21], facts)] == [0, 5000]
    assert facts.skipped == ["a window of b-1/text/1"]


# --- moving to another process ----------------------------------------------------------------------------------------
def test_datasets_pickle_small_and_whole(shards: MemorySource, text: MemorySource, numbers: MemorySource):
    for dataset in (
        ShardDataset("b-1/train", source=shards),
        TokenDataset("b-1/text", 50, source=text),
        ObjectDataset("b-1/numbers", source=numbers),
    ):
        again = pickle.loads(pickle.dumps(dataset))
        assert len(again) == len(dataset)
        assert again.fingerprint == dataset.fingerprint
        assert repr(again[17]) == repr(dataset[17])


def test_a_long_listing_is_not_pickled_but_found_again(numbers: MemorySource, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forebay.torch.dataset._INLINE_BYTES_MAX", 0)
    dataset = ObjectDataset("b-1/numbers", source=numbers)
    pickled = pickle.dumps(dataset)
    again = pickle.loads(pickled)
    assert again._source.source.listed == 0
    assert again.__getitems__([42]) == [b"42"]
    assert again._source.source.listed == 1
    changed = pickle.loads(pickled)
    changed._source.source.objects["numbers/99999"] = b"new"
    with pytest.raises(Precondition, match="is not what it was: 1 object was added"):
        changed.__getitems__([42])
