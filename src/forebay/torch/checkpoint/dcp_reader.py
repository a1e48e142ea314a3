"""`StorageReader`: `torch.distributed.checkpoint.load` from a bucket, of what DCP saved there or `Checkpointer` did.

Theory. Each rank reads the manifest and all indexes, and DCP's planner says which part of which saved part goes where.
That is what restoring does anyway (`restoring`): ranges of the streams, verified, by several threads, where what lies
together is read once. Where the job wants another dtype than was saved, the tensor is read as it was saved and copied.

An id of a run, or of a step that was saved several times, means the newest checkpoint that is there whole. Ranks choose
one each, before DCP lets them talk. If one was saved in between they may choose differently. That is noticed when they
plan, and refused.

Invariants. (1) When a load ends without an error, every byte of it matched its digest. (2) All ranks load the same
checkpoint.
"""

from __future__ import annotations

import io
import logging
import os
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from forebay.checkpoint.repository import Repository
from forebay.client.sync import Client
from forebay.core.checkpoint import Manifest
from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.torch.checkpoint.checkpointer import OUTAGE_S
from forebay.torch.checkpoint.dcp import PATIENCE_S, Addressed, leaves_of, name_of, pickle_of
from forebay.torch.checkpoint.restoring import Read, Saved, Source, Target, overlap, read_all
from forebay.torch.checkpoint.saving import asked, patiently
from forebay.torch.checkpoint.tree import dtype_of, rebuild

log = logging.getLogger("forebay.checkpoint")


class StorageReader(Addressed, dcp.StorageReader):  # type: ignore[misc]
    """Loads a checkpoint from `place`, or from the `checkpoint_id` of a load: `bucket/path/of/the/run` for the newest
    of the run, `…/step-100` for one of that step.

    Tensors are read into the memory that the job has for them, and converted if it is of another dtype. What was saved
    as each rank's own (`Checkpointer(own=…)`) is not read. `patience_s` and `url` as of `StorageWriter`.

    In a load, `NotFound` if there is no such checkpoint and `Corrupt` if its bytes do not verify: load an older step.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        url: str | None = None,
    ) -> None:
        Addressed.__init__(self, place)
        self._patience_s = patience_s
        self._client = Client(url)
        self._source: Source | None = None
        self._saved: dict[MetadataIndex, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        Addressed.reset(self, checkpoint_id)
        self._source, self._saved = None, {}

    # --- what there is -----------------------------------------------------------------------------------------------
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._named is None:
            raise Invalid("from where? StorageReader('bucket/path/of/the/run'), or give the load a checkpoint_id")
        try:
            source = asked(self._chosen, lambda: self._chosen(known=True), OUTAGE_S, self._patience_s)[0]
            return patiently(lambda: _metadata(source, self._place), self._patience_s)
        finally:
            self._client.close_idle()

    def _chosen(self, known: bool = False) -> Source:
        assert self._named is not None, "asked for when metadata is read"
        bucket, prefix, step = self._named
        repository = Repository(self._client, bucket, prefix)
        problem: Any = f"there is no checkpoint{'' if step is None else f' of step {step}'} under {bucket}/{prefix}"
        for found in repository.candidates(step, known=known):
            damage = repository.damage(found, known=known) if isinstance(found, Manifest) else found[1]
            if isinstance(found, Manifest) and damage is None:
                self._source = Source(repository, found, ())
                ranks = range(1, len(found.ranks))
                self._source.own = {name for rank in ranks for name in self._source.index(rank).tree}
                return self._source
            problem = damage
            log.warning("%s; looking for an older one", damage)
        raise NotFound(f"{problem}: see `forebay ckpt ls`")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self._saved = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._source is not None, "metadata is read first"
        return replace(plan, storage_data=(self._source.manifest.sequence, self._source.manifest.token))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise Unavailable("a checkpoint was saved while the ranks looked for the newest one: load again")
        return plans

    # --- reading -----------------------------------------------------------------------------------------------------
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            patiently(lambda: self._read(plan, planner), self._patience_s)
        finally:
            self._client.close_idle()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._source is not None, "metadata is read first"
        reads: list[Read] = []
        filled: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._pickle(self._saved[item.storage_index])))
                continue
            tensor = planner.resolve_tensor(item).detach()
            memory, found = _reads(item, self._saved[item.storage_index], tensor)
            reads += found
            filled.append((item, tensor, memory))
        read_all(self._source, reads)
        for item, tensor, memory in filled:
            if memory is not tensor:
                tensor.copy_(memory)
            planner.commit_tensor(item, tensor)

    def _pickle(self, node: Any) -> bytes:
        """What DCP unpickles, of a value of the tree."""
        if isinstance(node, dict) and "p" in node:
            return bytes(self._tensor(node["p"], None).numpy())
        return pickle_of(rebuild(node, self._tensor))

    def _tensor(self, path: str, template: Any) -> torch.Tensor:
        """A tensor inside a value."""
        assert self._source is not None, "metadata is read first"
        parts = self._source.whole(path, 0)
        tensor = torch.empty(parts[0].entry.whole_shape, dtype=dtype_of(parts[0].entry.dtype))
        target = Target(path, tensor, tuple((0, size) for size in tensor.shape))
        read_all(self._source, (cut for part in parts if (found := overlap(part, target)) for cut in found.cut()))
        return tensor


def _metadata(source: Source, place: Any) -> Metadata:
    """What DCP knows of a checkpoint. `storage_data` says where each part of each tensor lies."""
    known: dict[str, Any] = {}
    ways: dict[str, Any] = {}
    saved: dict[MetadataIndex, Any] = {}
    tree = source.index(0).tree
    for way, node in leaves_of({name: tree[name] for name in tree if name not in source.own}):
        name = name_of(way)
        if name in known:
            raise Invalid(f"two values of the checkpoint are {name} in DCP's words: restore it with Checkpointer")
        ways[name] = way
        if not (isinstance(node, dict) and "x" in node):
            known[name] = BytesStorageMetadata()
            saved[MetadataIndex(name)] = node
            continue
        parts = source.parts(node["x"], 0)
        first = parts[0].entry
        properties, size = TensorProperties(dtype=dtype_of(first.dtype)), torch.Size(first.whole_shape)
        chunks = [ChunkStorageMetadata(torch.Size(each.entry.first), torch.Size(each.entry.shape)) for each in parts]
        known[name] = TensorStorageMetadata(properties, size, chunks)
        saved.update((MetadataIndex(name, each.entry.first), each) for each in parts)
    return Metadata(known, ways, saved, StorageMeta(checkpoint_id=place))


def _reads(item: ReadItem, saved: Saved, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Read]]:
    """The memory that one item of the plan is read into, and how."""
    entry = saved.entry
    if tuple(tensor.shape) != tuple(item.lengths):
        raise Invalid(f"{item.dest_index.fqn} has shape {tuple(tensor.shape)} where {tuple(item.lengths)} was planned")
    dtype = dtype_of(entry.dtype)
    memory = tensor if tensor.dtype == dtype else torch.empty(tensor.shape, dtype=dtype)
    begins = [at + offset for at, offset in zip(entry.first, item.storage_offsets, strict=True)]
    box = tuple((begin, begin + length) for begin, length in zip(begins, item.lengths, strict=True))
    found = overlap(saved, Target(entry.path, memory, box))
    return memory, found.cut() if found is not None else []
