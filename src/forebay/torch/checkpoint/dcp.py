"""Between `torch.distributed.checkpoint` (DCP) and our format: what an id means, and a flat state as a tree.

Theory. DCP knows a state as a flat dictionary, whose names are the keys on the way joined by dots. Its planner keeps
the way itself (`planner_data`). Ours is a tree. So a tree is built from the ways when a checkpoint is saved, and its
leaves are DCP's names when it is loaded. A checkpoint that DCP saved is one that `Checkpointer` might have saved, and
each reads what the other wrote.

What is no tensor DCP hands over as bytes, pickled by `torch.save`. Plain values (numbers, text, lists of them) are
taken out of the pickle and stand in the tree. When they are loaded they are pickled again, since DCP wants to unpickle
them. Every other pickle is kept as it is: {"p": path}, its bytes in the stream.

An id is a place, `bucket/path/of/the/run`, and may end with a step: `…/step-100`. So the checkpoints of all steps are
one run. An id without a slash is a step of the run that the writer or reader was made for.

Invariant. A plain value is taken out of its pickle only if pickling it again gives the same bytes.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch

from forebay.checkpoint.repository import parse_run
from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.torch.checkpoint.tree import Flat, rebuild

PATIENCE_S = 300.0  # less than the ten minutes after which NCCL's watchdog kills ranks that wait for this one
PLAIN_BYTES_MAX = 64 * limits.KIB  # a larger pickle is kept: it is no number
_STEP = re.compile(r"(?:.*[^A-Za-z])?(?:step|checkpoint|iter|iteration)[-_=]?([0-9]{1,18})(?:\.[A-Za-z]+)?\Z", re.I)
_SCHEME = re.compile(r"\A(s3|forebay):/+")  # pathlib makes one slash of two

Way = tuple[str | int, ...]  # keys from the top of a state to a value


class Named(NamedTuple):
    """What an id means. `step`: None for the run as such: its newest checkpoint."""

    bucket: str
    prefix: str
    step: int | None


def named(place: str | os.PathLike[str], run: Named | None = None) -> Named:
    """The checkpoint that `place` names; one without a slash is a step of `run`. `Invalid` if it names none."""
    text = _SCHEME.sub("", os.fspath(place)).rstrip("/")
    above, _, last = text.rpartition("/")
    found = _STEP.match(last)
    if above:
        return Named(*parse_run(above if found else text), int(found[1]) if found else None)
    step = found[1] if found else last
    if run is None or not step.isdigit():
        raise Invalid(
            f"{place!r} names no checkpoint: write 'bucket/path/of/the/run/step-100', or 'bucket/path/of/the/run'"
        )
    return run._replace(step=int(step))


class Addressed:
    """What DCP asks of a storage about the ids of checkpoints. An id may be given here, or by each save and load."""

    def __init__(self, place: str | os.PathLike[str] | None) -> None:
        self._run = None if place is None else named(place)
        self._named = self._run
        self._place = place

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        return self._place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            named(checkpoint_id)
        except Invalid:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._named = named(checkpoint_id, self._run)
            self._place = checkpoint_id


# --- a flat state as a tree ------------------------------------------------------------------------------------------
class _Leaf(NamedTuple):
    node: Any


def trees_of(ways: Mapping[str, Sequence[str | int]], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """The trees, by top-level name, of the values `nodes`, by DCP's names; `ways` has the keys on the way to each.

    `Invalid` if the ways are not those that DCP's own planners make.
    """
    top: dict[str | int, Any] = {}
    for name, way in ways.items():
        if name not in nodes:
            continue  # of a rank that was not asked to save it
        if not way or not isinstance(way[0], str) or name_of(way) != name:
            raise Invalid(f"the planner calls {way!r} {name!r}: keep the names of DCP's own planners")
        place: Any = top
        for key in way[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or way[-1] in place:
            raise Invalid(f"the ranks' states contradict each other at {name}: give them different names")
        place[way[-1]] = _Leaf(nodes[name])
    missing = sorted(set(nodes) - set(ways))
    if missing:
        raise Invalid(f"the planner says no way to {missing[0]}: keep the `planner_data` of DCP's own planners")
    return {str(key): _node(value) for key, value in top.items()}


def _node(place: Any) -> Any:
    if isinstance(place, _Leaf):
        return place.node
    if all(isinstance(key, int) for key in place):
        return {"l": [_node(place[number]) if number in place else None for number in range(max(place) + 1)]}
    if any(isinstance(key, int) for key in place):
        raise Invalid(f"the ranks' states contradict each other: one has a list with {sorted(map(str, place))[0]!r}")
    return {"d": [[key, _node(value)] for key, value in place.items()]}


def leaves_of(trees: Mapping[str, Any]) -> Iterator[tuple[Way, Any]]:
    """What DCP takes for one value each, with the way to it."""
    for name, node in trees.items():
        yield from _leaves(node, (name,))


def _leaves(node: Any, way: Way) -> Iterator[tuple[Way, Any]]:
    if isinstance(node, dict) and "d" in node:
        for key, value in node["d"]:
            yield from _leaves(value, (*way, str(rebuild(key, _no_tensor))))
    elif is_opened(node) and "l" in node:
        for number, value in enumerate(node["l"]):
            yield from _leaves(value, (*way, number))
    else:
        yield way, node


def is_opened(node: Any) -> bool:
    """Whether DCP looks into such a value for tensors, or is one: lists only if there is something in them."""
    if not isinstance(node, dict):
        return False
    return "d" in node or "x" in node or ("l" in node and any(is_opened(each) for each in node["l"]))


def name_of(way: Sequence[str | int]) -> str:
    return ".".join(map(str, way))


# --- values that are no tensors --------------------------------------------------------------------------------------
class Plain(NamedTuple):
    """A value that a tree can hold."""

    node: Any


def plain_of(pickled: bytes) -> Plain | None:
    """The value in a pickle of `torch.save`; None if it has to stay there."""
    return _plain_of(pickled) if len(pickled) <= PLAIN_BYTES_MAX else None


@lru_cache(256)  # an optimizer has the same few numbers for each of its parameters
def _plain_of(pickled: bytes) -> Plain | None:
    try:
        flat = Flat()
        flat.add("value", torch.load(io.BytesIO(pickled), weights_only=True))
        node = flat.trees["value"]
        written = msgspec.json.decode(msgspec.json.encode(node)) == node  # text may have half of a character
        if flat.leaves or is_opened(node) or not written or pickle_of(rebuild(node, _no_tensor)) != pickled:
            return None
    except Exception:  # whatever it is, its bytes are kept
        return None
    return Plain(node)


def pickle_of(value: Any) -> bytes:
    """As DCP's planners make it."""
    into = io.BytesIO()
    torch.save(value, into)
    return into.getvalue()


def _no_tensor(path: str, template: Any) -> torch.Tensor:
    raise Invalid(f"{path} is no plain value")
