"""The asyncio client: drives the same flows as `sync.py`, on the running loop.

Theory. A flow decides what is asked; this module only moves bytes, with asyncio's streams and `patience_s` on every
wait. A connection carries one request at a time and is kept for the next. It keeps the blocking driver's promises about
retries, long bodies (announced first) and early answers. Files are read in a thread, a piece at a time. A stream that
is put is read on the loop, so pass one whose data is there, or a path.

Rejected: wrapping the blocking client in threads (a thread for each request, and no cancelling); httpx or aiohttp (a
second set of rules for what an answer means).

Invariants. (1) A connection whose answer was not read to its end, or whose request was cancelled, is closed. (2) A
client belongs to the loop that it was first used on.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from forebay.client import batchflow, flows, members
from forebay.client.calling import Calling, Fields
from forebay.client.connection import (
    CUT,
    Collected,
    CutOff,
    Stale,
    copy_into,
    cut_after,
    keep_alive,
    watch_closely,
)
from forebay.client.hinting import HintsAsync
from forebay.client.listing import listing
from forebay.client.many import Many
from forebay.client.members import Members
from forebay.client.resuming import may_begin_again
from forebay.client.sinks import IntoBuffer
from forebay.client.stripes import VERSIONS_MAX, Piece, Striped, changing
from forebay.client.upload import Data, PutOptions, put_data
from forebay.core import limits
from forebay.core.errors import Bug, Closed, Corrupt, Invalid, Precondition, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.messages.batch import Wanted
from forebay.core.messages.calls import CopyCall, JobState, JobVerb, ObjectState, Written
from forebay.core.messages.http1 import (
    EXPECT_BYTES_MIN,
    Chunks,
    Endpoint,
    Head,
    Request,
    Response,
    Sink,
    Source,
    build_request,
    parse_head,
)
from forebay.core.messages.node_state import NodeState
from forebay.core.types import Bucket, ListPage, RangeSpec

T = TypeVar("T")
PIECE_BYTES = 256 * limits.KIB
_HEAD_END = b"\r\n\r\n"


def connect(
    url: str | None = None, *, token: str | None = None, patience_s: float | None = None, ca: str | None = None
) -> Client:
    """A client of the node at `url`; arguments and environment as of `forebay.connect`. Opens nothing yet."""
    return Client(url, token=token, patience_s=patience_s, ca=ca)


class _Connection:
    """One connection, one request at a time."""

    def __init__(
        self, calling: Calling, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._calling, self.endpoint = calling, endpoint
        self._reader, self._writer = reader, writer
        self.served = 0
        self.reusable = False

    def close(self) -> None:
        self.reusable = False
        self._writer.transport.abort()

    def abandon(self) -> None:
        """Make the descriptor another file's before the transport takes it out of the poll set: that is then no change,
        since the set knows files, not numbers."""
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), self._writer.get_extra_info("socket").fileno(), inheritable=False)
        self.close()

    def is_quiet(self) -> bool:
        """Whether a kept connection looks alive."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def exchange(self, request: Request, more: Fields) -> Response:
        """Send and read the whole answer. `Stale`, or `Unavailable`/`Corrupt` saying what happened."""
        self.reusable = False
        try:
            return await self._exchange(request, more)
        except TimeoutError:
            self.close()
            raise Unavailable(
                f"the node at {self.endpoint.url} sent nothing for {self._calling.patience_s:g} s: check it "
                "with `forebay status`, then try again"
            ) from None
        except BaseException:
            self.close()
            raise

    async def _exchange(self, request: Request, more: Fields) -> Response:
        head: Head | None = None
        sent = True
        try:
            self._writer.write(build_request(request, self.endpoint.authority, more))
            if request.body_bytes >= EXPECT_BYTES_MIN:
                head = await self._head(request.method)
                sent = head.status == 100
            if sent and (request.source is not None or request.body_bytes >= EXPECT_BYTES_MIN):
                head, sent = None, False
                await self._send(request)
                sent = True
        except (ConnectionError, asyncio.IncompleteReadError):
            if request.body_bytes < EXPECT_BYTES_MIN or head is not None:
                raise self._gone() from None  # else it may have said why it wants no more
        while head is None or head.status < 200:
            try:
                head = await self._head(request.method)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if getattr(error, "partial", b""):
                    raise Unavailable(
                        f"the node at {self.endpoint.url} stopped in the middle of an answer: try again",
                        code=CUT,
                    ) from None
                raise self._gone() from None
        response = Response(head.status, head.headers)
        sink: Sink = Collected(None if head.chunked else head.length)
        if request.sink is not None and response.ok:
            sink = request.sink
            sink.begin(response)
        size = await self._pour(head, sink)
        self.served += 1
        self.reusable = head.keep_alive and sent
        body = sink.value() if isinstance(sink, Collected) else b""
        return Response(head.status, head.headers, body, size)

    async def _send(self, request: Request) -> None:
        source = request.source
        if source is None:
            self._writer.write(request.body)
            await self._within(self._writer.drain())
            return
        done = 0
        while done < source.size_bytes:
            piece = await asyncio.to_thread(_read, source, done)
            self._writer.write(piece)
            await self._within(self._writer.drain())
            done += len(piece)
            if source.progress is not None:
                source.progress(len(piece))

    async def _head(self, method: str) -> Head:
        try:
            data = await self._within(self._reader.readuntil(_HEAD_END))
        except asyncio.LimitOverrunError:
            raise Corrupt(f"the head of the answer is over {limits.HEADER_BYTES_MAX} bytes: check the URL") from None
        return parse_head(data[:-2], method)

    async def _pour(self, head: Head, sink: Sink) -> int:
        chunks = Chunks() if head.chunked else None
        done = 0
        while head.length is None or done < head.length:
            most = PIECE_BYTES if head.length is None else min(PIECE_BYTES, head.length - done)
            try:
                data = await self._within(self._reader.read(most))
            except ConnectionError:
                data = b""
            except TimeoutError as error:
                if error.errno != errno.ETIMEDOUT:  # else the kernel's word: nobody acknowledges
                    raise
                data = b""
            if not data:
                if head.length is None and chunks is None:
                    break
                raise CutOff(cut_after(done, head.length), Response(head.status, head.headers), sink, done)
            data = data if chunks is None else chunks.feed(data)
            copy_into(data, sink)
            done += len(data)
            if chunks is not None and chunks.done:
                break
        return done

    async def _within(self, wait: Awaitable[T]) -> T:
        async with asyncio.timeout(self._calling.patience_s):
            return await wait

    def _gone(self) -> Exception:
        if self.served:
            return Stale()
        return Unavailable(
            f"the node at {self.endpoint.url} closed the connection without an answer: see its log, or run "
            "`forebay doctor`",
            code=CUT,
        )


