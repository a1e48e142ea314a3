"""Objects as files: a reader that can seek, and a writer whose bytes become the object.

Reading. A reader is one version of one object: it learns size and ETag when it is opened, and every byte is of that
version or the read fails with `Precondition`. On the node's host it reads from the object's file (`door.py`). Over HTTP
it keeps one GET open where the last read ended, so a file that is read from end to end is one request, and the kernel
and the node read ahead. After a seek it requests exactly the ranges asked for, until reading goes on from there. A
short way forward is read and thrown away. The node ends an answer whose reader rests for a minute; the reader then
requests the rest, as of any answer that is cut (`resuming.py`).

Writing. Written bytes wait in memory, and from SPOOL_BYTES on in a temporary file. `close` makes them the object. A
`with` that ends by an error, `abort`, and a writer that is dropped unclosed write nothing.

A reader can be pickled (it opens nothing until it is read) and works in a forked child, which leaves the parent's
connection alone. Neither is for two threads at once.

Rejected: a buffer in the reader (`io.BufferedReader` is one, for many small reads); uploading during the writing (an
error then needs an abort, and a killed process leaves an upload at the node).

Invariants. (1) All bytes of a reader are of one version. (2) After a failed `close` the object is what it was.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forebay.client import flows
from forebay.client.connection import CUT
from forebay.client.door import Found
from forebay.client.resuming import Cuts
from forebay.client.upload import PutOptions, put_file
from forebay.core import limits
from forebay.core.errors import Closed, Invalid, Precondition, Unavailable
from forebay.core.messages.http1 import Request
from forebay.core.types import RangeSpec
from forebay.ports import clock

if TYPE_CHECKING:
    from forebay.client.connection import Connection
    from forebay.client.sync import Client
    from forebay.core.messages.calls import Written

SKIP_BYTES_MAX = 256 * limits.KIB  # a seek forward by no more is cheaper to read than to ask for
SPOOL_BYTES = 8 * limits.MIB
DOOR_AGAIN_S = 1.0  # an object that the door has not is fetched over HTTP meanwhile


class _Stream:
    """A GET from `start` on of one version of an object, its body taken piece by piece. It goes to the end of the
    object, or of what the node that is asked holds of it."""

    def __init__(self, client: Client, bucket: str, key: str, start: int, etag: str, size_bytes: int) -> None:
        self.position = start
        self.pid = os.getpid()
        self._client = client
        self.end = client.stretch(bucket, start, size_bytes)
        last = f"{self.end - 1}" if self.end < size_bytes else ""
        headers = [("Range", f"bytes={start}-{last}")] if start or last else []
        headers += [("If-Match", f'"{etag}"')] if etag else []
        request = Request("GET", flows.object_target(bucket, key), tuple(headers), of=(bucket, key))
        self._connection: Connection | None
        self._connection, response, self._first = client.begin(request)
        if not response.ok:
            client.give_back(self._connection)
            raise flows.raised(response, f"{bucket}/{key}")
        got = flows.got(response)
        if (got.start, got.size_bytes, got.body_bytes) != (start, size_bytes, self.end - start) or response.body:
            self.close()
            raise _changed(bucket, key)

    def readinto(self, view: memoryview) -> int:
        """The next bytes, at least one. `Unavailable` with code CUT when the node ended the answer."""
        if self._first:
            size = min(len(view), len(self._first))
            view[:size] = self._first[:size]
            self._first = self._first[size:]
        else:
            if self._connection is None:
                raise Closed("the answer was read to its end already")
            size = self._connection.receive_into(view[: self.end - self.position])
            if not size:
                raise Unavailable(
                    f"the answer was cut at offset {self.position} of {self.end}: see the node's log, then try again",
                    code=CUT,
                )
        self.position += size
        if self.position == self.end and self._connection is not None:
            self._connection.end()
            self._client.give_back(self._connection)
            self._connection = None
        return size

    def skip(self, size_bytes: int) -> None:
        """Throw so many bytes away."""
        with memoryview(bytearray(min(size_bytes, 64 * limits.KIB))) as room:
            while size_bytes:
                size_bytes -= self.readinto(room[:size_bytes])

    def close(self) -> None:
        """Leave the rest unread."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ObjectReader(io.RawIOBase):
    """One version of an object as a seekable, unbuffered binary file. `Precondition` if it is another version by now.

    `read(n)` and `readinto` give all that is asked for unless the object ends. `size` and `etag` are facts of that
    version.
    """

    mode = "rb"

    def __init__(self, client: Client, bucket: str, key: str, size_bytes: int, etag: str, body: bytes | None) -> None:
        """For `Client.open` and pickle; `body` is all of a small object."""
        super().__init__()
        self.bucket, self.key = bucket, key
        self.size, self.etag = size_bytes, etag
        self._client = client
        self._body = body
        self._position = 0
        self._sequential_at = 0  # where the last read ended: reading on from there is taken for a habit
        self._stream: _Stream | None = None
        self._door_at_s = 0.0

    @property
    def name(self) -> str:
        """`bucket/key`, for people."""
        return f"{self.bucket}/{self.key}"

    def __repr__(self) -> str:
        return f"<ObjectReader {self.name} at {self._position} of {self.size}>"

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self._client, self.bucket, self.key, self.size, self.etag, self._body, self._position, self.closed)
        return _again, state

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check()
        try:
            base = (0, self._position, self.size)[whence]
        except IndexError:
            raise Invalid(f"whence {whence} is not known: use 0, 1 or 2") from None
        if base + offset < 0:
            raise Invalid(f"offset {base + offset} lies before the object: seek within 0..{self.size}")
        self._position = base + offset
        return self._position

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        super().close()

    def readinto(self, buffer: Any) -> int:
        self._check()
        with memoryview(buffer).cast("B") as whole:
            wanted = max(0, min(len(whole), self.size - self._position))
            done = 0
            while done < wanted:
                with whole[done:wanted] as view:
                    done += self._fill(view)
            return done

    def read(self, size: int | None = -1) -> bytes:
        self._check()
        left = max(0, self.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if self._body is not None:
            data = self._body[self._position : self._position + wanted]
            self._position += len(data)
            return data
        if wanted and self._try_door():
            body = self._client.door.pread(self.bucket, self.key, self._position, wanted, etag=self.etag)
            if body is not None:
                self._moved(wanted)
                return body
        room = io.BytesIO(bytes(wanted))  # gives out its own bytes without a copy
        with room.getbuffer() as view:
            self.readinto(view)
        return room.getvalue()

    def readall(self) -> bytes:
        return self.read()

    # --- where bytes come from ---------------------------------------------------------------------------------------
    def _fill(self, view: memoryview) -> int:
        """Bytes from where we are into `view`, at least one."""
        if self._body is not None:
            view[:] = self._body[self._position : self._position + len(view)]
            self._position += len(view)
            return len(view)
        if self._try_door():
            size = self._client.door.readinto(self.bucket, self.key, self._position, view, etag=self.etag)
            if size:
                self._moved(size)
                return size
            self._door_at_s = clock.monotonic_s() + DOOR_AGAIN_S
        size = self._fill_over_http(view)
        self._moved(size)
        return size

    def _moved(self, size_bytes: int) -> None:
        self._position += size_bytes
        self._sequential_at = self._position

    def _try_door(self) -> bool:
        return self._stream is None and (not self._door_at_s or clock.monotonic_s() >= self._door_at_s)

    def _fill_over_http(self, view: memoryview) -> int:
        stream = self._stream
        end = self._position + len(view)
        if (
            stream is None
            and len(view) > limits.STRIPE_BYTES
            and self._client.stretch(self.bucket, self._position, end) < end
        ):
            return self._fill_once(view)  # several nodes send at once
        if stream is not None and stream.pid != os.getpid():
            stream.close()  # the parent reads from it: this closes the child's descriptor only
            stream = self._stream = None
        if stream is not None and 0 <= self._position - stream.position <= SKIP_BYTES_MAX:
            try:
                stream.skip(self._position - stream.position)
                return self._take(stream, view)
            except Unavailable as error:
                stream.close()
                self._stream = None
                if error.code != CUT:
                    raise
        elif stream is not None:
            stream.close()
            self._stream = None
            if self._position != self._sequential_at:
                return self._fill_once(view)
        elif self._position != self._sequential_at:
            return self._fill_once(view)
        return self._fill_anew(view)

    def _fill_anew(self, view: memoryview) -> int:
        """Bytes from an answer that begins where we are."""
        cuts = Cuts()
        while True:
            try:
                self._stream = _Stream(self._client, self.bucket, self.key, self._position, self.etag, self.size)
                return self._take(self._stream, view)
            except Unavailable as error:
                if self._stream is not None:
                    self._stream.close()
                    self._stream = None
                if error.code != CUT or not cuts.go_on(self._position):
                    raise

    def _take(self, stream: _Stream, view: memoryview) -> int:
        size = stream.readinto(view)
        if stream.position == stream.end:
            self._stream = None
        return size

    def _fill_once(self, view: memoryview) -> int:
        """One GET of exactly these bytes."""
        spec = RangeSpec(self._position, self._position + len(view) - 1)
        got = self._client.get_into(self.bucket, self.key, view, range=spec, etag=self.etag)
        if got.size_bytes != self.size or got.body_bytes != len(view):
            raise _changed(self.bucket, self.key)
        return len(view)

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the file is closed: open the object again")  # as every file of Python says it


def _again(
    client: Client, bucket: str, key: str, size_bytes: int, etag: str, body: bytes | None, position: int, closed: bool
) -> ObjectReader:
    reader = ObjectReader(client, bucket, key, size_bytes, etag, body)
    reader.seek(position)
    if closed:
        reader.close()
    return reader


def _changed(bucket: str, key: str) -> Precondition:
    return Precondition(f"{bucket}/{key} is another version than when it was opened: open it again")


class ObjectWriter(io.RawIOBase):
    """A binary file that becomes the object when it is closed; see the module's header.

    `written` says what the object is then. The errors of `Client.put` are raised by `close`. A wrapper
    (`TextIOWrapper`, `BufferedWriter`) closes what it wraps also after an error, and would make half a file the object:
    call `abort` then, or write without one.
    """

    mode = "wb"

    def __init__(self, client: Client, bucket: str, key: str, options: PutOptions) -> None:
        super().__init__()
        self.bucket, self.key = bucket, key
        self.written: Written | None = None
        self._client = client
        self._options = options
        self._memory = io.BytesIO()
        self._file: io.FileIO | None = None
        self._size_bytes = 0
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """`bucket/key`, for people."""
        return f"{self.bucket}/{self.key}"

    def __repr__(self) -> str:
        return f"<ObjectWriter {self.name}, {self._size_bytes} bytes>"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        try:
            self.abort()
        except AttributeError:
            pass  # it was never made whole, or Python ends, and modules are gone

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("the file is closed: open the object again")
        with memoryview(data).cast("B") as view:
            if self._file is None and self._size_bytes + len(view) > SPOOL_BYTES:
                self._file = _temporary()
                with self._memory.getbuffer() as before:
                    _write(self._file, before)
                self._memory = io.BytesIO()
            if self._file is None:
                self._memory.write(view)
            else:
                _write(self._file, view)
            self._size_bytes += len(view)
            return len(view)

    def close(self) -> None:
        """Make what was written the object. Closed afterwards, whatever happens."""
        if self.closed:
            return
        try:
            if self._pid != os.getpid():
                raise Invalid("this file is another process's, from before a fork: close it there, or open it here")
            if self._file is None:
                with self._memory.getbuffer() as data:
                    self.written = self._client.run(
                        flows.put(self.bucket, self.key, self._options.all_headers(), body=data)
                    )
            else:
                fd, size_bytes = self._file.fileno(), self._size_bytes
                flow = put_file(self.bucket, self.key, fd, size_bytes, self._options, resumable=False)
                self.written = self._client.run(flow)
        finally:
            self._client.changed(self.bucket, self.key)
            self.abort()

    def abort(self) -> None:
        """Forget what was written; the object stays what it is. Twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._memory = io.BytesIO()
        super().close()


def _temporary() -> io.FileIO:
    file = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 - the writer closes it
    assert isinstance(file, io.FileIO)
    return file


def _write(file: io.FileIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += file.write(view[done:]) or 0


def find_object(client: Client, bucket: str, key: str, etag: str = "") -> Found:
    """The object as it is now, by the door or else by a HEAD. `Precondition` if `etag` is given and not its ETag."""
    found = client.door.find(bucket, key)
    if found is None:
        got = client.head(bucket, key)
        found = Found(got.size_bytes, got.etag, None)
    if etag and found.etag != etag:
        raise _changed(bucket, key)
    return found


def open_object(
    client: Client,
    bucket: str,
    key: str,
    mode: str,
    buffering: int,
    etag: str,
    content_type: str,
    metadata: Mapping[str, str] | None,
) -> ObjectReader | ObjectWriter | io.BufferedReader:
    """What `Client.open` returns."""
    if mode in ("wb", "xb"):
        return ObjectWriter(client, bucket, key, PutOptions.of(content_type, metadata, etag, mode == "xb"))
    if mode != "rb":
        raise Invalid(f"mode {mode!r} is not known: use rb, wb or xb, and io.TextIOWrapper for text")
    reader = ObjectReader(client, bucket, key, *find_object(client, bucket, key, etag))
    return io.BufferedReader(reader, buffering) if buffering > 1 else reader
