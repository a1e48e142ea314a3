"""The blocking client: drives the flows over a small pool of connections.

Theory. For each request of a flow the client takes an idle connection or opens one, sends, and returns the answer.
Nothing is opened before the first request. Connections belong to the process that opened them. A forked child finds
another pid, forgets the parent's sockets and opens its own, so a client made before a `DataLoader` forks works in each
worker.

Retry. A request is sent again only if it was certainly not heard: once, when a kept connection turns out closed before
any byte of an answer (`Stale`), and only if repeating is safe. Before any other request a kept connection is tested.
Of an object's bytes that were cut the rest is asked for (`resuming.py`).

Invariants. (1) A connection is in the pool or used by one thread, never both. (2) A connection whose answer was not
read to its end never returns to the pool.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from forebay.client import batchflow, exposition, flows, members
from forebay.client.calling import DEFAULT_URL as DEFAULT_URL
from forebay.client.calling import Calling, Fields
from forebay.client.connection import Connection, Stale, parse_url
from forebay.client.door import HostDoor
from forebay.client.download import Downloaded, download
from forebay.client.files import ObjectReader, ObjectWriter, open_object
from forebay.client.hinting import Hints
from forebay.client.listing import listing
from forebay.client.many import Many
from forebay.client.members import Members
from forebay.client.resuming import may_begin_again
from forebay.client.shared import SharedMemory
from forebay.client.sinks import IntoBuffer, IntoFd
from forebay.client.stripes import VERSIONS_MAX, Piece, Striped, changing
from forebay.client.upload import Data, PutOptions, put_data
from forebay.core import limits
from forebay.core.errors import Bug, Closed, Invalid, Precondition, Unavailable
from forebay.core.formats.listing import Listing
from forebay.core.formats.manifest import Manifest, WarmObjects
from forebay.core.formats.members import MemberIndex
from forebay.core.messages.batch import Wanted
from forebay.core.messages.calls import CachedPage, CopyCall, JobState, JobVerb, ManifestCall, ObjectState, Written
from forebay.core.messages.http1 import Endpoint, Request, Response
from forebay.core.messages.node_state import ClusterNode, NodeMap, NodeState, Wish
from forebay.core.metrics import Snapshot
from forebay.core.ranges import end_of_stripe
from forebay.core.types import Bucket, ListPage, RangeSpec
from forebay.core.volumes import LostObject, VolumeState

if TYPE_CHECKING:
    from forebay.client.connection import Trust

T = TypeVar("T")


def connect(
    url: str | None = None, *, token: str | None = None, patience_s: float | None = None, ca: str | None = None
) -> Client:
    """A client of the node at `url`, or at `FOREBAY_URL`, or on this host's default port. Opens nothing yet.

    `token` (or `FOREBAY_TOKEN`, or what the file `FOREBAY_TOKEN_FILE` holds at the time) is the bearer token, for nodes
    with identities. `patience_s` bounds every wait for the node where the limits of `core/limits.py`
    are too long. `ca` (or `FOREBAY_CA`) is a PEM file with the certificates that vouch for a node with https; without
    it, those this machine trusts. `Invalid` if the URL is malformed.
    """
    return Client(url, token=token, patience_s=patience_s, ca=ca)


def _remake(url: str, token: str | None, patience_s: float | None, ca: str | None) -> Client:
    return Client(url, token=token, patience_s=patience_s, ca=ca)


def driven(flow: flows.Flow[T], send: Callable[[Request], Response]) -> T:
    """The result of `flow`, whose requests `send` answers."""
    try:
        request = next(flow)
        while True:
            try:
                response = send(request)
            except BaseException as error:
                request = flow.throw(error)
            else:
                request = flow.send(response)
    except StopIteration as end:
        result: T = end.value
        return result


def _deliver(striped: Striped, done: Future[None], piece: Piece) -> None:
    done.result()
    striped.deliver(piece)


class Client:
    """A node as blocking calls. Share it between threads, fork, pickle it; close it, or use it with `with`.

    Every method raises `core.errors` kinds; `Unavailable` with code `NoNode` when nothing answers at the URL.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        patience_s: float | None = None,
        ca: str | None = None,
        trust: Trust | None = None,
    ) -> None:
        self._calling = Calling(url, token, patience_s, ca, trust)
        self._made_of = (self._calling.endpoint.url, self._calling.given_token, patience_s, self._calling.ca)
        self._given_trust = trust
        self.endpoint = self._calling.endpoint
        self._members = members.MembersCache()
        self._idle: dict[Endpoint, list[Connection]] = {}  # list.append and list.pop are atomic: threads need no lock
        self._pid = os.getpid()
        self._closed = False
        self._door: HostDoor | None = None
        self._first_door: dict[str, HostDoor] = {}

    @property
    def url(self) -> str:
        return self.endpoint.url

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}, {sum(map(len, self._idle.values()))} idle>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given_trust is not None:
            raise TypeError("a client with its own `trust` cannot be pickled: give it `ca` instead")
        return _remake, self._made_of  # the token goes along: another process has the same rights

    def at(self, url: str, patience_s: float | None = None) -> Client:
        """A client of another node of this one's cluster, with the same token and trust. `Invalid` if `url` has another
        scheme: the token is for this one's."""
        if parse_url(url).scheme != self.endpoint.scheme:
            raise Invalid(f"the node at {url} is not reached as {self.url} is: give both https, or neither")
        _, token, own_patience_s, ca = self._made_of
        return Client(url, token=token, patience_s=patience_s or own_patience_s, ca=ca, trust=self._given_trust)

    def close(self) -> None:
        """Close kept connections; later calls raise `Closed`. May be called twice."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close kept connections, and files of the host door, and stay usable."""
        if self._door is not None:
            self._door.close()
        for idle in list(self._idle.values()):
            while idle:
                idle.pop().close()

    @property
    def door(self) -> HostDoor:
        """The way to objects' files where the node is on this host (see `door.py`); where it is not, it gives None."""
        door = self._door
        if door is None:
            made = HostDoor(
                lambda: self.run(flows.door()),
                lambda: self._calling.token,
                known_members=self._known_members,
                read_members=lambda bucket, key: self.members(bucket, key).index,
            )
            # Threads may come at once: all use one of theirs, or a door with a connection would be forgotten open.
            door = self._door = self._first_door.setdefault("", made)
        return door

    def _known_members(self, bucket: str, key: str) -> MemberIndex | None:
        known = self._members.known(bucket, key)
        return known.index if known is not None else None

    # --- the driver --------------------------------------------------------------------------------------------------
    def run(self, flow: flows.Flow[T]) -> T:
        """Drive `flow` to its end and return its result. A failed request is raised inside the flow, and from here; so
        is Ctrl-C, and what a sink or a progress function raised, so that a flow can undo what it began."""
        return driven(flow, self.send)

    def send(self, request: Request) -> Response:
        """One request, one answer."""
        if request.of is not None:
            return self._of_object(request)
        request, more = self._calling.dress(request)
        kept = self._take(request)
        if kept is not None:
            try:
                return self._exchange(kept, request, more)
            except Stale:
                if not request.safe_to_repeat:
                    raise Unavailable(
                        f"the node at {self.url} closed the connection before it answered: look whether the request "
                        "took effect (`forebay job ls`), then repeat it"
                    ) from None
        try:
            return self._exchange(self._opened(request), request, more)
        except Stale:
            raise Bug("a fresh connection cannot be stale: please report this") from None

    def _of_object(self, request: Request) -> Response:
        for _ in range(VERSIONS_MAX):
            try:
                answer = self.run(self._calling.owners.asked(request))
                return answer if isinstance(answer, Response) else self._gathered(answer)
            except Precondition:
                if not may_begin_again(request):
                    raise
        raise changing("/".join(request.of or ()))

    def _gathered(self, striped: Striped) -> Response:
        """Read a large object with a few threads."""
        if lanes := striped.lanes():
            self._gather_lanes(striped, lanes)
            return striped.answer()
        pending: deque[tuple[Future[None], Piece]] = deque()
        with ThreadPoolExecutor(limits.CLIENT_STRIPES_MAX, "forebay-stripe") as pool:
            try:
                for piece in striped.pieces:
                    pending.append((pool.submit(self.run, striped.read(piece)), piece))
                    if len(pending) == limits.CLIENT_STRIPES_MAX:
                        _deliver(striped, *pending.popleft())
                while pending:
                    _deliver(striped, *pending.popleft())
            except BaseException:
                striped.stop()
                raise
        return striped.answer()

    def _gather_lanes(self, striped: Striped, lanes: list[deque[Piece]]) -> None:
        def read(lane: deque[Piece]) -> None:
            while not striped.stopped:
                try:
                    piece = lane.popleft()
                except IndexError:
                    return  # the lane's other thread took the last
                self.run(striped.read(piece))

        workers = min(len(lanes) * limits.CLIENT_LANE_STRIPES, limits.CLIENT_LANES_MAX)
        with ThreadPoolExecutor(workers, "forebay-stripe") as pool:
            under_way = [pool.submit(read, lane) for _ in range(limits.CLIENT_LANE_STRIPES) for lane in lanes]
            try:
                for done in as_completed(under_way):
                    done.result()
            except BaseException:
                striped.stop()
                raise

    def _exchange(self, connection: Connection, request: Request, more: Fields) -> Response:
        response = connection.exchange(request, more)
        self.give_back(connection)
        return response

    def begin(self, request: Request) -> tuple[Connection, Response, bytes]:
        """Send a GET whose body is taken from the connection as somebody asks for it (`Connection.begin`); then
        `give_back` the connection, or close it."""
        if request.of is None:
            return self._begin(request)
        begun: list[tuple[Connection, Response, bytes]] = []

        def send(one: Request) -> Response:
            if one.target != request.target:
                return self.send(one)
            while begun:  # what an owner refused
                self.give_back(begun.pop()[0])
            begun.append(self._begin(one))
            return begun[0][1]

        driven(self._calling.owners.asked(request, may_split=False), send)
        return begun[0]

    def _begin(self, request: Request) -> tuple[Connection, Response, bytes]:
        request, more = self._calling.dress(request)
        kept = self._take(request)
        if kept is not None:
            try:
                return kept, *kept.begin(request, more)
            except Stale:
                pass
        connection = self._opened(request)
        return connection, *connection.begin(request, more)

    def _opened(self, request: Request) -> Connection:
        connection = Connection(self._at(request), self._calling.patience_s, self._calling.context)
        if request.at is not None:
            connection.watch_closely()
        return connection

    def _at(self, request: Request) -> Endpoint:
        return request.at or self.endpoint

    def stretch(self, bucket: str, start: int, end: int) -> int:
        """How far one node should be asked for the bytes [start, end) of an object: to what it holds of it."""
        return min(end, end_of_stripe(start)) if self._calling.owners.is_spread(bucket) else end

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request, if it can be used again."""
        idle = self._idle.setdefault(connection.endpoint, [])
        room = len(idle) < limits.CLIENT_IDLE_CONNECTIONS_MAX and self._pid == os.getpid()
        if connection.reusable and room and not self._closed:
            idle.append(connection)
        else:
            connection.close()

    def _take(self, request: Request) -> Connection | None:
        if self._closed:
            raise Closed("the client is closed: make another with connect()")
        if self._pid != os.getpid():  # a forked child: the sockets are the parent's
            inherited, self._idle, self._pid = self._idle, {}, os.getpid()
            for connection in chain.from_iterable(inherited.values()):
                connection.close()  # closes the child's descriptor only
        idle = self._idle.get(self._at(request), [])
        while True:
            try:
                connection = idle.pop()
            except IndexError:
                return None
            if request.safe_to_repeat or connection.is_quiet():
                return connection
            connection.close()

    # --- objects -----------------------------------------------------------------------------------------------------
    def get(
        self, bucket: str, key: str, *, range: RangeSpec | None = None, etag: str = "", member: str | None = None
    ) -> bytes:
        """The bytes of the object, or of a range of it. With `etag`, `Precondition` if it is another version now.

        With `member` they are those of one file in a shard (tar, zip); `NotFound` (`NoSuchMember`) if it has none.
        """
        return self.run(flows.get(bucket, key, range=range, etag=etag, member=member))[1]

    def members(self, bucket: str, key: str, *, version: str = "") -> Members:
        """The members of a shard as it is now, or of a version that its backend keeps (its id). Kept, and only
        confirmed by the node the next time.

        `Corrupt` for what is no shard, or was cut; `NotSupported` for one that the node cannot read.
        """
        return self.run(self._members.read(bucket, key, version))

    def append_member(
        self, bucket: str, key: str, name: str, data: Data, *, etag: str = "", only_new: bool = False
    ) -> Written:
        """Make `data` (bytes, a path, or an open binary file) one more member of a tar, which is made if there is none.

        In buckets written `back` or `local`, else `NotSupported`. Whole or not at all, as a new version of the tar; of
        several at once none is lost. With `etag` only if the tar is that version, with `only_new` only if there is
        none; else `Precondition`. It may cost a copy of the tar: append what is large, or write shards yourself.
        """
        try:
            return self.run(members.append(bucket, key, name, data, etag=etag, only_new=only_new))
        finally:
            self.changed(bucket, key)

    def get_into(
        self, bucket: str, key: str, buffer: bytearray | memoryview, *, range: RangeSpec | None = None, etag: str = ""
    ) -> flows.Got:
        """The bytes into `buffer`, from its start; `Invalid` if it is too small, with nothing read."""
        return self.run(flows.get(bucket, key, sink=IntoBuffer(buffer), range=range, etag=etag))[0]

    def get_many(
        self,
        items: Sequence[Wanted],
        *,
        on_error: batchflow.OnError = "raise",
        into: bytearray | memoryview | None = None,
    ) -> Many:
        """Many objects, ranges or members of shards in few round trips, in the order asked.

        An item is an `Item` or a tuple of its fields: (bucket, key), (bucket, key, start, end), … (see
        `core/messages/batch.py`). Results are views of the memory they were received into, which each of them keeps
        alive: `bytes(result)` to keep one for long. With `into` the answer is received there if it fits (it takes 24
        bytes for each item beside its own), and results are valid until you use that memory again. Where the node is on
        this host, its files are read instead.

        The first error is raised; with `on_error="report"` errors stand in their items' places instead. What concerns
        the whole request (no node, a wrong token) is always raised. Items whose bytes had not come when a connection
        was cut are asked for once more.
        """
        host = self.door.read_many
        return self.run(batchflow.get_many(items, self.endpoint, host=host, on_error=on_error, into=into))

    def get_to_fd(
        self,
        bucket: str,
        key: str,
        fd: int,
        *,
        range: RangeSpec | None = None,
        etag: str = "",
        progress: Callable[[int], None] | None = None,
    ) -> flows.Got:
        """The bytes written to `fd` in order; `progress` is called with the size of each piece written."""
        return self.run(flows.get(bucket, key, sink=IntoFd(fd, progress), range=range, etag=etag))[0]

    def download(
        self, bucket: str, key: str, path: str, *, progress: Callable[[int, int], None] | None = None
    ) -> Downloaded:
        """The whole object to the file `path`, atomically; a download cut short is resumed (see `download.py`)."""
        return download(self.run, bucket, key, path, progress)

    @overload
    def open(self, bucket: str, key: str, mode: Literal["rb"] = "rb", *, etag: str = "") -> ObjectReader: ...
    @overload
    def open(
        self, bucket: str, key: str, mode: Literal["rb"] = "rb", *, buffering: int, etag: str = ""
    ) -> io.BufferedReader | ObjectReader: ...
    @overload
    def open(
        self,
        bucket: str,
        key: str,
        mode: Literal["wb", "xb"],
        *,
        etag: str = "",
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectWriter: ...
    def open(
        self,
        bucket: str,
        key: str,
        mode: str = "rb",
        *,
        buffering: int = 0,
        etag: str = "",
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectReader | ObjectWriter | io.BufferedReader:
        """The object as a binary file (see `files.py`).

        `rb`: seekable, pinned to the version it has now, unbuffered, or with `buffering` bytes through an
        `io.BufferedReader`. `wb`: what is written becomes the object when it is closed, or nothing does; `xb`: only if
        there is none. With `etag`, `Precondition` if it is another version, when it is opened or written.
        """
        return open_object(self, bucket, key, mode, buffering, etag, content_type, metadata)

    def changed(self, bucket: str, key: str) -> None:
        """This process has changed the object: what is open of it is another version."""
        if self._door is not None:
            self._door.forget(bucket, key)

    def put(
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
        """Make `data` the object: bytes, a path, or an open binary file, which is read to its end.

        Whole or not at all: after an error the object is what it was. With `etag` only if the object is that version
        now, with `only_new` only if there is none; else `Precondition`. `progress` is called with the size of each
        piece sent. `Busy` when the bucket has as many unwritten bytes as it may: try again later. A file above 5 GiB
        goes in parts: if that was cut off, put the file again, and what the node lacks is sent.
        """
        try:
            return self.run(
                put_data(bucket, key, data, PutOptions.of(content_type, metadata, etag, only_new), progress)
            )
        finally:
            self.changed(bucket, key)

    def put_shared(self, bucket: str, key: str, memory: SharedMemory, size_bytes: int, sums: Sequence[int]) -> Written:
        """As `put`, of the first `size_bytes` of `memory`; `sums` are the xxh3-64 of each 4 MiB of them. A node on this
        host reads the memory itself, and refuses what does not match (`Invalid`, `BadDigest`); another is sent it."""
        written: Written | None = None
        try:
            if size_bytes > limits.ETAG_MD5_BYTES_MAX:
                written = self.door.hand_over(bucket, key, memory, size_bytes, sums, self._calling.patience_s)
            return written or self.put(bucket, key, memory.view(size_bytes))
        finally:
            self.changed(bucket, key)

    def delete(self, bucket: str, key: str, *, etag: str = "") -> None:
        """Delete the object; one that is not there is fine. With `etag`, `Precondition` if it is another version."""
        try:
            self.run(flows.delete(bucket, key, etag=etag))
        finally:
            self.changed(bucket, key)

    def copy(self, source_bucket: str, source_key: str, bucket: str, key: str, *, only_new: bool = False) -> Written:
        """Copy an object inside the node, headers and all; its bytes do not come here."""
        condition = "*" if only_new else None
        try:
            return self.run(flows.copy(CopyCall(source_bucket, source_key, bucket, key, if_none_match=condition)))
        finally:
            self.changed(bucket, key)

    def head(self, bucket: str, key: str) -> flows.Got:
        """What a read would say of the object, without its bytes."""
        return self.run(flows.head(bucket, key))

    def stat(self, bucket: str, key: str, *, revalidate: bool = False) -> ObjectState:
        """What the node knows of the object; with `revalidate` it asks the backend first."""
        return self.run(flows.stat(bucket, key, revalidate=revalidate))

    def listing(
        self,
        bucket: str,
        prefix: str = "",
        id: str | None = None,
        refresh: bool = False,
        *,
        versions: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Listing:
        """One listing of everything under `prefix`, the same for every process that asks within the bucket's freshness.

        The node lists, in parallel, and keeps what it listed. With `id` exactly that listing, else `Precondition` says
        what changed; with `refresh` from a listing that begins now. `progress` hears how many objects were found.
        With `versions` it is of the newest version that the backend keeps of each object, as it is now: `versions=` of
        a dataset takes that. `NotSupported` where there are none.
        """
        return self.run(listing(bucket, prefix, id=id, refresh=refresh, versions=versions, progress=progress))

    def hints(self, job: str, listing: Listing) -> Hints:
        """Tell the node what `job` will read of the listing's objects: it fetches ahead, and keeps what is needed
        soonest. Nothing is sent before its `future`. Close it when the job ends. From now on this client reads at its
        own node."""
        self._calling.owners.stay()
        return Hints(self.run, job, listing)

    def list_page(
        self,
        bucket: str,
        prefix: str = "",
        *,
        delimiter: str = "",
        start_after: str = "",
        limit: int = limits.LIST_KEYS_MAX,
    ) -> ListPage:
        """One page of a listing in byte order; go on with `start_after=page.next_after` until that is empty."""
        return self.run(flows.list_page(bucket, prefix, delimiter, start_after, limit))

    def list_pages(self, bucket: str, prefix: str = "", *, delimiter: str = "") -> Iterator[ListPage]:
        """All pages of a listing, each fetched when it is asked for."""
        after = ""
        while True:
            page = self.list_page(bucket, prefix, delimiter=delimiter, start_after=after)
            yield page
            if not page.next_after:
                return
            if page.next_after <= after:
                raise Bug(f"the listing of {bucket}/{prefix} does not move past {after!r}: please report this")
            after = page.next_after

    def cached_page(
        self,
        bucket: str,
        prefix: str = "",
        *,
        delimiter: str = "",
        start_after: str = "",
        limit: int = limits.LIST_KEYS_MAX,
    ) -> CachedPage:
        """As `list_page`, of what the node's index knows; the backend is not asked."""
        return self.run(flows.cached_page(bucket, prefix, delimiter, start_after, limit))

    # --- buckets -----------------------------------------------------------------------------------------------------
    def buckets(self) -> list[Bucket]:
        """All buckets, by name."""
        return self.run(flows.buckets())

    def bucket(self, name: str) -> Bucket:
        """One bucket's settings; secrets in its options read `***`."""
        return self.run(flows.bucket(name))

    def bucket_put(self, bucket: Bucket, *, check: bool = True, force: bool = False, here: bool = False) -> Bucket:
        """Create or change a bucket; with `check` only if its backend answers and, if it is written back, takes a
        write. `force` gives up what only the node has where that is in the way; without it that is `Busy` or
        `Exists`. In a cluster at all nodes, unless `here`."""
        return self.run(flows.bucket_put(bucket, check=check, force=force, here=here))

    def bucket_delete(self, name: str, *, force: bool = False, here: bool = False) -> None:
        """Forget a bucket and evict what is cached of it; the backend keeps everything. `force` and `here` as in
        `bucket_put`."""
        self.run(flows.bucket_delete(name, force=force, here=here))

    def bucket_check(self, name: str) -> None:
        """Return if the bucket's backend answers the node with its credentials, else raise the kind that says why."""
        self.run(flows.bucket_check(name))

    # --- jobs --------------------------------------------------------------------------------------------------------
    def start_job(
        self,
        verb: JobVerb,
        bucket: str,
        prefix: str = "",
        keys: tuple[str, ...] = (),
        *,
        dry_run: bool = False,
        share: bool = False,
    ) -> JobState:
        """Start a job on all under `prefix`, or on exactly `keys`; it runs on in the node, whoever watches. With
        `share` it fetches only what is at home at this node of a cluster: ask all of them."""
        if prefix and keys:
            raise Invalid("a job takes a prefix or keys, not both")
        return self.run(flows.start_job(verb, bucket, prefix, keys, dry_run, share))

    def job(self, name: str) -> JobState:
        """How far a job is."""
        return self.run(flows.job(name))

    def jobs(self) -> list[JobState]:
        """The jobs the node remembers, newest first."""
        return self.run(flows.jobs())

    def job_cancel(self, name: str) -> JobState:
        """Stop a job; what it has done stays done."""
        return self.run(flows.job_cancel(name))

    # --- node --------------------------------------------------------------------------------------------------------
    def status(self) -> NodeState:
        """The node's processes, volumes and buckets."""
        return self.run(flows.status())

    def wish(self, node: str, word: Wish) -> ClusterNode:
        """Say what a node of the cluster shall be: named by its id, the beginning of its id, or its address."""
        return self.run(flows.wish(node, word))

    def warm(self) -> WarmObjects:
        """What this node has cached of buckets that have a backend, what was used last first."""
        return self.run(flows.warm())

    def manifest(self, bucket: str, key: str) -> Manifest:
        """What a cluster that went to zero left in a bucket. `Invalid` for an object that is none."""
        return self.run(flows.manifest(bucket, key))

    def manifest_put(self, bucket: str, key: str, manifest: Manifest, *, joined: bool = False) -> Manifest:
        """Write what a cluster leaves, as it is written: `Exists` while a node is not gone, or where another object is.
        `joined`: with what the manifest there says of nodes that have stopped since. May be called again."""
        return self.run(flows.manifest_put(ManifestCall(bucket, key, manifest, joined)))

    def stop_node(self) -> None:
        """End the node. `Exists` if it is not gone from its cluster: what it alone has would not be served any more."""
        self.run(flows.stop())

    def lost(self, bucket: str, prefix: str = "") -> Iterator[LostObject]:
        """Objects that were acknowledged, that no backend has, and whose bytes are gone."""
        after = ""
        while page := self.run(flows.lost(bucket, prefix, after)):
            yield from page
            after = page[-1].key

    def lost_give_up(self, bucket: str, prefix: str = "", keys: tuple[str, ...] = ()) -> list[LostObject]:
        """Give up lost objects under `prefix`, or `keys`: a page of them; those that were. Call it until it is
        empty."""
        return self.run(flows.lost_give_up(bucket, prefix, keys))

    def volume_add(self, path: str) -> VolumeState:
        """Have the node make a volume at `path`, or take in the one that lies there, when it starts the next time."""
        return self.run(flows.volume_add(path))

    def volume_give_up(self, name: str, *, force: bool = False) -> VolumeState:
        """Give up a volume (by id or path) that is not in use: what it owed is lost, but for what other nodes of a
        cluster keep and send back first. How it was. `Unavailable` if not all of that comes back, unless `force`."""
        return self.run(flows.volume_give_up(name, force))

    def node_map(self) -> NodeMap:
        """The versioned list of nodes."""
        return self.run(flows.node_map())

    def metrics_text(self) -> str:
        """The metrics as the node prints them."""
        return self.run(flows.metrics_text())

    def metrics(self) -> Snapshot:
        """The metrics as values; see `exposition.since` for rates."""
        return exposition.parse(self.metrics_text())

    def ready(self) -> bool:
        """Whether the node answers and says it is ready."""
        return self.run(flows.ready()).ok
