"""`StorageWriter`: `torch.distributed.checkpoint.save` and `async_save` to a bucket, in the format of `Checkpointer`.

Theory. DCP plans, and calls us in turn: on all ranks, on the coordinator (rank 0), on all ranks, on the coordinator.
The coordinator says which checkpoint it becomes (`prepare_global_plan`). Each rank lays out what it was given, copies
it blob by blob and sends it (`write_data`); both overlap in a few buffers, since the caller waits anyway.
The coordinator alone knows all names, so its index has the tree. It writes it when all ranks are done, and then the
manifest (`finish`). What fails on one rank DCP raises on all.

A planner that keeps its plans (`enable_plan_caching`) would give a rank the names of an earlier checkpoint. It is
refused: no object is ever written twice.

Rejected: to write under the names of the id (a save to the same id would destroy what it replaces before it is whole);
to send tensors without copying them to a buffer (a second way to do the same, for a copy that costs less than a tenth
of what sending does).

Invariants. (1) The manifest is written after all blobs and indexes, only if no other has its number. (2) A save that
fails leaves what was there as it was.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from forebay.checkpoint.repository import Repository
from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.checkpoint import Manifest, RankPart
from forebay.core.checkpoint_pace import Pace
from forebay.core.errors import ForebayError, Invalid
from forebay.ports import clock
from forebay.ports.chance import SystemChance
from forebay.torch.checkpoint.checkpointer import OUTAGE_S, UNSEEN
from forebay.torch.checkpoint.dcp import PATIENCE_S, Addressed, Named, plain_of, trees_of
from forebay.torch.checkpoint.ranks import Share
from forebay.torch.checkpoint.saving import NICENESS, SaveHandle, Sending, Terms, asked
from forebay.torch.checkpoint.staging import Arena, Layout, lay_out, stage
from forebay.torch.checkpoint.tree import dense, key_text

STAGING_BYTES = 256 * limits.MIB
log = logging.getLogger("forebay.checkpoint")


class _Given(NamedTuple):
    """What the coordinator tells a rank."""

    terms: Terms
    rank: int


class _Sent(NamedTuple):
    """What a rank tells the coordinator; `part` is None for the coordinator's own, whose index is still to be sent."""

    part: RankPart | None
    nodes: dict[str, Any]


