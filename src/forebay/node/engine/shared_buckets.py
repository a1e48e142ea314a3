"""The buckets of a cluster: added, changed or deleted at any node, they are so at all of them.

Theory. The cluster's store says of each bucket what it is, or that it was deleted. Who changes a bucket first does what
the store says of it, then the change at its own node (which checks it, and refuses what would lose something), then
writes it to the store, on the condition that nobody else did meanwhile. If that fails, the node goes back to what the
store says. Every node watches the store and does what it says; what it cannot do yet, since it would lose something
there, it tries again until it can, and `lagging` says why; meanwhile it takes no writes of the bucket, or it might
never come to that. No request for an object waits for any of it.

A node remembers the last word that it followed of each bucket, deleted ones too. So a bucket that somebody added at one
node alone stays that node's, also where one of that name was deleted; what was changed at one node alone stays until
the cluster says something new; and a store that was emptied is told again. An entry that is missing deletes nothing:
only one that says so does. Words have versions that grow, so a node that remembers a newer one does not follow an old
one (a backup that was restored, or what somebody put back), and puts its own in that one's place.

A bucket that was deleted and made again is another, which `created_s` tells: a node that missed the delete does it
first.

The store keeps DELETED_MAX words of deleted buckets, and a node as many: who makes and deletes buckets for ever fills
neither. A node that was away for longer than that brings its bucket back, unless another remembers.

*Secrets* in a bucket's options are sealed for the nodes: ChaCha20-Poly1305, with a key that all derive (HKDF-SHA256)
from the peer key, a random nonce, and the bucket's and the option's names authenticated along. Without a peer key a
bucket with a secret is not shared. With one, what the store says is signed too (HMAC-SHA256, of the bytes as they are:
releases that know other settings agree on them), since whoever adds a bucket says what a node reads: who can write to
the store, and has not got the key, is not believed.

After a change, the nodes that live are asked whether they have the bucket, for TOLD_S at most: a client that is sent to
another node next should find it there.

Rejected: asking all nodes to make the change (one that is down, or comes later, does not have it); asking the store for
a name that is not known here (anybody could load it with names); versions that count from 1 (a newcomer to an emptied
store would begin below what others remember of a deleted bucket: they begin with the time).

Invariants. (1) What the store says of a bucket, all nodes that live and lose nothing by it do. (2) No secret is in the
store but sealed. (3) A node with a peer key does nothing that nobody with the key said. (4) No node follows a word
that is older than the one it remembers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from forebay.core.backend_options import HIDDEN, is_secret
from forebay.core.errors import Busy, Corrupt, Exists, ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.limits import META_CHANGES_MAX, SHARED_BUCKET_BYTES_MAX, SHARED_BUCKETS_BYTES_MAX
from forebay.core.messages import calls
from forebay.core.types import Bucket
from forebay.meta.seam import Entry, MetaStore
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.cluster")

PREFIX = "bucket/"  # in the cluster's store
MEMORY = "node/shared-buckets/"  # in the node's own
DELETED_MAX = 1000
AGAIN_S = 2.0
TOLD_S, TOLD_LOOK_S = 5.0, 0.05
_SEALS, _SIGNS = b"forebay shared bucket 1", b"forebay shared bucket's word 1"
_NONCE_BYTES = 12


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the cluster says of a bucket: its settings, or None if it was deleted; `sealed`: its secret options. Of two
    words the one with the larger `version` is newer."""

    version: int
    bucket: Bucket | None = None
    sealed: dict[str, str] = {}


class Signed(msgspec.Struct, frozen=True):
    """A word as it is in the store. `mac` signs its bytes and the bucket's name."""

    word: msgspec.Raw
    mac: str = ""


