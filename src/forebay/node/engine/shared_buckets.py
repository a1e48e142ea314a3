"""The buckets of a cluster: added, changed or deleted at any node, they are so at all of them.

Theory. The cluster's store says of each bucket what it is, or that it was deleted. Who changes a bucket first does what
the store says of it, then the change at its own node (which checks it, and refuses what would lose something), then
writes it to the store, on the condition that nobody else did meanwhile. Every node watches the store and does what it
says; what it cannot do yet, since it would lose something there, it tries again until it can, and `lagging` says why.
No request for an object waits for any of it.

A node remembers which buckets it has from the cluster. So a bucket that somebody added at one node alone stays that
node's, also where one of that name was deleted; and a store that was emptied is told of them again. An entry that is
missing deletes nothing: only one that says so does.

*Secrets* in a bucket's options are sealed for the nodes: ChaCha20-Poly1305, with a key that all derive (HKDF-SHA256)
from the peer key, a random nonce, and the bucket's and the option's names authenticated along. Without a peer key a
bucket with a secret is not shared. With one, what the store says is signed too (HMAC-SHA256), since whoever adds a
bucket says what a node reads: who can write to the store, and has not got the key, is not believed.

After a change, the nodes that live are asked whether they have the bucket, for TOLD_S at most: a client that is sent to
another node next should find it there.

Rejected: asking all nodes to make the change (one that is down, or comes later, does not have it); asking the store for
a name that is not known here (anybody could load it with names).

Invariants. (1) What the store says of a bucket, all nodes that live and lose nothing by it do. (2) No secret is in the
store but sealed. (3) A node with a peer key does nothing that nobody with the key said.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from forebay.core.backend_options import HIDDEN, is_secret
from forebay.core.errors import Busy, Corrupt, ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages import calls
from forebay.core.types import Bucket
from forebay.meta.seam import Entry, MetaStore
from forebay.ports.chance import Chance

log = logging.getLogger("forebay.cluster")

PREFIX = "bucket/"  # in the cluster's store
MEMORY = "node/shared-buckets"
AGAIN_S = 2.0
TOLD_S, TOLD_LOOK_S = 5.0, 0.05
_SEALS, _SIGNS = b"forebay shared bucket 1", b"forebay shared bucket's word 1"
_NONCE_BYTES = 12


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the cluster says of a bucket: its settings, or None if it was deleted; `sealed`: its secret options. `mac`
    signs the rest and the bucket's name."""

    bucket: Bucket | None = None
    sealed: dict[str, str] = {}
    mac: str = ""


class _Unreadable(Corrupt):
    """What the store says of a bucket is not to be followed; who changes the bucket mends that."""


class AtNode(Protocol):
    """What is done at this node (`bucket_verbs.py`)."""

    def kept(self, name: str) -> Bucket | None: ...

    async def take_up(self, bucket: Bucket) -> None: ...

    async def delete_here(self, named: calls.BucketNamed) -> None: ...


class Cluster(Protocol):
    """What is known of the cluster (`seat.py`)."""

    found: asyncio.Event  # the store has answered, and was that of the right cluster

    @property
    def is_found(self) -> bool: ...


class Others(Protocol):
    """The other nodes that live (`peers.py`)."""

    async def have(self, bucket: str) -> bool: ...


