"""`forebay offload`: simulates what moving tensors out of the accelerator's memory would cost.

Theory. A trace (a file, made by `forebay.offload.tracing.profile` or `forebay offload trace`) is planned and replayed.
That needs no accelerator and no node, and `plan` and `show` need no torch. All numbers are simulated, and the output
says so.

Invariant. The printed numbers are the replay's, not the plan's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug
from forebay.cli.outcome import check_installed, verb
from forebay.core.errors import Invalid, NotSupported
from forebay.core.quantity import parse_rate, parse_size

if TYPE_CHECKING:
    from forebay.offload.planning.choose import Choice
    from forebay.offload.planning.hardware import Hardware
    from forebay.offload.planning.sweep import Step
    from forebay.offload.planning.trace import Trace

app = typer.Typer(
    no_args_is_help=True,
    help="Plan what a training step moves to disks, and what it costs.",
    rich_markup_mode=None,
    add_completion=False,
)
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace of one step: .json or .json.gz.")]
STALLS_SHOWN = 5


@app.command("plan")
@verb
def plan(
    trace: TraceFile,
    budget: Annotated[str, typer.Option("--budget", metavar="SIZE", help="Memory for the step, such as 24GiB.")],
    ssd: Annotated[str, typer.Option("--ssd", metavar="RATE", help="Disks read and write this, such as 3GB/s.")] = "",
    ssd_write: Annotated[str, typer.Option("--ssd-write", metavar="RATE", help="Where they write slower.")] = "",
    ssd_room: Annotated[str, typer.Option("--ssd-room", metavar="SIZE", help="Room on the disks.")] = "16TiB",
    host: Annotated[str, typer.Option("--host", metavar="SIZE", help="Host memory to use. Default: none.")] = "0",
    link: Annotated[str, typer.Option("--link", metavar="RATE", help="From accelerator to host, each way.")] = "50GB/s",
    sweep: Annotated[bool, typer.Option("--sweep/--no-sweep", help="Step time over bandwidths of disks.")] = True,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="DIR", help="Write memory.png, lifetimes.png, sweep.png there.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether a step fits, how long it takes then, and which disks it needs."""
    _check_installed(picture)
    from forebay.offload.planning.choose import choose
    from forebay.offload.planning.trace import load

    read = load(trace)
    hardware = _hardware(budget, ssd, ssd_write, ssd_room, host, link)
    chosen, compared = choose(read, hardware)
    steps = _swept(read, hardware, quiet=as_json) if sweep and hardware.disk_bytes else []
    if picture is not None:
        _draw(read, chosen, steps, picture)
    if as_json:
        show.document(_as_json(read, hardware, chosen, compared, steps))
        return
    _tell(read, hardware, chosen, compared, steps)


@app.command("show")
@verb
def show_trace(
    trace: TraceFile,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="DIR", help="Write memory.png and lifetimes.png there.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what a trace holds: operators, tensors by kind, how much memory it needs where."""
    _check_installed(picture)
    from forebay.offload.planning.trace import load

    read = load(trace)
    if picture is not None:
        _draw(read, None, [], picture)
    found = _facts(read)
    if as_json:
        show.document(found)
        return
    took = show.duration(read.compute_s)
    print(f"{read.name}: {read.operator_count:,} operators in {took}, {len(read.points):,} points")
    for key, value in read.about.items():
        print(f"  {key}: {value}")
    print(
        f"it needs {show.size(found['need_bytes'])} at most, and {show.size(found['active_bytes'])} at once "
        f"(at {found['active_operator']}): no budget below that works"
    )
    rows = [[kind, f"{told['tensors']:,}", show.size(told["size_bytes"])] for kind, told in found["kinds"].items()]
    print(show.columns(["kind", "tensors", "in all"], rows, right=(1, 2)))


@app.command("trace")
@verb
def make_trace(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="Such as llama-3-8b; a wrong one lists all.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it: .json or .json.gz.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a batch.")] = 1,
    sequence: Annotated[int, typer.Option("--sequence", min=1, help="Tokens in a sequence.")] = 2048,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Fewer layers than the shape has.")] = None,
    debug: Debug = False,
) -> None:
    """Make the trace of a known model's step without an accelerator: fake tensors, and a table of times."""
    try:
        from forebay.offload.tracing.shapes import trace_of
    except ImportError as error:
        raise NotSupported(f"torch is not here ({error}): pip install '.[torch]' in a checkout of forebay") from None
    made = trace_of(shape, batch=batch, sequence=sequence, layers=layers)
    made.save(out)
    print(f"{out}: {made.operator_count:,} operators, {made.tensor_count:,} tensors (times are from a table)")


def _check_installed(picture: Path | None) -> None:
    check_installed("numpy", *(["matplotlib"] if picture is not None else []), extra="plan")


# --- what is asked for -----------------------------------------------------------------------------------------------
def _hardware(budget: str, ssd: str, ssd_write: str, ssd_room: str, host: str, link: str) -> Hardware:
    from forebay.offload.planning.hardware import Hardware

    if not ssd and parse_size(host) == 0:
        raise Invalid("there is nothing to move tensors to: give --ssd 3GB/s, --host 64GiB, or both")
    read_bytes_s = parse_rate(ssd) if ssd else 0.0
    return Hardware(
        parse_size(budget),
        disk_bytes=parse_size(ssd_room) if ssd else 0,
        disk_write_bytes_s=parse_rate(ssd_write) if ssd_write else read_bytes_s,
        disk_read_bytes_s=read_bytes_s,
        host_bytes=parse_size(host),
        link_out_bytes_s=parse_rate(link),
        link_in_bytes_s=parse_rate(link),
    )


