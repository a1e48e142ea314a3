"""Sends bytes from memory, from a file and from another socket on one socket, one thing at a time.

Theory. The loop's transport reads and owns the connection. Sending goes past it, into a duplicate of the socket's
descriptor: one `send` for a small answer; for a large one the head with MSG_MORE (the kernel then waits instead of
sending a small packet) and `sendfile`, resumed when the socket is writable. This process buffers nothing but the answer
in hand, so a slow client costs a descriptor, not memory. One `sendfile` is bounded, so a fast client with a large
object does not keep the others waiting.

What another node sends goes from its socket through a pipe into the client's by `splice`: the kernel hands pages on,
and this process sees none of the bytes. It is woken when there is a piece of SPLICE_BYTES, not for each packet.

Rejected: the transport's `write` (buffers without bound, 10 % slower at 1 KiB); `loop.sendfile` (an await and a future
for each); the transport's own descriptor (it may be closed and given to another client between two sends; a duplicate
is ours until we close it).

Invariants. (1) While `_sending`, nothing else is sent. (2) After `_close_socket`, no method touches a descriptor.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
import termios

from forebay.core.errors import Unavailable

SPLICE_BYTES = 256 * 1024  # waking up for less costs more than moving it
PIPE_BYTES = 1024 * 1024  # the most that Linux gives anybody by default
SOURCE_PATIENCE_S = 5.0  # of no byte, until the source counts as dead: as long as the engine gives another node
SENDFILE_BYTES_MAX = 2 * 1024 * 1024  # one call: about 0.3 ms at memory speed; nginx's sendfile_max_chunk is the same
_MORE = getattr(socket, "MSG_MORE", 0)
CAN_SPLICE = hasattr(os, "splice")
_SPLICED = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE if CAN_SPLICE else 0
_GONE = frozenset((errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNABORTED, errno.EBADF))


class ClientGone(ConnectionError):
    """The client closed the connection while something was written to it."""


class FileFailed(Unavailable):
    """A file or a source failed or ended while a piece of it was written: its last `left_bytes` were not sent."""

    left_bytes = 0
    silent = False  # the source said nothing for SOURCE_PATIENCE_S

    @property
    def kind(self) -> str:
        return "Unavailable"


class Sender:
    """See the module's header. A subclass says what follows when all is sent, and when file or client fail."""

    # Slots, not a dictionary: with more than thirty attributes the interpreter stops sharing keys between instances,
    # and each access costs three times as much (Python 3.11; 1 µs in a hit).
    __slots__ = (
        "_fd",
        "_file_fd",
        "_file_left",
        "_file_offset",
        "_held",
        "_loop",
        "_out",
        "_send",
        "_sending",
        "_socket",
        "_waiter",
        "_writer_armed",
    )

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._socket: socket.socket
        self._fd = -1  # our duplicate; -1 when closed
        self._out: memoryview | None = None  # what is left of the bytes that go first
        self._file_fd = -1
        self._file_offset = 0
        self._file_left = 0
        self._sending = False
        self._held = -1  # bytes the kernel held for the client when `_client_reads` looked last
        self._writer_armed = False
        self._waiter: asyncio.Future[None] | None = None

    def _open_socket(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        """Duplicate `fd`. OSError when descriptors are short."""
        self._loop = loop
        duplicate = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=duplicate)
        except BaseException:
            os.close(duplicate)
            raise
        self._socket.setblocking(False)
        self._send = self._socket.send
        self._fd = duplicate

    def _close_socket(self, reset: bool = False) -> None:
        """Close our descriptor; with `reset`, the client sees a reset instead of an orderly end."""
        if self._fd < 0:
            return
        if self._writer_armed:
            self._writer_armed = False
            self._loop.remove_writer(self._fd)
        self._sending = False
        self._out = None
        self._fd = -1
        if reset:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            except OSError:
                pass  # the connection is gone already
        self._socket.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientGone("the client is gone"))

    def _put(self, data: bytes | memoryview, file_fd: int = -1, offset: int = 0, left: int = 0) -> bool:
        """Send `data`, then `left` bytes of the file. True if the socket took all at once; else `_pump` carries on
        and calls `_sent`, `_fault` or `_vanished`."""
        assert not self._sending, "two answers at once"
        if self._fd < 0:
            return False
        try:
            taken = (self._send(data, _MORE) if left else self._send(data)) if data else 0
        except (BlockingIOError, InterruptedError):
            taken = 0
        except OSError:
            self._vanished()
            return False
        if taken == len(data) and not left:
            return True
        self._sending = True
        self._progressed()  # the client has the stall timeout from here
        self._file_fd, self._file_offset, self._file_left = file_fd, offset, left
        if taken != len(data):
            self._out = memoryview(data)[taken:]
            self._arm()
            return False
        return self._pump_file()

    def _pump(self) -> None:
        """The socket is writable: go on."""
        out = self._out
        if out is not None:
            try:
                taken = self._send(out, _MORE) if self._file_left else self._send(out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._vanished()
                return
            self._progressed()
            if taken != len(out):
                self._out = out[taken:]
                return
            self._out = None
            if not self._file_left:
                self._disarm()
                self._sent()
                return
        if self._pump_file():
            self._sent()

    def _pump_file(self) -> bool:
        """One sendfile. True when the file's part is complete."""
        left = self._file_left
        try:
            taken = os.sendfile(
                self._fd, self._file_fd, self._file_offset, left if left < SENDFILE_BYTES_MAX else SENDFILE_BYTES_MAX
            )
        except (BlockingIOError, InterruptedError):
            self._arm()
            return False
        except OSError as error:
            if error.errno in _GONE:
                self._vanished()
            else:
                self._disarm()
                self._fault(error)
            return False
        if taken == left:
            self._file_left = 0
            self._disarm()
            return True
        if taken == 0:
            self._disarm()
            self._fault(OSError(errno.EIO, "the file ends before the object does"))
            return False
        self._file_left = left - taken
        self._file_offset += taken
        self._progressed()
        self._arm()
        return False

    async def _splice_and_wait(self, source: socket.socket, pipe: Pipe, size_bytes: int) -> None:
        """Send `size_bytes` that come from another socket. `ClientGone`; `FileFailed` if the source ends, or is silent
        for SOURCE_PATIENCE_S. After either the pipe may hold bytes: close it."""
        held, left, silent, moved = 0, size_bytes, False, 0
        while left:
            if self._fd < 0:
                raise ClientGone("the client is gone")
            if moved > SENDFILE_BYTES_MAX:
                moved = 0
                await asyncio.sleep(0)  # others have their turn
                continue
            took = 0
            try:
                if held < left:
                    took = pipe.fill(source, min(left - held, PIPE_BYTES))
                    if took == 0:
                        raise _source_failed("it ended early", left)
                    silent = False
            except (BlockingIOError, InterruptedError):
                pass  # nothing is there, or the pipe has no room
            except OSError as error:
                raise _source_failed(str(error), left) from error
            held += took
            try:
                sent = pipe.drain(self._fd, held) if held else 0
            except (BlockingIOError, InterruptedError):
                await self._wait_for_client()
                continue
            except OSError as error:
                self._vanished()
                raise ClientGone("the client is gone") from error
            held, left, moved = held - sent, left - sent, moved + sent
            if sent:
                self._progressed()
                self._passed_on(sent)
            elif not held and left:
                if silent:
                    failed = _source_failed(f"it was silent for {SOURCE_PATIENCE_S:g} s", left)
                    failed.silent = True
                    raise failed
                silent = not await self._wait_for_source(source, min(left, SPLICE_BYTES))

    async def _wait_for_client(self) -> None:
        """Return when the client's socket takes bytes. `ClientGone`."""
        assert self._waiter is None, "two writers at once"
        self._waiter = waiter = self._loop.create_future()
        self._sending = self._writer_armed = True  # the client has the stall timeout
        self._loop.add_writer(self._fd, _settle, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if self._fd >= 0:
                self._disarm()
            if waiter.done() and not waiter.cancelled():
                waiter.exception()

    async def _wait_for_source(self, source: socket.socket, size_bytes: int) -> bool:
        """Wait until a source has so many bytes, or ended; False if it was silent for too long. `ClientGone`."""
        assert self._waiter is None, "two writers at once"
        self._waiter = waiter = self._loop.create_future()
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
        self._loop.add_reader(source, _settle, waiter)
        try:
            async with asyncio.timeout(SOURCE_PATIENCE_S):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
            self._loop.remove_reader(source)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()
        return True

    def _arm(self) -> None:
        if not self._writer_armed:
            self._writer_armed = True
            self._loop.add_writer(self._fd, self._pump)

    def _disarm(self) -> None:
        self._sending = False
        if self._writer_armed:
            self._writer_armed = False
            self._loop.remove_writer(self._fd)

    def _client_reads(self) -> bool:
        """Whether the client took bytes since this was asked last.

        A socket is called writable only when much of its buffer (megabytes) is free, so a slow client may read all the
        time and make no such progress; how much the kernel still holds for it tells.
        """
        held: int = struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        moved, self._held = held != self._held, held
        return moved

    async def _put_and_wait(self, data: bytes | memoryview, file_fd: int = -1, offset: int = 0, left: int = 0) -> None:
        """`_put`, and return when the socket has taken everything. `ClientGone`; `FileFailed` if the file ends."""
        if self._fd < 0:
            raise ClientGone("the client is gone")
        assert self._waiter is None, "two writers at once"
        self._waiter = waiter = self._loop.create_future()
        try:
            if not self._put(data, file_fd, offset, left):
                await waiter
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, whichever way this ended

    def _wake(self, error: OSError | None = None) -> bool:
        """Tell the waiter, if there is one, that its piece is sent or that the file failed."""
        waiter = self._waiter
        if waiter is None:
            return False
        if not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                failed = FileFailed(f"a file failed while it was sent ({error}): read again")
                failed.left_bytes = self._file_left
                waiter.set_exception(failed)
        return True

    # what a subclass decides
    def _sent(self) -> None:
        """All that `_put` took is sent, later than at once."""
        raise NotImplementedError

    def _fault(self, error: OSError) -> None:
        """The file failed; `_file_left` bytes of it were not sent."""
        raise NotImplementedError

    def _vanished(self) -> None:
        """The client is gone. Must call `_close_socket`."""
        raise NotImplementedError

    def _progressed(self) -> None:
        """The client took bytes."""
        raise NotImplementedError

    def _passed_on(self, size_bytes: int) -> None:
        """So many of them came from another socket."""


class Pipe:
    """What bytes go through from one socket to another. Both ends never block."""

    def __init__(self) -> None:
        """OSError when descriptors are short."""
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # who is not root has 64 MiB in pipes; a small one does too

    def fill(self, source: socket.socket, size_bytes: int) -> int:
        """Take up to so many bytes from a socket; 0 is its end. BlockingIOError if there are none, or no room."""
        return os.splice(source.fileno(), self._in, size_bytes, flags=_SPLICED)

    def drain(self, fd: int, size_bytes: int) -> int:
        """Give up to so many bytes to a socket. BlockingIOError if it takes none."""
        return os.splice(self._out, fd, size_bytes, flags=_SPLICED)

    def close(self) -> None:
        """May be called twice."""
        if self._in >= 0:
            os.close(self._in)
            os.close(self._out)
            self._in = self._out = -1


def _source_failed(why: str, left_bytes: int) -> FileFailed:
    failed = FileFailed(f"the other node's bytes broke off ({why}): read again")
    failed.left_bytes = left_bytes
    return failed


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