class StorageWriter(Addressed, dcp.StorageWriter):  # type: ignore[misc]
    """Saves what `torch.distributed.checkpoint` gives it, at `place` or at the `checkpoint_id` of a save.

    `place` is `bucket/path/of/the/run`, and may end with a step, as ids may: `…/step-100`. A save to an id that has a
    checkpoint makes a newer one; the other stays until it is pruned. `keep`: how many checkpoints of the run stay; None
    keeps all. `staging_bytes`: how much host memory sending takes. `patience_s`: how long a node that is away or full
    is waited for. `url` is the node's, as of `forebay.connect`. Nothing is opened before the first save.

    `Invalid` for a place that names no run; in a save, `Precondition` if another job saved under the run meanwhile. DCP
    raises what fails on any rank on all, as `CheckpointException`.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        staging_bytes: int = STAGING_BYTES,
        patience_s: float = PATIENCE_S,
        url: str | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise Invalid(f"keep={keep}: at least one checkpoint must stay, or None to keep all")
        Addressed.__init__(self, place)
        self._keep = keep
        self._staging_bytes = staging_bytes
        self._patience_s = patience_s
        self._client = Client(url)
        self._arena = Arena(staging_bytes)
        self._pace = Pace()
        self._is_coordinator = False
        self._mine: tuple[Sending, Layout] | None = None  # the coordinator's, until `finish`

    def __getstate__(self) -> dict[str, Any]:  # to the process of an `async_save`
        return {**self.__dict__, "_arena": None, "_mine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arena = Arena(self._staging_bytes)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        Addressed.reset(self, checkpoint_id)
        self._mine = None

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._place)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._named is None:
            raise Invalid("where to? StorageWriter('bucket/path/of/the/run'), or give the save a checkpoint_id")
        if not kwargs.get("use_collectives", True):
            raise Invalid("use_collectives=False would make each rank's part a checkpoint of its own: leave it out")
        if is_coordinator and kwargs.get("rank", 0) != 0:
            raise Invalid("another coordinator than rank 0 is not possible here: leave `coordinator_rank` out")
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return _fresh(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        repository = self._repository(self._named)
        try:
            newest, _ = asked(
                lambda: max(repository.sequences(), default=0),
                lambda: max(repository.sequences(known=True), default=0) + UNSEEN,
                OUTAGE_S,
                self._patience_s,
            )
        finally:
            self._client.close_idle()
        sequence = newest + 1
        step = sequence if self._named is None or self._named.step is None else self._named.step
        terms = Terms(sequence, step, SystemChance().token_hex(8), {})
        return [replace(_fresh(plan), storage_data=_Given(terms, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        terms, rank = plan.storage_data
        shares: list[Share] = []
        nodes: dict[str, Any] = {}
        for item in plan.items:
            _take(item, planner.resolve_data(item), shares, nodes)
        layout = lay_out(shares, self._staging_bytes)
        repository = self._repository(self._named)
        waited_for = threading.current_thread() is threading.main_thread()  # training trains, or stands and waits
        niceness = 0 if waited_for else NICENESS
        handle = SaveHandle(terms, repository, self._patience_s)
        sending = Sending(handle, terms, repository, rank, self._arena, self._patience_s, niceness, self._pace)
        try:
            self._send(sending, layout, pinned=any(share.local.is_cuda for share in shares), hurry=waited_for)
            part = None if self._is_coordinator else sending.put_index(layout, {})
        finally:
            self._client.close_idle()
        if self._is_coordinator:
            self._mine = sending, layout
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(f"rank {rank}"), layout.stream_bytes, _Sent(part, nodes))])
        return done

    def _send(self, sending: Sending, layout: Layout, pinned: bool, hurry: bool) -> None:
        self._arena.prepare(layout, pinned)
        sending.begin(layout)
        sending.send(layout, hurry)
        try:
            for filled in stage(layout, self._arena, lambda: None):
                sending.add(filled)
        finally:
            sending.no_more()
            sending.join()
        if sending.failed is not None:
            raise sending.failed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._mine is not None, "the coordinator writes before it finishes"
        (sending, layout), self._mine = self._mine, None
        sent: list[_Sent] = [result.storage_data for (result,) in results]
        plain = {name: node for each in sent for name, node in each.nodes.items()}
        nodes = {
            name: plain[name] if isinstance(kind, BytesStorageMetadata) else {"x": key_text(name)}
            for name, kind in metadata.state_dict_metadata.items()
        }
        ways = {name: (name,) for name in nodes} if metadata.planner_data is None else metadata.planner_data
        trees = trees_of(ways, nodes)
        try:
            parts = tuple(each.part or sending.put_index(layout, trees) for each in sent)
            terms = sending.terms
            names = tuple(sorted(trees))
            manifest = Manifest(terms.sequence, terms.step, terms.token, clock.wall_s(), parts, names)
            sending.waited_for(lambda: sending.repository.commit(manifest))
            metadata.storage_meta = self.storage_meta()
            if self._keep is not None:
                self._prune(sending.repository, self._keep)
        finally:
            self._client.close_idle()

    def _prune(self, repository: Repository, keep: int) -> None:
        try:
            repository.prune(keep)
        except ForebayError as error:
            log.warning("old checkpoints stay as they are for now: %s", error)

    def _repository(self, place: Named | None) -> Repository:
        assert place is not None, "asked for when the writer is set up"
        return Repository(self._client, place.bucket, place.prefix)


def _fresh(plan: SavePlan) -> SavePlan:
    if not plan.usable:
        raise Invalid(
            "the planner keeps its plans, which name objects of an earlier save: leave enable_plan_caching out"
        )
    return plan


def _take(item: WriteItem, data: Any, shares: list[Share], nodes: dict[str, Any]) -> None:
    """Add what one item of the plan saves: a tensor, or a value, as its node or as the pickle that DCP made of it."""
    name = item.index.fqn
    path = key_text(name)
    if item.type is not WriteItemType.BYTE_IO:
        whole = at = None
        if item.type is WriteItemType.SHARD:
            whole, at = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
        shares.append(Share(path, dense(data, name), whole, at))
        return
    pickled = data.getvalue()
    plain = plain_of(pickled)
    nodes[name] = {"p": path} if plain is None else plain.node
    if plain is None:
        shares.append(Share(path, torch.from_numpy(np.array(memoryview(pickled))), None, None))
