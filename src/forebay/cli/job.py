"""`forebay job`: what runs in the node, and stopping it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forebay.cli import jobs, show
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.messages.calls import JobState

app = typer.Typer(
    no_args_is_help=True, help="List, watch and cancel jobs.", rich_markup_mode=None, add_completion=False
)


def _names(ctx: Any, incomplete: str) -> list[str]:
    try:
        with open_client(ctx.params.get("url")) as client:
            return [state.job for state in client.jobs() if state.job.startswith(incomplete)]
    except Exception:
        return []


Name = Annotated[str, typer.Argument(metavar="JOB", autocompletion=_names, help="As `forebay job ls` names it.")]


@app.command("ls")
@verb
def ls(url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the jobs, newest first."""
    with open_client(url) as client:
        found = client.jobs()
    if as_json:
        show.document(found)
    elif not found:
        show.note("no jobs: `forebay prefetch BUCKET/PREFIX` starts one")
    else:
        rows = [
            (
                state.job,
                state.verb,
                f"{state.bucket}/{state.prefix}",
                state.state,
                f"{state.units_done}/{'?' if state.units_total is None else state.units_total}",
                str(state.units_failed),
                show.size(state.bytes_done),
                show.moment(state.started_s),
            )
            for state in found
        ]
        head = ("JOB", "VERB", "ON", "STATE", "OBJECTS", "FAILED", "DONE", "STARTED")
        print(show.columns(head, rows, right=(4, 5, 6)))


@app.command("show")
@verb
def show_job(name: Name, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show how far a job is."""
    with open_client(url) as client:
        _tell(client.job(name), as_json=as_json)


@app.command("watch")
@verb
def watch(name: Name, quiet: jobs.Quiet = False, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> int:
    """Watch a job until it ends; the exit code says how."""
    with open_client(url) as client:
        state = jobs.watch(client, client.job(name), quiet=quiet or as_json)
    _tell(state, as_json=as_json)
    return jobs.code_of(state)


@app.command("cancel")
@verb
def cancel(name: Name, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Stop a job; what it has done stays done."""
    with open_client(url) as client:
        _tell(client.job_cancel(name), as_json=as_json)


def _tell(state: JobState, *, as_json: bool) -> None:
    if as_json:
        show.document(state)
        return
    print(jobs.sentence(state))
    for text in state.errors:
        print(f"  {one_line(text)}")
