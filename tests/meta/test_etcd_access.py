"""An etcd that speaks TLS, wants certificates and users, and what is said where one of them is not as it should be."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.core.errors import Denied, ForebayError, Invalid, Unavailable
from forebay.meta.etcd import EtcdMeta
from forebay.meta.etcd_link import PASSWORD_VARIABLE, Access
from forebay.ports.clock import SystemClock
from tests.meta.secure_etcd import PASSWORD, USER, SecureEtcd
from tests.meta.watched import Watched
from tests.node import certificates

PATIENT_S = 60.0


@pytest.fixture(scope="module")
def secure() -> Iterator[SecureEtcd]:
    with SecureEtcd() as started:
        yield started


def meta_at(secure: SecureEtcd, access: Access, namespace: str = "open", patience_s: float = PATIENT_S) -> EtcdMeta:
    return EtcdMeta([secure.address], namespace, patience_s=patience_s, access=access)


async def everything(meta: EtcdMeta) -> None:
    """One of each kind of question."""
    async with Watched(meta, "") as watched, meta.hold(10.0, SystemClock()) as held:
        lease = await held.number()
        await meta.put("key", b"1", lease=lease)
        await meta.transact({"key": b"2", "other": b""})
        assert (await meta.get("key")) is not None
        await watched.until(lambda state: state == {"key": b"2", "other": b""})
        await meta.delete("key")
        await meta.delete("other")
    await meta.aclose()


def refused(secure: SecureEtcd, access: Access, kind: type[ForebayError], words: str, namespace: str = "open") -> None:
    async def story() -> None:
        meta = meta_at(secure, access, namespace, patience_s=3.0)
        with pytest.raises(kind, match=re.escape(words)):
            await meta.get("key")
        await meta.aclose()

    asyncio.run(story())


def test_certificates_are_wanted_on_both_sides(secure: SecureEtcd, tmp_path: Path) -> None:
    asyncio.run(everything(meta_at(secure, secure.access)))
    stranger = certificates.make(tmp_path, "stranger")
    refused(secure, secure.access._replace(ca=str(stranger.cert)), Unavailable, "its certificate is not trusted")
    refused(secure, Access(), Unavailable, "perhaps it wants TLS (--cluster-ca)")
    refused(secure, secure.access._replace(cert="", key=""), Unavailable, "--cluster-cert")
    with_another = secure.access._replace(cert=str(stranger.cert), key=str(stranger.key))
    refused(secure, with_another, Unavailable, "--cluster-cert")


def test_what_etcd_says_without_tls_is_explained(etcd: object, secure: SecureEtcd) -> None:
    async def story() -> None:
        meta = EtcdMeta(etcd.addresses, "open", patience_s=3.0, access=secure.access)  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match="speaks no"):
            await meta.get("key")
        await meta.aclose()

    asyncio.run(story())


def test_users_have_a_password_and_may_do_no_more_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    with SecureEtcd() as secure:
        access = secure.access._replace(user=USER, password_file=str(file))
        asyncio.run(everything(meta_at(secure, access, "ours")))  # nobody is asked yet
        secure.want_users("ours")
        asyncio.run(everything(meta_at(secure, access, "ours")))
        monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
        asyncio.run(everything(meta_at(secure, access._replace(password_file=""), "ours")))
        refused(secure, secure.access, Denied, "wants to know who asks: give --cluster-user", "ours")
        refused(secure, access, Denied, "permission denied", "theirs")
        common = access._replace(cert=str(secure.theirs.cert), key=str(secure.theirs.key))
        refused(secure, common, Denied, "takes no certificate with a common name", "ours")
        file.write_text("another")
        refused(secure, access, Denied, f"refuses the user {USER}", "ours")
        refused(secure, access._replace(user="nobody"), Denied, "refuses the user nobody", "ours")
        file.write_text(PASSWORD)

        async def restarted() -> None:
            meta = meta_at(secure, access, "ours")
            async with Watched(meta, "") as watched:
                revision = await meta.put("key", b"before", revision=0)
                secure.kill()
                secure.restart()  # it knows no token any more
                await meta.put("key", b"after", revision=revision)
                await watched.until(lambda state: state == {"key": b"after"})
            await meta.aclose()

        asyncio.run(restarted())


def test_what_is_named_and_cannot_be_used_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    pair = certificates.make(tmp_path, "ours")
    locked = certificates.make(tmp_path, "locked", pass_phrase=b"secret")
    for access, words in (
        (Access(ca=str(tmp_path / "none")), "--cluster-ca: "),
        (Access(ca=str(pair.key)), "--cluster-ca: "),
        (Access(cert=str(pair.cert)), "--cluster-cert (and --cluster-key): "),
        (Access(cert=str(locked.cert), key=str(locked.key)), "has a pass phrase"),
        (Access(key=str(pair.key)), "--cluster-key is given without --cluster-cert"),
        (Access(user="ann"), f"or set {PASSWORD_VARIABLE}"),
        (Access(user="ann", password_file=str(tmp_path / "none")), "--cluster-password-file"),
        (Access(password_file="x"), "without --cluster-user"),
    ):
        with pytest.raises(Invalid, match=re.escape(words)):
            access.check()
    Access(ca=str(pair.cert), cert=str(pair.cert), key=str(pair.key)).check()
