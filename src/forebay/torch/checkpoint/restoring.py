"""Puts a checkpoint back into a job's objects, whatever number of ranks saved it.

Theory. Every rank reads the indexes that it needs and plans where each tensor goes: into the memory that the job has
for it where shape and dtype are the same, else into new memory. A shard of a tensor is filled from those saved shards
that overlap it: the rows of the overlap are read, and where other dimensions are cut too, the wanted part of them is
copied. So a job of any number of ranks restores what any other number saved.

Nothing is read before the plan is whole: a key that is missing, a shape that differs, or a dtype that would be
converted is refused first, with all of them named. Some threads then read, each a cell of the stream at a time with
all tensors in it, so that no piece is read twice. Reading verifies each piece. If one is damaged, the ranks go to the
next older checkpoint together, and what was half read is overwritten by it.

Invariants. (1) When `restore` returns, every byte that it put into place matched its digest. (2) All ranks restore the
same checkpoint.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from itertools import groupby
from typing import Any, NamedTuple

import torch

from forebay.checkpoint.repository import Repository
from forebay.checkpoint.stream import READ_BYTES, Stream, by_threads
from forebay.core.checkpoint import Entry, Index, Manifest
from forebay.core.errors import Corrupt, Invalid
from forebay.torch.checkpoint.random_state import RandomState, other_gpus
from forebay.torch.checkpoint.ranks import Ranks, is_distributed, shard_of
from forebay.torch.checkpoint.staging import bytes_of, is_run
from forebay.torch.checkpoint.tree import dtype_name, dtype_of, key_text, rebuild

DIFFERENCES_SHOWN = 8
ROWS_BYTES = 4 * READ_BYTES  # of a tensor's rows that are read to be copied: at both ends a piece is read twice

Box = tuple[tuple[int, int], ...]  # begin and end in each dimension


class Saved(NamedTuple):
    """A part of a tensor in a checkpoint, and the rank whose stream it is in."""

    rank: int
    entry: Entry


class Source:
    """A manifest, and the indexes of its ranks, each read once."""

    def __init__(self, repository: Repository, manifest: Manifest, own: Collection[str]) -> None:
        self.manifest = manifest
        self._repository = repository
        self.own = own
        self._indexes: dict[int, Index] = {}
        self._threads = threading.local()
        self._shared: dict[str, list[Saved]] | None = None

    def index(self, rank: int) -> Index:
        if rank not in self._indexes:
            self._indexes[rank] = _sound(self._repository.index(self.manifest, rank))
        return self._indexes[rank]

    def stream(self, rank: int) -> Stream:
        """A rank's bytes, for the thread that asks."""
        mine = self._threads.__dict__.setdefault("streams", {})
        if rank not in mine:
            mine[rank] = self._repository.stream(self.manifest, self.index(rank))
        found: Stream = mine[rank]
        return found

    def tree(self, name: str, rank: int) -> Any:
        """What was saved under a top-level name: by this rank if the name is each rank's own."""
        return self.index(rank if name in self.own else 0).tree[name]

    def has(self, name: str, rank: int) -> bool:
        if name in self.own:
            return rank < len(self.manifest.ranks) and name in self.index(rank).tree
        return name in self.index(0).tree

    def parts(self, path: str, rank: int) -> list[Saved]:
        """Where the tensor of that path was saved; several if it was sharded."""
        if self._is_own(path):
            if rank >= len(self.manifest.ranks):  # what all have alike is the same memory as rank 0's own
                rank = 0
            found = [Saved(rank, entry) for entry in self.index(rank).entries if entry.path == path]
        else:
            found = self._all().get(path, [])
        if not found:
            raise Corrupt(f"the checkpoint names {path} and has no bytes of it: restore an older one")
        return found

    def _is_own(self, path: str) -> bool:
        return path.partition("/")[0] in map(key_text, self.own)

    def whole(self, path: str, rank: int) -> list[Saved]:
        """As `parts`; `Corrupt` if they are not all of the tensor, before anybody takes memory for it."""
        found = self.parts(path, rank)
        if sum(math.prod(part.entry.shape) for part in found) != math.prod(found[0].entry.whole_shape):
            raise Corrupt(f"the checkpoint has only a part of {path}: restore an older one")
        return found

    def _all(self) -> dict[str, list[Saved]]:
        if self._shared is None:
            self._shared = {}
            for rank in range(len(self.manifest.ranks)):
                for entry in self.index(rank).entries:
                    if not self._is_own(entry.path):
                        self._shared.setdefault(entry.path, []).append(Saved(rank, entry))
        return self._shared


def _sound(index: Index) -> Index:
    """The index, if the size of each entry is that of its elements."""
    for entry in index.entries:
        if math.prod(entry.shape) * dtype_of(entry.dtype).itemsize != entry.size_bytes:
            raise Corrupt(f"{entry.path} has another size than its elements: restore an older checkpoint")
    return index


