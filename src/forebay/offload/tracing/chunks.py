"""Runs an optimizer's step in chunks of parameters, so that not all of its state must be in memory at once.

Theory. Most optimizers update a parameter from its own gradient and state and from numbers of its group. For these, one
step over everything and one step per chunk, in any order, give the same bits. So `optimizer.step` is replaced, on this
one object, by a function that runs the hooks and the closure once, and then the class's own step for each chunk with
`param_groups` narrowed to it. The groups stay the same dictionaries, so what a schedule or the step writes into them is
kept. Without a gradient the class skips as always, and it makes its state when it first needs it.

torch wraps the class's `step` to run the hooks; the function below that wrapper runs for each chunk. A learning rate
schedule wraps the object's `step` to know that it was called. One that came before us is told of the call, and
`detach` puts it back. One that comes after us wraps our function, and keeps working when we are gone.

Invariants. (1) `param_groups` is as before whenever `step` returns or raises. (2) Each parameter of the optimizer is in
exactly one chunk; parameters added later make one more. (3) After `detach` the object's `step` is what it was, or, if
somebody wrapped ours, does what it did.

Rejected: the hooks of `register_step_pre_hook` (hooks registered later would run between our chunks); narrowing to new
dictionaries (what a step writes into its group would be lost); one optimizer for each chunk (state dictionaries, and
everything else that holds the optimizer, would change).

Not the same bits: parameters on several kinds of devices in one group, where torch chooses between its loops by looking
at all of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from forebay.core.errors import Invalid

CHUNK_BYTES = 256 << 20  # of parameters, gradients and state: some 5 ms of a 50 GB/s link, hundreds of chunks for 70B
AFTER = "after optimizer"  # the point behind the last chunk

Parameter = Any
Optimizer = Any
Groups = list[tuple[dict[str, Any], list[Parameter]]]

# How many tensors of a parameter's size each keeps as its state, for a group's settings. Each was read in torch 2.13:
# none looks at two parameters at once. Adafactor's factors are a row and a column: next to nothing.
_STATE_COPIES: dict[Any, Callable[[dict[str, Any]], int]] = {
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.RMSprop: lambda group: 1 + int(group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Rprop: lambda group: 2,
    torch.optim.Adafactor: lambda group: 0,
    torch.optim.Muon: lambda group: 1,
}
_trusted: weakref.WeakSet[Any] = weakref.WeakSet()  # classes of which their users say so


def check_separable(optimizer: Optimizer, *, trusted: bool = False) -> None:
    """`Invalid` unless stepping in chunks gives the same bits as stepping at once. Of a class made from one that does
    so, `trusted` says that it does too; that is remembered."""
    if type(optimizer) in _STATE_COPIES or type(optimizer) in _trusted:
        return
    known = ", ".join(sorted(kind.__name__ for kind in _STATE_COPIES))
    base = _made_from(optimizer)
    if base is not None and trusted:
        _trusted.add(type(optimizer))
        return
    what = "is not known to update each parameter by itself, so its step cannot go in chunks"
    if base is None:
        raise Invalid(
            f"{type(optimizer).__qualname__} {what}: use one of torch.optim's {known}, or do not offload its state"
        )
    raise Invalid(
        f"{type(optimizer).__qualname__} {what}: pass separable=True if it does so from a parameter's own gradient, "
        f"state and group, as {base.__qualname__} does; else use that"
    )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's own, and looks at nothing but its parameters' gradients, state and groups."""
    return type(optimizer) in _STATE_COPIES


def _made_from(optimizer: Optimizer) -> Any:
    """The class of torch's that an optimizer's class is, or was made from; None if there is none."""
    return next((kind for kind in type(optimizer).__mro__ if kind in _STATE_COPIES), None)


def default_chunks(model: Any, optimizer: Optimizer, chunk_bytes: int = CHUNK_BYTES) -> list[list[Parameter]]:
    """The optimizer's parameters, last registered first (their gradients are complete first), in chunks of at most
    `chunk_bytes` with their gradients and the state that they will have; one parameter each at least. The same before
    and after the first step."""
    check_separable(optimizer)
    sizes: dict[int, int] = {}
    held: dict[int, Parameter] = {}
    for group in optimizer.param_groups:
        tensors = 2 + _STATE_COPIES[_made_from(optimizer)](group)
        for parameter in group["params"]:
            sizes[id(parameter)] = tensors * parameter.numel() * parameter.element_size()
            held[id(parameter)] = parameter
    registered = [held.pop(id(parameter)) for parameter in model.parameters() if id(parameter) in held]
    chunks: list[list[Parameter]] = []
    filled_bytes = 0
    for parameter in reversed([*registered, *held.values()]):
        size_bytes = sizes[id(parameter)]
        if not chunks or filled_bytes + size_bytes > chunk_bytes:
            chunks.append([])
            filled_bytes = 0
        chunks[-1].append(parameter)
        filled_bytes += size_bytes
    return chunks


