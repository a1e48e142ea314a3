"""Saves to a node on this host hand over their memory: nothing is sent, and what goes wrong is as with what is sent."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.client.shared import SharedMemory
from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.errors import Unavailable
from forebay.core.s3rules.signedbody import UNSIGNED
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.front.http.bodies import Incoming, Wanted
from forebay.torch import Checkpointer
from forebay.torch.checkpoint.ranks import Share
from forebay.torch.checkpoint.staging import Arena, lay_out, stage
from tests.checkpoint.crash_trainer import fork
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.real
MIB = 1 << 20


def saver(node: NodeProcess, place: str, **more: Any) -> Checkpointer:
    return Checkpointer(place, url=node.endpoint, **more)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5_000_000,), value), "b": torch.full((3,), value)}  # 20 MB


def put_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large the bodies are that are sent over HTTP from now on."""
    sizes: list[int] = []
    put = Client.put

    def seen(self: Client, bucket: str, key: str, data: Any, **more: Any) -> Any:
        sizes.append(len(data))
        return put(self, bucket, key, data, **more)

    monkeypatch.setattr(Client, "put", seen)
    return sizes


@pytest.mark.parametrize("place", ["runs/handed", "straight/handed"])  # written back, and through
def test_blobs_are_not_sent(node: NodeProcess, monkeypatch: pytest.MonkeyPatch, place: str):
    sent = put_sizes(monkeypatch)
    with saver(node, place, staging_bytes=8 * MIB) as checkpoints:  # in waves, so that buffers are used again
        for step in (1, 2):
            checkpoints.save(step, state(float(step)), wait=True)
        assert max(sent) < MIB, "only indexes and manifests are"
        found = state(0.0)
        restored = checkpoints.restore(found)
        assert restored is not None
        assert (restored.step, restored.skipped) == (2, [])
        assert found["w"].unique().tolist() == found["b"].unique().tolist() == [2.0]
        checkpoints.repository.verify(checkpoints.list()[1])


