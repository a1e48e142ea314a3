"""`forebay ckpt`: the checkpoints of a run: what there is, whether it verifies, what may go, where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import show
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import as_forebay, check_installed, verb
from forebay.cli.progress import Progress
from forebay.core.errors import Corrupt, Invalid, NotFound
from forebay.ports import clock

if TYPE_CHECKING:
    from forebay.checkpoint.repository import Repository
    from forebay.core.checkpoint import Manifest

app = typer.Typer(
    no_args_is_help=True, help="List, verify, copy and prune checkpoints.", rich_markup_mode=None, add_completion=False
)
Run = Annotated[
    str, typer.Argument(metavar="RUN", autocompletion=complete_addresses, help="Where the run saves: bucket/path.")
]
Step = Annotated[int | None, typer.Option("--step", metavar="N", help="The step. Default: the newest checkpoint.")]
BAR = 20  # characters of the largest size
PICTURES = (".png", ".svg", ".pdf")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command("ls")
@verb
def ls(
    run: Run,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw sizes and stalls over time: .png, .svg, .pdf."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints of a run, newest first.

    With --json one line for each: {"sequence", "step", "saved_s", "size_bytes", "ranks", "stall_s", "problem"}.
    """
    from forebay.core.checkpoint import Manifest

    if picture is not None:
        if picture.suffix not in PICTURES:
            raise Invalid(f"--picture {picture}: its name must end in {', '.join(PICTURES)}")
        check_installed("matplotlib", extra="plan")
    rows = []
    with _repository(run, url) as repository:
        for found in repository.candidates():
            if isinstance(found, Manifest):
                problem = str(repository.damage(found) or "")
                said = (found.step, found.saved_s, found.size_bytes, len(found.ranks), found.stall_s)
                rows.append((found.sequence, *said, problem))
            else:
                rows.append((found[0], -1, 0.0, 0, 0, 0.0, str(found[1])))
    if picture is not None:
        _draw(run, rows, picture)
    if as_json:
        names = ("sequence", "step", "saved_s", "size_bytes", "ranks", "stall_s", "problem")
        for row in rows:
            show.line(dict(zip(names, row, strict=True)))
    elif not rows:
        show.note(f"no checkpoints under {run}")
    else:
        largest = max(1, *(row[3] for row in rows))
        shown = [
            (
                str(number),
                str(step),
                show.moment(saved),
                show.size(size),
                "#" * round(BAR * size / largest),
                str(ranks),
                f"{stall:.2f} s",
                problem or "whole",
            )
            for number, step, saved, size, ranks, stall, problem in rows
        ]
        head = ("NUMBER", "STEP", "SAVED", "SIZE", "", "RANKS", "STALL", "STATE")
        print(show.columns(head, shown, right=(0, 1, 3, 5, 6)))


def _draw(run: str, rows: list[tuple[int, int, float, int, int, float, str]], path: Path) -> None:
    """Those whose manifest can be read: the others have no time."""
    from forebay.checkpoint.pictures import TIME_MAX_S, Saved, draw_checkpoints

    saved = [
        Saved(step, at, size, stall, not problem)
        for _, step, at, size, _, stall, problem in rows
        if 0 < at < TIME_MAX_S
    ]
    if not saved:
        raise NotFound(f"no checkpoints under {run}: there is nothing to draw")
    draw_checkpoints(run, saved, path)


