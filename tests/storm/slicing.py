"""What a storm does to buckets in slices, and what it looks at: slices of a cluster's objects, as nodes see them.

Reads go to slices where nothing is cached, so nodes are told now and then to evict what they can. In a quiet moment all
is coded and nothing is missing, by what the nodes say themselves; and by what they hand out to who asks as a node: each
entry says what clients are shown, and each of its slices is at its place, with the bytes that the code gives it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from botocore.credentials import Credentials

from bench.parts import TOKEN, Node
from forebay.backends.coded.codec import Codec
from forebay.client.sync import Client, connect
from forebay.core.access import PEER_KEY_ID
from forebay.core.cluster.coding import ENTRY_BYTES_MAX, SLICES, Entry, code_of, decode_entry, entries_of, slice_name
from forebay.core.errors import ForebayError
from forebay.core.types import PEER_HEADER
from forebay.node.peer_key import read_secret
from forebay.sim.clients import Answer, Place
from tests.patience import PATIENCE_S, until

URL = "coded://2+1"  # three nodes have a slice each, which is what a storm has at least
AGAIN_S = 0.5  # between looks at all slices
EVICT_WITHIN_S = 5.0
UNCODED = "forebay_objects_without_all_slices"

AskAs = Callable[[str, str, str, dict[str, str], bytes | None, Credentials], Answer]


class Slicing:
    """The buckets in slices of a cluster. `nodes` are those that live now; `asked` asks at an endpoint, and signs.
    `patience_s`: how long all may take to be whole in a quiet moment."""

    def __init__(
        self, buckets: list[str], nodes: Callable[[], list[Node]], asked: AskAs, peer_key: Path, patience_s: float
    ) -> None:
        self.buckets, self._nodes, self._asked, self._patience_s = buckets, nodes, asked, patience_s
        self._peer = Credentials(PEER_KEY_ID, read_secret(str(peer_key)))
        code = code_of(URL)
        assert code is not None
        self._codec = Codec(code)

    @contextlib.contextmanager
    def evicting(self, chance: random.Random) -> Iterator[None]:
        """Now and then one of the nodes is told to evict all that it can."""
        ending, seed = threading.Event(), chance.random()

        def evict() -> None:
            own = random.Random(seed)
            while not ending.wait(own.uniform(0.05, 0.8)):
                with contextlib.suppress(ForebayError, OSError, AssertionError):
                    self._evict(own.choice(self._nodes()), EVICT_WITHIN_S)

        thread = threading.Thread(target=evict, daemon=True)
        if self.buckets:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            if self.buckets:
                thread.join()

    def _evict(self, node: Node, patience_s: float) -> None:
        for bucket in self.buckets:
            with connect(node.endpoint, token=TOKEN, patience_s=patience_s) as client:
                job = client.start_job("evict", bucket)
                is_done = functools.partial(_is_done, client, job.job)
                until(is_done, f"{bucket} is evicted at {node.host}", timeout_s=patience_s)

    def settle(self, places: list[Place]) -> list[str]:
        """Return when all is coded and nothing is missing, with nothing cached; or what is wrong after long."""
        if not self.buckets:
            return []
        found: list[str] = []

        def is_whole() -> bool:
            found[:] = self._owing() or self._amiss(places)
            if found:
                time.sleep(AGAIN_S)
            return not found

        with contextlib.suppress(AssertionError):
            until(is_whole, timeout_s=self._patience_s)
        if not found:
            for node in self._nodes():
                self._evict(node, PATIENCE_S)
        return found

    def clear(self, places: list[Place]) -> list[str]:
        """Return when nodes keep no slice that nobody names, or what they keep after long."""
        found: list[str] = []

        def is_clear() -> bool:
            try:
                found[:] = self._nobodys(places)
            except (OSError, http.client.HTTPException, ForebayError) as error:
                found[:] = [f"what slices there are is not said: {error!r}"]
            if found:
                time.sleep(AGAIN_S)
            return not found

        if self.buckets:
            with contextlib.suppress(AssertionError):
                until(is_clear, timeout_s=self._patience_s)
        return found

    def _nobodys(self, places: list[Place]) -> list[str]:
        kept = {(_id_of(node), name) for node in self._nodes() for name in self._listed(node)}
        named = set[tuple[str, str]]()
        for bucket, key in places:
            entry = self._entry(bucket, key) if bucket in self.buckets else None
            if entry is not None:
                named |= {
                    (place, slice_name(entry.generation, group, number))
                    for group in range(entry.groups)
                    for number, place in enumerate(entry.places)
                }
        return [f"slice {name} at {place} is nobody's" for place, name in sorted(kept - named)]

    def _listed(self, node: Node) -> list[str]:
        """The slices that a node keeps."""
        names: list[str] = []
        while True:
            after = f"&start-after={quote(names[-1])}" if names else ""
            answer = self._get(node.endpoint, f"/{SLICES}?list-type=2{after}", {PEER_HEADER: _id_of(node)})
            page = re.findall(r"<Key>([^<]*)</Key>", answer.body.decode())
            if answer.status != 200 or not page:
                return names
            names += page

    def _entry(self, bucket: str, key: str) -> Entry | None:
        kept = self._get(self._nodes()[0].endpoint, f"/{entries_of(bucket)}/{quote(key)}", {})
        if kept.status not in (200, 404):
            raise OSError(f"the entry of {bucket}/{key}: {kept.status}")
        return decode_entry(kept.body, key) if kept.status == 200 else None

    def _owing(self) -> list[str]:
        """What nodes say that they have yet to do."""
        try:
            found = []
            for node in self._nodes():
                with node.client() as client:
                    state = client.status()
                found += [
                    f"{node.endpoint}: {each.dirty_objects} objects of {each.name} are not coded: {each.flush_error}"
                    for each in state.buckets
                    if each.name in self.buckets and each.dirty_objects
                ]
                if uncoded := node.counter(UNCODED):
                    found.append(f"{node.endpoint}: {uncoded:g} objects are without all slices")
            return found
        except (ForebayError, OSError) as error:
            return [f"a node does not say: {error}"]

    # --- each slice --------------------------------------------------------------------------------------------------
    def _amiss(self, places: list[Place]) -> list[str]:
        found = []
        for bucket, key in places:
            if bucket in self.buckets:
                try:
                    found += [f"{bucket}/{key}: {what}" for what in self._amiss_of(bucket, key)]
                except (OSError, http.client.HTTPException, ForebayError) as error:
                    found.append(f"{bucket}/{key}: {error!r}")
        return found

    def _amiss_of(self, bucket: str, key: str) -> list[str]:
        """What is wrong with the entry and the slices of one object."""
        endpoint = self._nodes()[0].endpoint
        shown = self._get(endpoint, f"/{bucket}/{quote(key)}", {})
        entry = self._entry(bucket, key)
        if shown.status != 200 or entry is None:
            return [] if shown.status == 404 and entry is None else [f"GET {shown.status}, its entry is {entry}"[:300]]
        etag = shown.headers.get("etag", "").strip('"')
        if (entry.size_bytes, entry.etag) != (len(shown.body), etag):
            return [f"its entry says {entry.size_bytes} {entry.etag}, and clients are told {len(shown.body)} {etag}"]
        if entry.body is not None:
            return [] if entry.body == shown.body else ["its entry has other bytes than clients are shown"]
        if len(shown.body) <= ENTRY_BYTES_MAX:
            return ["it has slices, and is small"]
        return self._amiss_slices(entry, shown.body)

    def _amiss_slices(self, entry: Entry, body: bytes) -> list[str]:
        found, at = [], 0
        endpoints = {node_id: node.endpoint for node in self._nodes() if (node_id := _id_of(node))}
        if len(set(entry.places)) < len(entry.places):
            found.append(f"one node has two slices: {entry.places}")
        for group in range(entry.groups):
            data = body[at : at + entry.group_bytes(group)]
            at += len(data)
            for number, (place, right) in enumerate(zip(entry.places, self._codec.slices_of(data), strict=True)):
                name = slice_name(entry.generation, group, number)
                if place not in endpoints:
                    found.append(f"slice {name} is at {place}, which is no node any more")
                    continue
                answer = self._get(endpoints[place], f"/{SLICES}/{name}", {PEER_HEADER: place})
                if answer.status != 200 or answer.body != right:
                    found.append(f"slice {name} at {place}: {answer.status}, {answer.body[:80]!r} ({len(answer.body)})")
        return found

    def _get(self, endpoint: str, target: str, headers: dict[str, str]) -> Answer:
        return self._asked(endpoint, "GET", target, headers, None, self._peer)


def _is_done(client: Client, job: str) -> bool:
    return client.job(job).state != "running"


def _id_of(node: Node) -> str:
    with node.client() as client:
        cluster = client.status().cluster
    return "" if cluster is None else cluster.node_id
