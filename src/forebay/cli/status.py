"""`forebay status`: the node at a glance."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import verb
from forebay.cli.top import draw
from forebay.core.messages.node_state import BucketState, NodeState
from forebay.ports import clock

if TYPE_CHECKING:
    from forebay.client.sync import Client

LOOK_S = 2.0
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("status")
@verb
def status(
    watch: Annotated[bool, typer.Option("--watch", help=f"Look again every {LOOK_S:g} s until Ctrl-C.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the node, its volumes and its buckets.

    With --json the fields are those of NodeState in docs/protocol.md, one line for each look of --watch.
    """
    with open_client(url) as client:
        if watch:
            _watch(client, as_json=as_json)
        elif as_json:
            show.document(client.status())
        else:
            print(text(client.status(), client.url, clock.wall_s()))


def _watch(client: Client, *, as_json: bool) -> None:
    def looks() -> Iterator[NodeState]:
        while True:
            yield client.status()
            time.sleep(LOOK_S)

    texts = (text(state, client.url, clock.wall_s()) for state in looks())
    with suppress(KeyboardInterrupt):
        if as_json:
            for state in looks():
                show.line(state)
                sys.stdout.flush()
        elif sys.stdout.isatty():
            draw(texts)
        else:
            for shown in texts:
                print(shown, end="\n\n", flush=True)


def text(state: NodeState, place: str, now_s: float) -> str:
    """What people see."""
    up_s = max(0.0, now_s - state.started_s)
    fronts = ", ".join(str(front.pid) + ("" if front.connected else " (not connected)") for front in state.fronts)
    parts = [
        f"node {state.node_id} at {state.endpoint or place}",
        show.fields(
            [
                ("version", state.version),
                ("up for", show.duration(up_s)),
                ("processes", f"engine {state.engine_pid}; fronts {fronts or '-'}"),
                ("now", f"flights: {state.flights}, cold reads: {state.reads}, jobs: {state.jobs_running}"),
                ("passing by", f"{show.size(state.pass_bytes)} in memory, for want of a disk"),
            ][: 5 if state.pass_bytes else 4]
        ),
        *_cluster(state),
        "",
        show.columns(
            ("VOLUME", "STATE", "USED", "CAPACITY", "FULL", "OBJECTS", "PATH"),
            [
                (
                    volume.volume_id,
                    volume.state + (f": {volume.reason}" if volume.reason else ""),
                    show.size(volume.used_bytes),
                    show.size(volume.capacity_bytes),
                    show.percent(volume.used_bytes, volume.capacity_bytes),
                    str(volume.objects),
                    volume.path,
                )
                for volume in state.volumes
            ],
            right=(2, 3, 4, 5),
        ),
        "",
    ]
    if state.buckets:
        rows = [
            (
                bucket.name,
                show.size(bucket.cached_bytes),
                "-" if bucket.quota_bytes is None else show.size(bucket.quota_bytes),
                bucket.url,
                bucket.error or "ok",
            )
            for bucket in state.buckets
        ]
        parts.append(show.columns(("BUCKET", "CACHED", "QUOTA", "BACKEND", "LAST ANSWER"), rows, right=(1, 2)))
        parts += _dirty(state.buckets, now_s) + _missing(state)
        if state.catching_up:
            parts.append("what was owed before the start is still being read: buckets owe at least what is shown")
        if state.derived_bytes:
            parts.append(
                f"{show.size(state.derived_bytes)} of the volumes are indexes of shards, listings and the like"
            )
    else:
        parts.append("no buckets yet: add one with `forebay bucket add NAME s3://…`")
    return "\n".join(parts)


def _cluster(state: NodeState) -> list[str]:
    """The nodes of the cluster, a line each; nothing for a node alone."""
    cluster = state.cluster
    if cluster is None:
        return []
    rows = [
        (
            node.node_id + (" *" if node.node_id == cluster.node_id else ""),
            node.state,
            show.percent(node.share, 1.0),
            str(node.epoch or "-"),
            node.address,
            node.doing + (f" (release {node.release})" if node.release not in ("", state.version) else ""),
        )
        for node in cluster.nodes
    ]
    known = (
        f"map {cluster.epoch} is {'active' if cluster.active else 'being taken up'}" if cluster.epoch else "no map yet"
    )
    lines = ["", f"cluster {cluster.name}: {known}; this node (*) {'holds its' if cluster.holds else 'HOLDS NO'} lease"]
    lines += [show.columns(("NODE", "STATE", "KEYS", "MAP", "ADDRESS", "DOING"), rows, right=(2, 3))] if rows else []
    lines += [f"bucket {name} is not yet as the cluster has it: {why}" for name, why in cluster.lagging.items()]
    return [*lines, f"TROUBLE: {cluster.trouble}"] if cluster.trouble else lines


def _dirty(buckets: list[BucketState], now_s: float) -> list[str]:
    """What the backends have not yet; nothing where they have all."""
    rows = [
        (
            bucket.name,
            str(bucket.dirty_objects),
            show.size(bucket.dirty_bytes),
            "-" if bucket.dirty_since_s is None else show.duration(max(0.0, now_s - bucket.dirty_since_s)),
            str(bucket.flushing),
            str(bucket.conflicts),
        )
        for bucket in buckets
        if bucket.dirty_objects or bucket.conflicts
    ]
    head = ("DIRTY IN", "OBJECTS", "BYTES", "OLDEST", "FLUSHING", "CONFLICTS")
    return ["", show.columns(head, rows, right=(1, 2, 3, 4, 5))] if rows else []


def _missing(state: NodeState) -> list[str]:
    """What cannot be read because a volume is not in use, or because it is lost."""
    lines = [
        f"bucket {bucket.name}: what may be on {', '.join(bucket.missing)} is answered 503: `forebay volume ls`"
        for bucket in state.buckets
        if bucket.missing
    ]
    lines += [
        f"bucket {bucket.name}: {bucket.lost_objects} acknowledged objects are lost: `forebay lost ls {bucket.name}`"
        for bucket in state.buckets
        if bucket.lost_objects
    ]
    return ["", *lines] if lines else []