def _swept(trace: Trace, hardware: Hardware, *, quiet: bool) -> list[Step]:
    from forebay.offload.planning.sweep import sweep

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty() and not quiet:
            print(f"\r{done} of {of} bandwidths", end="\n" if done == of else "", file=sys.stderr, flush=True)

    return sweep(trace, hardware, progress=progress)


def _draw(trace: Trace, chosen: Choice | None, steps: list[Step], folder: Path) -> None:
    from forebay.offload.planning import pictures

    folder.mkdir(parents=True, exist_ok=True)
    pictures.draw_memory(trace, folder / "memory.png", choice=chosen)
    pictures.draw_lifetimes(trace, folder / "lifetimes.png")
    if steps:
        pictures.draw_sweep(f"{trace.name}: which disks", {"best plan": steps}, trace.compute_s, folder / "sweep.png")


# --- what is told ----------------------------------------------------------------------------------------------------
def _facts(trace: Trace) -> dict[str, Any]:
    from forebay.offload.planning.trace import KINDS

    active = trace.active_bytes()
    worst = int(active.argmax())
    kinds = {}
    for number, kind in enumerate(KINDS):
        these = trace.kinds == number
        kinds[kind] = {"tensors": int(these.sum()), "size_bytes": int(trace.sizes_bytes[these].sum())}
    return {
        "name": trace.name,
        "operators": trace.operator_count,
        "points": len(trace.points),
        "compute_s": trace.compute_s,
        "need_bytes": int(trace.need_bytes().max()),
        "active_bytes": int(active[worst]),
        "active_operator": trace.operators[worst],
        "kinds": kinds,
    }


def _as_json(
    trace: Trace, hardware: Hardware, chosen: Choice, compared: list[Choice], steps: list[Step]
) -> dict[str, Any]:
    return {
        "simulated": True,
        "trace": _facts(trace),
        "budget_bytes": hardware.budget_bytes,
        "chosen": _row(chosen),
        "policies": [_row(choice) for choice in compared],
        "sweep": [step._asdict() for step in steps],
    }


def _row(choice: Choice) -> dict[str, Any]:
    ran = choice.replayed
    return {
        "policy": choice.plan.rank,
        "step_s": ran.step_s,
        "share_of_ideal": ran.share_of_ideal,
        "stalled_for_tensors_s": ran.missing_s,
        "stalled_for_memory_s": ran.memory_s,
        "written_bytes": ran.written_bytes,
        "read_bytes": ran.read_bytes,
        "moves": len(choice.plan.moves),
        "unplanned": ran.unplanned,
        "peak_bytes": ran.peak_bytes,
        "excess_bytes": choice.plan.excess_bytes,
    }


def _tell(trace: Trace, hardware: Hardware, chosen: Choice, compared: list[Choice], steps: list[Step]) -> None:
    from forebay.offload.planning.plan import RANKS

    ran = chosen.replayed
    need = int(trace.need_bytes().max())
    print(f"{trace.name} needs {show.size(need)}, {100 * need / hardware.budget_bytes:.0f} % of the budget (simulated)")
    print(
        f"a step takes {show.duration(ran.step_s)}, {100 * ran.share_of_ideal:.0f} % of what it would without waiting "
        f"({show.duration(trace.compute_s)}), by {chosen.plan.rank}"
    )
    greedy = next((choice for choice in compared if choice.plan.rank == RANKS[0]), chosen)
    if greedy.plan.excess_bytes:
        print(
            f"the disks are too slow for this budget: {show.size(greedy.plan.excess_bytes)} more than they can move in "
            "time, where it is worst; the step waits there"
        )
    for stall in sorted(ran.stalls, key=lambda stall: -stall.seconds)[:STALLS_SHOWN]:
        what = trace.tensors[stall.tensor] if stall.tensor >= 0 else "memory"
        print(f"  {show.duration(stall.seconds)} before {trace.operators[stall.operator]}: waiting for {what}")
    head = ["policy", "step", "ideal", "for tensors", "for memory", "written", "read", "moves", "unplanned"]
    rows = [
        [
            choice.plan.rank,
            show.duration(choice.replayed.step_s),
            f"{100 * choice.replayed.share_of_ideal:.0f} %",
            show.duration(choice.replayed.missing_s),
            show.duration(choice.replayed.memory_s),
            show.size(choice.replayed.written_bytes),
            show.size(choice.replayed.read_bytes),
            f"{len(choice.plan.moves):,}",
            f"{choice.replayed.unplanned:,}",
        ]
        for choice in sorted(compared, key=lambda choice: choice.replayed.step_s)
    ]
    print(show.columns(head, rows, right=range(1, len(head))))
    if steps:
        _tell_sweep(trace, steps)


def _tell_sweep(trace: Trace, steps: list[Step]) -> None:
    from forebay.offload.planning.sweep import knee

    rows = [
        [f"{step.bytes_s / 1e9:g} GB/s", show.duration(step.step_s), f"{100 * trace.compute_s / step.step_s:.0f} %"]
        for step in steps
    ]
    print(show.columns(["disks", "step", "ideal"], rows, right=(0, 1, 2)))
    found = knee(steps)
    print(f"more than {found.bytes_s / 1e9:g} GB/s buys little: a step takes {show.duration(found.step_s)} there")
