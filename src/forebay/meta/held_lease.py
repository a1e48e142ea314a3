"""A lease that is kept for as long as somebody is inside it.

Theory. A task asks when `core/cluster/lease.py` says so, and passes on what the store answered. Whoever acts under the
lease asks `holds` right before it acts: the answer comes from a clock and no one else, so it is right after any pause.
The clock is the machine's, not the loop's, which may be as old as the loop's last turn; and one that goes on while the
machine is suspended (`ports/clock.py`: `boottime`), for the store's does.

Invariants. Those of `core/cluster/lease.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from forebay.core.cluster.lease import LeaseHold, Take
from forebay.core.errors import ForebayError, NotFound
from forebay.meta.seam import MetaStore
from forebay.ports.clock import Clock


class HeldLease:
    """See the module's header. Made by `MetaStore.hold`; leaving it revokes the lease."""

    def __init__(self, meta: MetaStore, ttl_s: float, clock: Clock) -> None:
        self._meta, self._clock = meta, clock
        self.hold = LeaseHold(ttl_s)  # asked by whoever decides under it; kept here alone
        self.trouble = ""  # why the store did not let it last on when it was last asked; "" when it did
        self._answered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def holds(self) -> bool:
        """Whether one may act under it at this moment."""
        return self.hold.holds(self._clock.monotonic_s())

    async def number(self, other_than: int = 0) -> int:
        """The lease that is held, as soon as it is another than this. What hung on that one is gone."""
        while self.hold.lease in (0, other_than):
            self._answered.clear()
            await self._answered.wait()
        return self.hold.lease

    async def __aenter__(self) -> HeldLease:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if self.hold.lease:
            with contextlib.suppress(ForebayError):
                await self._meta.revoke(self.hold.lease)

    async def _keep(self) -> None:
        while True:
            now_s = self._clock.monotonic_s()
            if now_s < self.hold.due_s:
                await asyncio.sleep(self.hold.due_s - now_s)
                continue
            asked = self.hold.ask(now_s)
            try:
                if isinstance(asked, Take):
                    lease = await self._meta.grant(asked.ttl_s)
                    self.hold.taken(self._clock.monotonic_s(), lease.number, lease.ttl_s)
                else:
                    await self._meta.renew(asked.lease)
                    self.hold.renewed(self._clock.monotonic_s())
                self.trouble = ""
            except NotFound:
                self.hold.gone(self._clock.monotonic_s())
            except ForebayError as error:
                self.trouble = error.message
                self.hold.failed(self._clock.monotonic_s())
            self._answered.set()
