"""Writes whose disk fails under them: the client is told to try again, and the node is not called faulty."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import Bug, ForebayError, Unavailable
from forebay.core.messages import calls
from forebay.core.types import Bucket
from forebay.node.engine.write import appends, copies, parts

from .conftest import MIB, Rig, pattern

Rigged = Callable[..., None]

LOCAL = Bucket("kept", "local://", write="local")
DEAD = [errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN]
TOUCHES = ("open", "unlink", "replace", "link", "stat", "truncate", "ftruncate", "preadv", "pread", "pwrite", "fsync")


class DeadDisk:
    """Stands for `os` in a module: all of the disk that it touches is an error from now on."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __getattr__(self, name: str) -> Any:
        if name not in TOUCHES:
            return getattr(os, name)

        def fail(*arguments: Any, **more: Any) -> Any:
            raise OSError(self.code, os.strerror(self.code))

        return fail


async def begun(rig: Rig) -> tuple[str, list[tuple[int, str, dict[str, str]]]]:
    """An upload with two parts."""
    await rig.front.call("bucket_put", LOCAL)
    made = await rig.front.call("upload_create", calls.UploadCreateCall("kept", "k"))
    sent = []
    for number in (1, 2):
        await rig.front.call("upload_part", part := a_part(rig, made.upload_id, number))
        sent.append((number, part.md5, {}))
    return made.upload_id, sent


def a_part(rig: Rig, upload_id: str, number: int) -> calls.UploadPartCall:
    data, path = pattern(6 * MIB, number), rig.engine.index.incoming("kept", "k")
    Path(path).write_bytes(data)
    return calls.UploadPartCall("kept", "k", upload_id, number, len(data), hashlib.md5(data).hexdigest(), path)


@pytest.mark.parametrize("code", DEAD)
def test_a_part_whose_disk_fails_may_be_sent_again(rigged: Rigged, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Its temp file could not be removed either, and that was answered as a bug of the node."""

    async def story(rig: Rig) -> None:
        upload_id, sent = await begun(rig)
        again = a_part(rig, upload_id, 1)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "os", DeadDisk(code))
            with pytest.raises(Unavailable, match="part 1 failed") as caught:
                await rig.front.call("upload_part", again)
        assert caught.value.code == ""
        await rig.front.call("upload_complete", calls.UploadCompleteCall("kept", "k", upload_id, sent))
        assert await rig.front.get("k", bucket="kept") == pattern(6 * MIB, 1) + pattern(6 * MIB, 2)

    rigged(story)


def test_a_part_that_is_on_disk_is_not_refused_for_a_file_that_stays(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        def fail(path: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

        upload_id, sent = await begun(rig)
        with monkeypatch.context() as patch:
            patch.setattr(parts.os, "unlink", fail)
            await rig.front.call("upload_part", a_part(rig, upload_id, 2))
        await rig.again()
        await rig.front.call("upload_complete", calls.UploadCompleteCall("kept", "k", upload_id, sent))
        assert await rig.front.get("k", bucket="kept") == pattern(6 * MIB, 1) + pattern(6 * MIB, 2)

    rigged(story)


@pytest.mark.parametrize(("code", "named"), [(errno.EIO, ""), (errno.ENOSPC, "InsufficientStorage")])
def test_an_upload_whose_disk_fails_while_it_is_joined_may_be_completed_again(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, code: int, named: str
) -> None:
    async def story(rig: Rig) -> None:
        upload_id, sent = await begun(rig)
        complete = calls.UploadCompleteCall("kept", "k", upload_id, sent)
        with monkeypatch.context() as patch:
            patch.setattr(parts, "os", DeadDisk(code))
            with pytest.raises(Unavailable) as caught:
                await rig.front.call("upload_complete", complete)
        assert caught.value.code == named
        await rig.front.call("upload_complete", complete)
        assert await rig.front.get("k", bucket="kept") == pattern(6 * MIB, 1) + pattern(6 * MIB, 2)

    rigged(story)


def test_a_refusal_is_told_though_its_disk_keeps_what_was_joined(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        upload_id, sent = await begun(rig)

        async def refuse(*arguments: Any, **more: Any) -> Any:
            monkeypatch.setattr(parts, "os", DeadDisk(errno.EIO))
            raise Unavailable("the backend is away")

        monkeypatch.setattr(rig.engine.writes, "put_file", refuse)
        with pytest.raises(Unavailable, match="the backend is away"):
            await rig.front.call("upload_complete", calls.UploadCompleteCall("kept", "k", upload_id, sent))
        monkeypatch.undo()
        await rig.front.call("upload_complete", calls.UploadCompleteCall("kept", "k", upload_id, sent))
        assert await rig.front.get("k", bucket="kept") == pattern(6 * MIB, 1) + pattern(6 * MIB, 2)

    rigged(story)


@pytest.mark.parametrize(("code", "named"), [(errno.EIO, ""), (errno.ENOSPC, "InsufficientStorage")])
@pytest.mark.parametrize("verb", ["append", "copy", "upload_part_copy"])
def test_what_is_written_for_an_append_or_a_copy_is_refused_likewise(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, verb: str, code: int, named: str
) -> None:
    """They said that there was no room, which no client tries again."""

    async def story(rig: Rig) -> None:
        upload_id, _ = await begun(rig)
        rig.remote.place("source", pattern(6 * MIB))
        asked: dict[str, Any] = {
            "append": calls.AppendCall("kept", "shard.tar", "member", 5, body=b"12345"),
            "copy": calls.CopyCall("remote", "source", "kept", "copied"),
            "upload_part_copy": calls.UploadPartCopyCall("kept", "k", upload_id, 3, "remote", "source"),
        }
        module = appends if verb == "append" else copies
        with monkeypatch.context() as patch:
            patch.setattr(module, "os", DeadDisk(code))
            with pytest.raises(Unavailable) as caught:
                await rig.front.call(verb, asked[verb])
        assert caught.value.code == named
        await rig.front.call(verb, asked[verb])

    rigged(story)


@pytest.mark.parametrize(
    ("error", "kind", "named"),
    [
        (OSError(errno.EIO, "it errs"), Unavailable, ""),
        (OSError(errno.EDQUOT, "too much"), Unavailable, "InsufficientStorage"),
        (OSError(errno.EBADF, "a closed file"), Bug, ""),
        (ValueError("wrong"), Bug, ""),
    ],
)
def test_no_verb_takes_a_disk_that_fails_for_a_bug(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[ForebayError], named: str
) -> None:
    async def story(rig: Rig) -> None:
        await rig.front.call("bucket_put", LOCAL)
        await rig.front.call("put", calls.PutCall("kept", "k", 4, body=b"here"))

        def fail(*arguments: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(rig.engine.store.headings, "keep", fail)
            with pytest.raises(kind) as caught:
                await rig.front.call("tag", calls.TagCall("kept", "k", "a=b"))
        assert caught.value.code == named
        await rig.front.call("tag", calls.TagCall("kept", "k", "a=b"))

    rigged(story)
