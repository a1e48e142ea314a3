"""One storage that moves: where it is, and how it gets to a tier and back.

Theory. A storage moves with all tensors over it. There are two kinds. A *lasting* storage (of a parameter, a gradient,
optimizer state) is emptied in place, `untyped_storage().resize_(0)`, and filled in place, so holders of the tensor keep
it. A *saved* storage is autograd's. Autograd holds our ticket instead, so dropping the storage frees it once nobody
else holds it.

Storing does not take a tensor away. It stays until its store is complete *and* somebody looks (`settle`, at points).
Whoever wants it before then has it. A failed store leaves it here.

A copy on a tier is good until the tensor is written. For lasting storages torch counts writes (`Tensor._version`), but
not those of fused optimizers or through `.data`. So whoever knows of a write reports it (`written`): the dispatch mode,
by what operators declare; the runner, by what the profiled step wrote. Torch counts no writes to inference tensors, so
their copies do not outlive their way back, and their stores are waited for. A saved storage may be written as long as
nobody asks for the value saved before: autograd refuses that, and so do we (`Original`).

Python may free an object anywhere: the collector may run on a tier's worker, or while a tier holds its lock. So an
object that dies only leaves its `Remains` to the books, and the training thread buries them later.

Invariants. (1) While a transfer is under way nobody resizes or writes the storage. (2) `ensure` returns with the bytes
here, or raises. (3) A slot is released after its storage has died. (4) Counts change only on the training thread.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from time import perf_counter
from typing import Any

import torch

from forebay.core.errors import Busy, ForebayError
from forebay.offload.tiers.queues import Ticket
from forebay.offload.tiers.tiers import Slot, Storage
from forebay.offload.tracing.dispatch import with_memory

_USE_COUNT: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # torch's own, and may go


class Residency(IntEnum):
    """Where the bytes are."""

    HERE = 0
    STORING = 1  # here as well
    AWAY = 2
    LOADING = 3


class Books:
    """What all movables of an engine have in common: counts, and the tiers in their order. `with books:` is around the
    engine's own work, which looks at tensors without wanting their bytes, and which no mode shall see."""

    def __init__(self, tiers: list[Storage]) -> None:
        self.tiers = tiers
        self.away_bytes = 0
        self.hollow_bytes = 0  # of storages that are there without their bytes
        self.make_room: Callable[[int], None] | None = None  # before so many bytes come unplanned
        self.brought: Callable[[Movable], object] | None = None  # what came unplanned
        self.relieve: Callable[[], bool] | None = None  # where there was no memory all the same; False: nothing can go
        self.lasting: dict[int, Lasting] = {}  # by address of the storage: all
        self.absent: dict[int, Lasting | None] = {}  # by address of the storage: those whose bytes are not here
        self.together: list[Movable] = []  # what the call of torch uses that wants something brought
        self.shown: set[Lasting] = set()  # in this step, their storages themselves were handed out
        self.own_work = 0  # how deep
        self._quiet: list[Any] = []  # while they live no mode sees what this thread asks of torch
        self.waited_s = 0.0  # for what was not here
        self.failures: list[ForebayError] = []  # of stores: the tensors stayed
        self.failed: list[Storage] = []  # tiers that stores failed in, in this step
        self.look_up: Callable[[str], Any] | None = None  # what lasts, by name, as the program has it now
        self.dead: deque[Callable[[], object]] = deque()  # to be buried; any thread may append, with any lock held

    def __enter__(self) -> None:
        self.own_work += 1
        if self.own_work == 1:
            unseen = torch._C.DisableTorchFunction()
            unseen.__enter__()
            self._quiet += [torch._C._DisableTorchDispatch(), unseen]
            try:  # deeper, a tier's lock may be held: programs can come here out of the collector
                self.bury()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self.own_work == 1:
            self._quiet.pop().__exit__(None, None, None)
            self._quiet.pop()
        self.own_work -= 1

    def bury(self) -> None:
        """Give back the room of what died since, and count its bytes no more. On the thread that trains."""
        while self.dead:
            self.dead[0]()  # may be interrupted, and is then begun again
            self.dead.popleft()


