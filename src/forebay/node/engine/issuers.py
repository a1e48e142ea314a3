"""The OIDC issuers as the engine follows them: which there are, and their public keys.

Theory. The engine alone asks the issuers, in threads, and sends fronts what they need with every `Welcome`; no request
waits for an issuer. Keys are fetched at the start, then every `EVERY_S`, and when a front meets a token with a key that
it does not know, at most once in `AGAIN_S`. An issuer that does not answer, or answers nonsense, changes nothing: its
keys go on for `KEPT_S` after it was last heard, over restarts too, since they are kept with the node's state. Then its
tokens let nobody in until it answers.

Whoever answers for an issuer says where its keys are, so that is held to narrow rules (`core/oidc.py`): https, no
redirects, an answer of bounded length and time, and no address of this machine or its link, unless the identities file
itself put the issuer there.

The secret of session tokens is drawn once for a node and kept with its state.

Rejected: asking from the front that needs the key (each would, and their loops serve hits); PyJWT's own client (it
follows redirects, reads without bound and blocks).

Invariants. (1) `encoded` changes only if issuers, rules or keys do. (2) One fetch of an issuer at a time, each ended by
`FETCH_S`. (3) Nothing is fetched for a node without issuers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from forebay.backends.bounds import Bounds
from forebay.backends.http.requests import Wire, anonymous
from forebay.core.errors import Denied, ForebayError, Invalid, Unavailable
from forebay.core.messages.calls import IssuerNamed, Nothing
from forebay.core.oidc import (
    Issuer,
    IssuerKeys,
    Jwk,
    Trusted,
    discovery_url,
    encode_trusted,
    is_loopback_name,
    keys_url,
    read_keys,
)
from forebay.core.reach import Reach
from forebay.core.types import Bucket
from forebay.meta.seam import MetaStore
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.issuers")

EVERY_S = 300.0  # issuers publish a key hours before they sign with it
AGAIN_S = 5.0  # between two fetches that somebody waits for, whatever comes
KEPT_S = 86_400.0  # keys of an issuer that does not answer: a day to mend it
FETCH_S = 10.0  # for one answer
SECRET = "oidc/secret"
KEPT = "oidc/keys/"


class _Kept(msgspec.Struct, array_like=True):
    keys: tuple[Jwk, ...]
    heard_s: float  # Unix time


class _Followed:
    """One issuer, and the task that asks it."""

    def __init__(self, issuer: Issuer, kept: _Kept) -> None:
        self.issuer = issuer
        self.keys, self.heard_s = kept.keys, kept.heard_s
        self.asked_s = float("-inf")  # monotonic; when the last fetch ended
        self.wanted = asyncio.Event()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None]

    async def end(self) -> None:
        """Ask no more. Twice is fine."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if not self.settled.done():
            self.settled.set_result(None)  # who waits for keys waits no longer


