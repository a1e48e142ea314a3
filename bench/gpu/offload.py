"""GPU row of offloading: a transformer in less memory than it takes, by the engine, and by what one would do instead.

Its processes ran on an H200 (2026-11-27), the row as a whole has not yet. What is tested is the same code on the CPU,
with tiny models and no limit of memory (`tests/bench/test_gpu_offload.py`). Where no CUDA device is, the row says so,
with the date, and nothing else.

Theory. The memory that the step takes is measured first, without a limit, and with it the step time that is called
ideal here. Then the device is made smaller: torch may have 90, 80, 70 and 60 % of that peak and no byte more, and each
side trains the same model on the same batches in what is left. A side that needs more runs out of memory, as it would
on a smaller device. Limits and what comes of exceeding them belong to a process, so every side is a process of its own,
which prints one line of JSON.

The sides: nothing (expected to fail: otherwise the limit would not bind), the engine, torch's `save_on_cpu`, activation
checkpointing of each block, and TRL's activation offloading if it is installed. All have the same allocator (expandable
segments), the same precision (TF32 for products, float32 for the rest, no autocast), fused AdamW on the device, and
deterministic kernels where torch has them, so that losses can be compared bit by bit. The engine plans for
PLANNED_SHARE of its limit: the rest is for what the allocator cannot use.

The model is the one of `forebay.offload.tracing.shapes`, as wide as a third of the device's memory allows: narrow
layers compute too little for the bytes that they move.

Judged are: whether the engine trained at each limit, whether its losses are those of training without it, and how far
the predicted step time was off. Its share of the ideal step, and its step beside that of the best of the others, are
reported. Samples are the steps of one process, without the first ones and, for the engine, those that it watches and
those in which it would run operators again that had no memory (`rescue`).

`python -m bench.gpu.offload [--quick] [--share 0.8]` runs the row alone, without the rest of the benchmark and
what that needs: torch, numpy, xxhash and msgspec are enough.
`python -m bench.gpu.offload --first-day` makes the checks that come before all measuring (`first_day.py`).
`python -m bench.gpu.offload child '{"side": …}'` is one process.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import report
from bench.report import Result, number
from bench.row import MIB, Row
from bench.stats import Measure, bounded, compared
from bench.workloads import BY_NAME

if TYPE_CHECKING:
    from bench.parts import Lab

SHARES, QUICK_SHARES = (0.9, 0.8, 0.7, 0.6), (0.8,)
SIDES = ("none", "ours", "save_on_cpu", "checkpoint", "trl")
PEERS = SIDES[2:]
PLANNED_SHARE = 0.92  # of the limit
WARM_STEPS = 2  # not timed: the optimizer makes its state, kernels are chosen
# The engine watches five and rescues sixteen. Then it may find that steps differ from the prediction, plan anew and
# rescue sixteen again, on busy cores more than once: it goes on until STEADY_MIN steps of one plan were timed.
STEPS = {"ours": 32, "none": 48}
STEADY_MIN, STEPS_MAX = 10, 200
PEER_STEPS = 6
BARE_STEPS = 3  # under a limit: enough to run out of memory
CHILD_TIMEOUT_S = 600.0
SEED = 5

WIDTHS = (2048, 1536, 1024, 768, 512, 256)
NEED_SHARE = 1 / 3  # of the device's memory
LAYERS, HEAD_WIDTH, WORDS, BATCH, SEQUENCE = 12, 64, 32_768, 8, 1024
QUICK = {"layers": 8, "width": 1024, "words": 8192, "batch": 4, "sequence": 512}  # no operator needs much of it

Told = dict[str, Any]  # what a child says
Work = dict[str, Any]  # what it is asked


@dataclass(frozen=True)
class Alone:
    """What this row wants of a `Lab`, without its servers."""

    dir: Path
    quick: bool


def _offload(name: str) -> Any:
    """A module of `forebay.offload`, parts of which want torch."""
    return importlib.import_module(f"forebay.offload.{name}")


# --- one process -----------------------------------------------------------------------------------------------------
def child(work: Work) -> Told:
    """Train as one side; what came of it, as far as it came. `work`: side, device, steps, shape (or none, for one that
    suits the device), and where they matter limit_bytes, budget_bytes, host_bytes, disk_bytes, folder, options and
    close_to."""
    told: Told = {"side": work["side"], "oom": False, "error": "", "steps_s": [], "losses": [], "warm": WARM_STEPS}
    try:
        torch = _settled(work)
        told["torch"] = str(torch.__version__)
        work.setdefault("shape", None)
        work["shape"] = told["shape"] = work["shape"] or shape_for(torch.cuda.get_device_properties(0).total_memory)
        SIDE_OF[work["side"]](Training(torch, work), work, told)
    except Exception as error:  # whatever it is, the parent shall hear of it
        told["oom"] = _is_out_of_memory(error)
        said = str(error).splitlines()
        told["error"] = f"{type(error).__name__}: {said[0] if said else ''}"
    _tell_memory(work, told)
    return told


def _settled(work: Work) -> Any:
    """torch, with what all sides have alike."""
    torch = importlib.import_module("torch")
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)  # attention asks for more than warnings before it adds up in one order
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost each side what it allocates
    if work["device"] == "cpu":
        torch.set_num_threads(1)
    elif limit_bytes := work.get("limit_bytes"):
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), 0)
    return torch


def _tell_memory(work: Work, told: Told) -> None:
    if work["device"] == "cuda" and "torch" in told:
        cuda = importlib.import_module("torch").cuda
        told["device"] = cuda.get_device_name(0)
        told["peak_bytes"] = cuda.max_memory_allocated(0)
        told["reserved_bytes"] = cuda.max_memory_reserved(0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is why, also where someone made another error of it."""
    torch = sys.modules.get("torch")
    while error is not None and torch is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def shape_for(total_bytes: int) -> dict[str, int]:
    """The widest of WIDTHS whose step takes less than NEED_SHARE of so much memory, by a rough count."""
    for width in WIDTHS:
        shape = {"layers": LAYERS, "width": width, "words": WORDS, "batch": BATCH, "sequence": SEQUENCE}
        if _need_bytes(**shape) <= total_bytes * NEED_SHARE:
            break
    return shape


