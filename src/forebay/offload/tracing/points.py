"""The points of a step at which an engine can act: hooks on modules, gradients and the optimizer.

Theory. Eager torch calls back at the forward pass of a module, at the graph node that made its output, when a gradient
is complete, and before each chunk of the optimizer's step (`chunks`). Between the backward pass and that step there are
points where calls from Python use many gradients (`between`). Each such place has a name. A name that comes
again in the same step (a module used twice, or activation checkpointing) gets a number: `forward of x #2`. The same
model, optimizer and settings give the same names in the same order as long as the step does the same. So a plan made
from one step's names can be followed in the next.

"backward of x" is a hook on the graph's node, not on the module: `register_full_backward_hook` wraps the output, and
operators in place on it then fail. A node goes with its graph. Nothing here holds tensors, nodes or graphs, and a node
that outlives `detach` calls nobody.

Each place costs one call of torch into Python, one dictionary and the call of `at`.

Invariants. (1) After `detach` neither model nor optimizer holds a hook of ours. (2) Names are unique between two
`begin_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from forebay.offload.tracing.between import BETWEEN, Between
from forebay.offload.tracing.chunks import AFTER, CHUNK_BYTES, ChunkedStep, default_chunks
from forebay.offload.tracing.compiled import Around, Hook, inside_compiled, is_compiled

BEGINS, ENDS = "step begins", "step ends"
BACKWARD = "backward of "  # and the module's name
GRADIENT = "gradient of "  # and the parameter's name
CHUNK = "optimizer chunk "  # and its number

Wanted = Callable[[str, Any], bool]


def default_points(model: Any) -> Wanted:
    """Modules that own parameters themselves, and the blocks of a `ModuleList` or `Sequential` that hold any."""
    blocks = {
        id(block)
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for block in module.children()
    }

    def wanted(name: str, module: Any) -> bool:
        if any(True for _ in module.parameters(recurse=False)):
            return True
        return id(module) in blocks and any(True for _ in module.parameters())

    return wanted


class Points:
    """Calls `at(name)` at each point of a step, between `attach` and `detach`. Neither has an effect when done twice.

    `points_of(name, module)` says which modules have points; see `default_points`. Compiled ones have, and those inside
    of them have not: torch cuts what it compiles in two where a hook is. The caller says where a step begins and ends.
    `around` is entered for the update of an optimizer's chunk. `Invalid` (from `attach`) if the optimizer cannot step
    in chunks.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        at: Callable[[str], None],
        *,
        points_of: Wanted | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        around: Callable[[Sequence[Any]], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model = model
        self._at = at
        self._wanted = points_of or default_points(model)
        self.chunks = default_chunks(model, optimizer, chunk_bytes)  # what "optimizer chunk <i>" is about to step
        self._step = ChunkedStep(optimizer, self.chunks, self._reach, around)
        self.between = Between(lambda: self._reach(BETWEEN), chunk_bytes)  # for who sees calls of torch
        self._counts: dict[str, int] = {}
        self._handles: list[Any] = []
        self._attached = False
        self._forwards: dict[int, str] = {}  # names of points, by the `id` of a module

    def attach(self) -> None:
        """Register all hooks, or none."""
        if self._attached:
            return
        self._step.attach()
        self._attached = True
        try:
            inner = inside_compiled(self._model)
            for name, module in self._model.named_modules():
                if id(module) not in inner and (self._wanted(name, module) or _is_region(module)):
                    self._hook_module(name or "the model", module)
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad and parameter.is_leaf:
                    self._hook_gradient(GRADIENT + name, parameter)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Remove all hooks."""
        self._attached = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._step.detach()
        self.between.end()

    def begin_step(self) -> None:
        """A step begins here: names count from one again."""
        self._counts.clear()
        self._reach(BEGINS)

    def begin_forward(self, module: Any) -> None:
        """The forward pass of a module began before its hook was there."""
        if (name := self._forwards.get(id(module))) is not None:
            self._reach(name)

    def end_step(self) -> None:
        """And ends here."""
        self._reach(ENDS)

    def _reach(self, name: str) -> None:
        count = self._counts.get(name, 0) + 1
        self._counts[name] = count
        if name.startswith((GRADIENT, BACKWARD, BETWEEN, AFTER)):
            self.between.begin()
        else:
            self.between.end()
        self._at(name if count == 1 else f"{name} #{count}")

    def _hook_module(self, name: str, module: Any) -> None:
        forward, after, backward = f"forward of {name}", f"after forward of {name}", BACKWARD + name

        self._forwards[id(module)] = forward

        def before_forward(module: Any, args: Any) -> None:
            self._reach(forward)

        def after_forward(module: Any, args: Any, output: Any) -> None:
            self._reach(after)
            if torch.is_grad_enabled():
                self._hook_nodes(backward, output)

        if is_compiled(module):
            self._handles.append(Around(module, before_forward, after_forward))
            return
        self._handles.append(module.register_forward_pre_hook(Hook(before_forward), prepend=True))
        self._handles.append(module.register_forward_hook(Hook(after_forward)))

    def _hook_nodes(self, name: str, output: Any) -> None:
        """The point is where the first of the output's nodes runs."""
        nodes = {node for node in _nodes(output) if node is not None}
        if len(nodes) == 1:
            nodes.pop().register_prehook(lambda gradients: self._reach_backward(name))
            return
        coming = [name]

        def first(gradients: Any) -> None:
            if coming:
                self._reach_backward(coming.pop())

        for node in nodes:
            node.register_prehook(first)

    def _reach_backward(self, name: str) -> None:
        if self._attached:  # a graph may outlive us
            self._reach(name)

    def _hook_gradient(self, name: str, parameter: Any) -> None:
        self._handles.append(parameter.register_post_accumulate_grad_hook(lambda parameter: self._reach(name)))


def _is_region(module: Any) -> bool:
    return is_compiled(module) and any(True for _ in module.parameters())


def _nodes(output: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output.grad_fn
    elif isinstance(output, dict):
        for value in output.values():
            yield from _nodes(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _nodes(value)
