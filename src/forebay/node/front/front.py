"""A front: the process that clients talk to. It reads the store, and asks the engine for what is not there.

Theory. This module puts the front together, and nothing else knows all its parts: the store's readers' side, the link
to the engine, the API handlers, the HTTP server. A front starts to listen once its engine has welcomed it, since before
that it knows neither volumes nor buckets. From then on it serves hits with or without an engine. Several fronts share
an address with SO_REUSEPORT and nothing else.

Invariant. After `stop` no connection, descriptor, task or timer of the front is left.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from forebay.core.messages.wire import Welcome
from forebay.core.metrics import Snapshot
from forebay.core.s3rules.names import BASE_DOMAINS, Addressing
from forebay.node.front.audit.audit import Audit
from forebay.node.front.audit.trail import Trail
from forebay.node.front.batch.batches import Batches
from forebay.node.front.door import Door
from forebay.node.front.http.accounts import Accounts
from forebay.node.front.http.admission import Admission
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.counts import FrontCounts
from forebay.node.front.http.server import Server, Timeouts, listen
from forebay.node.front.link import GRACE_S, Link
from forebay.node.front.native.api import Native
from forebay.node.front.objects.body_intake import Intake
from forebay.node.front.objects.fast_lane import Lane
from forebay.node.front.objects.handed_memory import HandedMemory
from forebay.node.front.objects.listings import ListingAnswers
from forebay.node.front.objects.members import Members
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Reads
from forebay.node.front.objects.relay import Dial, Sources
from forebay.node.front.objects.shards import Shards
from forebay.node.front.s3.errors import RequestIds
from forebay.node.front.s3.operations import S3
from forebay.node.settings import Settings
from forebay.node.store.derived import Derived
from forebay.node.store.reader import StoreReader
from forebay.node.tls import tls_files
from forebay.node.vitals import vitals
from forebay.ports import clock as clocks

log = logging.getLogger("forebay.front")

WELCOME_TIMEOUT_S = 60.0  # an engine that rebuilds its index after a crash takes a while


class Front:
    """One front. Call `start`, then `stop`, both on the loop that it runs on."""

    def __init__(
        self,
        settings: Settings,
        number: int = 0,
        *,
        clock: clocks.Clock = clocks.system,
        timeouts: Timeouts = Timeouts(),
        grace_s: float = GRACE_S,
        accounts_fd: int | None = None,
    ) -> None:
        self.counts = FrontCounts()
        self.number = number
        self.settings = settings
        self._clock = clock
        self._timeouts = timeouts
        self._started_s = clock.wall_s()
        self._store = StoreReader([], suspect=lambda *suspicion: self._reads.suspect(*suspicion))
        domains = (settings.domain,) if settings.domain else ()
        self._addressing = Addressing((*BASE_DOMAINS, *domains))
        self._auth = Auth(
            clock.wall_s,
            self._addressing,
            Accounts(number, clock.monotonic_s, accounts_fd),
            lambda *question: self.link.begin(*question),
        )
        self._welcomed: Welcome | None = None
        self.link = Link(
            settings.engine_socket,
            number,
            welcome=self._follow,
            dropped=self._dropped,
            report=self.snapshot,
            grace_s=grace_s,
            hung_after_s=settings.hung_after_s,
            clock=clock,
        )
        if settings.cluster:
            self._store.acts = self.link.acts
        sources = Sources() if settings.cluster else None
        self._reads = Reads(self._store, self.link, self.counts, clock=clock, sources=sources)
        self._audit = self._make_audit(settings)
        self._lane = Lane(
            self._reads,
            self._store,
            self.link,
            open_to_all=lambda: self._auth.open and settings.audit != "reads",  # the lane tells nobody what it served
            ids=RequestIds(),
            path_style=lambda host: self._auth.knows(host) and not self._addressing.bucket_of_host(host),
            clock=clock,
        )
        self.door = Door(
            settings.door_socket(number),
            self._reads,
            self._store,
            self.link,
            self._auth,
            clock=clock,
            stall_s=timeouts.stall_s,
        )
        self._tls = tls_files(settings, clock.wall_s)
        self.server: Server | None = None
        self._shards: Shards | None = None
        self.port = 0

    async def start(self, listener: socket.socket | None = None, *, reuse_port: bool = False) -> None:
        """Connect to the engine, then listen; returns when requests are answered.

        `listener` is a bound socket to use; without it the settings' address is bound. `Unavailable` if no engine
        welcomes us within WELCOME_TIMEOUT_S; `Invalid` if the address cannot be had.
        """
        self.link.start()
        try:
            await self.link.wait(WELCOME_TIMEOUT_S)
            if listener is None:
                listener = listen(self.settings.host, self.settings.port, reuse_port=reuse_port)
        except BaseException:
            await self.link.stop()
            raise
        self.port = listener.getsockname()[1]
        assert self._welcomed is not None
        domains = (self.settings.domain,) if self.settings.domain else ()
        puts = Puts(self.link.call, Intake(self._store.incoming), self.link, self.link.begin)
        s3 = S3(self._reads, self.link.call, self._auth, puts, self._welcomed.node_id, domains)
        self._shards = Shards(
            self._reads,
            self._store,
            self.link,
            Derived(self._store, self.link.call, self.link.touch),
            place=self._welcomed.node_id,
            clock=self._clock,
        )
        batches = Batches(self._reads, self._store, self.link, self._auth, shards=self._shards, clock=self._clock)
        native = Native(
            self._reads,
            puts,
            self._store,
            self.link.call,
            self._auth,
            self._missing,
            batches=batches,
            members=Members(self._shards, self._reads, puts, self.link.call),
            door=self.door,
        )
        native.listings = ListingAnswers(Derived(self._store, self.link.call, self.link.touch), self.link.call)
        self.server = Server(
            s3,
            native,
            self._lane,
            counts=self.counts,
            admission=Admission(self.counts, share=self.settings.connections_share),
            clock=self._clock,
            timeouts=self._timeouts,
            tls=self._tls,
            audit=self._audit,
        )
        self.door.take = HandedMemory(self._reads, puts, self._auth, self.server.workers).take
        if self._audit is not None:
            self._audit.trail.start()
            self.door.tell = self._audit.at_door
        self.door.start()
        await self.server.start(listener)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Finish answers under way within `grace_s`, then close everything. May be called twice."""
        if self.server is not None:
            await self.server.stop(grace_s)
        self.door.stop()
        await self.link.stop()
        if self._reads.sources is not None:
            self._reads.sources.close()
        if self._shards is not None:
            await self._shards.aclose()
        self._store.close()
        if self._audit is not None:
            await asyncio.to_thread(self._audit.trail.stop)

    def read_anew(self) -> None:
        """Read what somebody may have changed: the certificate."""
        if self._tls is not None:
            self._tls.follow(anew=True)

    def relay_through(self, dial: Dial | None) -> None:
        """Reach other nodes in this way, or relay nothing."""
        self._reads.sources = None if dial is None else Sources(dial)

    def snapshot(self) -> Snapshot:
        """This front's counters and gauges."""
        self.counts.engine_connects = self.link.connects
        counted = self.counts.snapshot()
        values = counted.values | self._auth.accounts.values() | vitals(f"front-{self.number}", self._started_s)
        values["forebay_files_open"] = self._store.files_open
        values["forebay_door_connections"] = len(self.door.guests)
        values["forebay_door_files_total"] = self.door.files_given
        if self._audit is not None:
            values["forebay_audit_lines_total"] = self._audit.trail.lines
            values["forebay_audit_dropped_total"] = self._audit.trail.dropped
        snapshot = Snapshot(values, counted.histograms)
        snapshot.check()
        return snapshot

    def _make_audit(self, settings: Settings) -> Audit | None:
        if settings.audit == "off":
            return None
        file, clock = settings.audit_file(self.number), self._clock
        trail = Trail(file, self.number, size_bytes_max=settings.log_bytes_max, clock=clock)
        return Audit(trail, self._auth, self._addressing, reads=settings.audit == "reads", clock=clock)

    def _follow(self, welcome: Welcome) -> None:
        self._welcomed = welcome
        if not self.link.connected:
            self._store.let_go()
            self.door.let_go()
        self._auth.update(welcome.identities, welcome.trusted, welcome.buckets)
        self._auth.node, self._auth.as_home = welcome.node_id.encode(), welcome.as_home.encode()
        self._reads.follow(welcome)
        self.door.follow(welcome)
        self._lane.follow()

    def _dropped(self, object_ids: list[int]) -> None:
        self._store.dropped(object_ids)
        self.door.dropped(object_ids)

    def _missing(self) -> str:
        """Why this front is not ready; "" if it is."""
        if not self.link.connected:
            return self.link.trouble
        if self._welcomed is None or not self._welcomed.volumes:
            return "no volume is usable: reads pass through to the backend"
        if self._welcomed.away:
            return self._welcomed.away
        return "stopping" if self.server is None or self.server.draining else ""
