"""What the engine takes from an issuer, and what it does about one that is slow, huge, wrong or somewhere else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.messages.calls import IssuerNamed
from forebay.core.oidc import Issuer, decode_trusted
from forebay.meta.sqlite import SqliteMeta
from forebay.node.engine import issuers as engine_issuers
from forebay.node.engine.issuers import AGAIN_S, EVERY_S, KEPT_S, Issuers
from forebay.ports.chance import system as chance
from tests.engine.conftest import FakeClock
from tests.front.web_tokens import EC_KEY, KEY_SET, OTHER_KEY, issuer, public_jwk
from tests.patience import PATIENCE_S
from tests.patience import until_async as until

DESCRIPTION = "/.well-known/openid-configuration"


class Web(ThreadingHTTPServer):
    """An issuer on loopback that says what it is told to say."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[str] = []
        self.keys: object = KEY_SET
        self.description: object = {"issuer": self.url, "jwks_uri": f"{self.url}/keys?a=b"}
        self.redirects = ""  # where to, instead of an answer
        self.trickles = threading.Event()  # set: one byte, and then nothing until it is cleared
        self.goes_on = threading.Event()

    def handle_error(self, *_: object) -> None:
        pass  # clients that hang up are what is tested


class _Answers(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects)
            self.end_headers()
            return
        if self.server.trickles.is_set():
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX")
            self.server.goes_on.wait(PATIENCE_S)
            return
        said = self.server.description if self.path == DESCRIPTION else self.server.keys
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.goes_on.set()
        server.shutdown()
        thread.join()


