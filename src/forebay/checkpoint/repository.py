"""The checkpoints of one run: listing, choosing, verifying, pruning and copying them.

Theory. Everything is asked of the bucket each time: the manifests that there are, and what lies below data/. Nothing is
remembered, so any process on any machine sees the same checkpoints. A manifest is small and a listing of manifests is
one request, so `candidates` costs one request and one more for each checkpoint that is looked at.

What a checkpoint is made of may be gone though its manifest is there: a tier that was lost after it flushed the
manifest and before it flushed a blob. So a checkpoint is chosen only when a listing shows every object with its size,
and its bytes count only when their digests match.

A bucket may be away for hours while the node goes on: then saves and restores go by what the node knows and has. It
knows what was saved through it and not evicted since. Pruning waits until the bucket is back.

Pruning deletes the manifest first, then its data: a checkpoint that is half deleted does not exist. It also sweeps the
data of saves that were cut off, once a newer checkpoint exists.

Invariants. (1) `prune` never deletes the newest checkpoint that the bucket has whole, nor any newer one. (2) `commit`
never replaces a manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from forebay.checkpoint.stream import Stream, by_threads, cells
from forebay.client.connection import CUT
from forebay.core import checkpoint as form
from forebay.core.checkpoint import Index, Manifest
from forebay.core.errors import Busy, Corrupt, ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.goodput import Life
from forebay.core.types import check_bucket_name

if TYPE_CHECKING:
    from forebay.client.sync import Client
    from forebay.core.messages.calls import CachedEntry

NODE_AWAY = (CUT, "NoNode")  # codes of errors that say nothing about the bucket
NEWER_MAX = 5  # checkpoints that one restore loses to pruning before it gives up
Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Damage(NamedTuple):
    """Why a checkpoint cannot be restored: the object that is wrong, and what is wrong with it."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class Pruned(NamedTuple):
    """What `prune` removed: checkpoints by sequence, and the objects of saves that were cut off."""

    sequences: list[int]
    leftovers: int
    size_bytes: int


def parse_run(place: str) -> tuple[str, str]:
    """Bucket and prefix (ending with a slash) of a run's `bucket/prefix`, with `s3://` or `forebay://` before it or
    not; `Invalid` without a prefix: a bucket's root is no place for the objects of one run."""
    text = place.removeprefix("forebay://").removeprefix("s3://")
    bucket, _, prefix = text.partition("/")
    prefix = prefix.strip("/")
    if "://" in text or not bucket or not prefix:
        raise Invalid(f"{place!r} does not name a run: write 'bucket/path/of/the/run'")
    return check_bucket_name(bucket), prefix + "/"


def check_pace(tried: Collection[int]) -> None:
    """`Unavailable` when more than NEWER_MAX of the sequences that were tried in this order came after the first."""
    if sum(sequence > next(iter(tried)) for sequence in tried) > NEWER_MAX:
        raise Unavailable("checkpoints go faster than they can be read: keep more of them, or save less often")


