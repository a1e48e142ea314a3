"""Reads of one version on the wire: what is asked, and that nothing else is taken for it."""

from __future__ import annotations

import pytest

from forebay.backends.locate import locate
from forebay.backends.seam import Backend
from forebay.core.errors import Denied, Invalid, NotFound, NotSupported, Unavailable
from forebay.core.types import Bucket
from forebay.core.versions import name_of_version, versions_of
from tests.backends.backend_places import run, whole
from tests.backends.scripted_http import Asked, ScriptedServer, answer

ETAG = '"e1"'
DATE = "Sat, 21 Nov 2026 12:00:00 GMT"
NAME = name_of_version("dir/key", "v1+/=")


def versions(server: ScriptedServer, prefix: str = "") -> Backend:
    options = {"endpoint": server.url, "skip_signature": "true"}
    return locate(Bucket(versions_of("corpus"), f"s3://corpus{prefix}", options=options))


@pytest.mark.parametrize("by_wire", [False, True])
def test_a_read_names_the_version_and_says_it(by_wire: bool) -> None:
    def script(asked: Asked) -> bytes:
        body = b"" if asked.method == "HEAD" else b"body"
        return answer("200 OK", body, content_length="4", etag=ETAG, last_modified=DATE, x_amz_version_id="v1+/=")

    async def story() -> None:
        with ScriptedServer(script) as server:
            backend = versions(server, "/under")
            backend.by_wire = by_wire  # type: ignore[attr-defined]
            opened = await backend.fetch(NAME)
            assert await whole(opened) == b"body"
            for info in (opened.info, await backend.head(NAME)):
                assert (info.key, dict(info.headers)["x-amz-version-id"]) == (NAME, "v1+/=")
            for asked in server.asked:
                assert asked.target == "/corpus/under/dir/key?versionId=v1%2B%2F%3D"
            with pytest.raises(NotSupported):
                await backend.delete(NAME)
            await backend.aclose()

    run(story())


@pytest.mark.parametrize("by_wire", [False, True])
@pytest.mark.parametrize("said", [{}, {"x_amz_version_id": "v2"}, {"x_amz_version_id": "null"}])
def test_another_version_is_never_taken_for_it(said: dict[str, str], by_wire: bool) -> None:
    def script(asked: Asked) -> bytes:
        return answer("200 OK", b"" if asked.method == "HEAD" else b"body", etag=ETAG, last_modified=DATE, **said)

    async def story() -> None:
        with ScriptedServer(script) as server:
            backend = versions(server)
            backend.by_wire = by_wire  # type: ignore[attr-defined]
            for ask in (backend.fetch(NAME), backend.head(NAME), backend.check(NAME, ETAG)):
                with pytest.raises(NotSupported, match="does it keep versions"):
                    await ask
            await backend.aclose()

    run(story())


def test_a_version_that_is_gone_and_one_that_marks_a_delete() -> None:
    missing = b"<Error><Code>NoSuchVersion</Code></Error>"
    marker = b"<Error><Code>MethodNotAllowed</Code></Error>"

    async def story() -> None:
        for status, body, kind, code in (
            ("404 Not Found", missing, NotFound, "NoSuchVersion"),
            ("405 Method Not Allowed", marker, Invalid, "MethodNotAllowed"),
        ):
            with ScriptedServer(lambda asked, status=status, body=body: answer(status, body)) as server:  # type: ignore[misc]
                backend = versions(server)
                with pytest.raises(kind) as caught:
                    await backend.fetch(NAME)
                assert caught.value.code == code
                await backend.aclose()

    run(story())


def test_only_s3_has_versions_here() -> None:
    for url in ("memory://x", "file:///tmp", "gs://b", "local://"):
        with pytest.raises(NotSupported, match="versions"):
            locate(Bucket(versions_of("corpus"), url))


# --- listing ---------------------------------------------------------------------------------------------------------
def page(*items: str, after: tuple[str, str] | None = None) -> bytes:
    more = (
        f"<NextKeyMarker>{after[0]}</NextKeyMarker><NextVersionIdMarker>{after[1]}</NextVersionIdMarker>"
        if after
        else ""
    )
    body = (
        f"<EncodingType>url</EncodingType><IsTruncated>{str(bool(after)).lower()}</IsTruncated>{more}{''.join(items)}"
    )
    return answer("200 OK", f"<ListVersionsResult>{body}</ListVersionsResult>".encode())


def version(key: str, id: str, *, latest: bool = True, kind: str = "Version") -> str:
    return (
        f"<{kind}><Key>{key}</Key><VersionId>{id}</VersionId><IsLatest>{str(latest).lower()}</IsLatest>"
        f"<LastModified>2026-11-21T12:00:00.000Z</LastModified><ETag>&quot;e-{id}&quot;</ETag><Size>7</Size></{kind}>"
    )


def test_the_newest_versions_of_what_is_there_are_listed_page_by_page() -> None:
    pages = [
        page(version("under/a", "a2"), version("under/a", "a1", latest=False), after=("under/a", "a1")),
        page(version("under/a", "a0", latest=False), after=("under/a", "a0")),
        page(
            version("under/b", "b2", kind="DeleteMarker"),
            version("under/b", "b1", latest=False),
            version("under/c%2B+d", "c1"),
            version("elsewhere", "e1"),
        ),
    ]

    async def story() -> None:
        with ScriptedServer(lambda asked: pages.pop(0)) as server:
            backend = versions(server, "/under")
            found, after = [], ""
            while True:
                got = await backend.list_page("", "", after, 1000)
                found += got.entries
                after = got.next_after
                if not after:
                    break
            assert [(entry.key, entry.size_bytes, entry.etag) for entry in found] == [
                (name_of_version("a", "a2"), 7, "e-a2"),
                (name_of_version("c+ d", "c1"), 7, "e-c1"),
            ]
            first, second, third = (asked.target for asked in server.asked)
            assert "key-marker=under%2F&max-keys=1000&prefix=under%2F&versions=" in first
            for asked, marker in ((second, "a1"), (third, "a0")):
                assert "key-marker=under%2Fa&" in asked
                assert f"version-id-marker={marker}" in asked
            await backend.aclose()

    run(story())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (page(version("under/a", "null")), NotSupported),
        (page(version("under/a", "")), NotSupported),
        (page(after=("", "")), Unavailable),
        (answer("501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>"), NotSupported),
        (answer("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>"), Denied),
    ],
)
def test_what_cannot_be_pinned_is_never_listed(body: bytes, kind: type[Exception]) -> None:
    async def story() -> None:
        with ScriptedServer(lambda asked: body) as server:
            backend = versions(server, "/under")
            with pytest.raises(kind):
                await backend.list_page("", "", "", 1000)
            await backend.aclose()

    run(story())