def _need_bytes(layers: int, width: int, words: int, batch: int, sequence: int) -> int:
    """Weights and both moments, what autograd keeps (17 tensors of the width in each layer), and scores three times."""
    weights = layers * 12 * width**2 + 2 * words * width
    tokens = batch * sequence
    return 12 * weights + 4 * tokens * (layers * 17 * width + 3 * words)


class Training:
    """A model, its optimizer and its steps, which are the same for all sides. Sides change `around`."""

    def __init__(self, torch: Any, work: Work) -> None:
        self.torch, self.device, self._shape = torch, torch.device(work["device"]), work["shape"]
        self._shapes = _offload("tracing.shapes")
        width, sequence = self._shape["width"], self._shape["sequence"]
        heads = max(1, width // HEAD_WIDTH)
        dimensions = {"vocabulary": self._shape["words"], "layers": self._shape["layers"], "width": width}
        dimensions |= {"heads": heads, "key_heads": heads, "hidden": 4 * width, "positions": sequence}
        torch.manual_seed(SEED)
        with self.device:  # made where it stays: as quick as that is, and the same in each process
            self.model = self._shapes.Decoder(self._shapes.Shape(**dimensions, gated=False, biased=True), sequence)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=work["device"] == "cuda")
        self.around: AbstractContextManager[Any] = nullcontext()  # forward and backward; entered at each step

    def take(self, step: int) -> float:
        """One step; its loss."""
        size = self._shape["batch"], self._shape["sequence"] + 1
        chance = self.torch.Generator().manual_seed(step)
        words = self.torch.randint(0, self._shape["words"], size, generator=chance).to(self.device)
        with self.around:
            loss = self._shapes.word_loss(self.model, (words[:, :-1], words[:, 1:]))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def run(
        self,
        steps: int,
        told: Told,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        """So many steps, and more while it `goes_on`, each of them timed from a device that is idle to one that is idle
        again."""
        for step in itertools.count():
            if step >= steps and not (step < STEPS_MAX and goes_on()):
                return
            self._settle()
            began_s = time.perf_counter()
            with within():
                loss = self.take(step)
            self._settle()
            told["steps_s"].append(time.perf_counter() - began_s)
            told["losses"].append(loss)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


# --- the sides -------------------------------------------------------------------------------------------------------
def _none(training: Training, work: Work, told: Told) -> None:
    training.run(work["steps"], told)
    if work["device"] == "cpu":  # nobody counts memory there: what the profiler makes of one more step
        with _offload("tracing.profile").Profiler(training.model, training.optimizer) as profiler:
            training.take(work["steps"])
        told["peak_bytes"] = int(profiler.trace().need_bytes().max())


def _save_on_cpu(training: Training, work: Work, told: Told) -> None:
    save = training.torch.autograd.graph.save_on_cpu
    with_pinned = functools.partial(save, pin_memory=work["device"] == "cuda")
    training.around = _Anew(with_pinned)
    training.run(work["steps"], told)


def _checkpoint(training: Training, work: Work, told: Told) -> None:
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    for block in training.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    training.run(work["steps"], told)


def _trl(training: Training, work: Work, told: Told) -> None:
    """As TRL's trainers have it: one manager for all steps, around forward and backward, and not for the scores."""
    offloading = importlib.import_module("trl.models.activation_offloading")
    training.model.__dict__["output"] = training.model.scores  # where it looks for them; not a second module
    training.around = offloading.get_act_offloading_ctx_manager(training.model)
    training.run(work["steps"], told)


def _ours(training: Training, work: Work, told: Told) -> None:
    """The engine with both tiers. It is closed only when all went well: to close it brings everything back, for which
    there may be no memory; the process ends anyway. `close_to`: where the state is left that the device cannot hold."""
    host, disk = (
        _offload("tiers.host_tier").HostTier(work["host_bytes"]),
        _offload("tiers.disk_tier").DiskTier([work["folder"]], work["disk_bytes"]),
    )
    off = _offload("engine").Offload(
        training.model,
        training.optimizer,
        budget=work["budget_bytes"],
        tiers=[host, disk],
        experimental=True,
        **work.get("options", {}),
    )

    plans: list[Any] = []

    @contextmanager
    def within() -> Iterator[None]:
        if not plans or off.choice is not plans[-1]:
            plans.append(off.choice)
            settled = _offload("rescue").STEPS  # in which each operator passes a mode
            told["warm"] = len(told["steps_s"]) + 1 + settled  # the first is on the way from another state
        with off.step():
            yield

    try:
        training.run(work["steps"], told, within, lambda: len(steady(told)) < STEADY_MIN)
    finally:  # how far it came says why it stopped
        found = off.report()
        fields = (
            "policy moves predicted_s step_s missing_s memory_s written_bytes read_bytes unplanned over_bytes unlike"
        )
        told["report"] = {name: getattr(found, name) for name in [*fields.split(), "need_bytes", "budget_bytes"]}
        told["failures"] = list(found.failures)
        told["paths"] = [str(getattr(tier, "path", tier.name)) for tier in (host, disk)]
    off.close(to=work.get("close_to"))


class _Anew(AbstractContextManager[Any]):
    """A new context manager each time it is entered, for those that can be entered once."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> Any:
        self._now = self._make()
        return self._now.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._now.__exit__(*error)


SIDE_OF: dict[str, Callable[[Training, Work, Told], None]] = {
    "none": _none,
    "ours": _ours,
    "save_on_cpu": _save_on_cpu,
    "checkpoint": _checkpoint,
    "trl": _trl,
}


# --- all processes ---------------------------------------------------------------------------------------------------
def asked(work: Work) -> Told:
    """What a process that does this work says. One that dies without a word has its last line for an error."""
    alike = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    alike["PYTORCH_CUDA_ALLOC_CONF"] = alike["PYTORCH_ALLOC_CONF"]  # as older torches call it
    told: Told = {"side": work["side"], "oom": False, "error": "", "steps_s": [], "losses": [], "warm": WARM_STEPS}
    if work["side"] == "trl" and importlib.util.find_spec("trl") is None:
        return told | {"error": "not installed"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.offload", "child", json.dumps(work)],
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
            env={**os.environ, **alike},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return told | {"error": f"it took more than {CHILD_TIMEOUT_S:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"side"'):
            return dict(json.loads(line))
    said = (done.stderr or done.stdout).strip().splitlines()
    return told | {"error": f"it ended with {done.returncode}: {said[-1] if said else ''}"}


@dataclass(frozen=True)
class Round:
    """What all processes told. `plain`: without a limit, before and after all others."""

    plain: Told
    again: Told
    limited: dict[float, dict[str, Told]]  # by share and side

    @property
    def ideal_s(self) -> float:
        return statistics.median([*steady(self.plain), *steady(self.again)])


def steady(told: Told) -> list[float]:
    """Seconds of the steps that count."""
    return list(told["steps_s"][told["warm"] :])


def measured(
    folder: Path,
    shares: Sequence[float],
    base: Work,
    ask: Callable[[Work], Told] = asked,
    sides: Sequence[str] = SIDES,
) -> Round:
    """Each side at every share of the memory that it takes without a limit. `ask` does the work of one process."""

    def told_of(side: str, share: float | None, work: Work) -> Told:
        told = ask({**base, "side": side, "steps": STEPS.get(side, PEER_STEPS), **work})
        print(f"[bench]   {_line(share, told)}", file=sys.stderr, flush=True)
        return told

    plain = told_of("none", None, {})
    if plain["error"]:
        return Round(plain, plain, {})
    base = {**base, "shape": plain["shape"]}
    peak = int(plain["peak_bytes"])
    rooms = {"host_bytes": min(peak, _free_memory_bytes() // 2), "folder": str(folder)}
    rooms["disk_bytes"] = min(peak, shutil.disk_usage(folder).free // 2)
    limited: dict[float, dict[str, Told]] = {}
    for share in shares:
        limit = int(peak * share)
        works: dict[str, Work] = {side: {"limit_bytes": limit} for side in SIDES}
        works["none"]["steps"] = BARE_STEPS
        works["ours"] |= {"budget_bytes": int(limit * PLANNED_SHARE), **rooms}
        limited[share] = {side: told_of(side, share, works[side]) for side in sides}
    return Round(plain, told_of("none", None, {"steps": PEER_STEPS}), limited)


def _free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- the row ---------------------------------------------------------------------------------------------------------
def no_device() -> str:
    """Why there is nothing to run on, with the day; empty where there is a CUDA device."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    if importlib.util.find_spec("torch") is None:
        return f"not run: torch is not installed ({day})"
    if not importlib.import_module("torch").cuda.is_available():
        return f"not run: no CUDA device ({day})"
    return ""


def gpu(lab: Lab | Alone, row: Row, shares: Sequence[float] = ()) -> Result:
    """Each side at each share of the memory, or why that could not be."""
    reason = no_device()
    if reason:
        return Result(row, error=reason)
    base: Work = {"device": "cuda"}
    if lab.quick:
        base["shape"] = dict(QUICK)
    return judged(row, measured(lab.dir, shares or (QUICK_SHARES if lab.quick else SHARES), base))


def judged(row: Row, found: Round) -> Result:
    """The measures and what is said beside them."""
    if found.plain["error"] or len(steady(found.plain)) < 1:
        return Result(row, error=f"without a limit it did not train: {found.plain['error']}")
    trained = {share: sides["ours"] for share, sides in found.limited.items() if _has_trained(sides["ours"])}
    other = [share for share, told in trained.items() if difference(told, found.plain)]
    measures = [bounded("trained, of the limits", "of them", row.goals["trained"], [len(trained) / len(found.limited)])]
    if trained:  # where nothing was trained, nothing was the same either
        measures.append(bounded("limits with other losses", "", row.goals["other losses"], [float(len(other))]))
    for share, told in trained.items():
        measures += _of_share(row, share, told, found)
    return Result(row, tuple(measures), notes=_notes(found), extra={"plain": found.plain, "limited": _named(found)})


def _of_share(row: Row, share: float, told: Told, found: Round) -> list[Measure]:
    steps_s, at = steady(told), f"at {share:.0%}"
    error = abs(told["report"]["predicted_s"] / statistics.median(steps_s) - 1)
    measures = [
        bounded(f"share of the ideal step, {at}", "", row.goals["of ideal"], [found.ideal_s / s for s in steps_s]),
        bounded(f"error of the prediction, {at}", "", row.goals["error"], [error]),
    ]
    peers = {side: found.limited[share][side] for side in PEERS if _has_trained(found.limited[share][side])}
    if peers:
        best = min(peers, key=lambda side: statistics.median(steady(peers[side])))
        ours, theirs = (1 / statistics.median(steady(each)) for each in (told, peers[best]))
        name = f"beside the best other, {at}"
        measures.append(compared(name, "steps/s", row.goals["of ideal"], [ours], [theirs], best))
    return measures


def _has_trained(told: Told) -> bool:
    return not told["error"] and bool(steady(told))


def difference(told: Told, plain: Told) -> float:
    """The largest between two losses of the same step; 0 is bit by bit."""
    return max((abs(a - b) for a, b in zip(told["losses"], plain["losses"], strict=False)), default=0.0)


def _named(found: Round) -> dict[str, object]:
    return {f"{share:.0%}": sides for share, sides in found.limited.items()}


def _notes(found: Round) -> tuple[str, ...]:
    plain, again = found.plain, found.again
    shape = ", ".join(f"{name} {size}" for name, size in plain["shape"].items())
    before_s, after_s = (statistics.median(steady(told)) if steady(told) else 0.0 for told in (plain, again))
    same = "the same losses" if not difference(again, plain) else f"losses off by {difference(again, plain):.3g}"
    times = f"{before_s:.4f} s a step before all others and {after_s:.4f} s after them"
    notes = [
        f"{plain.get('device', 'CPU')}, torch {plain['torch']}: {shape}; float32, TF32 for products, AdamW",
        f"without a limit: {plain['peak_bytes'] / MIB:,.0f} MiB at the most, {times}, {same}",
    ]
    for share, sides in found.limited.items():
        notes += [_line(share, told, found) for told in sides.values()]
    return tuple(notes)


def _line(share: float | None, told: Told, found: Round | None = None) -> str:
    """One process, for people; beside the others where they are known."""
    head = f"{f'{share:.0%}' if share else 'no limit'}: {told['side']}"
    if told["oom"]:
        expected = " (as expected)" if told["side"] == "none" else ""
        return f"{head} ran out of memory in step {len(told['losses']) + 1}{expected}"
    if told["error"]:
        return f"{head}: {told['error']}"
    if share and told["side"] == "none":
        return f"{head} did not run out of memory, so this limit binds nobody"
    if not steady(told):
        return f"{head} took {len(told['losses'])} steps, too few to tell"
    step_s = statistics.median(steady(told))
    said = [f"{head} {step_s:.4f} s a step ({number(min(steady(told)))} to {number(max(steady(told)))})"]
    if found is not None:
        off, steps = difference(told, found.plain), min(len(told["losses"]), len(found.plain["losses"]))
        losses = f"losses off by {off:.3g}" if off else "losses bit-equal"
        said += [f"{found.ideal_s / step_s:.0%} of ideal", f"{losses} over {steps} steps"]
    if "report" in told:
        facts = told["report"]
        said.append(f"predicted {facts['predicted_s']:.4f} s and by its own count {facts['step_s']:.4f} s")
        said.append(f"waited {facts['missing_s']:.4f} s for tensors and {facts['memory_s']:.4f} s for memory")
        said.append(f"{facts['written_bytes'] / MIB:,.0f} MiB out and {facts['read_bytes'] / MIB:,.0f} MiB in")
        said += [f"plan '{facts['policy']}' of {facts['moves']} moves, {facts['unplanned']} unplanned", *told["paths"]]
        said += [f"failed: {failure}" for failure in told["failures"]]
    return ", ".join(said)


def main(argv: Sequence[str]) -> int:
    """A child's work, or the row alone."""
    if argv[:1] == ["child"]:
        print(json.dumps(child(json.loads(argv[1]))), flush=True)
        return 0
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.offload", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model at one share: does it work at all?")
    parser.add_argument("--share", action="append", type=float, default=[], help=f"of the peak (default: {SHARES})")
    parser.add_argument("--first-day", action="store_true", help="what to look at first with a device, in its order")
    parser.add_argument("--out", metavar="FILE", help="JSON file")
    arguments = parser.parse_args(argv)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        if arguments.first_day:
            return int(importlib.import_module("bench.gpu.first_day").first_day(Path(folder)))
        result = gpu(Alone(Path(folder), arguments.quick), BY_NAME["offload-gpu"], arguments.share)
    results = [report.timed(result, time.perf_counter() - began_s)]
    print(report.table(results))
    print(report.notes(results))
    if arguments.out:
        Path(arguments.out).write_text(report.as_json(results, quick=arguments.quick, wall_s=time.time()))
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