def test_without_such_memory_they_are_sent(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> int:
        raise OSError("no memory of that kind here")

    sent = put_sizes(monkeypatch)
    monkeypatch.setattr(os, "memfd_create", none)
    with saver(node, "runs/sent") as checkpoints:
        checkpoints.save(1, state(1.0), wait=True)
        assert max(sent) > 20 * 10**6
        found = state(0.0)
        assert checkpoints.restore(found) is not None
        assert found["w"].unique().tolist() == [1.0]


@pytest.mark.parametrize("size_bytes", [32 * MIB, 20 * MIB + 1, 17 * MIB - 4095])
def test_what_is_handed_over_goes_to_the_disk_and_not_to_the_page_cache(node: NodeProcess, size_bytes: int):
    body = os.urandom(size_bytes)
    memory = SharedMemory(size_bytes)
    memory.view(size_bytes)[:] = body
    sums = [
        int(form.piece_digest(body[at : at + form.PIECE_BYTES]), 16) for at in range(0, size_bytes, form.PIECE_BYTES)
    ]
    volumes = node.dir / "node" / "volumes"
    with Client(node.endpoint) as client:
        client.bucket_put(Bucket("here", LOCAL_URL, write="local"))  # no flush reads it
        client.put_shared("here", "body", memory, size_bytes, sums)
        (file,) = [path for path in volumes.rglob("data/*/*/*") if path.stat().st_size == size_bytes]
        assert cached_bytes(file) <= MIB, "the last bytes may be: they are no whole page"
        assert client.get("here", "body") == body
        client.delete("here", "body")


def test_large_tensors_of_a_blob_can_be_mapped_where_they_lie(node: NodeProcess):
    wanted = {f"w{n}": torch.full((50_000 + 333 * n,), float(n)) for n in range(100)} | {"b": torch.ones(3)}
    with saver(node, "runs/mapped") as checkpoints:
        manifest = checkpoints.save(1, wanted, wait=True).durable()
        (size_bytes,) = manifest.ranks[0].blobs
        volumes = node.dir / "node" / "volumes"
        (file,) = [path for path in volumes.rglob("data/*/*/*") if path.stat().st_size == size_bytes]
        entries = [entry for entry in checkpoints.repository.index(manifest, 0).entries if entry.path != "b/"]
        large = [entry for entry in entries if entry.size_bytes >= 64 << 10]
        assert len(large) == 100
        with file.open("rb") as opened:
            for entry in large:
                pages = mmap.mmap(opened.fileno(), entry.size_bytes, prot=mmap.PROT_READ, offset=entry.offset)
                with pages, memoryview(pages) as view:
                    assert bytes(view) == wanted[entry.path.split("/")[0]].numpy().tobytes()


def cached_bytes(file: Path) -> int:
    """How much of a file is in the page cache."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as pages:
        size_bytes = len(pages)
        found = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), found) == 0
        return sum(page & 1 for page in found) * mmap.PAGESIZE


@pytest.mark.parametrize("refusal", ["no_flag", "no_write"])
def test_a_filesystem_that_takes_nothing_past_its_cache_gets_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
):
    """The node in a process of ours, so that the filesystem's refusals can be told."""
    set_flags, pwrite = fcntl.fcntl, os.pwrite
    direct: set[int] = set()

    def refuses_the_flag(fd: int, command: int, value: Any = 0) -> Any:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            if refusal == "no_flag":
                raise OSError(errno.EINVAL, "no direct I/O here")
            direct.add(fd)
        elif command == fcntl.F_SETFL:
            direct.discard(fd)
        return set_flags(fd, command, value)

    def refuses_writes(fd: int, data: Any, at: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "pages are larger here")
        return pwrite(fd, data, at)

    monkeypatch.setattr(fcntl, "fcntl", refuses_the_flag)
    monkeypatch.setattr(os, "pwrite", refuses_writes)
    body = os.urandom(17 * MIB + 5)
    source = os.memfd_create("body")
    os.write(source, body)
    volume = tmp_path / "tmp"
    volume.mkdir()
    incoming = Incoming(Wanted(payload=UNSIGNED), len(body), place=lambda: str(volume / "1"))
    incoming.synced_soon = True
    for at in range(0, len(body), 8 * MIB):
        incoming.take_from(source, at, min(8 * MIB, len(body) - at))
    incoming.finish()
    os.close(source)
    assert Path(incoming.result.path).read_bytes() == body
    assert not direct


def test_bytes_that_change_on_the_way_never_count(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    """What the client digested is not what the node reads."""
    put_shared = Client.put_shared
    times = []

    def flipped(self: Client, bucket: str, key: str, memory: Any, size_bytes: int, sums: Any) -> Any:
        memory.view(size_bytes)[size_bytes // 2] ^= 1
        times.append(key)
        return put_shared(self, bucket, key, memory, size_bytes, sums)

    with saver(node, "runs/flipped", patience_s=0.2) as checkpoints:
        checkpoints.save(1, state(1.0), wait=True)
        monkeypatch.setattr(Client, "put_shared", flipped)
        with pytest.raises(Exception, match="other digests"):
            checkpoints.save(2, state(2.0), wait=True)
        found = state(0.0)
        restored = checkpoints.restore(found)
        assert restored is not None
        assert restored.step == 1


def test_a_node_that_dies_while_it_reads_is_waited_for(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    put_shared = Client.put_shared
    killed = []

    def cut(self: Client, *rest: Any) -> Any:
        if not killed:
            killed.append(True)
            assert node.process is not None
            node.process.kill()
            node.process.wait()
            with pytest.raises(Unavailable):
                put_shared(self, *rest)
            node.start()
        return put_shared(self, *rest)

    monkeypatch.setattr(Client, "put_shared", cut)
    with saver(node, "runs/cut") as checkpoints:
        checkpoints.save(1, state(1.0), wait=True)
        found = state(0.0)
        assert checkpoints.restore(found) is not None
        assert found["w"].unique().tolist() == [1.0]


def test_a_node_that_is_killed_in_the_middle_of_reading_gets_the_rest_of_the_save_later(node: NodeProcess):
    volumes = node.dir / "node" / "volumes"
    with saver(node, "runs/halved") as checkpoints:
        checkpoints.save(1, state(1.0), wait=True)
        before = set(volumes.rglob("*"))
        handle = checkpoints.save(2, {"w": torch.full((40_000_000,), 2.0)})  # two blobs

        def begun() -> bool:
            return any(_size(path) > MIB for path in set(volumes.rglob("*")) - before)

        until(lambda: begun() or handle.done, "the node has a part of a blob")
        assert node.process is not None
        node.process.kill()
        node.process.wait()
        node.start()
        handle.durable()
        found = {"w": torch.zeros(40_000_000)}
        restored = checkpoints.restore(found)
        assert restored is not None
        assert (restored.step, restored.skipped) == (2, [])
        assert found["w"].unique().tolist() == [2.0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def test_a_blob_that_rotted_is_asked_for_over_http_and_an_older_checkpoint_is_restored(node: NodeProcess):
    """What is read from a file that nobody has compared counts only if it matches."""
    with saver(node, "runs/rotted") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(float(step)), wait=True)
        large = [path for path in (node.dir / "node" / "volumes").rglob("data/*/*/*") if path.stat().st_size > 10**7]
        newest = max(large, key=lambda path: path.name)
        with newest.open("r+b") as file:
            file.seek(9 * MIB)
            file.write(b"rotten")
        found = state(0.0)
        restored = checkpoints.restore(found)
        assert restored is not None
        assert found["w"].unique().tolist() == [float(restored.step)], "never a mixture"


def test_several_threads_copy_all_of_it_also_in_a_forked_child(tmp_path: Path):
    torch.set_num_threads(4)
    try:
        arena = Arena(None)
        state = [Share(f"w{n}", torch.randn(2_000_003 + n)[3:], None, None) for n in range(9)]  # 72 MB

        def copied() -> None:
            whole = lay_out(state, None)
            arena.prepare(whole, pinned=False)
            stream = b"".join(bytes(filled.view()) for filled in stage(whole, arena, lambda: None))
            for entry, share in zip(whole.entries, whole.shares, strict=True):
                expected = share.local.numpy().tobytes()
                assert stream[entry.offset : entry.offset + entry.size_bytes] == expected

        copied()
        _, status = os.waitpid(fork(tmp_path / "child", copied), 0)
        assert status == 0, (tmp_path / "child.error").read_text()
    finally:
        torch.set_num_threads(1)


def test_a_forked_child_does_not_save_over_its_parents_copy(tmp_path: Path):
    arena = Arena(None)
    mine = lay_out([Share("w", torch.zeros(2_000_000), None, None)], None)
    arena.prepare(mine, pinned=False)
    (filled,) = stage(mine, arena, lambda: None)
    arena.give(filled.buffer)

    def child() -> None:
        theirs = lay_out([Share("w", torch.ones(2_000_000), None, None)], None)
        arena.prepare(theirs, pinned=False)
        (copied,) = stage(theirs, arena, lambda: None)
        assert bytes(copied.view()[:4]) == torch.ones(1).numpy().tobytes()

    _, status = os.waitpid(fork(tmp_path / "child", child), 0)
    assert status == 0, (tmp_path / "child.error").read_text()
    assert not any(filled.view())


@pytest.mark.parametrize("wait", [True, False])
def test_who_waits_has_blobs_sent_while_others_are_copied(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, wait: bool
):
    """Otherwise nothing is sent before all is copied: that would take cores from the copy, which is the stall."""
    sent, copied = threading.Event(), []
    copy, put_shared = Arena.copy, Client.put_shared

    def copying(self: Arena, copies: Any) -> None:
        copied.append(True)
        if len(copied) == 3 and wait:
            assert sent.wait(PATIENCE_S), "blobs are copied, and none is sent"
        assert wait or not sent.is_set()
        copy(self, copies)

    def sending(self: Client, *rest: Any) -> Any:
        sent.set()
        return put_shared(self, *rest)

    monkeypatch.setattr(form, "BLOB_BYTES_MIN", 4 * MIB)
    monkeypatch.setattr(Arena, "copy", copying)
    monkeypatch.setattr(Client, "put_shared", sending)
    with saver(node, f"runs/overlapped-{wait}") as checkpoints:
        checkpoints.save(1, state(1.0), wait=wait).durable()
        assert len(copied) == (5 if wait else 1), "blob by blob, or all at once"
        found = state(0.0)
        assert checkpoints.restore(found) is not None
        assert found["w"].unique().tolist() == [1.0]


def test_after_ctrl_c_nobody_copies(monkeypatch: pytest.MonkeyPatch):
    """The job may free its tensors then, and another save may fill the buffers."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    main, helped, memmove = threading.main_thread(), threading.Event(), ctypes.memmove
    copied: list[int] = []

    def copying(to: int, source: int, size_bytes: int) -> None:
        if threading.current_thread() is main:
            assert helped.wait(PATIENCE_S), "a thread helps"
            raise KeyboardInterrupt
        helped.set()
        time.sleep(0.02)  # the first is under way while Ctrl-C comes
        memmove(to, source, size_bytes)
        copied.append(source)

    monkeypatch.setattr(ctypes, "memmove", copying)
    source = torch.ones(200 * MIB, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt):
        Arena(None).copy([(torch.empty_like(source), source)])
    then = len(copied)
    assert 1 <= then < 50, "pieces of 4 MiB"
    time.sleep(0.2)
    assert len(copied) == then


def test_what_was_put_in_order_does_not_wait_for_all_blobs(monkeypatch: pytest.MonkeyPatch):
    """At each blob's end a part is put in order: kept until all is copied, they would be a sixteenth of the state."""
    monkeypatch.setattr(form, "BLOB_BYTES_MIN", 4 * MIB)
    tall = torch.arange(4_000_000, dtype=torch.float32).view(2000, 2000).t()
    layout, arena = lay_out([Share("w", tall, None, None)], None), Arena(None)
    arena.prepare(layout, False)
    late: list[torch.Tensor] = []
    monkeypatch.setattr(Arena, "copy", lambda self, copies: late.extend(source for _, source in copies))
    stream = b"".join(bytes(each.view()) for each in stage(layout, arena, lambda: None, at_once=True))
    assert layout.blobs > 2
    assert late == []
    assert stream[: tall.numel() * 4] == tall.contiguous().numpy().tobytes()


@pytest.mark.parametrize(("cap_mib", "sizes_mib"), [(66, [65]), (66, [65, 64, 66]), (256, [1024, 512, 128, 1024])])
def test_buffers_stay_below_the_cap_as_states_come(cap_mib: int, sizes_mib: list[int]):
    arena = Arena(cap_mib * MIB)
    for size_mib in sizes_mib:
        share = Share("w", torch.empty(size_mib * MIB, dtype=torch.uint8), None, None)
        arena.prepare(lay_out([share], cap_mib * MIB), pinned=False)
        assert 0 < arena.held_bytes <= cap_mib * MIB


def test_a_tensor_that_does_not_lie_in_order_takes_no_memory_beyond_the_cap(tmp_path: Path):
    tall = torch.arange(16_000_000, dtype=torch.float32).view(4000, 4000)  # 64 MB
    first = tall[:500].t()  # has the system load what torch needs for it
    states = [first, tall.t(), torch.complex(tall, tall)[:, ::2].conj(), tall.view(1, 2, 2000, 4000).transpose(2, 3)]

    def child() -> None:
        for tensor in states:
            arena = Arena(16 * MIB)
            layout = lay_out([Share("w", tensor, None, None)], 16 * MIB)
            arena.prepare(layout, pinned=False)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = resident("VmRSS")
            stream = tmp_path / "stream"
            with stream.open("wb") as file:
                for filled in stage(layout, arena, lambda: None):
                    file.write(filled.view())
                    arena.give(filled.buffer)
            more = resident("VmHWM") - before
            if tensor is not first:
                assert more < 32 * MIB, "the cap, and a few parts that are put in order"
            saved = torch.from_file(str(stream), size=tensor.numel(), dtype=tensor.dtype)
            assert torch.equal(saved, tensor.resolve_conj().reshape(-1))

    _, status = os.waitpid(fork(tmp_path / "child", child), 0)
    assert status == 0, (tmp_path / "child.error").read_text()


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (int(line.split()[1]) << 10 for line in lines if line.startswith(what + ":"))
    return found