class Repository:
    """The checkpoints below `prefix` (with its slash) of a bucket, through `client`. Errors are kinds of
    `core.errors`; see the module for what is asked when."""

    def __init__(self, client: Client, bucket: str, prefix: str) -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = prefix

    def __repr__(self) -> str:
        return f"<Repository {self.bucket}/{self.prefix} at {self.client.url}>"

    # --- what there is -----------------------------------------------------------------------------------------------
    def sequences(self, *, known: bool = False) -> list[int]:
        """Of all manifests, newest first. With `known`, of those that the node knows if the bucket is away."""
        found = (form.sequence_of(name) for name, _ in self._objects("manifests/", known=known))
        return sorted((sequence for sequence in found if sequence), reverse=True)

    def newest(self, step: int | None = None, tried: Collection[int] = (), *, known: bool = False) -> int | None:
        """The sequence of the newest checkpoint, of `step` if one is given, that is not among those `tried`; None if
        there is none. `known` as of `sequences`."""
        there = iter(self.sequences(known=known))
        if step is not None:
            found = self.candidates(step, known=known)
            there = (manifest.sequence for manifest in found if isinstance(manifest, Manifest))
        return next((sequence for sequence in there if sequence not in tried), None)

    def manifest(self, sequence: int) -> Manifest:
        """`NotFound` if there is none, `Corrupt` if it is damaged or is another one's."""
        manifest = Manifest.read(self.read(form.manifest_name(sequence)))
        if manifest.sequence != sequence:
            raise Corrupt(f"manifest {sequence} is a copy of {manifest.sequence}: delete it")
        return manifest

    def candidates(
        self, step: int | None = None, *, known: bool = False
    ) -> Iterator[Manifest | tuple[int, ForebayError]]:
        """Checkpoints newest first, each read when it is asked for; with `step` those of that step. For a manifest that
        cannot be read: its sequence and the error. `known` as of `sequences`."""
        for sequence in self.sequences(known=known):
            try:
                manifest = self.manifest(sequence)
            except NotFound:
                continue  # pruned meanwhile
            except (Corrupt, Invalid) as error:
                yield sequence, error
            else:
                if step is None or manifest.step == step:
                    yield manifest

    def index(self, manifest: Manifest, rank: int) -> Index:
        """What that rank saved; `Corrupt` if it is not what the manifest names."""
        part = manifest.ranks[rank]
        name = form.index_name(manifest.sequence, manifest.token, rank)
        if part.index_bytes > form.INDEX_BYTES_MAX:
            raise Corrupt(f"{self.prefix}{name} has {part.index_bytes} bytes, which no index has: restore an older one")
        index = Index.read(self.read(name), part.index_digest)
        if index.rank != rank or index.stream_bytes != sum(part.blobs):
            raise Corrupt(f"{self.prefix}{name} is not of this manifest: restore an older checkpoint")
        return index

    def stream(self, manifest: Manifest, index: Index) -> Stream:
        """A rank's bytes, verified as they are read."""
        names = [
            self.prefix + form.blob_name(manifest.sequence, manifest.token, index.rank, blob)
            for blob in range(len(manifest.ranks[index.rank].blobs))
        ]
        return Stream(self.client, self.bucket, names, index)

    def read(self, name: str) -> bytes:
        return self.client.get(self.bucket, self.prefix + name)

    # --- whether it is whole -----------------------------------------------------------------------------------------
    def damage(self, manifest: Manifest, *, known: bool = False) -> Damage | None:
        """What is missing of it or has another size, by one listing; None if nothing is. `known` as of `sequences`."""
        there = dict(self._objects(_folder(manifest), known=known))
        for name, size_bytes in manifest.objects():
            found = there.get(name)
            if found != size_bytes:
                what = "is missing" if found is None else f"has {found} bytes instead of {size_bytes}"
                return Damage(self.prefix + name, what)
        return None

    def verify(self, manifest: Manifest, progress: Progress = lambda done, total: None) -> Damage | None:
        """As `damage`, and every byte is read and compared with its digest."""
        missing = self.damage(manifest)
        if missing is not None:
            return missing
        indexes: list[Index] = []
        done, total = 0, manifest.size_bytes
        for rank, part in enumerate(manifest.ranks):
            try:
                indexes.append(self.index(manifest, rank))
            except (Corrupt, NotFound) as error:
                return self._damaged(manifest, rank, error)
            done += part.index_bytes
            progress(done, total)

        def compared(cell: tuple[int, int]) -> int | Damage:
            rank, start = cell
            try:
                return self.stream(manifest, indexes[rank]).verify(start)
            except (Corrupt, NotFound) as error:
                return self._damaged(manifest, rank, error)

        with closing(by_threads(compared, [(i.rank, at) for i in indexes for at in cells(i.stream_bytes)])) as found:
            for read in found:
                if isinstance(read, Damage):
                    return read
                done += read
                progress(done, total)
        return None

    def _damaged(self, manifest: Manifest, rank: int, error: ForebayError) -> Damage:
        return Damage(f"{self.prefix}{_folder(manifest)} rank {rank}", str(error))

    def rehearse(
        self, step: int | None = None, progress: Progress = lambda done, total: None
    ) -> tuple[Manifest | None, dict[int, Damage]]:
        """What a restore would take, read and compared whole, and what was wrong with newer ones, by sequence."""
        damaged: dict[int, Damage] = {}
        while (sequence := self.newest(step, damaged)) is not None:
            check_pace(damaged)
            try:
                manifest = self.manifest(sequence)
                damage = self.verify(manifest, progress)
            except (NotFound, Corrupt, Invalid) as error:
                damage = Damage(self.prefix + form.manifest_name(sequence), str(error))
            if damage is None:
                return manifest, self._still_there(damaged)
            damaged[sequence] = damage
        return None, self._still_there(damaged)

    def _still_there(self, damaged: dict[int, Damage]) -> dict[int, Damage]:
        """Without those that were pruned while they were read."""
        there = self.sequences() if damaged else []
        return {sequence: damage for sequence, damage in damaged.items() if sequence in there}

    def is_in_bucket(self, manifest: Manifest) -> bool:
        """Whether the backend has all of it, so that the loss of the tier does not take it along."""
        names = [form.manifest_name(manifest.sequence), *(name for name, _ in manifest.objects())]
        return all(self._is_clean(name) for name in names)

    def _is_clean(self, name: str) -> bool:
        state = self.client.stat(self.bucket, self.prefix + name)
        return state.local or not state.dirty  # a bucket without a backend has no other place

    # --- changes -----------------------------------------------------------------------------------------------------
    def commit(self, manifest: Manifest) -> None:
        """Make it a checkpoint. `Precondition` if another job saved one of this sequence or a later one: give each
        job a prefix of its own. While the bucket is away that is judged by what the node knows; a manifest that another
        node wrote meanwhile is found when this one is flushed."""
        taken = [sequence for sequence in self.sequences(known=True) if sequence >= manifest.sequence]
        if taken and not self._is_ours(manifest):
            raise self._two_jobs(manifest.sequence)
        if taken:
            return  # an answer was lost, and it had arrived
        try:
            self._put(manifest, only_new=True)
        except Precondition:
            if not self._is_ours(manifest):
                raise self._two_jobs(manifest.sequence) from None
        except (Unavailable, Busy):  # the latter where another node than the client's has the key
            if not self._bucket_is_away():
                raise
            self._put(manifest, only_new=False)

    def _put(self, manifest: Manifest, only_new: bool) -> None:
        key = self.prefix + form.manifest_name(manifest.sequence)
        self.client.put(self.bucket, key, manifest.to_bytes(), content_type="application/json", only_new=only_new)

    def _bucket_is_away(self) -> bool:
        """Whether the node answers, and says that the bucket's backend does not."""
        try:
            self.client.bucket_check(self.bucket)
        except Unavailable as error:
            return error.code not in NODE_AWAY
        except ForebayError:
            return False
        return False

    def _is_ours(self, manifest: Manifest) -> bool:
        try:
            return self.manifest(manifest.sequence).token == manifest.token
        except (NotFound, Corrupt, Invalid):
            return False

    def _two_jobs(self, sequence: int) -> Precondition:
        return Precondition(
            f"another job saved checkpoint {sequence} under {self.bucket}/{self.prefix} meanwhile: stop one of them, "
            "or give each its own prefix"
        )

    def prune(self, keep: int, *, dry_run: bool = False, progress: Progress = lambda done, total: None) -> Pruned:
        """Delete all but the newest `keep` checkpoints, and what saves that were cut off left behind.

        Never the newest one that the bucket has whole, nor newer ones: while a tier has not flushed, more stay.
        """
        sequences = self.sequences()
        going = form.prunable(sequences, keep, self._newest_in_bucket(sequences, keep))
        removed, leftovers, size_bytes = [], 0, 0
        for sequence in sorted(going):
            if not dry_run:
                self._delete(form.manifest_name(sequence))
            removed.append(sequence)
        staying = set(sequences) - set(going)
        found = [(name, size, save) for name, size in self._objects("data/") if (save := form.save_of(name))]
        kept = self._kept({save for _, _, save in found}, staying)
        found = [each for each in found if each[2] not in kept]
        total_bytes = sum(size for _, size, _ in found)
        for name, size, save in found:
            leftovers += save.sequence not in going
            size_bytes += size
            if not dry_run:
                self._delete(name)
            progress(size_bytes, total_bytes)
        return Pruned(removed, leftovers, size_bytes)

    def _kept(self, saves: set[form.Data], staying: set[int]) -> set[form.Data]:
        """Of these saves, those of checkpoints that stay, and those that may still be under way."""
        newest = max(staying, default=0)
        kept = {save for save in saves if save.sequence in staying or save.sequence > newest}
        for save in list(kept):  # a save that broke off left its sequence to the next life's
            others = {other for other in kept if other.sequence == save.sequence}
            if save.sequence in staying and len(others) > 1:
                try:
                    token = self.manifest(save.sequence).token
                except (NotFound, Corrupt, Invalid):
                    continue  # nobody can say which of them it is
                kept -= {other for other in others if other.token != token}
        return kept

    def _newest_in_bucket(self, sequences: list[int], keep: int) -> int | None:
        """The newest checkpoint that is whole at the backend, asked from the newest on: mostly the first is it."""
        if len(sequences) <= keep:
            return None
        for found in self.candidates():
            if isinstance(found, Manifest) and self.damage(found) is None and self.is_in_bucket(found):
                return found.sequence
        return None

    def _delete(self, name: str) -> None:
        self.client.delete(self.bucket, self.prefix + name)

    def copy(self, manifest: Manifest, target: Repository, progress: Progress = lambda done, total: None) -> int:
        """Copy a checkpoint to another run at the same node, as its newest; its sequence there. Bytes are not sent
        here and back. `Corrupt` if it is not whole."""
        missing = self.damage(manifest)
        if missing is not None:
            raise Corrupt(f"{missing}: copy another checkpoint")
        sequence = max(target.sequences(), default=0) + 1
        there = _with_sequence(manifest, sequence)
        done = 0
        for (name, size_bytes), (new, _) in zip(manifest.objects(), there.objects(), strict=True):
            self.client.copy(self.bucket, self.prefix + name, target.bucket, target.prefix + new)
            done += size_bytes
            progress(done, manifest.size_bytes)
        target.commit(there)
        return sequence

    # --- the lives of the job ----------------------------------------------------------------------------------------
    def lives(self) -> list[Life]:
        """The records of all lives of the job that can be read."""
        found = []
        for name, _ in self._objects("lives/"):
            try:
                found.append(msgspec.json.decode(self.read(name), type=Life))
            except (NotFound, msgspec.MsgspecError):
                continue  # a damaged record costs a line of a report
        return found

    def record(self, name: str, life: Life) -> None:
        """Keep the record of a life; `name` is its own."""
        self.client.put(self.bucket, f"{self.prefix}lives/{name}", msgspec.json.encode(life))

    def _objects(self, below: str, *, known: bool = False) -> Iterator[tuple[str, int]]:
        """Names below the prefix, and sizes, of all objects there; with `known`, if the bucket is away, of those that
        the nodes have whole."""
        begin = self.prefix + below
        try:
            found = [(e.key, e.size_bytes) for page in self.client.list_pages(self.bucket, begin) for e in page.entries]
        except Unavailable:
            if not known or not self._bucket_is_away():
                raise
            found = [(e.key, e.size_bytes) for e in self._here(begin) if e.dirty or e.cached_bytes >= e.size_bytes]
        for key, size_bytes in found:
            yield key.removeprefix(self.prefix), size_bytes

    def _here(self, begin: str) -> Iterator[CachedEntry]:
        """What the nodes of the cluster have, each name once: a node lists what is on its own disks."""
        seen: set[str] = set()
        nodes = self.client.node_map().nodes
        for url in [node.endpoint for node in nodes] if len(nodes) > 1 else [self.client.url]:
            with self.client.at(url) as client:
                after: str | None = ""
                while after is not None:
                    page = client.cached_page(self.bucket, begin, start_after=after)
                    yield from (entry for entry in page.entries if entry.key not in seen)
                    seen.update(entry.key for entry in page.entries)
                    after = page.next_after or None


def _folder(manifest: Manifest) -> str:
    return f"data/{manifest.sequence:012}-{manifest.token}/"


def _with_sequence(manifest: Manifest, sequence: int) -> Manifest:
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    return Manifest(**{**fields, "sequence": sequence})