class Movable(ABC):
    """A storage of `size_bytes`. Not for use by several threads at once."""

    def __init__(self, name: str, size_bytes: int, books: Books) -> None:
        self.name, self.size_bytes = name, size_bytes
        self.residency = Residency.HERE
        self._books = books
        self._tier: Storage | None = None
        self._slot: Slot | None = None
        self._ticket: Ticket | None = None
        self._stored_version: Hashable = None  # of the copy in the slot; None: there is none
        self._going_version: Hashable = None  # of the store under way

    # --- what kinds define -------------------------------------------------------------------------------------------
    @abstractmethod
    def version(self) -> Hashable:
        """Another one after each write, as far as writes are counted; else another one each time."""

    @abstractmethod
    def _bytes(self) -> Any:
        """The storage as a tensor of uint8."""

    @abstractmethod
    def _empty(self) -> None:
        """Let the memory go."""

    @abstractmethod
    def _fill(self) -> None:
        """Get memory again, with anything in it."""

    @abstractmethod
    def _mark(self, *, absent: bool) -> None:
        """Its bytes are not here, or here again: for the guard."""

    def can_leave(self) -> bool:
        """Whether the memory can be let go of."""
        return True

    def counts_writes(self) -> bool:
        """Whether torch does."""
        return True

    def is_held_elsewhere(self) -> bool:
        """Whether somebody else would keep the memory if it left."""
        return False

    # --- leaving -----------------------------------------------------------------------------------------------------
    def leave(self, tier: Storage, due: float) -> bool:
        """Begin to go, if it is here; at once if the tier has a good copy. Whether it goes."""
        self.settle()
        if self.residency is not Residency.HERE:
            return self.residency is not Residency.LOADING
        if not self.can_leave():
            return False
        version = self.version()
        if self._slot is not None and self._tier is tier and self._stored_version == version:
            self._go()
            return True
        slot = self._reserve(tier)
        if slot is None:
            return False
        self._stored_version = None
        try:
            self._ticket = tier.store(slot, self._bytes(), due=due)
        except ForebayError as error:
            self._failed(error)
            return False
        self.residency, self._going_version = Residency.STORING, version
        if not self.counts_writes():
            self._ticket.urge()
            self._ticket.ended.wait()
            self._end(unwritten=True)  # nobody had the time
        return self.residency is not Residency.HERE

    def _reserve(self, tier: Storage) -> Slot | None:
        """A slot of that tier, for which one elsewhere is given up; None if it has no such room, now or ever."""
        if self._slot is None or self._tier is not tier:
            if not 0 < self.size_bytes <= tier.room_bytes:
                return None
            self._books.bury()
            try:
                slot = tier.reserve(self.size_bytes)
            except Busy:
                return None
            self._release()
            self._slot, self._tier = slot, tier
        return self._slot

    def settle(self) -> None:
        """See whether what is under way is over."""
        if self._ticket is not None and self._ticket.done():
            self._end()

    def wait(self) -> None:
        """Until what is under way is over."""
        if self._ticket is not None:
            self._ticket.urge()
            self._ticket.ended.wait()
            self._end()

    def _end(self, *, unwritten: bool = False) -> None:
        ticket, self._ticket = self._ticket, None
        assert ticket is not None, "nothing was under way"
        if self.residency is Residency.STORING:
            if ticket.error is not None:
                self.residency = Residency.HERE
                self._failed(ticket.error)
            elif self._going_version is not None and (unwritten or self.version() == self._going_version):
                self._stored_version = self._going_version
                self.residency = Residency.HERE
                if self.can_leave():
                    self._go()
            else:
                self.residency = Residency.HERE  # somebody wrote it meanwhile
        elif ticket.error is not None:
            self._go()
            raise ticket.error
        else:
            self.residency = Residency.HERE
            self._mark(absent=False)

    def _failed(self, error: ForebayError) -> None:
        """A store failed: the tensor is here, and its slot holds nothing."""
        self._books.failures.append(error)
        if self._tier is not None and self._tier not in self._books.failed:
            self._books.failed.append(self._tier)
        self._release()

    def _go(self) -> None:
        self._empty()
        self.residency = Residency.AWAY
        self._books.away_bytes += self.size_bytes
        self._mark(absent=True)

    # --- coming ------------------------------------------------------------------------------------------------------
    def come(self, due: float, *, urgent: bool = False) -> None:
        """Begin to come, if it is away."""
        self.settle()
        if self.residency is Residency.AWAY:
            assert self._tier is not None, "away, and nowhere"
            assert self._slot is not None, "away, and nowhere"
            with_memory(self._fill, self._books.relieve or (lambda: False))  # it has gaps that nobody counts
            self._books.away_bytes -= self.size_bytes
            self.residency = Residency.LOADING
            try:
                self._ticket = self._tier.load(self._slot, self._bytes(), due=due, urgent=urgent)
            except BaseException:
                self._go()
                raise
        elif urgent and self.residency is Residency.LOADING and self._ticket is not None:
            self._ticket.urge()

    def ensure(self) -> None:
        """Here, whatever it takes. Raises what a load raised."""
        if self.residency is Residency.HERE:
            return
        self.settle()
        residency = Residency(self.residency)  # it may be another now
        if residency is Residency.STORING:
            self._keep()
        elif residency is not Residency.HERE:
            if residency is Residency.AWAY and self._books.make_room is not None:
                self._books.make_room(self.size_bytes)
            began_s = perf_counter()
            self.come(0.0, urgent=True)
            self.wait()
            self._books.waited_s += perf_counter() - began_s
            if self._books.brought is not None:
                self._books.brought(self)

    def _keep(self) -> None:
        """It is wanted while it is being stored: it stays. What was not written yet never is."""
        assert self._ticket is not None, "a store without a ticket"
        began_s = perf_counter()
        self._ticket.drop()
        self._ticket.ended.wait()  # nobody may write it before the disk has read what is under way
        self._books.waited_s += perf_counter() - began_s
        failed, self._ticket = self._ticket.error, None
        self.residency = Residency.HERE
        if failed is None and self.version() == self._going_version:
            self._stored_version = self._going_version

    def written(self) -> None:
        """The bytes were changed, perhaps in a way that torch does not count."""
        self._stored_version = self._going_version = None

    # --- the end -----------------------------------------------------------------------------------------------------
    def _release(self) -> None:
        if self._slot is not None and self._tier is not None:
            self._tier.release(self._slot)
        self._slot = self._tier = None
        self._stored_version = None

    def _remains(self, storage: Any = None) -> Remains:
        """What it has of tiers and counts, and has no more; with the storage, if a transfer may be using it."""
        away_bytes = self.size_bytes if self.residency is Residency.AWAY else 0
        remains = Remains(self._books, self._tier, self._slot, self._ticket, storage, away_bytes)
        self._tier = self._slot = self._ticket = self._stored_version = None
        self.residency = Residency.HERE
        return remains