class Place:
    """The engine's part, alone."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self.meta = SqliteMeta(directory / "meta.sqlite")
        self.told = 0
        self.issuers = Issuers(self.meta, self.clock, chance, self._changed)

    def _changed(self) -> None:
        self.told += 1

    def key_ids(self) -> list[str]:
        """Those that fronts are told of."""
        if not self.issuers.encoded:
            return []
        return [key["kid"] for one in decode_trusted(self.issuers.encoded).issuers for key in one.keys]

    async def asked_again(self, at: Issuer) -> None:
        """Return when the issuer was asked once more, because a front wished it."""
        self.clock.ahead_s += AGAIN_S + 1
        await self.issuers.refresh(IssuerNamed(at.name))


@asynccontextmanager
async def placed(directory: Path) -> AsyncIterator[Place]:
    """A `Place`, closed afterwards."""
    place = Place(directory)
    try:
        yield place
    finally:
        await place.issuers.aclose()
        await place.meta.aclose()


def run(story: object) -> None:
    asyncio.run(story)  # type: ignore[arg-type]


def test_keys_are_fetched_kept_and_changed(web: Web, tmp_path: Path) -> None:
    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            await place.issuers.follow((at,))
            await until(lambda: place.key_ids() == ["rsa", "ec", "ed"])
            assert web.asked == [DESCRIPTION, "/keys?a=b"]
            told = place.told
            await place.asked_again(at)
            assert (place.told, len(web.asked)) == (told, 4)  # the same keys are no news
            web.keys = {"keys": [public_jwk(OTHER_KEY, "new")]}
            await place.asked_again(at)
            assert place.key_ids() == ["new"]
            secret = decode_trusted(place.issuers.encoded).secret
            await place.issuers.follow(())
            assert place.issuers.encoded == b""
        web.redirects = "http://127.0.0.1:1/"  # and it answers no more
        async with placed(tmp_path) as again:
            await again.issuers.follow((at,))
            assert again.key_ids() == ["new"]
            assert decode_trusted(again.issuers.encoded).secret == secret

    run(story())


def test_a_thousand_wishes_are_one_question(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            await place.issuers.follow((at,))
            await until(place.key_ids)
            before = len(web.asked)
            now_s = place.clock.monotonic_s() + AGAIN_S + 1
            monkeypatch.setattr(place.clock, "monotonic_s", lambda: now_s)  # however long the answers take
            await asyncio.gather(*(place.issuers.refresh(IssuerNamed("corp")) for _ in range(1000)))
            await asyncio.gather(*(place.issuers.refresh(IssuerNamed("corp")) for _ in range(1000)))
            assert len(web.asked) - before == 2  # its description, and its keys
            await place.issuers.refresh(IssuerNamed("nobody"))

    run(story())


def test_keys_go_on_for_a_day_without_their_issuer(web: Web, tmp_path: Path) -> None:
    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            await place.issuers.follow((at,))
            await until(place.key_ids)
            web.description = {"error": "closed"}
            await place.asked_again(at)
            assert place.key_ids() == ["rsa", "ec", "ed"]
            place.clock.ahead_s += KEPT_S - 100
            await place.asked_again(at)
            assert place.key_ids() == ["rsa", "ec", "ed"]
            place.clock.ahead_s += 200
            await place.asked_again(at)
            assert place.key_ids() == []
            web.description = {"issuer": web.url, "jwks_uri": f"{web.url}/keys"}
            await place.asked_again(at)
            assert place.key_ids() == ["rsa", "ec", "ed"]

    assert EVERY_S < KEPT_S
    run(story())


def test_nonsense_and_floods_change_nothing(web: Web, tmp_path: Path) -> None:
    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            web.keys = {"keys": [public_jwk(EC_KEY, "good")]}
            await place.issuers.follow((at,))
            await until(place.key_ids)
            for said in (b"", b"<html>", b"[" * 100_000, {"keys": []}, {"keys": [{"kty": "oct", "k": "eA"}]}):
                web.keys = said
                await place.asked_again(at)
                assert place.key_ids() == ["good"], said
            web.keys = b'{"keys": [], "x": "' + b"y" * limits.ISSUER_ANSWER_BYTES_MAX + b'"}'
            await place.asked_again(at)
            assert place.key_ids() == ["good"]

    run(story())


def test_an_issuer_leads_nowhere_else(web: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Redirects, keys at other ports of this machine, and names that lead here."""

    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            with Web() as inner:
                listening = threading.Thread(target=inner.serve_forever, kwargs={"poll_interval": 0.01})
                listening.start()
                web.redirects = f"{inner.url}/secret"
                await place.issuers.follow((at,))
                await until(lambda: "redirects are not followed" in caplog.text)
                web.redirects = ""
                for there in (
                    f"{inner.url}/keys",
                    f"https://127.0.0.1:{inner.server_port}/keys",
                    "https://169.254.169.254/",
                ):
                    web.description = {"issuer": web.url, "jwks_uri": there}
                    before = len(web.asked)
                    await place.asked_again(at)
                    assert len(web.asked) > before
                    assert place.key_ids() == []
                assert inner.asked == []
                inner.shutdown()
                listening.join()
            named = issuer(name="named", issuer=f"https://[::ffff:127.0.0.1]:{web.server_port}")
            elsewhere = issuer(name="linked", issuer="https://[::ffff:169.254.169.254]")
            await place.issuers.follow((named, elsewhere))
            await until(lambda: caplog.text.count("gives no keys") >= 3)
            assert "leads to an address of this machine or its link" in caplog.text

    run(story())


def test_an_issuer_that_trickles_is_cut(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_issuers, "FETCH_S", 0.2)

    async def story() -> None:
        at = issuer(issuer=web.url)
        async with placed(tmp_path) as place:
            web.trickles.set()
            await place.issuers.follow((at,))
            await until(lambda: web.asked)
            await place.issuers.refresh(IssuerNamed("corp"))
            web.trickles.clear()
            await place.asked_again(at)
            assert place.key_ids()
            web.trickles.set()
            place.clock.ahead_s += AGAIN_S + 1
            stopped = asyncio.create_task(place.issuers.refresh(IssuerNamed("corp")))
            await until(lambda: len(web.asked) > 3)
            await place.issuers.aclose()  # while it is asked
            stopped.cancel()
            await until(lambda: not [one for one in threading.enumerate() if one.name.startswith("forebay-wire")])

    run(story())
