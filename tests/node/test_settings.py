"""Settings: from defaults, a file and flags, and nothing that is not known."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

from forebay.core.errors import Exists, Invalid, NotFound
from forebay.core.quantity import parse_size
from forebay.node.last_start import check_not_looser, remember
from forebay.node.process.supervisor import Lock, hold_port
from forebay.node.settings import Settings, from_json, load, parse_listen
from forebay.ports import chance, clock


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("100", 100), ("1.5KiB", 1536), ("2 GB", 2 * 10**9), ("3T", 3 << 40), ("7mib", 7 << 20)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1 XB", "GiB", "1e9", "0x10"])
def test_sizes_that_nobody_means(text: str) -> None:
    with pytest.raises(Invalid):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        (":0", ("127.0.0.1", 0)),
        ("localhost", ("localhost", 9400)),
        ("[::1]:9", ("::1", 9)),
        ("[::1]", ("::1", 9400)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


def test_flags_replace_the_file_and_the_file_replaces_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/some/home")
    config = tmp_path / "node.toml"
    config.write_text(
        'dir = "/somewhere"\ncapacity = "10GiB"\nfronts = 3\nvolumes = ["/a", "/b"]\nauto-buckets = false\n'
    )
    loaded = load(config, fronts=1, listen=None, volumes=())
    assert loaded == Settings("/somewhere", "127.0.0.1:9400", 1, 10 << 30, ("/a", "/b"), auto_buckets=False)
    assert load(config, capacity="1GiB", volumes=("/c",)).volumes == ("/c",)
    assert from_json(loaded.to_json()) == loaded
    assert load(None, dir="~/x").dir == "/some/home/x"
    with pytest.raises(NotFound):
        load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    "text",
    ["capcity = 1", "fronts = -1", 'listen = "1.2.3.4:80"', 'capacity = "1MiB"', "fronts = [", 'listen = "x:99999"'],
)
def test_what_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'dir = "/d"\n{text}\n')
    with pytest.raises(Invalid):
        load(config)


def test_a_setting_that_is_not_known_is_told_with_the_one_that_is_meant(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('dir = "/d"\nflush-timout = 5\n')
    with pytest.raises(Invalid, match=r"no setting flush_timout; did you mean flush_timeout\?"):
        load(config)


def test_a_value_that_is_none_of_the_choices_is_told_with_those(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"audit is 'chnges'; did you mean changes\?: choose one of off, changes, reads"):
        load(None, dir="/d", audit="chnges")
    with pytest.raises(Invalid, match=r"the setting listen does not fit .*got `int`"):
        load(None, dir="/d", listen=3)


def test_the_endpoint_is_one_that_a_client_can_use() -> None:
    assert Settings("/d", "0.0.0.0:80", identities="/i").endpoint == "http://127.0.0.1:80"
    assert Settings("/d", "[::1]:80").endpoint == "http://[::1]:80"
    assert Settings("/d", "localhost:80").endpoint == "http://localhost:80"


def test_a_start_is_held_against_the_last_one(tmp_path: Path) -> None:
    def start(listen: str, identities: str = "", cert: str = "", loosen: bool = False) -> str:
        settings = Settings(str(tmp_path), listen, identities=identities, tls_cert=cert, loosen=loosen)
        try:
            check_not_looser(settings)
        except Invalid as refused:
            return str(refused)
        remember(settings)
        return ""

    assert start("127.0.0.1:0") == ""
    assert start("localhost:1") == "", "another name of loopback"
    assert "add --listen localhost:1;" in start("192.0.2.1:1", "/i"), "wider"
    assert start("192.0.2.1:1", "/i", "/c", loosen=True) == ""
    assert start("192.0.2.1:2", "/j", "/d") == "", "as before, from other files"
    assert "listening at 0.0.0.0, which" in start("0.0.0.0:2", "/j", "/d")
    assert "listening at 192.0.2.9, which" in start("192.0.2.9:2", "/j", "/d")
    assert "without TLS, which it was not at its last start: add --tls-cert /d;" in start("192.0.2.1:2", "/j")
    assert "open to everybody and without TLS" in start("127.0.0.1:2")
    assert start("127.0.0.1:2", "/j", "/d") == "", "tighter"
    assert "add --listen" in start("192.0.2.1:2", "/j", "/d"), "what was tightened stays so"
    (tmp_path / "settings.json").write_text("{")
    assert "mend it, or delete it" in start("127.0.0.1:2", "/j", "/d")
    (tmp_path / "settings.json").write_text('{"of_a_later_version": 1}')
    assert start("127.0.0.1:2") == ""


def test_one_lock_one_port(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "deep" / "node.lock")
    with pytest.raises(Exists):
        Lock(tmp_path / "deep" / "node.lock")
    lock.release()
    Lock(tmp_path / "deep" / "node.lock").release()
    holder, settings = hold_port(Settings("/d", "127.0.0.1:0"))
    with holder:
        assert settings.port > 0
        with pytest.raises(Exists):
            with socket.create_server(("127.0.0.1", settings.port), reuse_port=True):
                hold_port(settings)
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", settings.port)) != 0, "held, but nobody listens"
    with pytest.raises(Invalid):
        hold_port(Settings("/d", "192.0.2.1:0", identities="/i"))


def test_the_doors_to_clock_and_chance() -> None:
    assert abs(clock.wall_s() - time.time()) < 5
    assert clock.monotonic_s() <= clock.monotonic_s()
    assert len(chance.token_hex(8)) == 16 != chance.token_hex(8)
    assert 0 <= chance.random() < 1
    assert 0 <= chance.randbits(3) < 8
    one, two = chance.Seeded(7), chance.Seeded(7)
    assert [one.random(), one.randbits(64), one.token_hex(4)] == [two.random(), two.randbits(64), two.token_hex(4)]
    assert random.Random(7).random() == chance.Seeded(7).random()


def test_how_long_a_stop_may_flush(tmp_path: Path) -> None:
    assert load(dir=str(tmp_path)).flush_timeout_s == 60
    config = tmp_path / "node.toml"
    config.write_text("flush_timeout = 5\n")
    assert load(config, dir=str(tmp_path)).flush_timeout_s == 5
    assert load(config, dir=str(tmp_path), flush_timeout=0.0).flush_timeout_s == 0
    with pytest.raises(Invalid, match="--flush-timeout -1"):
        load(dir=str(tmp_path), flush_timeout=-1.0)