class ChunkedStep:
    """Replaces `step` of one optimizer, between `attach` and `detach`, by one that goes chunk by chunk.

    `at("optimizer chunk <i>")` is called before each chunk and `at("after optimizer")` behind the last. `around` is
    entered for the update of a chunk's parameters. `Invalid` if the optimizer's parameters depend on one another, or if
    its `step` was replaced by something unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chunks: Sequence[Sequence[Parameter]],
        at: Callable[[str], None],
        around: Callable[[Sequence[Parameter]], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_separable(optimizer)
        self._optimizer = weakref.ref(optimizer)  # its `step` will hold us
        self._chunks = [list(chunk) for chunk in chunks]
        self._numbers = {id(parameter): number for number, chunk in enumerate(self._chunks) for parameter in chunk}
        if len(self._numbers) != sum(map(len, self._chunks)):
            raise Invalid("a parameter is in two chunks of the optimizer's step: it would be updated twice")
        self._at, self._around = at, around
        self._before: Any = None  # what stood at the object
        self._ours: Any = None
        self._attached = False

    def attach(self) -> None:
        """Replace the step. Once attached, nothing happens."""
        if self._attached:
            return
        optimizer = self._optimizer()
        if optimizer is None:
            raise Invalid("the optimizer is gone: keep it as long as its step is to go in chunks")
        self._before = vars(optimizer).get("step")
        scheduled = hasattr(self._before, "_wrapped_by_lr_sched")
        if self._before is not None and not scheduled:
            raise Invalid(
                "something else has replaced this optimizer's step: attach before it does, or without it "
                f"({self._before!r})"
            )
        whole = type(optimizer).step
        below = whole.__wrapped__ if getattr(whole, "hooked", False) else whole
        self._ours = self._replacement(below, scheduled=scheduled)
        optimizer.step = self._ours
        self._attached = True

    def detach(self) -> None:
        """Put the step back. Once detached, nothing happens."""
        self._attached = False
        optimizer = self._optimizer()
        if optimizer is not None and self._ours is not None and vars(optimizer).get("step") is self._ours:
            del optimizer.step
            if self._before is not None:
                optimizer.step = self._before
        self._ours = self._before = None

    def _replacement(self, below: Callable[..., Any], *, scheduled: bool) -> Any:
        """The function that stands at the object. It holds the optimizer weakly, and looks like a method to what wraps
        it."""

        @functools.wraps(below)
        def chunked(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._run(optimizer, below, closure)

        hooked = torch.optim.Optimizer.profile_hook_step(chunked)
        held = self._optimizer

        @functools.wraps(hooked)
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer = held()
            assert optimizer is not None, "a step of an optimizer that is gone"
            if scheduled:
                optimizer._opt_called = True  # what the schedule's own wrapper does
            return hooked(optimizer, *args, **kwargs)

        step.__func__ = hooked  # type: ignore[attr-defined]
        if scheduled:
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def _run(self, optimizer: Optimizer, below: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        if not self._attached:
            return below(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        parts = self._parts(groups)
        try:
            for number, part in enumerate(parts):
                self._at(f"optimizer chunk {number}")
                for group, parameters in part:
                    group["params"] = parameters
                optimizer.param_groups = [group for group, _ in part]
                if part:
                    with self._around([parameter for group in optimizer.param_groups for parameter in group["params"]]):
                        below(optimizer)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            optimizer.param_groups = groups
        self._at(AFTER)
        return loss

    def _parts(self, groups: list[dict[str, Any]]) -> list[Groups]:
        """For each chunk the groups that it has parameters of, with these; one more for parameters of no chunk."""
        parts: list[Groups] = [[] for _ in self._chunks]
        others: Groups = []
        for group in groups:
            split: dict[int, list[Parameter]] = {}
            for parameter in group["params"]:
                split.setdefault(self._numbers.get(id(parameter), -1), []).append(parameter)
            for number, parameters in split.items():
                (others if number < 0 else parts[number]).append((group, parameters))
        return [*parts, others] if others else parts
