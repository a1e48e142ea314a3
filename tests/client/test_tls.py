"""https: the same client over TLS, and a certificate that nobody vouches for is refused.

`loopback.pem` is a self-signed certificate for 127.0.0.1 with its key; it is trusted nowhere but here.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from forebay.client.sync import Client
from forebay.core.errors import Unavailable
from tests.client.fake_node import FakeNode

CERTIFICATE = str(Path(__file__).with_name("loopback.pem"))


@pytest.fixture
def tls_url(node: FakeNode) -> str:
    """The fake node behind TLS; handshakes happen in each connection's own thread."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    node.server.socket = context.wrap_socket(node.server.socket, server_side=True, do_handshake_on_connect=False)
    return node.url.replace("http://", "https://")


def test_reads_over_tls(node: FakeNode, tls_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", CERTIFICATE)
    node.objects["corpus"]["a"] = os.urandom(3_000_000)
    with Client(tls_url) as client:
        assert client.get("corpus", "a") == node.objects["corpus"]["a"]
        client.download("corpus", "a", str(tmp_path / "a"))
        assert (tmp_path / "a").read_bytes() == node.objects["corpus"]["a"]
        assert client.start_job("prefetch", "corpus").state == "done"
        node.drop_connections()
        assert client.get("corpus", "a") == node.objects["corpus"]["a"], "a kept connection that died is replaced"
        room = bytearray(3_000_000)
        node.cut_after = 1_000_000
        with pytest.raises(Unavailable, match="cut after"):
            client.get_into("corpus", "a", room)


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_url: str) -> None:
    with Client(tls_url) as client, pytest.raises(Unavailable, match="certificate") as caught:
        client.status()
    assert caught.value.code == "NoNode"


def test_http_and_https_are_not_taken_for_each_other(node: FakeNode) -> None:
    with Client(node.url.replace("http://", "https://")) as client, pytest.raises(Unavailable, match="no TLS with"):
        client.status()
