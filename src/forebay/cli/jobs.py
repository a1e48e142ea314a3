"""`forebay prefetch`, `pin`, `unpin`, `evict`, `refresh`: start a job in each node and watch it.

Theory. A job runs in its node, so Ctrl-C ends only the watching, and says so. All nodes of a cluster work at once, each
on what it has, or on its share of what is to be fetched. The exit code is 0 if all units went
well, 9 if some failed, and 1 if the job as a whole failed. `forebay flush` uses the same functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from forebay.cli import address, show
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Here, Url, open_client
from forebay.cli.outcome import EXIT_PARTIAL, Interrupted, one_line, verb
from forebay.cli.progress import Progress
from forebay.core import limits
from forebay.core.errors import Invalid, NotFound, Unavailable
from forebay.core.messages.calls import JobState, JobVerb

if TYPE_CHECKING:
    from forebay.client.sync import Client

KEYS_BYTES_MAX = limits.JSON_BODY_BYTES_MAX - 4096  # of one job that names its objects; the rest is its bucket
LOOK_FIRST_S, LOOK_S = 0.05, 0.5  # a small job ends at once; a long one is looked at twice a second

Addresses = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ADDRESS...]", autocompletion=complete_addresses, help="Buckets, folders, objects; NAME* for a prefix."
    ),
]
Exact = Annotated[bool, typer.Option("--exact", help="Each ADDRESS is one object, whatever lies below it.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="FILE", help="Objects, one address a line; - is standard input.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count what would be done, and do nothing.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Watch until it is done, or return at once.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]

DONE = {
    "prefetch": "brought in",
    "pin": "pinned",
    "unpin": "unpinned",
    "evict": "evicted",
    "refresh": "checked",
    "flush": "flushed",
    "rewarm": "rewarmed by",
}


MOVING = ("prefetch", "flush", "rewarm")  # their bytes move; those of the others are counted only


Job = tuple[str, str, tuple[str, ...]]


def plan(client: Client, verb: JobVerb, texts: list[str], *, exact: bool) -> list[Job]:
    """(bucket, prefix, keys) of each job that the addresses ask for."""
    if not exact:
        return [job for at in map(address.parse, texts) for job in _selected(client, verb, at)]
    by_bucket: dict[str, list[str]] = {}
    for at in map(address.parse_object, texts):
        by_bucket.setdefault(at.bucket, []).append(at.key)
    return [(bucket, "", keys) for bucket, all_keys in by_bucket.items() for keys in _pieces(all_keys)]


def _pieces(keys: list[str]) -> Iterator[tuple[str, ...]]:
    """The keys, so many at a time as one request may name."""
    piece: list[str] = []
    size_bytes = 0
    for key in keys:
        key_bytes = len(msgspec.json.encode(key)) + 1
        if size_bytes + key_bytes > KEYS_BYTES_MAX:
            yield tuple(piece)
            piece, size_bytes = [], 0
        piece.append(key)
        size_bytes += key_bytes
    if piece:
        yield tuple(piece)


def listed(file: str) -> list[str]:
    """The addresses in `file`, one a line; "-" is standard input."""
    try:
        with open(sys.stdin.fileno() if file == "-" else file, "rb", closefd=file != "-") as lines:
            found = [line.rstrip(b"\r\n").decode() for line in lines]
    except UnicodeDecodeError:
        raise Invalid(f"{file} is not UTF-8 text: give one address a line") from None
    if not any(found):
        raise Invalid(f"{file} names no objects: give one address a line")
    return [text for text in found if text]


def _selected(client: Client, verb: JobVerb, at: address.Address) -> list[tuple[str, str, tuple[str, ...]]]:
    """One job for the object of a name, one for its folder. Verbs that ask the backend anyway learn first which of the
    two is there; the others must not need it: what they work on is here, and a backend that is away hinders nobody to
    evict. What is pinned or owed (a delete, say) need not be in any listing."""
    key, prefix = address.selection(at)
    one: tuple[str, str, tuple[str, ...]] = (at.bucket, "", (key,))
    folder: tuple[str, str, tuple[str, ...]] = (at.bucket, prefix, ())
    if verb == "unpin":
        pins = client.bucket(at.bucket).pinned
        if not {key or prefix, prefix} & set(pins):
            there = ", ".join(f"s3://{at.bucket}/{one_line(pin)}" for pin in pins) or "none"
            raise NotFound(f"there is no pin on {one_line(str(at))}; pins of this bucket: {there}")
        return [job for job, pin in ((one, key), (folder, prefix)) if pin in pins and (key or job is folder)]
    if not key and verb == "prefetch" and not client.list_page(at.bucket, prefix, limit=1).entries:
        raise address.nothing_there(at)  # a pin may come before what it pins
    if not key:
        return [folder]
    if verb not in ("prefetch", "pin"):
        return [one, folder]
    found = [one] if any(entry.key == key for entry in client.list_page(at.bucket, key, limit=1).entries) else []
    found += [folder] if client.list_page(at.bucket, prefix, limit=1).entries else []
    if not found:
        raise address.nothing_there(at)
    return found


def run(
    verb: JobVerb,
    texts: list[str],
    *,
    exact: bool,
    dry_run: bool,
    wait: bool,
    quiet: bool,
    url: str | None,
    as_json: bool,
    source: str | None = None,
    here: bool = False,
) -> int:
    """Start the jobs, one after the other, and watch each; the exit code. `source`: the file that names the objects.
    `here`: only at the node that is asked."""
    if bool(texts) == (source is not None):
        raise Invalid("name what to work on: ADDRESSes, or a list of them with --from FILE")
    if source is not None:
        texts, exact = listed(source), True
    with open_client(url) as client:
        with nodes(client, here=here) as at:
            return on_nodes(
                at, verb, lambda _: texts, exact=exact, dry_run=dry_run, wait=wait, quiet=quiet, as_json=as_json
            )


def on_nodes(
    at: Sequence[Node],
    verb: JobVerb,
    texts: Callable[[Client], list[str]],
    *,
    exact: bool,
    dry_run: bool,
    wait: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Start the jobs, one after the other, each at all nodes at once; the exit code. A node that cannot be asked is
    told of at the end, and hinders no other."""
    watched = [_AtNode(node) for node in at]
    for each in watched:
        with _missing(each):
            each.todo = plan(each.node.client, verb, texts(each.node.client), exact=exact)
    for number in range(max(len(each.todo) for each in watched)):
        now = [each for each in watched if number < len(each.todo) and not each.missed]
        for each in now:
            bucket, prefix, keys = each.todo[number]
            with _missing(each):
                share = len(watched) > 1
                state = each.node.client.start_job(verb, bucket, prefix, keys, dry_run=dry_run, share=share)
                each.states.append(state)
        if wait:
            _watch_all([each for each in now if not each.missed], quiet=quiet or as_json)
        for each in now:
            if not as_json and not each.missed:
                each.tell(dry_run=dry_run)
    if as_json:
        show.document([state for each in watched for state in each.states])
    missed = [each.missed for each in watched if each.missed]
    for text in missed:
        show.note(f"forebay: {one_line(text)}")
    codes = [code_of(state) for each in watched for state in each.states if not each.missed]
    return max([*codes, EXIT_PARTIAL if missed else 0])