class Target(NamedTuple):
    """Memory that is to hold the elements of `box` of the whole tensor."""

    path: str
    tensor: torch.Tensor
    box: Box


class Plan:
    """What one rank will read, and what is in the way of it."""

    def __init__(self, source: Source, ranks: Ranks, strict: bool) -> None:
        self.differences: list[str] = []
        self.values: dict[str, Any] = {}
        self.absent: list[str] = []  # names that this rank wanted and the checkpoint has not
        self.manifest = source.manifest
        self._source = source
        self._ranks = ranks
        self._strict = strict
        self._targets: dict[str, tuple[torch.Tensor, Target | None]] = {}
        self._now: dict[str, Any] = {}  # by name: its tensors stay where `look` saw them
        self._places: list[tuple[torch.device, int, int, str]] = []
        self._shared: set[str] = set()

    @property
    def paths(self) -> set[str]:
        """Of the tensors that are read into memory."""
        return {path for path, (_, target) in self._targets.items() if target is not None}

    def look(self, name: str, wanted: Any) -> None:
        """Note where the tensors of `wanted` lie now. All names are looked at before any is added."""
        if self._source.has(name, self._ranks.rank):
            self._now[name] = wanted.state_dict() if hasattr(wanted, "state_dict") else wanted
            rebuild(self._tree(name, wanted), self._note, self._now[name])

    def _note(self, path: str, template: torch.Tensor | None) -> torch.Tensor:
        local: Any = template.to_local() if is_distributed(template) else template  # type: ignore[union-attr]
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.numel() and local.device.type != "meta":
            begin = local.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            self._places.append((local.device, begin, begin + (last + 1) * local.element_size(), path))
        return torch.empty(0)

    def part(self) -> None:
        """What was saved apart and lies in the same memory now gets new memory, and `put_back` copies it: read there,
        the one would overwrite the other."""
        self._places.sort(key=lambda place: (str(place[0]), place[1]))
        furthest: tuple[torch.device, int, int, str] | None = None
        for place in self._places:
            if furthest is not None and place[0] == furthest[0] and place[1] < furthest[2]:
                if place[3] != furthest[3]:
                    self._shared |= {place[3], furthest[3]}
                if place[2] <= furthest[2]:
                    continue
            furthest = place

    def _tree(self, name: str, wanted: Any) -> Any:
        tree = self._source.tree(name, self._ranks.rank)
        return _numbered(tree) if isinstance(wanted, torch.optim.Optimizer) else tree

    def add(self, name: str, wanted: Any) -> None:
        """Plan to restore `wanted` (an object with `state_dict`, or a state itself) from what was saved as `name`."""
        if not self._source.has(name, self._ranks.rank):
            self.absent.append(name)
            return
        now, tree = _with_optimizer_shapes(wanted, self._now[name]), self._tree(name, wanted)
        if isinstance(wanted, torch.optim.Optimizer) and (differs := _other_parameters(tree, now)):
            if self._strict:
                self.differences.append(f"{name} {differs}")
            else:
                self.absent.append(name)  # torch loads an optimizer whole or not at all
            return
        if self._strict and isinstance(wanted, torch.nn.Module):
            self._compare_keys(name, tree, now)
        self.values[name] = rebuild(tree, self._tensor, now)
        if isinstance(wanted, RandomState) and (differs := other_gpus(self.values[name])):
            if self._strict:
                self.differences.append(f"{name} {differs}")
            self.values[name]["cuda"] = []  # the generators that every process has are taken
        if not _is_place_for(wanted, self.values[name]):
            self.differences.append(
                f"{name} was saved as a {type(self.values[name]).__name__} and cannot be put into a "
                f"{type(wanted).__name__} (give an object with load_state_dict, a dictionary or a list)"
            )

    def _compare_keys(self, name: str, tree: Any, now: Mapping[str, Any]) -> None:
        saved = {key for key, _ in tree.get("d", [])} if isinstance(tree, dict) else set()
        self.differences += [f"{name}/{key} is missing in the checkpoint" for key in now if key not in saved]
        self.differences += [f"{name}/{key} is only in the checkpoint" for key in sorted(saved - set(now))]

    def _tensor(self, path: str, template: torch.Tensor | None) -> torch.Tensor:
        entry = self._source.parts(path, self._ranks.rank)[0].entry
        dtype, shape = dtype_of(entry.dtype), entry.whole_shape
        if path in self._targets:  # two names of what was one tensor
            if template is not None and tuple(template.shape) != shape:
                self.differences.append(f"a tensor saved as {path} has shape {tuple(template.shape)}, not {shape}")
            return self._targets[path][0]
        if template is not None and tuple(template.shape) != shape:
            self.differences.append(f"{path} has shape {tuple(template.shape)} and was saved as {shape}")
            template = None
        if template is not None and template.dtype != dtype:
            if self._strict:
                self.differences.append(f"{path} is {dtype_name(template.dtype)} and was saved as {entry.dtype}")
            template = torch.empty_like(template, dtype=dtype) if is_distributed(template) else None  # it is converted
        if template is not None and path in self._shared:
            template = torch.empty_like(template)
        if template is None:
            self._source.whole(path, self._ranks.rank)
        result, target = _placed(path, shape, dtype, template)
        self._targets[path] = (result, target)
        return result

    def check(self) -> None:
        """`Invalid` that names what differs."""
        if self.differences:
            more = len(self.differences) - DIFFERENCES_SHOWN
            shown = "; ".join(self.differences[:DIFFERENCES_SHOWN]) + (f"; and {more} more" if more > 0 else "")
            advice = "restore with strict=False to take what fits" if self._strict else "leave out what differs"
            raise Invalid(f"the checkpoint does not fit: {shown}: {advice}")

    def read(self) -> None:
        """Fill all memory. `Corrupt` if something does not verify; the memory is then undefined."""
        reads: list[Read] = []
        for _, target in self._targets.values():
            if target is None:
                continue
            elements = 0
            for part in self._source.parts(target.path, self._ranks.rank):
                found = overlap(part, target)
                if found is not None:
                    elements += found.into.numel()
                    reads += found.cut()
            if elements != target.tensor.numel():
                raise Corrupt(f"the checkpoint has only a part of {target.path}: restore an older one")
        read_all(self._source, reads)