@app.command("verify")
@verb
def verify(
    run: Run, step: Step = None, quiet: Quiet = False, url: Url = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Read a checkpoint whole and compare every byte with its digest. Fails if one is wrong.

    With --json {"sequence", "step", "size_bytes"}.
    """
    with _repository(run, url) as repository, Progress("verify", quiet=quiet) as progress:
        found = _chosen(repository, run, step)
        damage = repository.verify(found, progress.at)
    if damage is not None:
        raise Corrupt(f"step {found.step}: {damage}")
    if as_json:
        show.document({"sequence": found.sequence, "step": found.step, "size_bytes": found.size_bytes})
    else:
        print(f"step {found.step}: {show.size(found.size_bytes)} of {_ranks(found)}, all as they were saved")


def _ranks(found: Manifest) -> str:
    return show.counted(len(found.ranks), "rank")


@app.command("restore-test")
@verb
def restore_test(
    run: Run, step: Step = None, quiet: Quiet = False, url: Url = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Read what a restore would take, whole and compared, and say how long that took.

    Fails if a checkpoint is damaged, also where a restore would take an older one. With --json {"sequence", "step",
    "size_bytes", "seconds", "damaged"}, `damaged` by sequence.
    """
    began_s = clock.monotonic_s()
    with _repository(run, url) as repository, Progress("restore-test", quiet=quiet) as progress:
        found, damaged = repository.rehearse(step, progress.at)
    seconds = clock.monotonic_s() - began_s
    said = "; ".join(f"checkpoint {sequence}: {damage}" for sequence, damage in damaged.items())
    if found is None:
        raise Corrupt(f"nothing can be restored: {said}") if damaged else _nothing(run, step)
    if as_json:
        names = {sequence: str(damage) for sequence, damage in damaged.items()}
        of = {"sequence": found.sequence, "step": found.step, "size_bytes": found.size_bytes}
        show.document({**of, "seconds": seconds, "damaged": names})
    else:
        rate = show.rate(found.size_bytes / seconds)
        print(f"step {found.step}: {show.size(found.size_bytes)} of {_ranks(found)} can be restored, "
              f"read in {show.duration(seconds)} ({rate})")  # fmt: skip
    if damaged:
        raise Corrupt(f"a restore takes step {found.step}, since newer ones are damaged: {said}")


@app.command("cp")
@verb
def cp(
    run: Run,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The run that gets it: bucket/path.")],
    step: Step = None,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Copy a checkpoint to another run, as its newest. The node copies; no bytes come here.

    With --json {"sequence", "step", "size_bytes"}, of the copy.
    """
    from forebay.checkpoint.repository import Repository, parse_run

    with _repository(run, url) as repository, Progress("copy", quiet=quiet) as progress:
        found = _chosen(repository, run, step)
        sequence = repository.copy(found, Repository(repository.client, *parse_run(target)), progress.at)
    if as_json:
        show.document({"sequence": sequence, "step": found.step, "size_bytes": found.size_bytes})
    else:
        print(f"step {found.step} is checkpoint {sequence} of {target}, {show.size(found.size_bytes)}")


@app.command("export")
@verb
def export(
    run: Run,
    target: Annotated[str, typer.Argument(metavar="FILE", help="The file to write: model.safetensors")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Only what was saved below it, as: model")
    ] = None,
    step: Step = None,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the tensors of a checkpoint to a file in the safetensors format. An existing file is replaced.

    With --json {"sequence", "step", "tensors", "size_bytes"}.
    """
    from forebay.checkpoint.export import export as write

    with _repository(run, url) as repository, Progress("export", quiet=quiet) as progress:
        found = _chosen(repository, run, step)
        try:
            written = write(repository, found, target, name, progress.at)
        except OSError as error:
            raise as_forebay(error) from error
    if as_json:
        show.document({"sequence": found.sequence, "step": found.step, **written._asdict()})
    else:
        print(f"step {found.step}: {written.tensors} tensors, {show.size(written.size_bytes)}, to {target}")


@app.command("prune")
@verb
def prune(
    run: Run,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=1, help="How many of the newest stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete all but the newest checkpoints, and what saves that were cut off left behind.

    The newest that the bucket has whole stays, and all that are newer. With --json {"sequences", "leftovers",
    "size_bytes"}.
    """
    with _repository(run, url) as repository, Progress("prune", quiet=quiet, has_rate=False) as progress:
        pruned = repository.prune(keep, dry_run=dry_run, progress=progress.at)
    if as_json:
        show.document(pruned._asdict())
    else:
        said = "would delete" if dry_run else "deleted"
        numbers = ", ".join(map(str, pruned.sequences)) or "none"
        print(f"{said} checkpoints: {numbers}; objects of saves that were cut off: {pruned.leftovers}; "
              f"{show.size(pruned.size_bytes)} in all")  # fmt: skip


@app.command("goodput")
@verb
def goodput(
    run: Run,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="As metrics, for the node exporter's textfile collector.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show where the time of a run went: productive, stalled by saves, restarting, lost or down.

    With --json the sums, in seconds.
    """
    from forebay.core.goodput import as_metrics
    from forebay.core.goodput import goodput as sums
    from forebay.core.metrics import render

    with _repository(run, url) as repository:
        lives = repository.lives()
        place = f"{repository.bucket}/{repository.prefix}".rstrip("/")
    if not lives:
        raise NotFound(f"no run has saved under {run} yet: see `forebay ckpt ls`")
    if prometheus:
        print(render(as_metrics(place, lives)), end="")
        return
    found = sums(lives)
    if as_json:
        show.document(found)
        return
    parts = (
        ("productive", found.productive_s),
        ("stalled by saves", found.stalled_s),
        ("restarting", found.restarting_s),
        ("lost or down", found.lost_s),
    )
    rows = [(name, f"{seconds:.1f} s", show.percent(seconds, found.run_s)) for name, seconds in parts]
    print(show.columns(("PART", "TIME", "SHARE"), rows, right=(1, 2)))
    print(f"lives: {found.lives}, failures: {found.failures}, saves: {found.saves}")


@contextmanager
def _repository(run: str, url: str | None) -> Iterator[Repository]:
    from forebay.checkpoint.repository import Repository, parse_run

    bucket, prefix = parse_run(run)
    with open_client(url) as client:
        yield Repository(client, bucket, prefix)


def _chosen(repository: Repository, run: str, step: int | None) -> Manifest:
    from forebay.core.checkpoint import Manifest

    for found in repository.candidates(step):
        if isinstance(found, Manifest):
            return found
        raise found[1]
    raise _nothing(run, step)


def _nothing(run: str, step: int | None) -> NotFound:
    wanted = "" if step is None else f" of step {step}"
    return NotFound(f"there is no checkpoint{wanted} under {run}: see `forebay ckpt ls`")
