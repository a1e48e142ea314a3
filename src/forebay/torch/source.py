"""The seam from which a dataset reads, the node behind it, and the layer that waits for a node.

Theory. Datasets need three things: the objects under a prefix, the members of a shard, and many pieces of bytes at
once. `NodeSource` gets them from a node through the client. `Patient` is the only layer that retries: a training job
has hours, so it waits up to `patience_s` for a node that restarts or is busy, and reports how long. It repeats only
what failed. Between the two stands the way past a node that is gone (`switch.py`).

A source works in every process: it pickles as the arguments of its client, opens nothing before its first use, and the
client forgets its parent's sockets after a fork.

Invariants. (1) `get_many` gives as many values as items, in their order. (2) It waits only for errors after which the
same request can succeed; the caller gets the others.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from forebay.client.hinting import Hints
from forebay.client.patience import WAITED_FOR, with_patience
from forebay.client.sync import Client
from forebay.core.errors import Closed, ForebayError, Invalid, NotFound, NotSupported, Precondition
from forebay.core.formats.listing import Listing
from forebay.core.formats.members import MemberIndex
from forebay.core.machines.copies import SHARE as COPIES_SHARE
from forebay.core.machines.hints import HintsState
from forebay.core.messages.batch import Item
from forebay.core.types import Bucket, check_bucket_name
from forebay.core.versions import whose_versions
from forebay.ports import clock

PATIENCE_S = 300.0  # a node that restarts is back in seconds, one whose machine restarts in minutes
ANSWER_S = 2.0  # for a node to say whether it is ready

Bytes = bytes | memoryview
T = TypeVar("T")


class Answers(NamedTuple):
    """For each item its bytes or its error, in order; `cold`: how many were not at the node when asked for; `direct`:
    how many were read past it."""

    values: list[Bytes | ForebayError]
    cold: int = 0
    direct: int = 0


class Telling(Protocol):
    """One job's hints at a node: `forebay.client.hinting.Hints`."""

    def future(self, accesses: Any, start: int | None = None, use_bytes: int = 0) -> Any:
        """From access `start` on these are read: rows of (object, first block, end block), uint32; of each block
        `use_bytes` on average (0: all)."""
        ...

    def at(self, position: int) -> Any:
        """The accesses before `position` are consumed."""
        ...

    def close(self) -> None:
        """The job is over."""
        ...


class Source(Protocol):
    """What a dataset reads from. Errors are kinds of `core.errors`."""

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        """The listing of all objects under `prefix`; with `id` that one, else `Precondition` says what changed."""
        ...

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        """What is in a shard with that etag, or in that version of it (`Item.version`); `Corrupt` if it is none, or is
        cut short."""
        ...

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> int | None:
        """How many bytes of a bucket the node can keep, or with `cluster` all nodes together; None if nobody says."""
        ...

    def get_many(self, items: Sequence[Item]) -> Answers:
        """The bytes of all items; what is wrong with one of them stands in its place."""
        ...

    def hints(self, job: str, listing: Listing) -> Telling | None:
        """A way to tell what `job` will read of the listing's objects, safe to use from another thread; None if there
        is nobody to tell."""
        ...


class Facts(msgspec.Struct):
    """What one fetch was spent on; see `stall.py`. `index_s`: finding out what there is to fetch. `ended`, if set, ends
    waiting. `epoch`: the one that the samples are for; None where nobody said. `unlocked`: threads can decode at
    once. `skipped` are the names of samples that were left out, and `gaps` where those of the last fetch stood."""

    index_s: float = 0.0
    read_s: float = 0.0
    busy_s: float = 0.0
    decode_s: float = 0.0
    items: int = 0
    cold: int = 0
    direct: int = 0
    size_bytes: int = 0
    skipped: list[str] = []
    gaps: list[int] = []
    ended: threading.Event | None = None
    epoch: int | None = None
    unlocked: bool = False


class Patient:
    """A source that is waited for."""

    def __init__(self, source: Source, patience_s: float = PATIENCE_S) -> None:
        self.source = source
        self.patience_s = patience_s

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        return self._waiting(lambda: self.source.listing(bucket, prefix, id), Facts())

    def members(self, bucket: str, key: str, etag: str, facts: Facts) -> MemberIndex:
        return self._waiting(lambda: self.source.members(bucket, key, etag), facts)

    def get_many(self, items: Sequence[Item], facts: Facts) -> list[Bytes | ForebayError]:
        """As `Source.get_many`; errors that remain are those that waiting does not mend. `Unavailable` when the node,
        or what is behind it, has not come back in time."""
        began_s = clock.monotonic_s()
        values: list[Any] = []
        wanted = list(range(len(items)))

        def attempt() -> None:
            nonlocal wanted, values
            answers = self.source.get_many([items[n] for n in wanted] if values else items)
            facts.cold += answers.cold
            facts.direct += answers.direct
            if not values:
                values = answers.values
            else:
                for number, value in zip(wanted, answers.values, strict=True):
                    values[number] = value
            wanted = [number for number in wanted if isinstance(values[number], WAITED_FOR)]
            if wanted:
                error = values[wanted[0]]
                assert isinstance(error, ForebayError), "chosen for being one"
                raise error

        busy_s = facts.busy_s
        self._waiting(attempt, facts)
        assert len(values) == len(items), "a source answers every item"
        facts.items += len(items)
        facts.read_s += clock.monotonic_s() - began_s - (facts.busy_s - busy_s)
        return values

    def _waiting(self, attempt: Callable[[], T], facts: Facts) -> T:
        tried_s = clock.monotonic_s()

        def timed() -> T:
            nonlocal tried_s
            tried_s = clock.monotonic_s()
            return attempt()

        def pause(delay_s: float, _: ForebayError) -> None:
            _sleep(delay_s, facts)
            facts.busy_s += clock.monotonic_s() - tried_s

        advice = "when the node is back, start the job again from its last saved state; nothing is lost or read twice"
        return with_patience(timed, self.patience_s, pause, advice)


