"""Traces one training step by running it: every operator, its time, and the storages that it reads and writes.

Theory. Three things watch the step. A dispatch mode sees each operator below autograd. Hooks (`points`) report the
places at which an engine can act. A hook for saved tensors reports what autograd keeps for the backward pass. The
ledger (`storages`) turns this into lives and uses.

Profile a step like those to come, not the first one, in which the optimizer makes its state. If it is the first
nevertheless, state and kept gradients count as if they had been there.

An engine finds these names again: "parameter <name>", "gradient <name>", "<key> of <name>" for optimizer state,
"saved <n>" (`saved`), "buffer <name>". Everything else is "temporary <n>", of kind temporary, which no engine can move.
Also temporary are storages from before the step that are not the model's or the optimizer's (batches, whose owner may
look at them), and buffers.

A gradient that is alive at the end is persistent. If the step dropped an older one, `zero_grad` comes first, and the
gradient lives only to the end of the step.

Storages without a use (a parameter that takes no part, a gradient of the step before) are memory all the same: they
count as workspace of the operators during which they live. On the GPU, the allocator's peak during each operator, above
what it leaves behind, is workspace too.

Watching inflates times, those of small operators most: see `timing`. The device is that of the model's first parameter;
tensors elsewhere are not counted.

Invariants. (1) However the `with` ends, nothing of ours is left at model and optimizer. (2) No storage and no graph
lives longer because it is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import Ints, TensorSaid, Trace, build
from forebay.offload.tracing.between import Between
from forebay.offload.tracing.chunks import CHUNK_BYTES
from forebay.offload.tracing.compiled import show_regions
from forebay.offload.tracing.dispatch import OperatorMode, with_memory
from forebay.offload.tracing.points import GRADIENT, Points, Wanted
from forebay.offload.tracing.saved import SavedNumbers
from forebay.offload.tracing.storages import Seen, Storages, bytes_here, does_no_work, short_name

SecondsOf = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], float]  # of an operator, its arguments and output


class Company:
    """Who moves tensors while they are profiled: told of all that the profiler is told of, and asked for sizes."""

    def begin(self, storages: Storages) -> None:
        """The step begins; `storages` is the profiler's ledger."""

    def end(self) -> None:
        """It is over."""

    def before(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run: what it uses must be here."""

    def after(self) -> None:
        """It ran, and is recorded."""

    def relieve(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """There was no memory for it; whether it should be run again."""
        return False

    def at(self, name: str) -> None:
        """A point is reached."""

    def pack(self, tensor: Any) -> Any:
        """What autograd keeps in place of a tensor."""
        return tensor

    def unpack(self, packed: Any) -> Any:
        """The tensor again."""
        return packed

    def gone_bytes(self) -> int:
        """Of storages that live on elsewhere, and will be others when they are back."""
        return 0

    def hollow_bytes(self) -> int:
        """Of storages that are there without their bytes."""
        return 0

    def size_of(self, storage: Any) -> int:
        """The bytes of a storage, whether they are here or not."""
        return bytes_here(storage)


class Profiler:
    """`with Profiler(model, optimizer) as profiler:` around one training step; then `profiler.trace()`.

    While it runs the optimizer steps in chunks, as it will when tensors are moved. `seconds_of(operator, args, kwargs,
    output)` gives times instead of a clock. `company` is for who moves tensors in the same step. `Invalid` for
    optimizers that cannot step in chunks.

    With `dropped` it may be entered when the model's first forward pass has begun (`begin_forward`), if no operator ran
    before in the step: the parameters that have no gradient by then, or no more.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        points_of: Wanted | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        seconds_of: SecondsOf | None = None,
        company: Company | None = None,
        dropped: Iterable[Any] | None = None,
    ) -> None:
        show_regions()
        self._model, self._optimizer = model, optimizer
        self._company = company or Company()
        first = next(model.parameters(), None)
        if first is None:
            raise Invalid(
                "the model has no parameters, so there is no device to profile: give the model that is trained"
            )
        self.device = first.device
        self._points = Points(model, optimizer, self._at, points_of=points_of, chunk_bytes=chunk_bytes)
        self._storages = Storages(self.device, self._company.size_of)
        self._saved = SavedNumbers(model, optimizer)
        self._names = _parameter_names(model, optimizer)
        self._clock = _clock(self.device, seconds_of)
        self._operators: list[str] = []
        self._reached: list[tuple[str, int]] = []
        self.here_bytes: dict[str, int] = {}  # by point: what lived when it was reached, wherever its bytes are
        self._others_bytes = 0  # that nobody knows, and that stay
        self._gradients: dict[int, list[Seen]] = {  # of each parameter, in the order they came
            id(parameter): [Seen(0, 0, existed=True)] for parameter in dropped or ()
        }
        self._is_late = dropped is not None
        self._successors: set[Seen] = set()  # gradients that came after one of an earlier step
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._company.unpack)
        self._mode = OperatorMode(self._dispatch)
        self._rows: tuple[list[tuple[str, float, int]], list[TensorSaid]] | None = None

    def __enter__(self) -> Profiler:
        if self._reached:
            raise Invalid("a profiler sees one step: make another for the next")
        self._name_what_is_there()
        self._points.attach()
        self._saved.begin_step()
        self._company.begin(self._storages)
        self._hooks.__enter__()
        self._mode.__enter__()
        if self._is_late:
            self._mode.sink()
        self._points.begin_step()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._is_late:
            self._mode.rise()
        self._mode.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)
        self._points.end_step()
        self._points.detach()
        self._others_bytes = self._clock.beside(self._storages.living_bytes - self._company.hollow_bytes())
        self.here_bytes = {name: size_bytes + self._others_bytes for name, size_bytes in self.here_bytes.items()}
        self._company.end()
        if kind is None:
            self._note_gradients()
            self._name_state()
            for gradients in self._gradients.values():
                self._successors.update(gradients[1:] if gradients and gradients[0].existed else ())
        self._storages.close()
        if kind is None:
            self._rows = self._operator_rows(), self._tensor_rows()

    def begin_forward(self, module: Any) -> None:
        """The forward pass of a module is under way."""
        self._points.begin_forward(module)

    @property
    def between(self) -> Between:
        """Of this step, for who sees calls of torch."""
        return self._points.between

    @property
    def operators(self) -> int:
        """How many were seen."""
        return len(self._operators)

    def trace(self, name: str = "step", about: dict[str, str] | None = None) -> Trace:
        """What was seen. `Invalid` if the step did not end, or did nothing."""
        if self._rows is None:
            raise Invalid("no step was profiled: run a whole one within the profiler")
        operators, tensors = self._rows
        told = {"torch": str(torch.__version__), "device": str(self.device), "seconds": self._clock.kind}
        return build(name, operators, self._reached, tensors, told | (about or {}))

    # --- looking -----------------------------------------------------------------------------------------------------
    def _dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._company.before(operator, args, kwargs)
        if does_no_work(operator):
            output = operator(*args, **kwargs)
            if operator is torch.ops.aten.lift_fresh.default:
                self._storages.born(output)  # a constant that Python made just now
            return output

        def timed() -> Any:
            self._clock.start()
            output = operator(*args, **kwargs)
            self._clock.stop()
            return output

        output = with_memory(timed, lambda: self._company.relieve(operator, args, kwargs))
        if self._storages.record(operator, args, kwargs, output):
            self._clock.keep(operator, args, kwargs, output)
            self._operators.append(short_name(operator))
        self._company.after()
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: Any) -> Any:
        number = self._saved.number(tensor)  # of tensors elsewhere too: an engine counts them all
        for seen in self._storages.of(tensor, existed=True):
            seen.saved = seen.saved or number
        return self._company.pack(tensor)

    def _at(self, name: str) -> None:
        self._reached.append((name, self._storages.operators))
        self.here_bytes[name] = self._storages.living_bytes + self._company.gone_bytes()
        if name.startswith(GRADIENT):
            parameter = self._by_gradient.get(name.partition(" #")[0])
            if parameter is not None:
                self._note_gradient(parameter)
        elif name.startswith("optimizer chunk"):
            self._note_gradients()
        self._company.at(name)

    def _name_what_is_there(self) -> None:
        for parameter, name in self._names.values():
            self._storages.name(parameter, "parameter", f"parameter {name}")
        self._by_gradient = {GRADIENT + name: parameter for parameter, name in self._names.values()}
        self._name_state()
        self._note_gradients()
        for name, buffer in self._model.named_buffers():
            self._storages.name(buffer, "temporary", f"buffer {name}")

    def _name_state(self) -> None:
        """State that is made in this step counts as if it had been there: in the next it is."""
        for parameter, state in self._optimizer.state.items():
            if id(parameter) not in self._names:
                continue
            name = self._names[id(parameter)][1]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._storages.name(value, "optimizer state", f"{key} of {name}")

    def _note_gradients(self) -> None:
        for parameter, _ in self._names.values():
            self._note_gradient(parameter)

    def _note_gradient(self, parameter: Any) -> None:
        if parameter.grad is None:
            return
        earlier = self._gradients.setdefault(id(parameter), [])
        for seen in self._storages.of(parameter.grad, existed=True):
            if seen not in earlier and seen.kind is None:
                earlier.append(seen)
                seen.kind = "gradient"

    # --- telling -----------------------------------------------------------------------------------------------------
    def _operator_rows(self) -> list[tuple[str, float, int]]:
        seconds, workspaces = self._clock.read()
        change: Ints = np.zeros(self._storages.operators + 1, np.int64)
        for seen in self._storages.seen:
            if not seen.uses:
                birth, death = self._life(seen)
                change[birth] += seen.size_bytes
                change[death + 1] -= seen.size_bytes
        unused: list[int] = np.cumsum(change[:-1]).tolist()
        sums = [workspace + more + self._others_bytes for workspace, more in zip(workspaces, unused, strict=True)]
        return list(zip(self._operators, seconds, sums, strict=True))

    def _tensor_rows(self) -> list[TensorSaid]:
        self._name_gradients()
        rows: list[TensorSaid] = []
        others = 0
        for seen in self._storages.seen:
            if not seen.uses or not seen.size_bytes:
                continue
            if seen.kind is None:
                seen.kind = "activation" if seen.saved and not seen.existed else "temporary"
                others += not seen.saved
                seen.name = f"saved {seen.saved}" if seen.saved else f"temporary {others}"
            persistent, life = self._persists(seen), self._life(seen)
            rows.append(
                TensorSaid(
                    seen.name, seen.kind, seen.size_bytes, seen.uses, seen.writes, persistent=persistent, life=life
                )
            )
        return rows

    def _name_gradients(self) -> None:
        """One that is used in the step has its parameter's name; if there are more, as they came."""
        for parameter, gradients in self._gradients.items():
            name = f"gradient {self._names[parameter][1]}"
            for number, seen in enumerate((seen for seen in gradients if seen.uses), 1):
                seen.name = name if number == 1 else f"{name} #{number}"

    def _persists(self, seen: Seen) -> bool:
        if not seen.alive:
            return False
        if seen.existed or seen.kind == "optimizer state":
            return True
        return seen.kind == "gradient" and seen not in self._successors

    def _life(self, seen: Seen) -> tuple[int, int]:
        if self._persists(seen):
            return 0, self._storages.operators - 1
        return seen.birth, max([seen.death, *seen.uses[-1:]])