def _placed(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, template: torch.Tensor | None
) -> tuple[torch.Tensor, Target | None]:
    """The tensor that a path becomes, and the memory of it that is read into."""
    if template is not None and is_distributed(template):
        shard = shard_of(template, path)
        if shard is None:
            return template, None
        box = tuple((at, at + size) for at, size in zip(shard.at, shard.local.shape, strict=True))
        return template, Target(path, shard.local, box)
    tensor = torch.empty(shape, dtype=dtype) if template is None else template.detach()
    return tensor, Target(path, tensor, tuple((0, size) for size in shape))


class Read(NamedTuple):
    """Bytes of a rank's stream from `start` on, and the memory `into` that their elements go to: all of them in
    order, or the `box` of the rows read (of shape `rows`) where dimensions beside the first are cut."""

    rank: int
    start: int
    into: torch.Tensor
    rows: tuple[int, ...] = ()
    box: Box | None = None

    @property
    def cell(self) -> int:
        return self.start // READ_BYTES

    def cut(self) -> list[Read]:
        """The same in parts that are in one cell each, so that several threads can share it."""
        if self.box is not None:
            return list(self._cut_rows(self.box))
        end = self.start + self.into.numel() * self.into.element_size()
        if end <= (self.cell + 1) * READ_BYTES:
            return [self]
        memory = bytes_of(self.into)
        begins = [self.start, *range((self.cell + 1) * READ_BYTES, end, READ_BYTES)]
        cuts = zip(begins, [*begins[1:], end], strict=True)
        return [Read(self.rank, begin, memory[begin - self.start : stop - self.start]) for begin, stop in cuts]

    def _cut_rows(self, box: Box) -> Iterator[Read]:
        if not self.rows:
            yield self
            return
        row_bytes = math.prod(self.rows[1:]) * self.into.element_size()
        height = max(1, ROWS_BYTES // row_bytes)
        for at in range(0, self.rows[0], height):
            here = min(height, self.rows[0] - at)
            into = self.into.narrow(0, at, here)
            yield Read(self.rank, self.start + at * row_bytes, into, (here, *self.rows[1:]), ((0, here), *box[1:]))

    def fill(self, stream: Stream) -> None:
        if self.box is None:
            stream.read_into(self.start, memoryview(bytes_of(self.into).numpy()))
            return
        read = torch.empty(self.rows, dtype=self.into.dtype)
        stream.read_into(self.start, memoryview(bytes_of(read).numpy()))
        for dimension, (begin, end) in enumerate(self.box):
            read = read.narrow(dimension, begin, end - begin)
        self.into.copy_(read)


def overlap(part: Saved, target: Target) -> Read | None:
    """What a saved part has of the target's box; None if nothing."""
    entry = part.entry
    have = tuple((at, at + size) for at, size in zip(entry.first, entry.shape, strict=True))
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(have, target.box, strict=True))
    if any(begin >= end for begin, end in both):
        return None
    into = target.tensor
    for dimension, ((begin, end), (first, _)) in enumerate(zip(both, target.box, strict=True)):
        into = into.narrow(dimension, begin - first, end - begin)
    if not both:
        return Read(part.rank, entry.offset, into) if _is_memory(into) else Read(part.rank, entry.offset, into, (), ())
    row_bytes = math.prod(entry.shape[1:]) * target.tensor.element_size()
    start = entry.offset + (both[0][0] - have[0][0]) * row_bytes
    if both[1:] == have[1:] and _is_memory(into):
        return Read(part.rank, start, into)
    height = both[0][1] - both[0][0]
    inside = tuple((begin - first, end - first) for (begin, end), (first, _) in zip(both[1:], have[1:], strict=True))
    return Read(part.rank, start, into, (height, *entry.shape[1:]), ((0, height), *inside))