class Followed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node remembers of a bucket: the last word that it followed, as it is in the store, b"" for none; whether
    that lists the bucket; and whether a change was begun here of which it is not known how it ended."""

    said: bytes = b""
    version: int = 0
    mine: bool = False
    changing: bool = False


class _Settings(msgspec.Struct):
    bucket: dict[str, msgspec.Raw] | None = None


class _Unreadable(Corrupt):
    """What the store says of a bucket is not to be followed; who changes the bucket mends that."""


class AtNode(Protocol):
    """What is done at this node (`bucket_verbs.py`)."""

    def kept(self, name: str) -> Bucket | None: ...

    async def take_up(self, bucket: Bucket) -> None: ...

    async def delete_here(self, named: calls.BucketNamed) -> None: ...

    def takes_writes(self, name: str, does: bool) -> None: ...


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
        clock: Clock,
    ) -> None:
        self._meta, self._memory, self._here, self._cluster, self._others = meta, memory, here, cluster, others
        self._chance, self._clock = chance, clock
        self._cipher = ChaCha20Poly1305(_derived(secret, _SEALS)) if secret else None
        self._signs = _derived(secret, _SIGNS) if secret else b""
        self._words: dict[str, Entry] = {}  # what the store says, as far as this node has heard
        self._done: dict[str, int] = {}  # by name: the revision of the word that this node follows
        self._followed: dict[str, Followed] = {}
        self._heard = -1  # the store's revision; -1: nothing yet
        self._turns: dict[str, asyncio.Lock] = {}
        self._news = asyncio.Event()
        self.lagging: dict[str, str] = {}  # buckets of which this node does not do yet what the cluster says, and why

    @property
    def reaches_others(self) -> bool:
        """Whether this node and the others know each other."""
        return self._others is not None

    async def load(self) -> None:
        """Remember which buckets are the cluster's."""
        entries, _ = await self._memory.range(MEMORY)
        for entry in entries:
            self._followed[entry.key.removeprefix(MEMORY)] = msgspec.msgpack.decode(entry.value, type=Followed)

    def check(self, bucket: Bucket) -> None:
        """`Invalid` if the bucket cannot be shared."""
        if self._cipher is None and (secrets := _secrets(bucket)):
            raise Invalid(
                f"bucket {bucket.name} has secrets ({', '.join(sorted(secrets))}), and without --peer-key they cannot "
                "be sealed for the other nodes: give the nodes one, name a profile in place of the secrets, or add the "
                "bucket at each node alone (`--here`)"
            )
        if (size_bytes := len(msgspec.json.encode(bucket))) > SHARED_BUCKET_BYTES_MAX:
            raise Invalid(
                f"the settings of bucket {bucket.name} have {size_bytes} bytes, of which the cluster's store takes "
                f"{SHARED_BUCKET_BYTES_MAX}: pin fewer, shorter prefixes, or give fewer CORS rules"
            )

    def _check_room(self, name: str) -> None:
        if sum(len(entry.value) for entry in self._words.values()) > SHARED_BUCKETS_BYTES_MAX:
            raise Invalid(
                f"the cluster's store takes {SHARED_BUCKETS_BYTES_MAX} bytes of buckets' settings, and has more: "
                f"delete buckets, pins or CORS rules first, or change {name} at each node alone (`--here`)"
            )

    # --- changes that are made here ----------------------------------------------------------------------------------
    async def change(self, name: str, make: Callable[[], Awaitable[Bucket]], *, stays: bool = False) -> Bucket:
        """Have `make` change the bucket at this node, then all nodes. `Unavailable` if the cluster's store does not
        answer: nothing is changed then, or all is if it heard. `Busy` if another node changed it at the same moment.
        `stays`: what was made here is not taken back if the store does not hear of it."""
        async with self._turn(name):
            before = await self._up_to_date(name)
            self._check_room(name)
            async with self._changing(name, before, stays=stays):
                made = await make()
                if self._cipher is None and _secrets(made):
                    return made  # it is this node's alone, see `check`
                said = await self._say(name, before, made)
        if said:
            await self._wait_for_others(name)
        return made

    async def delete(self, name: str, make: Callable[[], Awaitable[None]]) -> None:
        """The same for deleting it."""
        async with self._turn(name):
            before = await self._up_to_date(name, deletes=True)
            async with self._changing(name, before):
                await make()
                if before is not None or self._remembered(name).mine:
                    await self._say(name, before, None)

    @asynccontextmanager
    async def _changing(self, name: str, before: Entry | None, *, stays: bool = False) -> AsyncIterator[None]:
        """Inside, the node is ahead of what the store said before. What fails is taken back, also by the process that
        comes next."""
        old, remembered = self._here.kept(name), self._remembered(name)
        await self._remember(name, msgspec.structs.replace(remembered, changing=True))
        try:
            yield
        except BaseException:
            if stays or self._here.kept(name) is old:
                await self._remember(name, remembered)
                raise
            with suppress(ForebayError):
                if old is None:  # nobody was told that there is one
                    await self._here.delete_here(calls.BucketNamed(name))
                elif before is None:  # the store does not tell what it was
                    await self._here.take_up(old)
            self._done.pop(name, None)
            self._news.set()
            raise
        await self._remember(name, msgspec.structs.replace(self._remembered(name), changing=False))

    async def _up_to_date(self, name: str, *, deletes: bool = False) -> Entry | None:
        """What the store says of the bucket, which is done here by now, unless it and the caller delete the bucket."""
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
            try:
                await self._take_up(name, entry)
            except _Unreadable:
                pass
            except ForebayError as error:
                if deletes and self._read(name, entry).bucket is None:
                    return entry
                if isinstance(error, Busy):  # it tells of --force, which is for what the caller changes
                    raise Busy(
                        f"the cluster has changed bucket {name}, and this node cannot follow yet: {error.message} (and "
                        "`--here`, with the settings that the cluster has)",
                        retry_after_s=AGAIN_S,
                    ) from None
                raise
        return entry

    async def _say(self, name: str, before: Entry | None, bucket: Bucket | None) -> bool:
        """Whether that was news."""
        newest = self._remembered(name).version
        if before is not None:
            with suppress(_Unreadable):
                word = self._read(name, before)
                if self._opened(name, word) == bucket:
                    return False
                newest = max(newest, word.version)
        word = self._word(bucket, max(newest + 1, int(self._clock.wall_s() * 1000)))
        said = self._signed(name, word)
        try:
            revision = await self._meta.put(PREFIX + name, said, revision=0 if before is None else before.revision)
        except Precondition:
            raise Busy(
                f"another node changed bucket {name} at the same moment: look at it, then try again",
                retry_after_s=1.0,
            ) from None
        await self._follows(name, said, word, revision)
        if bucket is None:
            await self._forget_deleted()
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
                            self._caught_up(name)
                        else:
                            self._words[name] = Entry(change.key, change.value, change.revision)
                    self._news.set()
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _tend(self) -> None:
        """Do what the store says, for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self.lagging or self._unsaid() else None):
                    await self._news.wait()
            self._news.clear()
            for name in self._unsaid():
                await self._say_again(name)
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

    def _unsaid(self) -> list[str]:
        """Buckets of which the store has lost what it said."""
        if self._heard < 0:
            return []
        return [name for name, known in self._followed.items() if known.mine and name not in self._words]

    async def _say_again(self, name: str) -> None:
        if self._cluster.is_found and not self._turn(name).locked():
            with suppress(ForebayError):  # another node was first, or the store is away
                await self._meta.put(PREFIX + name, self._remembered(name).said, revision=0)

    async def _take_up(self, name: str, entry: Entry) -> None:
        """Do what the entry says of the bucket, if that is not done."""
        known = self._remembered(name)
        if self._done.get(name) == entry.revision:
            return
        word = self._read(name, entry)
        if word.version < known.version:
            with suppress(Precondition):  # another node was first
                await self._meta.put(PREFIX + name, known.said, revision=entry.revision)
                log.warning("the cluster's store had an old word of bucket %s: the newer is in its place", name)
        elif known.changing or known.said != entry.value:
            try:
                await self._do(name, self._opened(name, word), mine=known.mine)
            except Busy:  # under new writes it might never come to that
                self._here.takes_writes(name, False)
                raise
            await self._follows(name, entry.value, word, entry.revision)
        self._done[name] = entry.revision
        self._caught_up(name)

    def _caught_up(self, name: str) -> None:
        self.lagging.pop(name, None)
        self._here.takes_writes(name, True)

    async def _do(self, name: str, bucket: Bucket | None, *, mine: bool) -> None:
        here = self._here.kept(name)
        if here is not None and mine and (bucket is None or bucket.created_s != here.created_s):
            with suppress(NotFound):
                await self._here.delete_here(calls.BucketNamed(name))
            here = None
        if bucket is None or bucket == here:
            return
        if here is not None and not mine and bucket.owner and bucket.owner != here.owner:
            raise Exists(
                f"this node has a bucket of its own of that name, which {bucket.owner} did not make: delete it here "
                "(`--here`), or the cluster's"
            )
        await self._here.take_up(bucket)

    # --- words -------------------------------------------------------------------------------------------------------
    def _word(self, bucket: Bucket | None, version: int) -> Word:
        if bucket is None:
            return Word(version)
        self.check(bucket)
        secrets = _secrets(bucket)
        sealed = {name: self._sealed(bucket.name, name, value) for name, value in secrets.items()}
        shown = msgspec.structs.replace(bucket, options=bucket.options | dict.fromkeys(secrets, HIDDEN))
        return Word(version, shown, sealed)

    def _sealed(self, bucket: str, option: str, value: str) -> str:
        assert self._cipher is not None, "asked for before"
        nonce = bytes.fromhex(self._chance.token_hex(_NONCE_BYTES))
        box = self._cipher.encrypt(nonce, value.encode(), f"{bucket}\0{option}".encode())
        return base64.b64encode(nonce + box).decode()

    def _read(self, name: str, entry: Entry) -> Word:
        try:
            signed = msgspec.json.decode(entry.value, type=Signed)
            if self._signs and not hmac.compare_digest(signed.mac.encode(), self._mac(name, signed.word).encode()):
                raise _Unreadable(
                    f"what the cluster's store says of bucket {name} is not signed with this node's peer key: give all "
                    "nodes the same key, and set the bucket anew; if they have it, somebody else wrote to etcd"
                )
            settings = msgspec.json.decode(signed.word, type=_Settings).bucket or {}
            if later := settings.keys() - set(Bucket.__struct_fields__):
                raise Invalid(
                    f"bucket {name} has settings that this release does not know ({', '.join(sorted(later))}): update "
                    "this node"
                )
            word = msgspec.json.decode(signed.word, type=Word)
        except msgspec.MsgspecError as error:
            raise _Unreadable(
                f"what the cluster's store says of bucket {name} cannot be read ({error}): set the bucket anew"
            ) from None
        if word.bucket is not None and word.bucket.name != name:
            raise _Unreadable(f"what the cluster's store says of bucket {name} is of another: set the bucket anew")
        return word

    def _signed(self, name: str, word: Word) -> bytes:
        said = msgspec.Raw(msgspec.json.encode(word))
        return msgspec.json.encode(Signed(said, self._mac(name, said) if self._signs else ""))

    def _mac(self, name: str, word: msgspec.Raw) -> str:
        return hmac.digest(self._signs, name.encode() + b"\0" + bytes(word), hashlib.sha256).hex()

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
    def _remembered(self, name: str) -> Followed:
        return self._followed.get(name, Followed())

    async def _follows(self, name: str, said: bytes, word: Word, revision: int) -> None:
        """The node does what this word says."""
        self._done[name] = revision
        self._caught_up(name)
        await self._remember(name, Followed(said, word.version, word.bucket is not None))
        deleted = [name for name, known in self._followed.items() if known.said and not known.mine]
        for old in sorted(deleted, key=lambda name: self._followed[name].version)[:-DELETED_MAX]:
            await self._remember(old, Followed())

    async def _remember(self, name: str, known: Followed) -> None:
        if known == self._remembered(name):
            return
        if known == Followed():
            del self._followed[name]
            await self._memory.delete(MEMORY + name)
        else:
            self._followed[name] = known
            await self._memory.put(MEMORY + name, msgspec.msgpack.encode(known))

    async def _forget_deleted(self) -> None:
        """Have the store keep at most DELETED_MAX words of deleted buckets, the last."""
        if len(self._words) <= DELETED_MAX:
            return
        deleted = [(entry.revision, key) for key, entry in self._words.items() if self._is_deleted(key, entry)]
        old = sorted(deleted)[:-DELETED_MAX][: META_CHANGES_MAX // 2]
        if old:
            with suppress(ForebayError):  # by whoever deletes the next
                when = {PREFIX + key: revision for revision, key in old}
                await self._meta.transact(dict.fromkeys(when), when=when)

    def _is_deleted(self, name: str, entry: Entry) -> bool:
        with suppress(ForebayError):
            return self._read(name, entry).bucket is None
        return False

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())


def _derived(secret: str, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, None, info).derive(secret.encode())


def _secrets(bucket: Bucket) -> dict[str, str]:
    return {name: value for name, value in bucket.options.items() if is_secret(name, value)}
