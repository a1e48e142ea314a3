"""A whole cluster goes to zero, for `forebay drain --all`.

Theory. Four steps, each of which may be done again: all nodes are wished away; what only they have reaches the
backends; the manifest is written; they stop. Whoever is killed in between runs the same command again: nodes that are
gone are left so, and the manifest keeps what it says of those that have stopped.

Before the first step, everything is looked for that would keep a node from going: a node that is missing, a backend
that does not answer, objects of local buckets, lost objects. Then nothing has begun. What goes wrong later keeps nodes,
and is said while this waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from forebay.cli import address, jobs, show
from forebay.cli.options import open_client
from forebay.cli.outcome import Interrupted, one_line
from forebay.cli.progress import Progress
from forebay.core.errors import Exists, ForebayError, Invalid, NotFound, Unavailable
from forebay.core.formats.manifest import FORMAT, FormerNode, Manifest, WarmObjects, hottest, merged, without_secrets
from forebay.core.messages.node_state import ClusterNode, ClusterState, NodeState
from forebay.core.types import Bucket

if TYPE_CHECKING:
    from forebay.client.sync import Client

T = TypeVar("T")

LOOK_S = 0.5
PATIENCE_S = 30.0  # for a node that does not answer, since its processes may be starting again
STOP_LOOK_S = 0.1


def drain(url: str | None, manifest: str, *, as_json: bool) -> None:
    """Have all nodes go, write the manifest, and stop them. Errors say what keeps a node; all others may be gone."""
    place = address.parse_object(manifest)
    with open_client(url) as client:
        cluster = _cluster(client)
        here = [node for node in cluster.nodes if node.state != "gone"]
        _refuse_missing(here)
        with jobs.nodes(client) as at:
            states = {node: _patient(node.client.status) for node in at}
            _check_place(client.bucket(place.bucket), manifest)
            for node, state in states.items():
                _check(node, state)
            running = {state.node_id for state in states.values()}
        _check_free(client, place)
        for each in here:
            if each.wanted != "draining":
                client.wish(each.node_id, "draining")
        _wait(client, quiet=as_json)
        written = _leave(client, place, cluster, running)
    if as_json:
        show.document(written)
        return
    objects = show.counted(len(written.warm), "object")
    more = f" and leaves out {written.left_out}" if written.left_out else ""
    print(
        f"the cluster {written.cluster} is gone: {place} names {objects}{more}; `forebay rewarm {place}` in a new one"
    )


def take_back(url: str | None, *, as_json: bool) -> None:
    """Undo it, for nodes that still run."""
    with open_client(url) as client:
        found = [client.wish(each.node_id, "active") for each in _cluster(client).nodes if each.state != "missing"]
    if as_json:
        show.document(found)
    else:
        print(
            f"taken back: {show.counted(len(found), 'node')}; those that have stopped come back when they are started"
        )


def _cluster(client: Client) -> ClusterState:
    cluster = client.status().cluster
    if cluster is None:
        raise Invalid("this node is of no cluster: `forebay flush`, then `forebay down` are for it")
    if cluster.trouble or not cluster.nodes:
        raise Unavailable(f"this node does not know the cluster ({cluster.trouble or 'not yet'}): ask another one")
    return cluster


def _refuse_missing(nodes: list[ClusterNode]) -> None:
    for node in nodes:
        if node.state == "missing":
            raise Exists(
                f"node {node.node_id} at {node.address} is missing, and may have what no backend has: start it again; "
                f"if it never will be, `forebay drain {node.node_id} --give-up`. Run this again then"
            )


def _check_place(bucket: Bucket, manifest: str) -> None:
    if bucket.is_of_nodes:
        raise Invalid(f"{manifest} would go with the nodes: name an object of a bucket that has a backend")


def _check_free(client: Client, place: address.Address) -> None:
    """Refuse a place that is something else, or whose backend does not answer."""
    try:
        client.manifest(*place)
    except NotFound as error:
        if error.code != "NoSuchKey":
            raise
    except Invalid as error:
        raise Exists(f"{place} is something else: name an object that is not there ({error.message})") from None


def _check(node: jobs.Node, state: NodeState) -> None:
    """Refuse what cannot reach a backend."""
    settings = {bucket.name: bucket for bucket in node.client.buckets()}
    for bucket in state.buckets:
        name = bucket.name
        if bucket.lost_objects or bucket.missing:
            raise Exists(
                f"{node.label}bucket {name} has lost objects or a missing volume: `forebay lost ls {name}` and "
                "`forebay volume ls` there say what to do. No node was drained"
            )
        here = settings[name].write == "local" and node.client.cached_page(name, limit=1).entries
        if here or (settings[name].is_of_nodes and node.client.list_page(name, limit=1).entries):
            raise Exists(
                f"{node.label}bucket {name} has no backend, and its objects are on nodes alone: `forebay mv -r {name}/ "
                "ANOTHER/` to a bucket that has a backend, or delete them. No node was drained"
            )
        if bucket.dirty_objects:
            try:
                node.client.bucket_check(name)
            except ForebayError as error:
                raise Unavailable(
                    f"{node.label}{show.counted(bucket.dirty_objects, 'object')} of {name} are only there, and the "
                    f"backend does not take them ({one_line(error.message)}): mend that first. No node was drained",
                    code=error.code,
                ) from None


def _wait(client: Client, *, quiet: bool) -> None:
    """Until all nodes are gone. What keeps them is said once."""
    said: set[str] = set()
    most_bytes = 0
    with Progress("flush", quiet=quiet) as progress:
        try:
            while True:
                nodes = [node for node in _cluster(client).nodes if node.state != "gone"]
                if not nodes:
                    return
                _refuse_missing(nodes)
                back = next((node for node in nodes if node.wanted == "active"), None)
                if back is not None:
                    raise Exists(
                        f"somebody took node {back.node_id} back: run this again, or leave the cluster as it is"
                    )
                left_bytes, troubles = _owed(client)
                most_bytes = max(most_bytes, left_bytes)
                progress.at(most_bytes - left_bytes, most_bytes or None)
                for trouble in troubles - said:
                    show.note(f"forebay: {trouble}; it is tried again, and the node stays until then")
                said |= troubles
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            raise Interrupted(
                "stopped waiting; the nodes go on: run the same command again for the manifest, or --all --undo"
            ) from None


def _owed(client: Client) -> tuple[int, set[str]]:
    """How many bytes only nodes have, and why they do not go."""
    left_bytes, troubles = 0, set[str]()
    with jobs.nodes(client) as at:
        for node in at:
            with suppress(Unavailable):  # its state tells, if it stays away
                for bucket in node.client.status().buckets:
                    left_bytes += bucket.dirty_bytes
                    if bucket.flush_error:
                        troubles.add(f"{node.label}bucket {bucket.name}: {one_line(bucket.flush_error)}")
    return left_bytes, troubles


def _patient(ask: Callable[[], T]) -> T:
    """The answer of a node that ran a moment ago."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except Unavailable:
            if time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)