def _sleep(delay_s: float, facts: Facts) -> None:
    if (facts.ended or threading.Event()).wait(delay_s):
        raise Closed("the loader was closed while it waited for the node")


class NodeSource:
    """A node, through a client of its own, which is closed with it. `url` as of `forebay.connect`, or the client."""

    def __init__(self, url: str | Client | None = None) -> None:
        self._own(url if isinstance(url, Client) else Client(url))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_client" in state:  # none in what stands for a node that is gone
            self._own(state["_client"])

    def _own(self, client: Client) -> None:
        """No `__del__`: in a cycle, as exceptions make them, that may come after the sockets' own end, which warns."""
        self._client = client
        weakref.finalize(self, client.close).atexit = False  # then the kernel closes all

    @property
    def url(self) -> str:
        return self._client.url

    def answers(self) -> bool:
        """Whether the node says, within ANSWER_S, that it is ready."""
        try:
            with self._client.at(self.url, ANSWER_S) as client:
                return client.ready()
        except ForebayError:
            return False

    def nodes(self) -> list[str]:
        """URLs of the nodes of its cluster that can be asked instead; none for a node alone."""
        found = self._client.node_map().nodes
        return [node.endpoint for node in found] if len(found) > 1 else []

    def at(self, url: str) -> NodeSource:
        """Another node of its cluster."""
        return NodeSource(self._client.at(url))

    def settings(self, bucket: str) -> Bucket:
        """A bucket's settings, without its secrets."""
        return self._client.bucket(bucket)

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        return self._client.listing(bucket, prefix, id=id or None)

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> int:
        """As the volumes and the bucket's quota are now, whatever lies there. Of a cluster, what its nodes weigh (their
        capacities, in coarse steps), less the room that always belongs to copies."""
        nodes = self._client.node_map().nodes if cluster else []
        if len(nodes) > 1:
            room_bytes = int(sum(node.weight for node in nodes) * (1 - COPIES_SHARE))
        else:
            volumes = self._client.status().volumes
            room_bytes = sum(volume.capacity_bytes for volume in volumes if volume.state in ("ok", "full", "stalled"))
        quota_bytes = self.settings(bucket).quota_bytes
        return room_bytes if quota_bytes is None else min(room_bytes, quota_bytes * max(1, len(nodes)))

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        index = self._client.members(bucket, key, version=version).index
        if etag and index.etag != etag:
            raise Precondition(f"{bucket}/{key} changed since the dataset was listed: start anew")
        return index

    def get_many(self, items: Sequence[Item]) -> Answers:
        many = self._client.get_many(items, on_error="report")
        return Answers(list(many), many.cold)

    def hints(self, job: str, listing: Listing) -> Telling:
        return _Hints(copy.copy(self._client), job, listing)


class _Hints(Hints):
    """Hints over a client of their own, so that no worker is forked while a thread holds one of its locks."""

    def __init__(self, client: Client, job: str, listing: Listing) -> None:
        super().__init__(client.run, job, listing)
        self._client = client

    def future(self, accesses: Any, start: int | None = None, use_bytes: int = 0) -> HintsState:
        try:
            return super().future(accesses, start, use_bytes)
        except NotFound as error:
            if error.code != "NoSuchListing":
                raise
        if whose_versions(self.listing.bucket):
            raise NotSupported("the node has that listing of versions no more, and objects may have newer ones by now")
        # it made room for the data: the node lists again, and has no other now
        self._client.listing(self.listing.bucket, self.listing.prefix, id=self.listing.id)
        return super().future(accesses, start, use_bytes)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._client.close()


def parse_place(place: str) -> tuple[str, str]:
    """Bucket and prefix of `bucket/prefix`, `forebay://bucket/prefix` or `s3://bucket/prefix`; else `Invalid`."""
    if not isinstance(place, str):
        raise Invalid(
            f"a place is one 'bucket/prefix', not {place!r}: make a dataset for each, and of these a "
            "Mixture(datasets, repeats=[1, …]), which reads each once an epoch"
        )
    text = place
    for scheme in ("forebay://", "s3://"):
        text = text.removeprefix(scheme)
    bucket, _, prefix = text.partition("/")
    if "://" in text or not bucket:
        raise Invalid(f"{place!r} does not name a bucket: write 'bucket/prefix', 'forebay://…' or 's3://…'")
    return check_bucket_name(bucket), prefix
