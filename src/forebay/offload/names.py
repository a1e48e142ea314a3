"""What the names of a trace mean in a training: parameters, gradients, optimizer state, and what autograd saved.

Theory. A plan speaks of "gradient layers.0.weight". Which storage that is may be another in each step: gradients are
dropped and made anew, `.data` may be another's, tensors are swapped. So a name is looked up at each use, and what was
known by it is compared with what is there. This is done for every tensor of every stretch, so it is cheap: names are
taken apart once.

Invariants. (1) A storage has one movable, whatever names it has. (2) What is away and was dropped comes back as soon as
somebody touches it, as long as anybody holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from forebay.offload.movables import Books, Lasting, Movable, Residency
from forebay.offload.tickets import Tickets
from forebay.offload.tracing.chunks import AFTER
from forebay.offload.tracing.points import CHUNK, GRADIENT


class Names:
    """Of a model and its optimizer on `device`. `chunks` is what the optimizer updates at once."""

    def __init__(self, model: Any, optimizer: Any, books: Books, device: Any) -> None:
        self.parameters: dict[str, Any] = {}
        self.chunks: list[list[Any]] = []
        self.tickets: Tickets | None = None
        self._model, self._optimizer, self._books, self._device = model, optimizer, books, device
        ddp = torch.nn.parallel.DistributedDataParallel
        self.moves_gradients = not any(isinstance(module, ddp) for module in model.modules())  # else they are buckets
        self._known: dict[str, Lasting] = {}
        self._behind: list[Lasting] = []  # away, and known by no name
        self.renew()

    def renew(self) -> None:
        """The model may have other parameters now."""
        self.parameters = dict(self._model.named_parameters())

    def find(self, name: str) -> Movable | None:
        """The storage that a trace's tensor is now."""
        kind, _ = _parsed(name)
        if kind == "saved":
            return None if self.tickets is None else self.tickets.find(name)
        known = self._known.get(name)
        tensor = self.tensor(name)
        if known is not None and not known.is_of(tensor):
            self._leave_behind(self._known.pop(name))
            known = None
        if known is not None or tensor is None or tensor.layout is not torch.strided or tensor.device != self._device:
            return known
        storage = tensor.untyped_storage()
        same = self._books.lasting.get(storage._cdata)
        if same is not None and same.is_at(storage):
            return same  # two tensors in one storage go together
        is_shared = storage.device.type == "cpu" and storage.is_shared()
        if storage.nbytes() and storage.resizable() and not is_shared:
            known = self._known[name] = Lasting(name, tensor, self._books)
        return known

    def tensor(self, name: str) -> Any:
        """The tensor of that name in model or optimizer, None if it is not there."""
        kind, of = _parsed(name)
        parameter = self.parameters.get(of)
        if parameter is None or kind == "parameter":
            return parameter
        return parameter.grad if kind == "gradient" else self._optimizer.state.get(parameter, {}).get(kind)

    def gradients(self) -> Iterator[str]:
        """The names of those that there are."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                yield f"gradient {name}"

    def states(self, parameter: Any, name: str) -> Iterator[str]:
        """The names of the optimizer's tensors for a parameter."""
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {name}"

    def at(self, point: str | None) -> Iterable[str]:
        """What lasts and may have come into being at a point; at None all of it, what is needed last first."""
        if point is None:
            for name, parameter in self.parameters.items():
                yield from self.states(parameter, name)
            yield from self.gradients() if self.moves_gradients else ()
            yield from (f"parameter {name}" for name in reversed(self.parameters))
        elif point.startswith(GRADIENT) and self.moves_gradients:
            yield f"gradient {point.removeprefix(GRADIENT).partition(' #')[0]}"
        elif point.startswith((CHUNK, AFTER)):
            names = {id(parameter): name for name, parameter in self.parameters.items()}
            number = point.removeprefix(CHUNK).partition(" ")[0]
            over = int(number) if number.isdecimal() else len(self.chunks)  # were updated; at the end all
            for parameter in self.chunks[min(over, len(self.chunks)) - 1]:
                if id(parameter) in names:
                    yield from self.states(parameter, names[id(parameter)])

    # --- all of it ---------------------------------------------------------------------------------------------------
    def movables(self) -> list[Lasting]:
        """All that last and were found once."""
        return [*self._known.values(), *self._behind]

    def written(self) -> None:
        """Anything may have been."""
        for movable in self._known.values():
            movable.written()

    def come_back(self) -> None:
        """All of it is here."""
        with self._books:
            self.bury()
            ours = self.movables()
            for movable in ours:
                movable.come(0.0)
            for movable in ours:
                movable.ensure()

    def bury(self) -> None:
        """Forget what was dropped by whoever held it."""
        behind, self._behind = self._behind, []
        for name in [name for name, movable in self._known.items() if movable.is_dropped()]:
            behind.append(self._known.pop(name))
        for movable in behind:
            self._leave_behind(movable)

    def _leave_behind(self, movable: Lasting) -> None:
        """The program knows it by that name no more. If somebody has it still, as a list of gradients that outlives
        `zero_grad`, it stays away until it is touched."""
        if movable.residency is Residency.AWAY and not movable.is_at(None):
            self._behind.append(movable)
        else:
            movable.die()


@functools.lru_cache(1 << 16)  # of tensors in a step
def _parsed(name: str) -> tuple[str, str]:
    """The kind (parameter, gradient, saved, or the key of a state), and the parameter's name."""
    kind, _, rest = name.partition(" ")
    if kind in ("parameter", "saved"):
        return kind, rest
    if kind == "gradient":
        return kind, rest.partition(" #")[0]
    key, _, rest = name.partition(" of ")
    return key, rest