def _leave(client: Client, place: address.Address, before: ClusterState, running: set[str]) -> Manifest:
    """All are gone: write the manifest, and stop those that still run, the one that is asked last. `running` ran when
    this began."""
    cluster = _cluster(client)
    parts: dict[str, WarmObjects] = {}
    kept: dict[str, Bucket] = {}
    sizes: dict[str, int] = {}
    for node in cluster.nodes:
        with client.at(client.url if node.node_id == cluster.node_id else node.address) as other:
            try:
                parts[node.node_id] = _patient(other.warm) if node.node_id in running else other.warm()
                sizes[node.node_id] = sum(volume.capacity_bytes for volume in other.status().volumes)
                for bucket in other.buckets():
                    kept[bucket.name] = _with_pins(kept.get(bucket.name), bucket)
            except Unavailable:  # it has stopped
                continue
    buckets, hidden = without_secrets(kept[name] for name in sorted(kept) if not kept[name].is_of_nodes)
    warm = merged(part.warm for part in parts.values())
    nodes = [FormerNode(each.node_id, each.address, sizes.get(each.node_id, 0)) for each in before.nodes]
    left_out = sum(part.left_out for part in parts.values())
    release = client.status().version
    made = Manifest(FORMAT, cluster.name, release, time.time(), nodes, buckets, hidden, hottest(warm), left_out)
    written = client.manifest_put(*place, made, joined=len(parts) < len(cluster.nodes))
    others = [node for node in cluster.nodes if node.node_id in parts and node.node_id != cluster.node_id]
    for node in others:
        with client.at(node.address) as other:
            _stop(other)
    _stop(client)
    return written


def _with_pins(before: Bucket | None, bucket: Bucket) -> Bucket:
    """A bucket as the first node keeps it, with what is pinned at any."""
    if before is None:
        return bucket
    return msgspec.structs.replace(before, pinned=tuple(sorted({*before.pinned, *bucket.pinned})))


def _stop(client: Client) -> None:
    """Return when nobody listens there any more."""
    with suppress(Unavailable):
        client.stop_node()
        while True:
            client.status()
            time.sleep(STOP_LOOK_S)
