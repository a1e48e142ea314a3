"""ListObjects in both versions, ListBuckets, and the small bucket operations: corner cases that S3 suites ask about."""

from __future__ import annotations

from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.access import Grant, Identity
from forebay.core.errors import Invalid
from forebay.core.pages import after_prefix, last_shown, merge_pages
from forebay.core.types import ListEntry, ListPage
from forebay.node.front.s3.listing import ListRequest, decode_token, encode_token, fetch_page, render_list
from tests.s3.fake_front import Answer, Front, Object, list_dumbly


def _front(*keys: str) -> Front:
    return Front(corpus={key: Object(key.encode()) for key in keys})


def _keys(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [element.text or "" for element in answer.xml.findall("Contents/Key")]


def _prefixes(answer: Answer) -> list[str]:
    return [element.text or "" for element in answer.xml.findall("CommonPrefixes/Prefix")]


def _text(answer: Answer, name: str) -> str | None:
    return answer.xml.findtext(name)


def test_everything_that_version_1_says_of_a_bucket() -> None:
    answer = _front("a&b", "c").get("/corpus?max-keys=1")
    assert answer.headers["content-type"] == "application/xml"
    assert _text(answer, "Name") == "corpus"
    assert (_text(answer, "Prefix"), _text(answer, "Marker")) == ("", "")
    assert (_text(answer, "MaxKeys"), _text(answer, "IsTruncated")) == ("1", "true")
    for absent in ("Delimiter", "NextMarker", "KeyCount", "EncodingType", "NextContinuationToken"):
        assert _text(answer, absent) is None
    entry = answer.xml.find("Contents")
    assert entry is not None
    assert entry.findtext("Key") == "a&b"
    assert entry.findtext("ETag") == f'"{Object(b"a&b").etag}"'
    assert (entry.findtext("Size"), entry.findtext("StorageClass")) == ("3", "STANDARD")
    assert entry.findtext("LastModified") == "1994-11-15T12:45:26.750Z"
    assert entry.findtext("Owner/ID")


def test_everything_that_version_2_says_of_a_bucket() -> None:
    front = _front("a", "b", "c/d")
    answer = front.get("/corpus/?list-type=2&max-keys=2&start-after=0")
    assert (_text(answer, "KeyCount"), _text(answer, "MaxKeys"), _text(answer, "IsTruncated")) == ("2", "2", "true")
    assert (_text(answer, "StartAfter"), _text(answer, "Marker"), _text(answer, "Contents/Owner/ID")) == (
        "0",
        None,
        None,
    )
    token = _text(answer, "NextContinuationToken")
    assert token
    last = front.get(f"/corpus?list-type=2&continuation-token={quote(token)}&fetch-owner=true&delimiter=/")
    assert _text(last, "ContinuationToken") == token
    assert (_keys(last), _prefixes(last), _text(last, "KeyCount")) == ([], ["c/"], "1")
    assert (_text(last, "IsTruncated"), _text(last, "NextContinuationToken")) == ("false", None)
    assert _text(front.get("/corpus?list-type=2&fetch-owner=true"), "Contents/Owner/DisplayName") == "forebay"


def test_prefix_and_delimiter() -> None:
    front = _front("asdf", "boo/bar", "boo/baz/xyzzy", "cquux/thud", "cquux/bla")
    for query, keys, prefixes in (
        ("delimiter=/", ["asdf"], ["boo/", "cquux/"]),
        ("delimiter=/&prefix=boo/", ["boo/bar"], ["boo/baz/"]),
        ("delimiter=/&prefix=boo", [], ["boo/"]),
        ("delimiter=a", ["cquux/thud"], ["a", "boo/ba", "cquux/bla"]),
        ("delimiter=oo", ["asdf", "cquux/bla", "cquux/thud"], ["boo"]),
        ("delimiter=%2Fba", ["asdf", "cquux/bla", "cquux/thud"], ["boo/ba"]),
        ("delimiter=%25", ["asdf", "boo/bar", "boo/baz/xyzzy", "cquux/bla", "cquux/thud"], []),
        ("delimiter=", ["asdf", "boo/bar", "boo/baz/xyzzy", "cquux/bla", "cquux/thud"], []),
        ("delimiter=%0A", ["asdf", "boo/bar", "boo/baz/xyzzy", "cquux/bla", "cquux/thud"], []),
        ("prefix=", ["asdf", "boo/bar", "boo/baz/xyzzy", "cquux/bla", "cquux/thud"], []),
        ("prefix=nothing", [], []),
        ("prefix=%0A", [], []),
        ("prefix=boo/bar", ["boo/bar"], []),
    ):
        for version in ("", "&list-type=2"):
            answer = front.get(f"/corpus?{query}{version}")
            assert (_keys(answer), _prefixes(answer)) == (keys, prefixes), query


def test_version_1_pages_by_next_marker_when_there_is_a_delimiter() -> None:
    front = _front("asdf", "boo/bar", "boo/baz/xyzzy", "cquux/thud", "cquux/bla")
    seen, marker = [], ""
    while marker is not None:
        answer = front.get(f"/corpus?delimiter=/&max-keys=1&marker={quote(marker)}")
        seen.append((_keys(answer), _prefixes(answer), _text(answer, "IsTruncated")))
        marker = _text(answer, "NextMarker")
    assert seen == [(["asdf"], [], "true"), ([], ["boo/"], "true"), ([], ["cquux/"], "false")]


def test_markers_that_are_no_keys() -> None:
    front = _front("bar", "baz", "foo", "quxx")
    for version, name in (("", "marker"), ("list-type=2&", "start-after")):
        for marker, keys in (
            ("", ["bar", "baz", "foo", "quxx"]),
            ("bar", ["baz", "foo", "quxx"]),
            ("blah", ["foo", "quxx"]),
            ("zzz", []),
            ("%0A", ["bar", "baz", "foo", "quxx"]),
            ("%F4%8F%BF%BF", []),
        ):
            answer = front.get(f"/corpus?{version}{name}={marker}")
            assert (_keys(answer), _text(answer, "IsTruncated")) == (keys, "false"), marker
            assert _text(answer, "Marker" if name == "marker" else "StartAfter") is not None


def test_a_marker_inside_a_common_prefix_passes_over_it() -> None:
    front = _front("a/1", "a/2", "b")
    for marker in ("a/", "a/1", "a/1/x"):
        answer = front.get(f"/corpus?delimiter=/&marker={marker}")
        assert (_keys(answer), _prefixes(answer)) == (["b"], []), marker
        answer = front.get(f"/corpus?list-type=2&delimiter=/&start-after={marker}")
        assert (_keys(answer), _prefixes(answer)) == (["b"], []), marker


def test_how_many_keys() -> None:
    front = _front(*(f"{number:04}" for number in range(1100)))
    for asked, shown, echoed, truncated in (
        ("0", 0, "0", "false"),
        ("1", 1, "1", "true"),
        ("1000", 1000, "1000", "true"),
        ("1100", 1000, "1000", "true"),
        ("2147483647", 1000, "1000", "true"),
        ("", 1000, "1000", "true"),
    ):
        for version in ("", "&list-type=2"):
            answer = front.get(f"/corpus?max-keys={asked}{version}")
            assert len(_keys(answer)) == shown
            assert (_text(answer, "MaxKeys"), _text(answer, "IsTruncated")) == (echoed, truncated)
    for bad in ("blah", "-1", "1.5", "2147483648", "99999999999999999999", "0x10", "٣"):
        answer = front.get(f"/corpus?max-keys={quote(bad)}")
        assert (answer.status, answer.code) == (400, "InvalidArgument"), bad


def test_url_encoding_covers_every_name() -> None:
    front = _front("foo+1/bar", "foo/bar/xyzzy", "quux ab/thud", "asdf+b", "\x01", "a~*b")
    answer = front.get("/corpus?list-type=2&delimiter=/&encoding-type=url&start-after=%00&prefix=")
    assert _keys(answer) == ["%01", "asdf%2Bb", "a~*b"]
    assert _prefixes(answer) == ["foo%2B1/", "foo/", "quux%20ab/"]
    assert (_text(answer, "EncodingType"), _text(answer, "StartAfter"), _text(answer, "Delimiter")) == (
        "url",
        "%00",
        "/",
    )
    bad = front.get("/corpus?encoding-type=base64")
    assert (bad.status, bad.code) == (400, "InvalidArgument")


def test_without_url_encoding_control_characters_become_references() -> None:
    answer = _front("a\x01b<&>\"'\r\n").get("/corpus")
    assert b"<Key>a&#x1;b&lt;&amp;&gt;&quot;&apos;&#xd;&#xa;</Key>" in answer.body


def test_tokens_are_opaque_and_only_ours_are_understood() -> None:
    for text in ("", "a", "ключ", "a\x00b", after_prefix("a/"), "x" * 1024):
        assert decode_token(encode_token(text)) == text
        assert len(text) < 2 or text not in encode_token(text)
    front = _front("a")
    token = encode_token("key")
    for bad in (
        "a",
        "key",
        token[:-1],
        token[:-4],
        token[:5] + "A" + token[6:],
        "MQ==",
        "Ä",
        token + "\n",
        "2" + token[1:],
    ):
        with pytest.raises(Invalid):
            decode_token(bad)
        answer = front.get(f"/corpus?list-type=2&continuation-token={quote(bad)}")
        assert (answer.status, answer.code) == (400, "InvalidArgument")
    empty = front.get("/corpus?list-type=2&continuation-token=")
    assert (_keys(empty), _text(empty, "ContinuationToken")) == (["a"], "")


def test_a_token_decides_over_start_after() -> None:
    front = _front("bar", "baz", "foo", "quxx")
    first = front.get("/corpus?list-type=2&start-after=bar&max-keys=1")
    token = _text(first, "NextContinuationToken") or ""
    second = front.get(f"/corpus?list-type=2&start-after=bar&continuation-token={quote(token)}")
    assert (_keys(second), _text(second, "StartAfter")) == (["foo", "quxx"], "bar")


NAMES = st.text(st.sampled_from("ab/+ä\U0001f600"), min_size=1, max_size=6)


@given(
    keys=st.sets(NAMES, max_size=25),
    prefix=st.text(st.sampled_from("ab/"), max_size=2),
    delimiter=st.sampled_from(["", "/", "a", "b/"]),
    max_keys=st.integers(1, 5),
    version=st.sampled_from([1, 2]),
)
@settings(max_examples=150, deadline=None)
def test_following_pages_shows_everything_once(
    keys: set[str], prefix: str, delimiter: str, max_keys: int, version: int
) -> None:
    front = _front(*keys)
    base = f"/corpus?encoding-type=url&prefix={quote(prefix)}&delimiter={quote(delimiter)}&max-keys={max_keys}"
    seen: list[str] = []
    more = ""
    for _ in range(60):
        answer = front.get(f"{base}{'&list-type=2' if version == 2 else ''}{more}")
        page = [unquote(text) for text in _keys(answer) + _prefixes(answer)]
        assert len(page) <= max_keys
        seen += sorted(page)
        if _text(answer, "IsTruncated") == "false":
            break
        assert page
        if version == 2:
            more = f"&continuation-token={quote(_text(answer, 'NextContinuationToken') or '')}"
        else:
            marker = _text(answer, "NextMarker") if delimiter else _keys(answer)[-1]
            more = f"&marker={quote(unquote(marker or ''), safe='')}"
    plain, rolled, _ = list_dumbly(keys, prefix, delimiter, "", 10_000)
    assert seen == sorted(plain + rolled)


def test_short_pages_of_a_backend_are_filled_up() -> None:
    pages = {
        "": ListPage([], [], "a"),
        "a": ListPage([ListEntry("b", 1, "", 0)], ["c/"], after_prefix("c/")),
        after_prefix("c/"): ListPage([ListEntry("d", 1, "", 0)], [], "d"),
    }
    asked: list[int] = []

    async def call(verb: str, arguments: object) -> ListPage:
        asked.append(arguments.limit)  # type: ignore[attr-defined]
        return pages[arguments.start_after]  # type: ignore[attr-defined]

    import asyncio

    page = asyncio.run(fetch_page(call, "corpus", ListRequest(2, limit=3)))
    assert [entry.key for entry in page.entries] == ["b", "d"]
    assert (page.prefixes, page.next_after, asked) == (["c/"], "d", [3, 3, 1])


def test_a_backend_with_an_order_of_its_own_is_paged_by_next_marker() -> None:
    """SeaweedFS has `a/b` before `a.txt`: the last key shown is not where the backend goes on."""
    asked = ListRequest(1, limit=2)
    page = ListPage([ListEntry("a.txt", 1, "", 0), ListEntry("a/b", 1, "", 0)], [], "a.txt")
    assert b"<NextMarker>a.txt</NextMarker>" in render_list("corpus", asked, page)
    assert b"NextMarker" not in render_list("corpus", asked, ListPage(page.entries, [], "a/b"))
    folder = ListPage([ListEntry("a.txt", 1, "", 0)], ["a/"], after_prefix("a/"))
    assert b"<NextMarker>a/</NextMarker>" in render_list("corpus", ListRequest(1, delimiter="/"), folder)


# --- merging two listings ---------------------------------------------------------------------------------------------
def _page(keys: set[str], prefix: str, delimiter: str, after: str, limit: int, etag: str) -> ListPage:
    plain, rolled, next_after = list_dumbly(keys, prefix, delimiter, after, limit)
    return ListPage([ListEntry(key, 1, etag, 0.0) for key in plain], rolled, next_after)


@given(
    backend=st.sets(NAMES, max_size=20),
    local=st.sets(NAMES, max_size=20),
    prefix=st.text(st.sampled_from("ab/"), max_size=1),
    delimiter=st.sampled_from(["", "/", "a"]),
    limits=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    removed=st.sets(NAMES, max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_two_merged_listings_equal_the_listing_of_both(
    backend: set[str], local: set[str], prefix: str, delimiter: str, limits: tuple[int, int, int], removed: set[str]
) -> None:
    removed = {key for key in removed if not (delimiter and delimiter in key[len(prefix) :])} - local
    seen: list[tuple[str, str]] = []
    after = ""
    for _ in range(100):
        page = merge_pages(
            _page(backend, prefix, delimiter, after, limits[0], "backend"),
            _page(local, prefix, delimiter, after, limits[1], "local"),
            limits[2],
            removed,
        )
        assert len(page.entries) + len(page.prefixes) <= limits[2]
        seen += sorted([(entry.key, entry.etag) for entry in page.entries] + [(text, "") for text in page.prefixes])
        if not page.next_after:
            break
        assert page.next_after > after
        assert page.next_after >= last_shown(page)
        after = page.next_after
    plain, rolled, _ = list_dumbly((backend - removed) | local, prefix, delimiter, "", 10_000)
    tags = [(key, "local" if key in local else "backend") for key in plain]
    assert seen == sorted(tags + [(text, "") for text in rolled])


# --- the small operations ---------------------------------------------------------------------------------------------
def test_list_buckets_with_its_parameters() -> None:
    front = Front(alpha={}, beta={}, **{"beta-2": {}})
    answer = front.get("/")
    assert [element.text for element in answer.xml.findall("Buckets/Bucket/Name")] == ["alpha", "beta", "beta-2"]
    assert _text(answer, "Buckets/Bucket/CreationDate") == "1994-11-15T12:45:26.750Z"
    assert _text(answer, "Owner/ID")
    some = front.get("/?prefix=beta&max-buckets=1")
    assert [element.text for element in some.xml.findall("Buckets/Bucket/Name")] == ["beta"]
    token = quote(_text(some, "ContinuationToken") or "")
    rest = front.get(f"/?prefix=beta&max-buckets=1&continuation-token={token}")
    assert [element.text for element in rest.xml.findall("Buckets/Bucket/Name")] == ["beta-2"]
    assert _text(rest, "ContinuationToken") is None
    assert front.get("/?max-buckets=0").status == 400


def test_a_caller_sees_and_reads_only_what_is_granted() -> None:
    caller = Identity("caller", "AKID", "secret", grants=(Grant("read", "alpha"),))
    front = Front(caller, alpha={"k": Object(b"1")}, beta={"k": Object(b"2")})
    front.auth.signed = lambda request, bucket=None: caller  # type: ignore[method-assign]
    names = [element.text for element in front.get("/").xml.findall("Buckets/Bucket/Name")]
    assert names == ["alpha"]
    for target in ("/beta", "/beta/k", "/beta?location", "/beta?list-type=2"):
        answer = front.get(target)
        assert (answer.status, answer.code) == (403, "AccessDenied"), target
    assert front.get("/alpha/k").body == b"1"
    assert front.get("/gamma/k").code == "NoSuchBucket"


def test_a_bucket_that_must_be_looked_for_is_only_there_if_it_is() -> None:
    front = Front(corpus={})
    front.reads.found_later = {"corpus", "nowhere"}
    for ask in (("HEAD", "/{}"), ("GET", "/{}?location"), ("GET", "/{}?versioning")):
        assert front.ask(ask[0], ask[1].format("corpus")).status == 200
        assert front.ask(ask[0], ask[1].format("nowhere")).status == 404


def test_head_bucket_location_and_versioning() -> None:
    front = _front("a")
    head = front.ask("HEAD", "/corpus")
    assert (head.status, head.headers["x-amz-bucket-region"]) == (200, "us-east-1")
    assert front.ask("HEAD", "/corpus/").status == 200
    assert front.ask("HEAD", "/other").status == 404
    location = front.get("/corpus?location")
    assert (location.xml.tag, location.xml.text) == ("LocationConstraint", None)
    versioning = front.get("/corpus?versioning")
    assert (versioning.xml.tag, list(versioning.xml)) == ("VersioningConfiguration", [])
    for target in ("analytics", "inventory", "metrics", "intelligent-tiering", "abac"):
        answer = front.get(f"/corpus?{target}")
        assert (answer.status, answer.code) == (501, "NotImplemented"), target
    assert front.get("/corpus?list-type=3").code == "InvalidArgument"
    assert front.get("/corpus?unknown-parameter=1&x-id=ListObjects").status == 200
    assert front.get("/corpus?prefix=%ff").status == 400