@dataclass(slots=True)
class Remains:
    """Of a movable that died: a slot, a transfer perhaps, bytes that count as away."""

    books: Books
    tier: Storage | None
    slot: Slot | None
    ticket: Ticket | None
    storage: Any  # goes where it is buried: ledgers hear of it
    away_bytes: int

    def bury(self) -> None:
        """Leave nothing. May be called again, for what an interruption left."""
        if self.ticket is not None and not self.ticket.cancel():
            self.ticket.urge()
            self.ticket.ended.wait()
        self.ticket = self.storage = None
        self.books.away_bytes -= self.away_bytes
        self.away_bytes = 0
        slot, self.slot = self.slot, None
        if slot is not None and self.tier is not None:
            self.tier.release(slot)


class Lasting(Movable):
    """The storage of a tensor that somebody else holds: emptied and filled in place."""

    def __init__(self, name: str, tensor: Any, books: Books) -> None:
        storage = tensor.untyped_storage()
        super().__init__(name, storage.nbytes(), books)
        find = books.look_up  # a weak reference would do, but torch swaps no tensor that has one
        self._tensor: Callable[[], Any] = weakref.ref(tensor) if find is None else partial(find, name)
        self._number = id(tensor)
        self._storage: Callable[[], Any] = weakref.ref(storage, lambda _: books.dead.append(partial(self._hollow, 0)))
        self._address: int = storage._cdata
        self._hollow_bytes = 0
        self.stays = False  # somebody holds its address
        books.lasting[self._address] = self

    def is_of(self, tensor: Any) -> bool:
        """Whether this is the storage of that tensor still. Gradients are dropped and made anew, `.data` may be
        another's, and tensors are swapped."""
        if tensor is None or id(tensor) != self._number:
            return False
        with torch._C.DisableTorchFunction():  # who guards tensors would take it for the program
            return tensor.layout is torch.strided and self.is_at(tensor.untyped_storage())

    def _held(self) -> Any:
        """The tensor, as long as there is one and this is its storage."""
        tensor = self._tensor()
        return tensor if self.is_of(tensor) else None

    def tell(self, who: Callable[[Any], object]) -> None:
        """Show somebody the tensor, if it is there."""
        if (tensor := self._held()) is not None:
            who(tensor)

    def is_at(self, storage: Any) -> bool:
        """Whether that is the storage."""
        return self._storage() is storage

    def can_leave(self) -> bool:
        if self.stays or self in self._books.shown:
            return False
        storage: Any = self._storage()  # an array over it forbids torch to resize it, for good
        if storage is None or not storage.resizable():
            return False
        return storage.device.type != "cpu" or not storage.is_shared()  # by then other processes may have mapped it

    def is_dropped(self) -> bool:
        """Whether nobody holds the tensor any more, or it has another storage now."""
        return self._held() is None

    def counts_writes(self) -> bool:
        tensor = self._held()
        return tensor is not None and not tensor.is_inference()

    def version(self) -> Hashable:
        return self._held()._version if self.counts_writes() else object()

    def die(self) -> None:
        """It is nobody's any more. Who holds the storage still, by another tensor, has its bytes."""
        if self.residency in (Residency.AWAY, Residency.LOADING) and self._storage() is not None:
            self.ensure()
        self._mark(absent=False)
        self._remains().bury()
        if self._books.lasting.get(self._address) is self:
            del self._books.lasting[self._address]

    def _bytes(self) -> Any:
        storage: Any = self._storage()
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _empty(self) -> None:
        self._resize(0)
        self._hollow(self.size_bytes)

    def _fill(self) -> None:
        self._resize(self.size_bytes)
        self._hollow(0)

    def _hollow(self, size_bytes: int) -> None:
        self._books.hollow_bytes += size_bytes - self._hollow_bytes
        self._hollow_bytes = size_bytes

    def _resize(self, size_bytes: int) -> None:
        storage: Any = self._storage()
        assert storage is not None, "a storage that is gone comes or goes"
        storage.resize_(size_bytes)

    def _mark(self, *, absent: bool) -> None:
        if absent:
            self._books.absent[self._address] = self
        elif self._books.absent.get(self._address) is self:
            del self._books.absent[self._address]