class _AtNode:
    """The jobs of one node: those that are to be, how those that were begun are, and why it cannot be asked."""

    def __init__(self, node: Node) -> None:
        self.node, self.missed = node, ""
        self.todo: list[Job] = []
        self.states: list[JobState] = []

    def tell(self, *, dry_run: bool) -> None:
        """Say how the last job ended."""
        job, state = self.todo[len(self.states) - 1], self.states[-1]
        if not _is_beside(job, self.todo, self.states):
            print(f"{self.node.label}{sentence(state, keys=job[2], dry_run=dry_run)}")
        _complain(state)


@contextmanager
def _missing(each: _AtNode) -> Iterator[None]:
    """Note it if one of several nodes cannot be asked."""
    try:
        yield
    except (Unavailable, NotFound) as error:
        if not each.node.label:
            raise
        each.missed = f"{each.node.label}{error.message}"


class Node(NamedTuple):
    """A node that is asked; `label` names it in front of what it says, "" where it is the only one."""

    label: str
    client: Client


@contextmanager
def nodes(client: Client, *, here: bool = False) -> Iterator[list[Node]]:
    """The nodes of the cluster, first the one that `client` asks; that alone with `here`. Those that are gone have
    nothing."""
    own = None if here else client.status()
    if own is None:
        found = {}
    elif own.cluster is not None:
        found = {each.node_id: each.address for each in own.cluster.nodes if each.state != "gone"}
    else:
        found = {each.node_id: each.endpoint for each in client.node_map().nodes}
    others = {node: where for node, where in found.items() if own is None or node != own.node_id}
    with ExitStack() as clients:
        first = Node(label(own.node_id, client.url) if own is not None and others else "", client)
        yield [first, *(Node(label(node, at), clients.enter_context(client.at(at))) for node, at in others.items())]


def label(node: str, where: str) -> str:
    return f"node {node} at {where}: "


def _is_beside(job: Job, todo: list[Job], ended: list[JobState]) -> bool:
    """Whether the last of `ended`, of `job`, did nothing because a name meant the object alone, or its folder alone."""
    at = len(ended) - 1
    if ended[at].state != "done" or ended[at].units_done or ended[at].units_failed:
        return False
    bucket, prefix, keys = job
    if keys:  # its folder comes next
        return todo[at + 1 : at + 2] == [(bucket, f"{keys[0]}/", ())]
    return todo[max(0, at - 1) : at] == [(bucket, "", (prefix.removesuffix("/"),))] and ended[at - 1].units_done > 0


