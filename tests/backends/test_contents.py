"""Answers to listings are read the quick way and the slow way to the same end, or not the quick way at all."""

import random
from urllib.parse import quote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from forebay.backends.s3.contents import Contents, quick, slow

TIMES = ("2026-01-02T03:04:05.000Z", "2026-01-02T03:04:05Z", "2025-12-31T23:59:59.123456Z")
KEYS = ("a", "a b", "a+b", "ü/é", "x&y<z>", "new\nline", "100%", "deep/er/key.jpg", 'quo"te', "\U0001f600")


def answer(
    keys: list[str], *, prefixes: list[str] | None = None, order: str = "KMES", extra: str = "", tail: str = ""
) -> bytes:
    """As servers write it: `order` of key, modification time, ETag and size."""
    chance = random.Random(len(keys))
    objects = []
    for key in keys:
        fields = {
            "K": f"<Key>{quote_plus(key, safe='')}</Key>",
            "M": f"<LastModified>{chance.choice(TIMES)}</LastModified>",
            "E": f"<ETag>&quot;{chance.randbytes(16).hex()}&quot;</ETag>",
            "S": f"<Size>{chance.randrange(1 << 40)}</Size>",
        }
        objects.append(f"<Contents>{''.join(fields[name] for name in order)}{extra}</Contents>")
    groups = [f"<CommonPrefixes><Prefix>{quote_plus(one)}</Prefix></CommonPrefixes>" for one in prefixes or []]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        "<Name>b</Name><Prefix></Prefix><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
        f"<NextContinuationToken>1ue/+=</NextContinuationToken>{''.join(objects)}{''.join(groups)}{tail}"
        "</ListBucketResult>\n"
    ).encode()


def slowly(body: bytes) -> Contents:
    return slow(ElementTree.fromstring(body))


@pytest.mark.parametrize("order", ["KMES", "KSEM", "EKMS", "SMEK"])
@pytest.mark.parametrize("extra", ["", "<StorageClass>STANDARD</StorageClass>", "<Owner><ID>x</ID></Owner>"])
def test_usual_answers_are_read_quickly_and_rightly(order: str, extra: str) -> None:
    body = answer(list(KEYS), prefixes=["p/", "q r/"], order=order, extra=extra)
    found = quick(body)
    assert found is not None
    assert found == slowly(body)
    assert found.keys == list(KEYS)
    assert found.prefixes == ["p/", "q r/"]
    assert found.is_truncated
    assert found.token == "1ue/+="


@pytest.mark.parametrize("keys", [[], ["one"]])
def test_few_objects_are_read_quickly_too(keys: list[str]) -> None:
    body = answer(keys)
    assert quick(body) == slowly(body)


def test_etags_may_be_quoted_in_any_way_or_not_at_all() -> None:
    for quote in ("&quot;", "&#34;", '"', ""):
        body = answer(["k"]).replace(b"&quot;", quote.encode())
        found = quick(body)
        assert found is not None
        assert found == slowly(body)
        assert len(found.etags[0]) == 32


ODD = {
    "a comment": lambda body: body.replace(b"<Name>", b"<!-- <Key>no</Key> --><Name>"),
    "marked text": lambda body: body.replace(b"<Key>a</Key>", b"<Key><![CDATA[a]]></Key>"),
    "an entity in a key": lambda body: body.replace(b"<Key>a</Key>", b"<Key>a&amp;b</Key>"),
    "an object without a time": lambda body: body.replace(b"<LastModified>", b"<Changed>", 1).replace(
        b"</LastModified>", b"</Changed>", 1
    ),
    "no encoding": lambda body: body.replace(b"<EncodingType>url</EncodingType>", b""),
    "another time": lambda body: body.replace(b"<LastModified>2", b"<LastModified>X", 1),
    "a weak etag": lambda body: body.replace(b"<ETag>&quot;", b"<ETag>W/&quot;", 1),
    "a named space": lambda body: body.replace(b"<Contents>", b"<Contents xmlns='u'>", 1),
    "an empty element": lambda body: body.replace(b"<Contents>", b"<Contents><Size/>", 1),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_odd_is_read_slowly_or_the_same(what: str) -> None:
    body = ODD[what](answer(["a", "b", "c"]))
    assert quick(body) in (None, slowly(body))


def test_fields_that_change_places_between_objects_are_not_mixed_up() -> None:
    """As many of each field as of objects, but not one in each: columns would be out of step."""
    body = answer(["a", "b"])
    size = body[body.index(b"<Size>") : body.index(b"</Size>") + len(b"</Size>")]
    moved = body.replace(size, b"", 1)
    at = moved.rindex(b"</Contents>")
    moved = moved[:at] + size + moved[at:]
    assert quick(moved) is None


@pytest.mark.parametrize("cut", [2, 20, 100, 300])
def test_an_answer_that_is_cut_short_is_no_listing(cut: int) -> None:
    body = answer(["a", "b"])[:-cut]
    assert quick(body) is None
    with pytest.raises(ElementTree.ParseError):
        slowly(body)


def test_another_document_is_not_taken_for_a_listing() -> None:
    assert quick(b"<Error><Code>AccessDenied</Code></Error>") is None
    assert quick(escape("<ListBucketResult>").encode()) is None


def test_random_keys_come_back() -> None:
    chance = random.Random(8)
    alphabet = "abc/%+ &<>é\"'\n\t~\U0001f9ca"
    for _ in range(200):
        keys = ["".join(chance.choices(alphabet, k=chance.randrange(1, 12))) for _ in range(chance.randrange(20))]
        body = answer(keys, order="".join(chance.sample("KMES", 4)))
        found = quick(body)
        assert found is not None
        assert found.keys == keys
        assert found == slowly(body)