class Issuers:
    """See the module's header. `changed` is called when `encoded` did."""

    def __init__(self, meta: MetaStore, clock: Clock, chance: Chance, changed: Callable[[], None]) -> None:
        self.encoded = b""
        self._meta, self._clock, self._chance, self._changed = meta, clock, chance, changed
        self._secret = b""
        self._issuers: tuple[Issuer, ...] = ()
        self._following = asyncio.Lock()
        self._followed: dict[str, _Followed] = {}

    async def follow(self, issuers: tuple[Issuer, ...]) -> None:
        """These are the issuers from now on. Costs nothing if they were before."""
        async with self._following:
            if issuers != self._issuers:
                await self._follow(issuers)

    async def _follow(self, issuers: tuple[Issuer, ...]) -> None:
        if issuers and not self._secret:
            self._secret = await self._know_secret()
        wanted = {issuer.mark: issuer for issuer in issuers}
        for name, one in list(self._followed.items()):
            if wanted.get(one.issuer.mark) is None:
                del self._followed[name]
                await one.end()
        for issuer in issuers:
            known = self._followed.get(issuer.name)
            if known is not None:
                known.issuer = issuer  # its rules may be others
                continue
            one = self._followed[issuer.name] = _Followed(issuer, await self._read_kept(issuer))
            one.task = asyncio.create_task(self._keep(one))
        self._issuers = issuers
        self._tell()

    async def refresh(self, call: IssuerNamed) -> Nothing:
        """Returns when the keys of this issuer are not older than `AGAIN_S`, or it could not be asked."""
        one = self._followed.get(call.name)
        if one is not None and self._clock.monotonic_s() - one.asked_s >= AGAIN_S:
            one.wanted.set()
            await asyncio.shield(one.settled)
        return Nothing()

    async def aclose(self) -> None:
        """End what is under way. Twice is fine."""
        for one in self._followed.values():
            await one.end()

    # --- one issuer --------------------------------------------------------------------------------------------------
    async def _keep(self, one: _Followed) -> None:
        failures, told = 0, ""
        while True:
            try:
                one.keys = await self._fetch(one.issuer)
                one.heard_s = self._clock.wall_s()
                if failures:
                    log.info("the issuer %s answers again", one.issuer.name)
                failures, told = 0, ""
                await self._meta.put(_place(one.issuer), msgspec.msgpack.encode(_Kept(one.keys, one.heard_s)))
            except ForebayError as error:
                failures += 1
                if told != error.message:
                    told = error.message
                    log.error(
                        "the issuer %s (%s) gives no keys: %s; those that it gave go on for %d h",
                        *(one.issuer.name, one.issuer.issuer, error, KEPT_S // 3600),
                    )
            except Exception:
                failures += 1
                log.exception("fetching the keys of issuer %s broke; it is tried again", one.issuer.name)
            one.asked_s = self._clock.monotonic_s()
            self._tell()
            settled, one.settled = one.settled, asyncio.get_running_loop().create_future()
            settled.set_result(None)
            one.wanted.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(one.wanted.wait(), min(EVERY_S, 2.0**failures) if failures else EVERY_S)

    async def _fetch(self, issuer: Issuer) -> tuple[Jwk, ...]:
        try:
            authorities = Path(issuer.ca).read_text("latin-1") if issuer.ca else ""
        except OSError as error:
            raise Invalid(f"its ca {issuer.ca} cannot be read ({error.strerror}): correct the path") from None
        url = keys_url(issuer, await _answer(issuer, discovery_url(issuer), authorities))
        keys = read_keys(await _answer(issuer, url, authorities))
        if not keys:
            raise Unavailable("its key set has no key that signatures can be verified with: have that corrected")
        return keys

    # --- what is known -----------------------------------------------------------------------------------------------
    def _tell(self) -> None:
        now_s = self._clock.wall_s()
        known = tuple(
            IssuerKeys(one.issuer, one.keys if now_s - one.heard_s <= KEPT_S else ()) for one in self._followed.values()
        )
        encoded = encode_trusted(Trusted(self._secret, known)) if known else b""
        if encoded != self.encoded:
            self.encoded = encoded
            self._changed()

    async def _know_secret(self) -> bytes:
        entry = await self._meta.get(SECRET)
        if entry is None:
            await self._meta.put(SECRET, bytes.fromhex(self._chance.token_hex(32)))
            entry = await self._meta.get(SECRET)
        assert entry is not None
        assert len(entry.value) == 32
        return entry.value

    async def _read_kept(self, issuer: Issuer) -> _Kept:
        entry = await self._meta.get(_place(issuer))
        if entry is not None:
            with contextlib.suppress(msgspec.ValidationError, msgspec.DecodeError):
                return msgspec.msgpack.decode(entry.value, type=_Kept)
        return _Kept((), 0.0)


def _place(issuer: Issuer) -> str:
    return KEPT + issuer.mark.hex()


class _Line:
    """The connection of one fetch, so that it can be cut from outside its thread."""

    def __init__(self, issuer: Issuer) -> None:
        own = urlsplit(issuer.issuer)
        origin = f"{own.scheme}://{own.netloc}" if is_loopback_name(own.hostname or "") else ""
        judged = Bounds(Reach((origin,) if origin else ())).dial(Bucket(issuer.name, issuer.issuer, held=True))
        assert judged is not None
        self._judged = judged
        self._cut = False
        self._sock: socket.socket | None = None

    def dial(self, *arguments: Any) -> socket.socket:
        try:
            made = self._judged(*arguments)
        except Denied:
            raise Unavailable(
                f"{arguments[0][0]} leads to an address of this machine or its link: only an issuer whose URL names "
                "a loopback address may be there"
            ) from None
        self._sock = made.dup()
        if self._cut:
            self.cut()
        return made

    def cut(self) -> None:
        """End it now, whatever its thread waits for. Twice is fine."""
        self._cut = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()


async def _answer(issuer: Issuer, url: str, authorities: str) -> bytes:
    """What is at `url`; `Unavailable` if that is nothing, or does not come in time."""
    line = _Line(issuer)
    client = {"dial": line.dial, "root_certificate": authorities}
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    wire = Wire(parts._replace(query="").geturl(), anonymous, client, query=query)
    try:
        async with asyncio.timeout(FETCH_S):
            answer = await wire.run(lambda: wire.ask([]))
    except TimeoutError:
        raise Unavailable(f"{url} does not answer within {FETCH_S:.0f} s") from None
    finally:
        line.cut()
        wire.close()
    if answer.status != 200:
        raise Unavailable(f"{url} answers {answer.status}, not 200 (redirects are not followed)")
    return answer.body