def _parameter_names(model: Any, optimizer: Any) -> dict[int, tuple[Any, str]]:
    """Every parameter once, with its first name; those that only the optimizer knows by their place there."""
    names = {id(parameter): (parameter, name) for name, parameter in model.named_parameters()}
    for group_number, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), (parameter, f"group {group_number}, {number}"))
    return names


# --- clocks ----------------------------------------------------------------------------------------------------------
class _Clock:
    """The processor's: operators are done when they return."""

    kind = "measured"

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = self._last = 0.0

    def start(self) -> None:
        self._began = perf_counter()

    def stop(self) -> None:
        self._last = perf_counter() - self._began

    def keep(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The operator that stopped last is one that counts."""
        self._seconds.append(self._last)

    def read(self) -> tuple[list[float], list[int]]:
        """Seconds and workspace bytes of all operators that count."""
        return self._seconds, [0] * len(self._seconds)

    def beside(self, known_bytes: int) -> int:
        """Bytes that an allocator has given out beside those; 0 where nobody counts them."""
        return 0


class _Table(_Clock):
    """Times from a function."""

    kind = "from a table"

    def __init__(self, seconds_of: SecondsOf) -> None:
        super().__init__()
        self._seconds_of = seconds_of

    def keep(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._seconds.append(self._seconds_of(operator, args, kwargs, output))


class _CudaClock(_Clock):
    """Events before and after each operator; the allocator's peak between them."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._events: list[tuple[Any, Any]] = []
        self._workspaces: list[int] = []
        self._pair: tuple[Any, Any] = (None, None)
        self._allocated = 0

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)
        self._pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._pair[0].record()

    def stop(self) -> None:
        self._pair[1].record()

    def keep(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        left = max(self._allocated, torch.cuda.memory_allocated(self._device))
        self._workspaces.append(max(0, torch.cuda.max_memory_allocated(self._device) - left))
        self._events.append(self._pair)

    def read(self) -> tuple[list[float], list[int]]:
        torch.cuda.synchronize(self._device)
        return [began.elapsed_time(ended) / 1e3 for began, ended in self._events], self._workspaces

    def beside(self, known_bytes: int) -> int:
        return max(0, int(torch.cuda.memory_allocated(self._device)) - known_bytes)


def _clock(device: Any, seconds_of: SecondsOf | None) -> _Clock:
    if seconds_of is not None:
        return _Table(seconds_of)
    return _CudaClock(device) if device.type == "cuda" else _Clock()