def _read(source: Source, done: int) -> bytes:
    piece = os.pread(source.fd, min(PIECE_BYTES, source.size_bytes - done), source.offset + done)
    if not piece:
        raise Invalid(
            f"the file ended after {done} of {source.size_bytes} bytes while it was sent: nothing was written; send it "
            "again when nobody changes it"
        )
    return piece


class Client:
    """A node as coroutines; the methods and promises of `forebay.Client`. Close it, or use it with `async with`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        patience_s: float | None = None,
        ca: str | None = None,
    ) -> None:
        self._calling = Calling(url, token, patience_s, ca)
        self._members = members.MembersCache()
        self._idle: dict[Endpoint, list[_Connection]] = {}
        self._closed = False

    @property
    def url(self) -> str:
        return self._calling.endpoint.url

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close kept connections; later calls raise `Closed`. May be called twice."""
        self.drop()
        await asyncio.sleep(0)  # the loop closes the sockets in its next round

    def drop(self) -> None:
        """As `aclose`, without waiting; on the client's loop."""
        self._closed = True
        for connection in self._all_idle():
            connection.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, whose poll set the child shares."""
        self._closed = True
        for connection in self._all_idle():
            connection.abandon()

    def _all_idle(self) -> list[_Connection]:
        idle, self._idle = self._idle, {}
        return [connection for kept in idle.values() for connection in kept]

    async def run(self, flow: flows.Flow[T]) -> T:
        """Drive `flow` to its end; what fails is raised inside the flow, and from here."""
        try:
            request = next(flow)
            while True:
                try:
                    response = await self.send(request)
                except BaseException as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    async def send(self, request: Request) -> Response:
        """One request, one answer."""
        if self._closed:
            raise Closed("the client is closed: make another with connect()")
        if request.of is not None:
            return await self._of_object(request)
        request, more = self._calling.dress(request)
        kept = await self._take(request)
        if kept is not None:
            try:
                return await self._exchange(kept, request, more)
            except Stale:
                if not request.safe_to_repeat:
                    raise Unavailable(
                        f"the node at {self.url} closed the connection before it answered: look whether the request "
                        "took effect, then repeat it"
                    ) from None
        try:
            return await self._exchange(await self._open(request.at), request, more)
        except Stale:
            raise Bug("a fresh connection cannot be stale: please report this") from None

    async def _of_object(self, request: Request) -> Response:
        for _ in range(VERSIONS_MAX):
            try:
                answer = await self.run(self._calling.owners.asked(request))
                return answer if isinstance(answer, Response) else await self._gathered(answer)
            except Precondition:
                if not may_begin_again(request):
                    raise
        raise changing("/".join(request.of or ()))

    async def _gathered(self, striped: Striped) -> Response:
        """Read a large object with a few tasks."""
        if lanes := striped.lanes():
            await self._gather_lanes(striped, lanes)
            return striped.answer()
        pending: deque[tuple[asyncio.Task[None], Piece]] = deque()
        try:
            for piece in striped.pieces:
                pending.append((asyncio.ensure_future(self.run(striped.read(piece))), piece))
                if len(pending) == limits.CLIENT_STRIPES_MAX:
                    await pending[0][0]
                    striped.deliver(pending.popleft()[1])
            while pending:
                await pending[0][0]
                striped.deliver(pending.popleft()[1])
        finally:
            for task, _ in pending:
                task.cancel()
            await asyncio.gather(*(task for task, _ in pending), return_exceptions=True)
        return striped.answer()

    async def _gather_lanes(self, striped: Striped, lanes: list[deque[Piece]]) -> None:
        async def read(lane: deque[Piece]) -> None:
            while lane:
                await self.run(striped.read(lane.popleft()))

        count = min(limits.CLIENT_LANE_STRIPES, max(1, limits.CLIENT_LANES_MAX // len(lanes)))
        tasks = [asyncio.ensure_future(read(lane)) for lane in lanes for _ in range(count)]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, request: Request) -> _Connection | None:
        idle = self._idle.get(request.at or self._calling.endpoint, [])
        if idle and not request.safe_to_repeat:
            await asyncio.sleep(0)  # the loop hears of what was closed meanwhile
        while idle:
            connection = idle.pop()
            if request.safe_to_repeat or connection.is_quiet():
                return connection
            connection.close()
        return None

    async def _exchange(self, connection: _Connection, request: Request, more: Fields) -> Response:
        response = await connection.exchange(request, more)
        idle = self._idle.setdefault(connection.endpoint, [])
        if connection.reusable and len(idle) < limits.CLIENT_IDLE_CONNECTIONS_MAX and not self._closed:
            idle.append(connection)
        else:
            connection.close()
        return response

    async def _open(self, owner: Endpoint | None) -> _Connection:
        endpoint = owner or self._calling.endpoint
        context = self._calling.context() if endpoint.scheme == "https" else None
        try:
            async with asyncio.timeout(min(self._calling.patience_s, limits.CLIENT_CONNECT_TIMEOUT_S)):
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, ssl=context, limit=limits.HEADER_BYTES_MAX
                )
        except OSError as error:
            raise Unavailable(
                f"no node answers at {endpoint.url} ({error or type(error).__name__}): start one with `forebay up`, or "
                "name another with the URL or FOREBAY_URL",
                code="NoNode",
            ) from None
        sock = writer.get_extra_info("socket")
        keep_alive(sock) if owner is None else watch_closely(sock)
        return _Connection(self._calling, endpoint, reader, writer)

    # --- objects -----------------------------------------------------------------------------------------------------
    async def get(
        self, bucket: str, key: str, *, range: RangeSpec | None = None, etag: str = "", member: str | None = None
    ) -> bytes:
        """The bytes of the object, or of a range of it; see `forebay.Client.get`."""
        return (await self.run(flows.get(bucket, key, range=range, etag=etag, member=member)))[1]

    async def members(self, bucket: str, key: str, *, version: str = "") -> Members:
        """The members of a shard as it is now; see `forebay.Client.members`."""
        return await self.run(self._members.read(bucket, key, version))

    async def append_member(
        self, bucket: str, key: str, name: str, data: Data, *, etag: str = "", only_new: bool = False
    ) -> Written:
        """Make `data` one more member of a tar; see `forebay.Client.append_member`."""
        return await self.run(members.append(bucket, key, name, data, etag=etag, only_new=only_new))

    async def get_into(
        self, bucket: str, key: str, buffer: bytearray | memoryview, *, range: RangeSpec | None = None, etag: str = ""
    ) -> flows.Got:
        """The bytes into `buffer`, from its start; `Invalid` if it is too small, with nothing read."""
        return (await self.run(flows.get(bucket, key, sink=IntoBuffer(buffer), range=range, etag=etag)))[0]

    async def get_many(
        self,
        items: Sequence[Wanted],
        *,
        on_error: batchflow.OnError = "raise",
        into: bytearray | memoryview | None = None,
    ) -> Many:
        """Many objects, or ranges of them, in few round trips; see `forebay.Client.get_many`."""
        return await self.run(batchflow.get_many(items, self._calling.endpoint, on_error=on_error, into=into))

    async def head(self, bucket: str, key: str) -> flows.Got:
        """What a read would say of the object, without its bytes."""
        return await self.run(flows.head(bucket, key))

    async def stat(self, bucket: str, key: str, *, revalidate: bool = False) -> ObjectState:
        """What the node knows of the object; with `revalidate` it asks the backend first."""
        return await self.run(flows.stat(bucket, key, revalidate=revalidate))

    async def listing(
        self,
        bucket: str,
        prefix: str = "",
        id: str | None = None,
        refresh: bool = False,
        *,
        versions: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Listing:
        """One listing of everything under `prefix`; see `forebay.Client.listing`."""
        return await self.run(listing(bucket, prefix, id=id, refresh=refresh, versions=versions, progress=progress))

    def hints(self, job: str, listing: Listing) -> HintsAsync:
        """Tell the node what `job` will read; see `forebay.Client.hints`. Nothing is sent before its `future`."""
        self._calling.owners.stay()
        return HintsAsync(self.run, job, listing)

    async def put(
        self,
        bucket: str,
        key: str,
        data: Data,
        *,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
        etag: str = "",
        only_new: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Written:
        """Make `data` the object, whole or not at all; see `forebay.Client.put`."""
        options = PutOptions.of(content_type, metadata, etag, only_new)
        return await self.run(put_data(bucket, key, data, options, progress))

    async def delete(self, bucket: str, key: str, *, etag: str = "") -> None:
        """Delete the object; one that is not there is fine. With `etag`, `Precondition` if it is another version."""
        await self.run(flows.delete(bucket, key, etag=etag))

    async def copy(
        self, source_bucket: str, source_key: str, bucket: str, key: str, *, only_new: bool = False
    ) -> Written:
        """Copy an object inside the node, headers and all; its bytes do not come here."""
        condition = "*" if only_new else None
        return await self.run(flows.copy(CopyCall(source_bucket, source_key, bucket, key, if_none_match=condition)))

    async def list_page(
        self,
        bucket: str,
        prefix: str = "",
        *,
        delimiter: str = "",
        start_after: str = "",
        limit: int = limits.LIST_KEYS_MAX,
    ) -> ListPage:
        """One page of a listing in byte order; go on with `start_after=page.next_after` until that is empty."""
        return await self.run(flows.list_page(bucket, prefix, delimiter, start_after, limit))

    async def list_pages(self, bucket: str, prefix: str = "", *, delimiter: str = "") -> AsyncIterator[ListPage]:
        """All pages of a listing, each fetched when it is asked for."""
        after = ""
        while True:
            page = await self.list_page(bucket, prefix, delimiter=delimiter, start_after=after)
            yield page
            if not page.next_after:
                return
            if page.next_after <= after:
                raise Bug(f"the listing of {bucket}/{prefix} does not move past {after!r}: please report this")
            after = page.next_after

    # --- the node ----------------------------------------------------------------------------------------------------
    async def buckets(self) -> list[Bucket]:
        """All buckets, by name."""
        return await self.run(flows.buckets())

    async def start_job(
        self, verb: JobVerb, bucket: str, prefix: str = "", keys: tuple[str, ...] = (), *, dry_run: bool = False
    ) -> JobState:
        """Start a job on all under `prefix`, or on exactly `keys`; it runs on in the node, whoever watches."""
        if prefix and keys:
            raise Invalid("a job takes a prefix or keys, not both")
        return await self.run(flows.start_job(verb, bucket, prefix, keys, dry_run))

    async def job(self, name: str) -> JobState:
        """How far a job is."""
        return await self.run(flows.job(name))

    async def status(self) -> NodeState:
        """The node's processes, volumes and buckets."""
        return await self.run(flows.status())
