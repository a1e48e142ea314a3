"""An etcd of one member that speaks TLS alone, wants a certificate, and may want users."""

from __future__ import annotations

import asyncio
import base64
import socket
import tempfile
from pathlib import Path
from typing import Any

from bench import servers
from forebay.meta.etcd_link import Access, Members
from tests.node import certificates
from tests.patience import PATIENCE_S

USER, PASSWORD = "forebay", "a word of theirs"


class SecureEtcd(servers.Etcd):
    """`ours` is the certificate that it takes, `theirs` its own."""

    def __init__(self) -> None:
        super().__init__([self])
        folder = Path(tempfile.mkdtemp(prefix="forebay-etcd-tls-"))
        self.theirs, self.ours = certificates.make(folder, "etcd"), certificates.make(folder, "node", common=False)
        self.trusted = folder / "trusted.pem"  # its gateway is a client of itself
        self.trusted.write_bytes(self.theirs.cert.read_bytes() + self.ours.cert.read_bytes())

    @property
    def access(self) -> Access:
        return Access(str(self.theirs.cert), str(self.ours.cert), str(self.ours.key))

    def command(self) -> list[str]:
        client, peer = f"https://127.0.0.1:{self.ports[0]}", f"http://127.0.0.1:{self.ports[1]}"
        return [
            *(servers.find_program("etcd"), "--name", "alone", "--data-dir", f"{self.dir}/data"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"alone={peer}"),
            *("--cert-file", str(self.theirs.cert), "--key-file", str(self.theirs.key)),
            *("--client-cert-auth", "--trusted-ca-file", str(self.trusted)),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--logger", "zap", "--log-level", "error"),
        ]

    def is_ready(self) -> bool:
        """Whether it listens; it answers soon after."""
        with socket.create_connection(self.address, timeout=PATIENCE_S):
            return True

    def want_users(self, namespace: str) -> None:
        """From now on: USER may do everything below the namespace, and nothing else."""
        first, end = f"{namespace}/".encode(), f"{namespace}0".encode()
        permission = {"permType": "READWRITE", "key": _text(first), "range_end": _text(end)}
        steps: list[tuple[str, dict[str, Any]]] = [
            ("user/add", {"name": "root", "password": "of root"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": USER, "password": PASSWORD}),
            ("role/add", {"name": "node"}),
            ("role/grant", {"name": "node", "perm": permission}),
            ("user/grant", {"user": USER, "role": "node"}),
            ("enable", {}),
        ]

        async def take() -> None:
            members = Members([self.address], 60.0, self.access)
            for path, question in steps:
                await members.read(f"/v3/auth/{path}", question)
            await members.aclose()

        asyncio.run(take())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
