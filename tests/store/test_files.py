"""Data files: headers that tell who they are, wherever they are kept, and holes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from forebay.core.limits import BLOCK_BYTES
from forebay.node.store.disk import files


def _identity(size_bytes: int = 300_000, headers: int = 1, object_id: int = 0x1234) -> files.Identity:
    many = tuple((f"x-amz-meta-{number}", "m" * 100) for number in range(headers))
    return files.Identity(object_id, "corpus", "träin/\x00\n1.tar", size_bytes, "v1", "e", 5.5, many, 9.0, 65536)


def _create(tmp_path: Path, identity: files.Identity, *, xattrs: bool = True) -> tuple[str, files.Header]:
    path = str(tmp_path / files.file_name(identity.object_id))
    fd, header = files.create(str(tmp_path / "temp"), path, identity, xattrs=xattrs)
    os.close(fd)
    return path, header


@pytest.mark.parametrize(
    "identity, xattrs, sidecar",
    [
        (_identity(), True, False),
        (_identity(headers=60), True, True),  # 6 KiB of user metadata
        (_identity(size_bytes=65536 * 1000), True, True),  # 8,000 bytes of checksums
        (_identity(), False, True),  # a filesystem without xattrs
        (_identity(size_bytes=65536 * 400, headers=3), True, True),
    ],
)
def test_a_header_comes_back_with_its_checksums(
    tmp_path: Path, identity: files.Identity, xattrs: bool, sidecar: bool
) -> None:
    path, header = _create(tmp_path, identity, xattrs=xattrs)
    header.set_sums({0: 111, 3: 333})
    header.set_sums({3: 0, 4: 2**64 - 1})
    again = files.Header.read(path)
    assert again is not None
    assert again.identity == identity
    sums = again.sums()
    assert {block: value for block, value in enumerate(sums) if value} == {0: 111, 4: 2**64 - 1}
    assert len(sums) == -(-identity.size_bytes // 65536)
    assert os.path.exists(path + ".head") == sidecar
    assert os.path.getsize(path) == identity.size_bytes
    assert not (tmp_path / "temp").exists()
    files.remove(path)
    assert not os.path.exists(path)
    assert not os.path.exists(path + ".head")


@pytest.mark.parametrize("xattrs", [True, False])
def test_checksums_find_their_place_behind_a_header_that_was_replaced(tmp_path: Path, xattrs: bool) -> None:
    """A landing holds the header from before new tags: it wrote its next checksum into the middle of the longer one."""
    path, landing = _create(tmp_path, _identity(), xattrs=xattrs)
    landing.set_sums({0: 111})
    tags = files.Header.read(path)
    assert tags is not None
    named = msgspec.structs.replace(
        tags.identity, headers=(("x-amz-tagging", "colour=blue&" * 9),) * (1 if xattrs else 50)
    )
    tags.rename_to(named)
    landing.set_sums({1: 222})
    again = files.Header.read(path)
    assert again is not None
    assert again.identity == named
    assert list(again.sums())[:3] == [111, 222, 0]
    assert landing.sums() == again.sums()


@pytest.mark.parametrize("where", [0, 4, 9, 17, 40])
def test_a_garbled_header_is_refused_not_believed(tmp_path: Path, where: int) -> None:
    path, _ = _create(tmp_path, _identity())
    data = bytearray(os.getxattr(path, files.XATTR))
    data[where] ^= 0x40
    os.setxattr(path, files.XATTR, bytes(data))
    assert files.Header.read(path) is None


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    identity = _identity()
    path, _ = _create(tmp_path, identity, xattrs=False)
    whole = len(files.encode_header(identity))
    for length in (0, 3, 15, 16, whole - 1):
        os.truncate(path + ".head", length)
        assert files.Header.read(path) is None


def test_a_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    identity = _identity()
    path = str(tmp_path / files.file_name(identity.object_id))
    os.makedirs(path)  # the name is taken by a directory: the rename fails
    with pytest.raises(OSError):
        files.create(str(tmp_path / "temp"), path, identity)
    assert not (tmp_path / "temp").exists()


def test_ids_that_follow_each_other_share_a_directory() -> None:
    directories = {os.path.dirname(files.file_name(0xABCDEF0000 + number)) for number in range(256)}
    assert directories == {"ef/00"}
    assert files.file_name(0xABCDEF0100).startswith("ef/01/000000abcdef0100")


def test_a_punched_hole_gives_space_back_and_keeps_the_size(tmp_path: Path) -> None:
    path, header = _create(tmp_path, _identity(size_bytes=8 * 65536))
    with open(path, "r+b") as file:
        file.write(b"x" * 8 * 65536)
    header.set_sums(dict.fromkeys(range(8), 7))
    os.sync()
    before = os.stat(path).st_blocks
    assert files.punch_blocks(path, 65536, [1, 2, 7])
    assert os.stat(path).st_blocks <= before - 3 * 128
    data = Path(path).read_bytes()
    assert len(data) == 8 * 65536
    assert [data[block * 65536] for block in range(8)] == [120, 0, 0, 120, 120, 120, 120, 0]
    assert list(header.sums()) == [7, 0, 0, 7, 7, 7, 7, 0]


@pytest.mark.parametrize("read_again", [False, True], ids=["as written", "read from the disk again"])
def test_bytes_that_lie_in_a_socket_outlive_the_hole_that_is_punched_under_them(
    tmp_path: Path, read_again: bool
) -> None:
    """`sendfile` puts references to the file's pages into the socket: the lease is over before the client has read."""
    size_bytes = 2 * BLOCK_BYTES + 500  # a last page that is covered in part
    path, _ = _create(tmp_path, _identity(size_bytes=size_bytes))
    data = os.urandom(size_bytes)
    Path(path).write_bytes(data)
    with open(path, "rb") as file, _connection() as (sending, receiving):
        if read_again:  # the kernel then keeps larger pieces than pages
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        first = start = size_bytes - 100_000
        while start < size_bytes:
            start += os.sendfile(sending.fileno(), file.fileno(), start, size_bytes - start)
        assert files.punch_blocks(path, BLOCK_BYTES, [1, 2])
        received = receiving.makefile("rb").read(size_bytes - first)
    wrong = [at for at in range(len(received)) if received[at] != data[first + at]]
    assert not wrong, f"{len(wrong)} bytes changed, from {wrong[0]}"
    assert not any(Path(path).read_bytes()[BLOCK_BYTES:]), "the hole is there"


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection whose buffers take a mebibyte that nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as receiving:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        receiving.connect(listener.getsockname())
        receiving.settimeout(90)
        sending, _ = listener.accept()
        with sending:
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            yield sending, receiving