class Original:
    """A tensor over a storage, as it was when autograd saved it: written later, it is not what was saved."""

    __slots__ = ("_changed", "_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor: Any = tensor.detach()  # counts writes with the tensor, and lets its graph go
        self._version: int = tensor._version
        self._changed = False

    def version(self) -> int:
        return self._version if self._tensor is None else int(self._tensor._version)

    def is_changed(self) -> bool:
        return self._changed or self.version() != self._version

    def let_go(self) -> None:
        """The storage leaves: nobody can write it any more."""
        self._changed, self._version = self.is_changed(), self.version()
        self._tensor = None


class Saved(Movable):
    """A storage that autograd saved."""

    def __init__(self, name: str, storage: Any, books: Books) -> None:
        super().__init__(name, storage.nbytes(), books)
        self.storage: Any = storage
        self.device = storage.device
        self._originals: list[Original] = []  # while it was never away
        self._last_version = 0

    def __del__(self) -> None:
        """The last ticket is gone, and with it the graph that would have asked for it. On any thread, with any lock
        held: nothing is done here."""
        if self._slot is not None:
            self._books.dead.append(self._remains(self.storage if self._ticket is not None else None).bury)

    def is_held_elsewhere(self) -> bool:
        if self.storage is None:
            return False
        return _USE_COUNT is not None and _USE_COUNT(self.storage._cdata) > 1 + len(self._originals)

    def watch(self, tensor: Any) -> Original:
        """A tensor over it is saved."""
        self._originals.append(Original(tensor))
        return self._originals[-1]

    def version(self) -> Hashable:
        return max((original.version() for original in self._originals), default=self._last_version)

    def _bytes(self) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)

    def _empty(self) -> None:
        self._last_version = max((original.version() for original in self._originals), default=self._last_version)
        self.storage = None
        for original in self._originals:
            original.let_go()
        self._originals.clear()

    def _fill(self) -> None:
        self.storage = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def _mark(self, *, absent: bool) -> None:
        """Nothing: who wants it comes by its ticket."""
