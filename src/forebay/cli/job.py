"""`forebay job`: what runs in the nodes, and stopping it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import jobs, show
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.errors import NotFound, Unavailable
from forebay.core.messages.calls import JobState

if TYPE_CHECKING:
    from forebay.client.sync import Client

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
    """List the jobs of all nodes, newest first."""
    found: list[JobState] = []
    at: dict[str, str] = {}
    with open_client(url) as client:
        with jobs.nodes(client) as everywhere:
            for node in everywhere:
                try:
                    theirs = node.client.jobs()
                except Unavailable as error:
                    if not node.label:
                        raise
                    show.note(f"forebay: {node.label}{one_line(error.message)}")
                    continue
                found += theirs
                at |= dict.fromkeys((state.job for state in theirs), node.client.url if node.label else "")
    found.sort(key=lambda state: state.started_s, reverse=True)
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
                *([at[state.job]] if any(at.values()) else []),
            )
            for state in found
        ]
        more = ("NODE",) if any(at.values()) else ()
        head = ("JOB", "VERB", "ON", "STATE", "OBJECTS", "FAILED", "DONE", "STARTED", *more)
        print(show.columns(head, rows, right=(4, 5, 6)))


@app.command("show")
@verb
def show_job(name: Name, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show how far a job is."""
    with open_client(url) as client, _at(client, name) as node:
        _tell(node.job(name), as_json=as_json)


@app.command("watch")
@verb
def watch(name: Name, quiet: jobs.Quiet = False, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> int:
    """Watch a job until it ends; the exit code says how."""
    with open_client(url) as client, _at(client, name) as node:
        state = jobs.watch(node, node.job(name), quiet=quiet or as_json)
    _tell(state, as_json=as_json)
    return jobs.code_of(state)


@app.command("cancel")
@verb
def cancel(name: Name, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Stop a job; what it has done stays done."""
    with open_client(url) as client, _at(client, name) as node:
        _tell(node.job_cancel(name), as_json=as_json)


@contextmanager
def _at(client: Client, name: str) -> Iterator[Client]:
    """The node of the cluster that knows the job; the one that was asked, if none does."""
    with jobs.nodes(client) as everywhere:
        yield next((node.client for node in everywhere if _knows(node, name)), client)


def _knows(node: jobs.Node, name: str) -> bool:
    try:
        node.client.job(name)
    except (NotFound, Unavailable):
        if not node.label:
            raise
        return False
    return True


def _tell(state: JobState, *, as_json: bool) -> None:
    if as_json:
        show.document(state)
        return
    print(jobs.sentence(state))
    for text in state.errors:
        print(f"  {one_line(text)}")
