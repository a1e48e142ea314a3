"""The base of all datasets: the listing, batched reads, and pickling without sockets.

Theory. A dataset is map-style, so a worker has no state: it gets indices and fetches them, a batch in one request
(`__getitems__`). The kinds of datasets differ in which bytes make a sample. The process that makes the dataset lists
the bucket once. A forked worker shares the columns. A spawned worker receives them if they are few, and otherwise lists
again and checks that it finds the same.

Damage. `on_error="raise"` stops at the first sample that cannot be read. `"skip"` leaves it out of its batch and counts
it. A rank without a batch would stall the others, so a batch with no sample left is an error under both; for `"skip"`
the loader then takes samples from the epoch's start in its place. A dataset that changes while it is read always
raises, and so does a decoder that is wrong itself: skipping all that it fails on would hide it. So the kind of an error
decides whether it is the data's. BUGS no data makes a sound function raise. With OVERSIGHTS damage may show too, in a
function that takes for granted what the data does not have; our decoders are known to be sound, so there they are the
data's. Of a caller's function they are raised: a label that is in no table is one for each sample of its class, and
without these the model would be another one. What a sample needs can be said (`parts`), and what is wrong with it too
(ValueError). An OSError with a number is the system's: a file that is not there, or too many that are open.

Rejected: that every error is the data's, as handlers of other loaders have it, with which a typo trains on the rest;
to ask the traceback in whose code it was raised, which nobody could predict.

Invariants. (1) Sample i is the same bytes in every process: reads name the listed version. (2) A pickle holds no
descriptor, thread or lock.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, Precondition
from forebay.core.formats.listing import Listing
from forebay.core.messages.batch import Item
from forebay.torch.columns import Column, Fingerprint, ListingColumns
from forebay.torch.order import BlockShuffled, InOrder, Order, Permuted
from forebay.torch.source import Facts, NodeSource, Patient, Source, Telling, parse_place
from forebay.torch.switch import NodeOrBackend
from forebay.torch.versions import Pinned

OnError = Literal["raise", "skip"]
Shuffle = bool | Literal["block"]
BLOCK_BYTES = 64 * limits.MIB  # of a run of keys or windows that a block shuffle keeps together
WINDOW_BYTES = 4 * limits.GIB  # of a block shuffle: what fits a node's cache many times over
_INLINE_BYTES_MAX = limits.MIB  # of a listing that a pickle holds itself
NOTHING_LEFT = "NothingLeft"  # the code of the error of a batch of which everything was skipped
BUGS = (NameError, AttributeError, ImportError, MemoryError, torch.OutOfMemoryError)
OVERSIGHTS = (TypeError, LookupError, ZeroDivisionError, AssertionError, NotImplementedError, RecursionError)
SKIPPED = (Corrupt, NotFound)  # what `on_error="skip"` is about


class Accesses(NamedTuple):
    """Rows (object's number in the listing, first block, end block), uint32; and how many bytes are read of these
    blocks together (0: all)."""

    rows: Column
    size_bytes: int

    @property
    def blocks(self) -> int:
        """How many blocks are read, each as often as it is."""
        return int((self.rows[:, 2].astype(np.int64) - self.rows[:, 1]).sum())

    @property
    def use_bytes(self) -> int:
        """How many bytes of a block are read on average (0: all)."""
        return -(-self.size_bytes // max(1, self.blocks))


class OfEpoch(list[int]):
    """Indices that tell the dataset which epoch they are for, whatever loader of torch's they go through."""

    def __init__(self, indices: list[int], epoch: int) -> None:
        super().__init__(indices)
        self.epoch = epoch


class Dataset(TorchDataset):  # type: ignore[misc]  # torch is not followed by the type checker
    """Samples at a node. `Invalid`, `NotFound` and `Unavailable` come from the constructor, which lists the bucket."""

    def __init__(
        self,
        place: str,
        *,
        suffixes: Sequence[str],
        url: str | None,
        on_error: OnError,
        patience_s: float,
        direct_after_s: float | None,
        direct: Mapping[str, str] | None,
        source: Source | None,
        keys: Sequence[str] | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        if isinstance(keys, str):
            raise Invalid(f"keys={keys!r} is not a list of keys: write keys=[{keys!r}]")
        if sum(given is not None for given in (keys, listing, versions)) > 1:
            raise Invalid("keys=, listing= and versions= each name the objects: pass one of them")
        if on_error not in get_args(OnError):
            raise Invalid(f"on_error={on_error!r} is not known: use 'raise' or 'skip'")
        self.place = place
        self.on_error: OnError = on_error
        self._suffixes = tuple(suffixes)
        began = None if listing is None else _columns_of(listing, suffixes)
        self._names = tuple(began.names) if began else None if keys is None else tuple(keys)
        bucket = parse_place(place)[0]
        source = source or NodeOrBackend(NodeSource(url), bucket, direct_after_s, direct)
        if versions is not None:
            source = Pinned(source, parse_place(place), versions)
        self._source = Patient(source, patience_s)
        self._listing: Listing | None = None
        self._columns: ListingColumns | None = self._listed()
        if not self._columns.objects:
            which = f" that end in {', '.join(suffixes)}" if suffixes else ""
            raise NotFound(f"there are no objects under {place!r}{which}: see what is with `forebay ls {place}`")
        if began and (changed := self._columns.difference(began.fingerprint("", 0), self._columns.fingerprint("", 0))):
            raise Precondition(
                f"{place} is not what listing= says ({changed}): restore the data, or begin an epoch with a new listing"
            )

    def room_bytes(self, *, cluster: bool = False) -> int | None:
        """How many bytes of this the node can hold, or with `cluster` all nodes together; None if nobody says."""
        return self._source.source.room_bytes(parse_place(self.place)[0], cluster=cluster)

    # --- what kinds define -------------------------------------------------------------------------------------------
    shape = ""
    samples = 0
    any_order = True  # whether samples cost the same in any order
    comes_in_parts = False  # whether it has an order that does without knowing all samples
    arriving = False  # whether epoch 0 has that order, where the user says no more than that it is shuffled

    def blocks(self) -> tuple[Column, Column]:
        """Samples and bytes of each block, in order: what a block shuffle keeps together."""
        raise NotImplementedError

    def accesses(self, indices: Column) -> Accesses:
        """What each of these samples reads."""
        raise NotImplementedError

    def sizes(self, indices: Column) -> Column:
        """How many bytes each of these samples has, as it lies in the bucket."""
        raise NotImplementedError

    def of_blocks(self, blocks: Column) -> Accesses:
        """As `accesses`, for all of the blocks of an order in windows."""
        raise NotImplementedError

    def empty(self) -> NotFound:
        """The error of a dataset that turned out to have no samples."""
        raise NotImplementedError

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        """The samples at `indices`, in order, but for those skipped; what it took is added to `facts`."""
        raise NotImplementedError

    @property
    def known_samples(self) -> int | None:
        """How many there are; None as long as that is not known."""
        return self.samples

    @property
    def counted(self) -> bool:
        """Whether `accesses` can tell of any sample without asking for much."""
        return True

    # --- torch's protocol --------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        index, samples = operator.index(index), len(self)
        if not -samples <= index < samples:
            raise IndexError(f"sample {index} of {samples}")
        return self.__getitems__([index % samples])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return self.fetch(indices, Facts(epoch=getattr(indices, "epoch", None)))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_listing"] = None
        if self.listing.memory_bytes > _INLINE_BYTES_MAX:
            state["_columns"] = None
            state["_listed_as"] = self.listing.listing_id
        return state

    # --- the listing -------------------------------------------------------------------------------------------------
    @property
    def listing(self) -> ListingColumns:
        """The objects. In a spawned worker the first use may ask for them again; `Precondition` if they changed."""
        if self._columns is None:
            self._columns = self._listed(self.__dict__["_listed_as"])
        return self._columns

    def _listed(self, listing: str = "") -> ListingColumns:
        self._listing = self._source.listing(*parse_place(self.place), listing)
        return ListingColumns.of(self._listing, self._suffixes, self._names)

    @property
    def keys(self) -> list[str]:
        """The keys of all objects: given as `keys=`, they make the same dataset again though others were added."""
        return self.listing.names

    def hints(self, job: str) -> Telling | None:
        """A way to tell the node what `job` reads of this; None if there is none, or in a copy of the dataset."""
        return None if self._listing is None else self._source.source.hints(job, self._listing)

    def changed_since(self, listing: str) -> str:
        """In the node's words, what changed since that listing; empty if it does not say."""
        try:
            self._source.listing(*parse_place(self.place), listing)
        except Precondition as error:
            return error.message
        return ""

    @property
    def fingerprint(self) -> Fingerprint:
        """What the dataset is, for saved states."""
        return self.listing.fingerprint(self.shape, 0 if self.comes_in_parts else self.samples)

    def order(
        self,
        shuffle: Shuffle,
        window_bytes: int,
        seed: int,
        epoch: int,
        *,
        arriving: bool = False,
        window: int = 0,
        before: int = 0,
    ) -> Order:
        """The order of an epoch. The rest matters where samples come in parts: see `ShardDataset.order`."""
        if shuffle == "block":
            return BlockShuffled(*self.blocks(), window_bytes, seed, epoch)
        return Permuted(self.samples, seed, epoch) if shuffle else InOrder(self.samples)

    # --- damage ------------------------------------------------------------------------------------------------------
    def _kept(self, name: Callable[[int], str], made: list[Any], facts: Facts) -> list[Any]:
        """`made` without what is skipped; errors stand in it in place of samples. `name` tells which sample it was."""
        facts.gaps = []
        if not any(isinstance(sample, ForebayError) for sample in made):
            return made
        kept = []
        for number, sample in enumerate(made):
            if not isinstance(sample, ForebayError):
                kept.append(sample)
            elif self.on_error == "skip" and isinstance(sample, SKIPPED):
                facts.skipped.append(name(number))
                facts.gaps.append(number)
            elif isinstance(sample, Precondition):
                raise Precondition(
                    f"{name(number)} changed since the dataset was listed: put the old version back, or start anew"
                ) from sample
            else:
                raise sample
        if not kept:
            raise Corrupt(
                f"none of the {len(made)} samples of a batch could be had, {name(0)} being the first", code=NOTHING_LEFT
            )
        return kept


def _columns_of(listing: Listing | bytes, suffixes: Sequence[str]) -> ListingColumns:
    """`Corrupt` for bytes that are not those of a listing."""
    return ListingColumns.of(listing if isinstance(listing, Listing) else Listing(listing), suffixes)


def parameters(function: Callable[..., Any] | None, names: Sequence[str] = ("epoch",)) -> list[str]:
    """Those of `names` that the function has parameters for, and is so told."""
    if function is None:
        return []
    try:
        known = inspect.signature(function).parameters
    except (ValueError, TypeError):  # one that is built in and does not say
        return []
    return [name for name in names if name in known]


def frees_lock(decoders: Iterable[Any]) -> bool:
    """Whether one of these leaves the interpreter's lock free (`decoders.Pictures`), so that threads can decode at
    once."""
    return any(getattr(decoder, "unlocked", False) for decoder in decoders)


def decoded(name: Callable[[], str], decode: Callable[..., Any], *data: Any) -> Any:
    """What `decode(*data)` makes, or the `Corrupt` that its failure means. Refusals of ours are raised, and what is no
    fault of the data as it is, with a note that names the sample: see the module's header."""
    try:
        return decode(*data)
    except ForebayError:
        raise
    except Exception as error:
        if not _is_of_data(error, decode):
            error.add_note(
                f"while decoding {name()}: {type(error).__name__} is taken for a fault of the function, not of the "
                "data, and never skipped. If it is the data's, catch it there and raise a ValueError"
            )
            raise
        found = Corrupt(f"{name()} cannot be decoded ({type(error).__name__}: {error}): repair it, or on_error='skip'")
        found.__cause__ = error
        return found


def _is_of_data(error: Exception, decode: Any) -> bool:
    """Whether the data is to blame for what this function raised."""
    if isinstance(error, BUGS) or (isinstance(error, OSError) and error.errno is not None):
        return False
    while isinstance(decode, partial):
        decode = decode.func
    where = getattr(decode, "__module__", None) or ""
    return where.startswith("forebay.") or not isinstance(error, OVERSIGHTS)


def ranges(listing: ListingColumns, objects: Column, starts: Column, ends: Column) -> Accesses:
    """To the bytes starts..ends of objects."""
    return Accesses(block_rows(listing, objects, starts, ends), int((ends - starts).sum()))


def whole(listing: ListingColumns, objects: Column) -> Accesses:
    """To all of objects."""
    return Accesses(block_rows(listing, objects, np.zeros_like(objects), listing.sizes[objects]), 0)


def block_rows(listing: ListingColumns, objects: Column, starts: Column, ends: Column) -> Column:
    """Rows (object's number in the listing, first block, end block) for the bytes starts..ends of objects."""
    blocks = np.maximum(1, -(-listing.sizes[objects] // limits.BLOCK_BYTES))
    first = np.minimum(starts // limits.BLOCK_BYTES, blocks - 1)
    end = np.clip(-(-ends // limits.BLOCK_BYTES), first + 1, blocks)
    return np.ascontiguousarray(np.stack([listing.numbers_in_listing(objects), first, end], 1), np.uint32)


def runs(sizes: Column, block_bytes: int = BLOCK_BYTES) -> tuple[Column, Column]:
    """Samples of these sizes in runs of about `block_bytes`: the samples and bytes of each."""
    block = (np.cumsum(sizes) - sizes) // block_bytes
    _, first, counts = np.unique(block, return_index=True, return_counts=True)
    return counts, np.add.reduceat(sizes, first)


def whole_objects(listing: ListingColumns, numbers: Sequence[int]) -> list[Item]:
    """Items for whole objects, each of the version that was listed."""
    return [Item(listing.bucket, listing.key(n), 0, None, "", listing.etag(n)) for n in numbers]
