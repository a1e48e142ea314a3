"""Cluster state of many nodes: etcd.

Theory. etcd has what the seam asks for (revisions, transactions that compare, watches, leases), so this file says it in
etcd's words; `etcd_link.py` finds a member that answers. All keys lie under one namespace, since an etcd may serve
others. Values and keys travel as base64, numbers as text: that is JSON's way of 64 bits.

A watch is a stream of one member. It starts with a listing and goes on from its revision. When the stream ends, another
member continues from the revision that came last. When the member says that this revision is compacted, or when after
`LOOK_S` of silence the state is not what the watch knows (a member that is frozen or cut off, a store that was taken
back), it lists again and tells the difference (`core/cluster/mirror.py`). etcd sends all events of one revision
together, so no transaction is seen in halves.

Rejected: etcd's progress notices as the sign of life (ten minutes apart; a member that is cut off sends none and is not
missed); serializable reads (a member that is cut off answers them from the past).

Invariants. Those of `meta/seam.py`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from forebay.core.cluster.mirror import Mirror
from forebay.core.errors import ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.limits import META_PATIENCE_S
from forebay.meta.etcd_link import Access, Address, Fields, Members
from forebay.meta.held_lease import HeldLease
from forebay.meta.seam import Change, Entry, Heard, Lease, check_size
from forebay.ports.clock import Clock

PORT = 2379
NAMESPACE = "forebay"
LOOK_S = 5.0  # how long a dead watch can go unnoticed; a look costs one read of one entry
AGAIN_S = 0.2  # between attempts of a watch to find a member


def parse_url(url: str) -> tuple[list[Address], str]:
    """Endpoints and namespace of `etcd://HOST[:PORT],HOST[:PORT]…[/NAMESPACE]`; `Invalid` if it is something else."""
    scheme, separator, rest = url.partition("://")
    hosts, _, namespace = rest.partition("/")
    if scheme != "etcd" or not separator:
        raise Invalid(f"{url} is no etcd URL: write etcd://HOST:PORT,HOST:PORT")
    found: list[Address] = []
    for text in hosts.split(","):
        host, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not host and not _:
            host, port = text, ""
        if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
            raise Invalid(f"{url} names the endpoint {text!r}: write HOST:PORT, several with commas between")
        found.append((host.strip("[]"), int(port or PORT)))
    return found, namespace.strip("/") or NAMESPACE


class EtcdMeta:
    """`MetaStore` in the etcd whose members have these client addresses. Opens nothing before it is used."""

    def __init__(
        self,
        addresses: Sequence[Address],
        namespace: str = NAMESPACE,
        *,
        patience_s: float = META_PATIENCE_S,
        access: Access = Access(),  # it is a value
    ) -> None:
        self._under = f"{namespace}/"
        # a user may be allowed to read nothing beside the namespace
        self._members = Members(addresses, patience_s, access, ("/v3/kv/range", {"key": self._key(""), "limit": "1"}))

    async def get(self, key: str) -> Entry | None:
        answer = await self._members.read("/v3/kv/range", {"key": self._key(key)})
        entries = self._entries(answer)
        return entries[0] if entries else None

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        answer = await self._members.read("/v3/kv/range", self._prefix(prefix))
        return self._entries(answer), _revision(answer)

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        return (await self._change({key: value}, {} if revision is None else {key: revision}, lease))[1]

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        return (await self._change({key: None}, {} if revision is None else {key: revision}))[0]

    async def transact(
        self, changes: Mapping[str, bytes | None], *, when: Mapping[str, int] | None = None, lease: int = 0
    ) -> int:
        check_size(changes, when or {})
        return (await self._change(changes, when or {}, lease))[1]

    async def watch(self, prefix: str) -> AsyncGenerator[Heard, None]:
        mirror = Mirror()
        listed = False
        while True:
            try:
                if not listed:
                    changes = mirror.listed(*await self.range(prefix))
                    yield Heard(changes, mirror.revision)
                    listed = True
                async with aclosing(self._events(prefix, mirror.revision + 1)) as events:
                    async for happened in events:
                        if happened is None:
                            if not await self._agrees(prefix, mirror):
                                listed = False
                                break
                        elif changes := mirror.heard(happened):
                            yield Heard(changes, mirror.revision)
            except _Compacted:
                listed = False
            except ForebayError:  # whoever holds a lease hears why
                await asyncio.sleep(AGAIN_S)

    async def grant(self, ttl_s: float) -> Lease:
        # Asked twice it makes two leases, of which one ends unused.
        answer = await self._members.read("/v3/lease/grant", {"TTL": str(max(1, round(ttl_s)))})
        return Lease(int(answer["ID"]), float(answer["TTL"]))

    async def renew(self, lease: int) -> None:
        answer = await self._members.read("/v3/lease/keepalive", {"ID": str(lease)})
        if not int(answer.get("TTL", 0)):
            raise NotFound(f"there is no lease {lease}: it ran out, take a new one")

    async def revoke(self, lease: int) -> None:
        try:
            await self._members.read("/v3/lease/revoke", {"ID": str(lease)})
        except NotFound:
            pass

    def hold(self, ttl_s: float, clock: Clock) -> HeldLease:
        return HeldLease(self, ttl_s, clock)

    async def aclose(self) -> None:
        await self._members.aclose()

    # --- in etcd's words ---------------------------------------------------------------------------------------------
    async def _change(
        self, changes: Mapping[str, bytes | None], when: Mapping[str, int], lease: int = 0
    ) -> tuple[bool, int]:
        """One transaction; (whether something changed, the revision now)."""
        compares = [
            {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in when.items()
        ]
        question = {"compare": compares, "success": [self._written(*one, lease) for one in changes.items()]}
        answer = await self._members.write("/v3/kv/txn", question)
        if not answer.get("succeeded"):
            said = ", ".join(f"{key} at revision {revision}" for key, revision in when.items())
            raise Precondition(f"not all of these are as they were: {said}. Read them again and decide anew")
        done = [next(iter(response.values())) for response in answer.get("responses", ())]
        deleted = any(int(one.get("deleted", 0)) for one in done)
        return deleted or any(value is not None for value in changes.values()), _revision(answer)

    def _written(self, key: str, value: bytes | None, lease: int) -> Fields:
        if value is None:
            return {"request_delete_range": {"key": self._key(key)}}
        return {"request_put": {"key": self._key(key), "value": _text(value), "lease": str(lease)}}

    async def _agrees(self, prefix: str, mirror: Mirror) -> bool:
        newest = {"limit": "1", "sort_order": "DESCEND", "sort_target": "MOD", "keys_only": True}
        answer = await self._members.read("/v3/kv/range", {**self._prefix(prefix), **newest})
        entries = self._entries(answer)
        return mirror.agrees(int(answer.get("count", 0)), entries[0].revision if entries else 0, _revision(answer))

    async def _events(self, prefix: str, first: int) -> AsyncGenerator[list[Change] | None, None]:
        """What happened from revision `first` on, whole revisions; None after each LOOK_S of silence."""
        question = {"create_request": {**self._prefix(prefix), "start_revision": str(first)}}
        async with aclosing(self._members.stream("/v3/watch", question, LOOK_S)) as answers:
            async for answer in answers:
                if answer is None:
                    yield None
                elif answer.get("canceled"):
                    if int(answer.get("compact_revision", 0)):
                        raise _Compacted
                    raise Unavailable(f"etcd ended a watch: {answer.get('cancel_reason', 'it gave no reason')}")
                elif events := answer.get("events"):
                    yield [self._happened(event) for event in events]

    def _happened(self, event: Fields) -> Change:
        entry = event["kv"]
        gone = event.get("type") == "DELETE"
        return Change(self._named(entry), None if gone else _bytes(entry.get("value", "")), int(entry["mod_revision"]))

    def _entries(self, answer: Fields) -> list[Entry]:
        return [
            Entry(self._named(entry), _bytes(entry.get("value", "")), int(entry["mod_revision"]))
            for entry in answer.get("kvs", ())
        ]

    def _key(self, key: str) -> str:
        return _text((self._under + key).encode())

    def _named(self, entry: Fields) -> str:
        # Somebody else's key may be no UTF-8. Nobody here asks for it by name, and it must not end a watch.
        return _bytes(entry["key"]).decode(errors="replace").removeprefix(self._under)

    def _prefix(self, prefix: str) -> Fields:
        first = (self._under + prefix).encode()
        # The least key above all that start so: UTF-8 has no byte 0xff, so the last byte can always grow.
        return {"key": _text(first), "range_end": _text(first[:-1] + bytes((first[-1] + 1,)))}


class _Compacted(Exception):
    """The history that a watch asked for is gone."""


def _revision(answer: Fields) -> int:
    return int(answer["header"].get("revision", 0))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text)
