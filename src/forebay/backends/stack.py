"""Composes the layers around a backend, in one function.

Theory. All behaviour is added by wrapping, so this function shows what happens to a request. From the bottom up: the
backend answers; `faults` (tests, benchmarks, the demo) disturb it; `Counting` counts every request that is sent,
and in a cluster is one that asks other nodes first (`wrap/peers.py`), or one that stops waiting for a node with its
lease (`wrap/while_alive.py`); `Retrying`, the only layer that retries, hides
passing faults.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.backends.bounds import Bounds
from forebay.backends.coded.backend import CodedBackend, Places
from forebay.backends.coded.codec import Codec
from forebay.backends.http.cloud import CloudReads
from forebay.backends.locate import locate
from forebay.backends.seam import Backend
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.backends.wrap.faulty import FaultPlan, Faulty
from forebay.backends.wrap.peers import Peers, PeersFirst
from forebay.backends.wrap.retrying import Retrying
from forebay.backends.wrap.while_alive import AnotherNode, WhileAlive
from forebay.core.cluster.coding import code_of
from forebay.core.errors import Invalid
from forebay.core.machines.retry import RetryPolicy
from forebay.core.types import CODED, Bucket
from forebay.ports import chance as system_chance
from forebay.ports import clock as system_clock
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

NODE_POLICY = RetryPolicy(attempts_max=3, elapsed_max_s=10.0)  # the client tries again, perhaps by another map


def open_node(
    bucket: Bucket,
    *,
    clock: Clock,
    chance: Chance,
    counters: BackendCounters,
    node: str,
    peer: str,
    while_alive: WhileAlive,
    once: bool = True,
) -> Backend:
    """Another node of the cluster (or this one, with `node` "") as the backend of `bucket`, ready to use; `peer` says
    who is asked, and by which map, and `while_alive` ends what it does not answer before its lease has ended. Not
    `once`: what may have been done may be asked again, since it is never other bytes under the same name."""
    asked = AnotherNode(locate(bucket, clock, node, peer=peer), counters, clock, while_alive)
    return Retrying(asked, clock, chance, counters, NODE_POLICY, once=once)


def open_coded(
    bucket: Bucket, entries: Callable[[], Backend], places: Places, *, clock: Clock, chance: Chance
) -> CodedBackend:
    """The backend of a bucket whose objects are erasure-coded over the nodes, ready to use. `entries` and the nodes try
    again themselves. `Invalid` for another URL, `NotSupported` if this machine cannot compute slices."""
    code = code_of(bucket.url)
    if code is None:
        raise Invalid(f"{bucket.url} names no code: write {CODED}K+M")
    return CodedBackend(bucket.name, Codec(code), entries, places, chance, clock)


def open_backend(
    bucket: Bucket,
    *,
    clock: Clock = system_clock.system,
    chance: Chance = system_chance.system,
    counters: BackendCounters | None = None,
    faults: FaultPlan | None = None,
    forked: bool = False,
    node: str = "",
    bounds: Bounds | None = None,
    peers: Peers | None = None,
) -> Backend:
    """The backend of `bucket`, ready to use; it connects on first use. Close it with `aclose`.

    `forked`: this process was forked from one that may have used obstore, which hangs then, so no body is read with it.
    `node`: the id of the node that asks, so that it knows its own request (`LOOP_HEADER`).
    `peers`: nodes that are asked for bytes first.
    `bounds`: what the node keeps its buckets from. `Invalid` says what is wrong with the URL or options, `Denied` that
    they are not within bounds.
    """
    counters = counters or BackendCounters()
    backend = locate(bucket, clock, node, bounds)
    if isinstance(backend, CloudReads):
        backend.by_wire = forked or (bounds is not None and bounds.dial(bucket) is not None)  # obstore dials by itself
    if faults is not None:
        backend = Faulty(backend, faults, clock=clock)
    shared = peers is not None and bucket.write == "through" and backend.scheme not in ("memory", "local")
    if peers is not None and shared:
        backend = PeersFirst(backend, counters, clock, bucket.name, peers)
    else:
        backend = Counting(backend, counters, clock)
    return Retrying(backend, clock, chance, counters)