def read_all(source: Source, reads: Iterable[Read]) -> None:
    """Fill all memory, with some threads. What lies together in a stream is read by one, which fetches and digests a
    piece once for all small tensors in it. `Corrupt` if something does not verify."""
    ordered = sorted(reads, key=lambda read: (read.rank, read.start))

    def fill(group: list[Read]) -> None:
        for read in group:
            read.fill(source.stream(read.rank))

    for _ in by_threads(fill, [list(group) for _, group in groupby(ordered, lambda read: (read.rank, read.cell))]):
        pass


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether bytes can be read straight into it."""
    return tensor.device.type == "cpu" and is_run(tensor)


def _numbered(tree: Any) -> Any:
    """An optimizer's tree with numbers where `torch.distributed.checkpoint` made text of them: it would overlook the
    state of a parameter that is numbered "0"."""

    def renamed(key: Any, node: Any) -> list[Any]:
        if key != "state" or not isinstance(node, dict) or "d" not in node:
            return [key, node]
        return [key, {"d": [[int(k) if isinstance(k, str) and k.isdigit() else k, v] for k, v in node["d"]]}]

    if not isinstance(tree, dict) or "d" not in tree:
        return tree
    nodes = [renamed(key, node) for key, node in tree["d"]]
    if all(key != "state" for key, _ in nodes):  # it leaves out dictionaries that are empty, too
        nodes.append(["state", {"d": []}])
    return {"d": nodes}


def _with_optimizer_shapes(wanted: Any, now: Any) -> Any:
    """`now`, the state that `wanted` has. An optimizer that has not stepped has none of its own, so it gets the places
    that its parameters' shapes say: a DTensor's state is sharded like its parameter."""
    if not isinstance(wanted, torch.optim.Optimizer) or now["state"]:
        return now
    parameters = [parameter for group in wanted.param_groups for parameter in group["params"]]
    if not any(is_distributed(parameter) for parameter in parameters):
        return now
    return {**now, "state": {number: _Like(parameter) for number, parameter in enumerate(parameters)}}


class _Like(Mapping[str, Any]):
    """Whatever is asked of one parameter's state: a place like the parameter's."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def __getitem__(self, name: str) -> Any:
        return None if name == "step" else torch.zeros_like(self._parameter)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _other_parameters(tree: Any, now: Mapping[str, Any]) -> str:
    """In what an optimizer's groups of parameters differ from those that were saved; empty if in nothing."""
    saved = rebuild(dict(tree["d"]).get("param_groups"), lambda path, template: torch.empty(0))
    sizes = [[len(group["params"]) for group in groups or ()] for groups in (now.get("param_groups"), saved)]
    return f"has groups of {sizes[0]} parameters and was saved with {sizes[1]}" if sizes[0] != sizes[1] else ""


def _is_place_for(wanted: Any, value: Any) -> bool:
    if hasattr(wanted, "load_state_dict"):
        return True
    if isinstance(wanted, torch.Tensor):
        return isinstance(value, torch.Tensor)
    return (isinstance(wanted, MutableMapping) and isinstance(value, Mapping)) or (
        isinstance(wanted, list) and isinstance(value, list)
    )


def put_back(wanted: Any, value: Any, strict: bool) -> None:
    """Give a restored value to what it is for: an object with `load_state_dict`, or something that is changed in
    place."""
    if isinstance(wanted, torch.nn.Module):
        wanted.load_state_dict(value, strict=strict)
    elif hasattr(wanted, "load_state_dict"):
        wanted.load_state_dict(value)
    elif isinstance(wanted, MutableMapping):
        wanted.clear()
        wanted.update(value)
    elif isinstance(wanted, list):
        wanted[:] = value
    elif not _is_read_into(wanted, value):
        with torch.no_grad():
            wanted.copy_(value)


def _is_read_into(wanted: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value was read into the tensor's own memory."""
    if is_distributed(wanted) or is_distributed(value):
        return value is wanted
    first, second = (
        (tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        for tensor in (wanted, value)
    )
    return first == second
