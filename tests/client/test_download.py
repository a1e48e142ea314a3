"""An object to a file: whole or not at all, resumed where it was cut, never two versions in one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.client.download import kept_bytes, part_mark
from forebay.client.sync import Client
from forebay.core.errors import Busy, Invalid, NotFound, Unavailable
from tests.client.fake_node import FakeNode

DATA = bytes(range(256)) * 4000


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".part"))


def test_a_file_appears_whole(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    seen: list[tuple[int, int]] = []
    done = client.download("corpus", "a", str(tmp_path / "out"), progress=lambda *at: seen.append(at))
    assert (done.size_bytes, done.resumed_bytes) == (len(DATA), 0)
    assert (tmp_path / "out").read_bytes() == DATA
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert parts(tmp_path) == []


def test_an_empty_object_is_an_empty_file(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = b""
    assert client.download("corpus", "a", str(tmp_path / "out")).size_bytes == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_a_cut_download_is_resumed_with_the_bytes_that_are_missing(
    node: FakeNode, client: Client, tmp_path: Path
) -> None:
    node.objects["corpus"]["a"] = DATA
    target = tmp_path / "out"
    target.write_bytes(b"what was there before")
    node.cut_after = 300_000
    with pytest.raises(Unavailable, match="cut after 300000"):
        client.download("corpus", "a", str(target))
    assert target.read_bytes() == b"what was there before", "the target is untouched until all is there"
    assert kept_bytes(str(target)) == 300_000
    node.cut_after = None
    node.seen.clear()
    done = client.download("corpus", "a", str(target))
    assert (done.size_bytes, done.resumed_bytes) == (len(DATA), 300_000)
    assert target.read_bytes() == DATA
    ranges = [headers.get("range") for method, _, headers in node.seen if method == "GET"]
    assert ranges == ["bytes=300000-"]
    assert parts(tmp_path) == []


def test_a_killed_download_is_resumed_too(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.cut_after = 200_000
    code = (
        "import os, sys\nfrom forebay.client.sync import Client\n"
        "def progress(done, size):\n    if done >= 200_000: os.kill(os.getpid(), 9)\n"
        "Client(sys.argv[1]).download('corpus', 'a', sys.argv[2], progress=progress)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, node.url, str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    node.cut_after = None
    assert client.download("corpus", "a", str(tmp_path / "out")).resumed_bytes == 200_000
    assert (tmp_path / "out").read_bytes() == DATA


def test_a_part_of_another_version_is_thrown_away(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.cut_after = 300_000
    with pytest.raises(Unavailable):
        client.download("corpus", "a", str(tmp_path / "out"))
    node.cut_after = None
    node.objects["corpus"]["a"] = DATA[::-1]
    done = client.download("corpus", "a", str(tmp_path / "out"))
    assert done.resumed_bytes == 0
    assert (tmp_path / "out").read_bytes() == DATA[::-1]
    assert parts(tmp_path) == []


def test_a_change_between_look_and_read_begins_again(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.cut_after = 300_000
    with pytest.raises(Unavailable):
        client.download("corpus", "a", str(tmp_path / "out"))
    node.cut_after = None
    first_head = client.head("corpus", "a")

    class Stepped(Client):
        """The object changes right after the first look at it."""

        def send(self, request):  # type: ignore[no-untyped-def]
            response = super().send(request)
            if request.method == "HEAD":
                node.objects["corpus"]["a"] = DATA[::-1]
            return response

    with Stepped(node.url) as stepped:
        done = stepped.download("corpus", "a", str(tmp_path / "out"))
    assert done.etag != first_head.etag
    assert (tmp_path / "out").read_bytes() == DATA[::-1]
    assert parts(tmp_path) == []


def test_a_part_that_is_complete_already_only_takes_its_name(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.cut_after = len(DATA) - 1
    with pytest.raises(Unavailable):
        client.download("corpus", "a", str(tmp_path / "out"))
    node.cut_after = None
    (part,) = parts(tmp_path)
    with (tmp_path / part).open("ab") as file:
        file.write(DATA[-1:])
    node.seen.clear()
    assert client.download("corpus", "a", str(tmp_path / "out")).resumed_bytes == len(DATA)
    assert (tmp_path / "out").read_bytes() == DATA
    assert node.requests("GET") == []


def test_without_an_etag_nothing_is_kept(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.no_etag = True
    node.cut_after = 100
    with pytest.raises(Unavailable):
        client.download("corpus", "a", str(tmp_path / "out"))
    assert parts(tmp_path) == []
    node.cut_after = None
    assert client.download("corpus", "a", str(tmp_path / "out")).resumed_bytes == 0


def test_two_downloads_to_one_target_do_not_mix(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    node.cut_after = 1000
    with pytest.raises(Unavailable):
        client.download("corpus", "a", str(tmp_path / "out"))
    node.cut_after = None
    (part,) = parts(tmp_path)
    fd = os.open(tmp_path / part, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Busy, match="another download"):
        client.download("corpus", "a", str(tmp_path / "out"))
    os.close(fd)
    client.download("corpus", "a", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == DATA


def test_a_missing_object_leaves_nothing(node: FakeNode, client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        client.download("corpus", "missing", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_no_target(client: Client, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="directory"):
        client.download("corpus", "a", str(tmp_path))


def test_a_folder_that_takes_the_targets_name_meanwhile_leaves_no_part(
    node: FakeNode, client: Client, tmp_path: Path
) -> None:
    node.objects["corpus"]["a"] = DATA  # and `get -r` of a bucket with a/b makes the folder
    with pytest.raises(Invalid, match="out has become a directory"):
        client.download(
            "corpus", "a", str(tmp_path / "out"), progress=lambda *_: (tmp_path / "out").mkdir(exist_ok=True)
        )
    assert parts(tmp_path) == []


def test_a_device_is_written_to_and_never_replaced(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["a"] = DATA
    assert client.download("corpus", "a", "/dev/null").size_bytes == len(DATA)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError) as caught:
        client.download("corpus", "a", "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    assert client.get("corpus", "a") == DATA, "the connection of the failed one was not used again"


def test_a_link_is_followed_and_the_mode_is_kept(node: FakeNode, client: Client, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = DATA
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    client.download("corpus", "a", str(link))
    assert link.is_symlink()
    assert real.read_bytes() == DATA
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "a[*]?b", "x" * 60 + "1"])
def test_any_file_name_has_a_part(node: FakeNode, client: Client, tmp_path: Path, name: str) -> None:
    node.objects["corpus"]["a"] = DATA
    client.download("corpus", "a", str(tmp_path / name))
    assert (tmp_path / name).read_bytes() == DATA
    assert part_mark("x" * 60 + "1") != part_mark("x" * 60 + "2")