class SharedBuckets:
    """See the module's header. `secret` is what nodes derive from the peer key, "" if there is none; `others` is None
    where the nodes would not know each other."""

    def __init__(
        self,
        meta: MetaStore,
        memory: MetaStore,
        here: AtNode,
        cluster: Cluster,
        others: Others | None,
        *,
        secret: str,
        chance: Chance,
    ) -> None:
        self._meta, self._memory, self._here, self._cluster, self._others = meta, memory, here, cluster, others
        self._chance = chance
        self._cipher = ChaCha20Poly1305(_derived(secret, _SEALS)) if secret else None
        self._signs = _derived(secret, _SIGNS) if secret else b""
        self._words: dict[str, Entry] = {}  # what the store says, as far as this node has heard
        self._done: dict[str, int] = {}  # by name: the revision of the word that this node follows
        self._mine: set[str] = set()  # buckets that it has from the cluster
        self._heard = 0  # the store's revision
        self._turns: dict[str, asyncio.Lock] = {}
        self._news = asyncio.Event()
        self.lagging: dict[str, str] = {}  # buckets of which this node does not do yet what the cluster says, and why

    async def load(self) -> None:
        """Remember which buckets are the cluster's."""
        entry = await self._memory.get(MEMORY)
        self._mine = set() if entry is None else set(msgspec.json.decode(entry.value, type=list[str]))

    def check(self, bucket: Bucket) -> None:
        """`Invalid` if the bucket cannot be shared."""
        if self._cipher is None and (secrets := _secrets(bucket)):
            raise Invalid(
                f"bucket {bucket.name} has secrets ({', '.join(sorted(secrets))}), and without --peer-key they cannot "
                "be sealed for the other nodes: give the nodes one, name a profile in place of the secrets, or add the "
                "bucket at each node alone (`--here`)"
            )

    # --- changes that are made here ----------------------------------------------------------------------------------
    async def change(self, name: str, make: Callable[[], Awaitable[Bucket]]) -> Bucket:
        """Have `make` change the bucket at this node, then all nodes. `Unavailable`, with nothing changed, if the
        cluster's store does not answer. `Busy` if another node changed it at the same moment."""
        async with self._turn(name):
            before = await self._up_to_date(name)
            made = await make()
            if self._cipher is None and _secrets(made):
                return made  # it is this node's alone, see `check`
            said = await self._say(name, before, self._word(made))
        if said:
            await self._wait_for_others(name)
        return made

    async def delete(self, name: str, make: Callable[[], Awaitable[None]]) -> None:
        """The same for deleting it."""
        async with self._turn(name):
            before = await self._up_to_date(name)
            await make()
            if before is not None or name in self._mine:
                await self._say(name, before, Word())

    async def _up_to_date(self, name: str) -> Entry | None:
        """What the store says of the bucket, which is done here by now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await self._cluster.found.wait()
        if not self._cluster.is_found:
            raise Unavailable(
                f"the cluster's store has not answered yet, so bucket {name} cannot be changed at all nodes: try "
                "again, or change it at each node alone (`--here`)",
                retry_after_s=AGAIN_S,
            )
        try:
            entry = await self._meta.get(PREFIX + name)
        except Unavailable as error:
            raise Unavailable(
                f"{error.message}; so bucket {name} cannot be changed at all nodes: try again, or change it at each "
                "node alone (`--here`)",
                retry_after_s=AGAIN_S,
            ) from None
        if entry is not None:
            with suppress(_Unreadable):
                await self._take_up(name, entry)
        return entry

    async def _say(self, name: str, before: Entry | None, word: Word) -> bool:
        """Whether that was news."""
        if before is not None:
            with suppress(_Unreadable):
                if self._read(name, before) == self._opened(name, word):
                    return False
        try:
            revision = await self._meta.put(
                PREFIX + name, self._signed(name, word), revision=0 if before is None else before.revision
            )
        except Precondition:
            raise Busy(
                f"another node changed bucket {name} at the same moment: look at it, then try again",
                retry_after_s=1.0,
            ) from None
        self._done[name] = revision
        self.lagging.pop(name, None)
        await self._remember(name, word.bucket is not None)
        return True

    async def _wait_for_others(self, name: str) -> None:
        if self._others is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                while not await self._others.have(name):  # noqa: ASYNC110  # they say it when they are asked
                    await asyncio.sleep(TOLD_LOOK_S)

    # --- what the cluster says ---------------------------------------------------------------------------------------
    async def follow(self) -> None:
        """Hear what the store says, for ever."""
        await self._cluster.found.wait()
        doing = asyncio.create_task(self._tend())
        try:
            async with aclosing(self._meta.watch(PREFIX)) as told:
                async for heard in told:
                    if heard.revision < self._heard:  # the store was taken back, or emptied
                        self._done.clear()
                    self._heard = heard.revision
                    for change in heard.changes:
                        name = change.key.removeprefix(PREFIX)
                        if change.value is None:
                            self._words.pop(name, None)
                            self.lagging.pop(name, None)
                        else:
                            self._words[name] = Entry(change.key, change.value, change.revision)
                    for name in self._mine - self._words.keys():
                        await self._say_again(name)
                    self._news.set()
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _say_again(self, name: str) -> None:
        """The store has lost what it said of a bucket."""
        bucket = self._here.kept(name)
        if bucket is None or not self._cluster.is_found:
            return
        with suppress(ForebayError):  # another node was first, or it is heard of later
            await self._meta.put(PREFIX + name, self._signed(name, self._word(bucket)), revision=0)

    async def _tend(self) -> None:
        """Do what the store says, for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self.lagging else None):
                    await self._news.wait()
            self._news.clear()
            for name in [name for name, word in self._words.items() if self._done.get(name) != word.revision]:
                try:
                    async with self._turn(name):
                        if (entry := self._words.get(name)) is not None and self._cluster.is_found:
                            await self._take_up(name, entry)
                except ForebayError as error:
                    if self.lagging.get(name) != error.message:
                        log.warning("bucket %s is not yet as the cluster has it: %s", name, error.message)
                    self.lagging[name] = error.message
                except Exception:
                    self.lagging[name] = "a fault of Forebay, see the log"
                    log.exception("bucket %s could not be made as the cluster has it", name)

    async def _take_up(self, name: str, entry: Entry) -> None:
        """Do what the entry says of the bucket, if that is not done."""
        if self._done.get(name, 0) >= entry.revision:
            return
        bucket, here = self._read(name, entry), self._here.kept(name)
        if bucket is not None:
            if here != bucket:
                await self._here.take_up(bucket)
            await self._remember(name, True)
        elif name in self._mine:
            if here is not None:
                with suppress(NotFound):
                    await self._here.delete_here(calls.BucketNamed(name))
            await self._remember(name, False)
        self._done[name] = entry.revision
        self.lagging.pop(name, None)

    # --- words -------------------------------------------------------------------------------------------------------
    def _word(self, bucket: Bucket) -> Word:
        self.check(bucket)
        secrets = _secrets(bucket)
        sealed = {name: self._sealed(bucket.name, name, value) for name, value in secrets.items()}
        return Word(msgspec.structs.replace(bucket, options=bucket.options | dict.fromkeys(secrets, HIDDEN)), sealed)

    def _sealed(self, bucket: str, option: str, value: str) -> str:
        assert self._cipher is not None, "asked for before"
        nonce = bytes.fromhex(self._chance.token_hex(_NONCE_BYTES))
        box = self._cipher.encrypt(nonce, value.encode(), f"{bucket}\0{option}".encode())
        return base64.b64encode(nonce + box).decode()

    def _read(self, name: str, entry: Entry) -> Bucket | None:
        try:
            word = msgspec.json.decode(entry.value, type=Word)
        except msgspec.MsgspecError as error:
            raise _Unreadable(
                f"what the cluster's store says of bucket {name} cannot be read ({error}): set the bucket anew"
            ) from None
        if self._signs and not hmac.compare_digest(word.mac, self._mac(name, word)):
            raise _Unreadable(
                f"what the cluster's store says of bucket {name} is not signed with this node's peer key: give all "
                "nodes the same key, and set the bucket anew; if they have it, somebody else wrote to etcd"
            )
        return self._opened(name, word)

    def _signed(self, name: str, word: Word) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(word, mac=self._mac(name, word) if self._signs else ""))

    def _mac(self, name: str, word: Word) -> str:
        said = msgspec.json.encode([name, msgspec.structs.replace(word, mac="")], order="deterministic")
        return hmac.digest(self._signs, said, hashlib.sha256).hex()

    def _opened(self, name: str, word: Word) -> Bucket | None:
        if word.bucket is None or not word.sealed:
            return word.bucket
        if self._cipher is None:
            raise Invalid(f"the secrets of bucket {name} are sealed with the peer key: start this node with --peer-key")
        options = dict(word.bucket.options)
        for option, box in word.sealed.items():
            try:
                raw = base64.b64decode(box, validate=True)
                bound = f"{name}\0{option}".encode()
                options[option] = self._cipher.decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], bound).decode()
            except (InvalidTag, ValueError):
                raise _Unreadable(
                    f"the secret {option} of bucket {name} does not open: give this node the peer key of the others, "
                    "or set the option anew"
                ) from None
        return msgspec.structs.replace(word.bucket, options=options)

    # --- memory ------------------------------------------------------------------------------------------------------
    async def _remember(self, name: str, mine: bool) -> None:
        if (name in self._mine) == mine:
            return
        self._mine = self._mine | {name} if mine else self._mine - {name}
        await self._memory.put(MEMORY, msgspec.json.encode(sorted(self._mine)))

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())


def _derived(secret: str, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, None, info).derive(secret.encode())


def _secrets(bucket: Bucket) -> dict[str, str]:
    return {name: value for name, value in bucket.options.items() if is_secret(name, value)}