def watch(client: Client, state: JobState, *, quiet: bool = False) -> JobState:
    """Look at the job until it has ended; its last state. `Interrupted` on Ctrl-C, and the job goes on."""
    each = _AtNode(Node("", client))
    each.states.append(state)
    _watch_all([each], quiet=quiet)
    return each.states[-1]


def _watch_all(at: list[_AtNode], *, quiet: bool) -> None:
    """Look at the last job of each node until all have ended, or `missed`."""
    if not at:
        return
    pause_s, state = LOOK_FIRST_S, at[0].states[-1]
    try:
        what = f"{state.verb} {state.bucket}/{one_line(state.prefix)}"
        with Progress(what, quiet=quiet, has_rate=state.verb in MOVING) as progress:
            while running := [each for each in at if each.states[-1].state == "running" and not each.missed]:
                states = [each.states[-1] for each in at]
                totals = [state.bytes_total for state in states if state.bytes_total is not None]
                known = sum(totals) if len(totals) == len(states) else None
                progress.at(sum(state.bytes_done for state in states), known)
                time.sleep(pause_s)
                pause_s = min(LOOK_S, pause_s * 1.5)
                for each in running:
                    with _missing(each):
                        each.states[-1] = _looked_at(each.node.client, each.states[-1])
    except KeyboardInterrupt:
        job = next((each.states[-1].job for each in at if each.states[-1].state == "running"), state.job)
        raise Interrupted(
            f"stopped watching; job {job} goes on in the node: `forebay job watch {job}` watches it again, "
            f"`forebay job cancel {job}` stops it"
        ) from None


def _looked_at(client: Client, state: JobState) -> JobState:
    try:
        return client.job(state.job)
    except Unavailable as error:
        raise Unavailable(
            f"lost sight of job {state.job} ({error.message}): when the node is back, `forebay job show {state.job}` "
            "tells whether it is done; starting the same job again repeats nothing that is done",
            code=error.code,
        ) from None


def code_of(state: JobState) -> int:
    """The exit code that the job's end deserves; a job that still runs has not failed."""
    if state.state == "failed":
        return 1
    if state.units_failed or state.state == "cancelled":
        return EXIT_PARTIAL
    return 0


def sentence(state: JobState, *, keys: tuple[str, ...] = (), dry_run: bool = False) -> str:
    """One line on how far the job is, which names `keys`."""
    what = f"s3://{state.bucket}/{one_line(keys[0] if len(keys) == 1 else state.prefix)}"
    counts = f"{show.counted(state.units_done, 'object')}, {show.size(state.bytes_done)}"
    if state.state == "running":
        total = "? objects" if state.units_total is None else show.counted(state.units_total, "object")
        return f"job {state.job} runs: {state.verb} {what}: {state.units_done} of {total}"
    if dry_run:
        units = state.units_done if state.units_total is None else state.units_total
        total_bytes = state.bytes_done if state.bytes_total is None else state.bytes_total
        would = f"{show.counted(units, 'object')}, {show.size(total_bytes)}"
        return f"would have {DONE.get(state.verb, state.verb)} {what}: {would}"
    if state.state == "cancelled":
        return f"job {state.job} was cancelled: {state.verb} {what}: {counts} done"
    took = (state.ended_s or state.started_s) - state.started_s
    pace = f" in {show.duration(took)}" if took > 0 else ""
    if pace and state.verb in MOVING and state.bytes_done:
        pace += f", {show.rate(state.bytes_done / took)}"
    word = "failed after" if state.state == "failed" else DONE.get(state.verb, state.verb)
    return f"{word} {what}: {counts}{pace}"


def _complain(state: JobState) -> None:
    if not state.units_failed and state.state != "failed":
        return
    failed = (
        f"{state.units_failed} of {show.counted(state.units_total or 0, 'object')}" if state.units_failed else "the job"
    )
    show.note(f"forebay: {failed} failed:")
    for text in state.errors:
        show.note(f"  {one_line(text)}")
    show.note("  run the same command again: what is done is not repeated")


# --- the verbs -------------------------------------------------------------------------------------------------------
def _app(name: JobVerb, first_line: str) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(
        name,
        help=f"{first_line}\n\nRuns as a job in each node: Ctrl-C stops watching, not the job. With --json a list of "
        "JobState (docs/protocol.md).",
    )
    @verb
    def start(
        addresses: Addresses = None,
        exact: Exact = False,
        source: From = None,
        dry_run: DryRun = False,
        wait: Wait = True,
        quiet: Quiet = False,
        url: Url = None,
        here: Here = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> int:
        return run(
            name, addresses or [], exact=exact, dry_run=dry_run, wait=wait, quiet=quiet, url=url, as_json=as_json,
            source=source, here=here,
        )  # fmt: skip

    return app


APPS = {
    "prefetch": _app("prefetch", "Bring objects into the cache."),
    "pin": _app("pin", "Fetch objects and never evict them."),
    "unpin": _app("unpin", "Let pinned objects be evicted again."),
    "evict": _app("evict", "Drop objects from the cache."),
    "refresh": _app("refresh", "Ask the backend whether cached objects are still current."),
}
