"""Certificates for tests, made on the spot: each vouches for itself and for 127.0.0.1."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Pair(NamedTuple):
    """Two PEM files. `serial` tells one certificate from another."""

    cert: Path
    key: Path
    serial: int

    def replace(self, other: Pair) -> None:
        """Put `other`'s content where this pair lies, key last, as a renewal does."""
        for ours, theirs in ((self.cert, other.cert), (self.key, other.key)):
            new = ours.with_suffix(".new")
            new.write_bytes(theirs.read_bytes())
            new.replace(ours)


def make(
    folder: Path, name: str, *, days: float = 30, pass_phrase: bytes = b"", common: bool = True, by: Pair | None = None
) -> Pair:
    """A pair in `folder` that ends in `days`. Not `common`: the name is an organization's. `by` whom it is vouched for;
    else by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    kind = x509.NameOID.COMMON_NAME if common else x509.NameOID.ORGANIZATION_NAME
    subject = x509.Name([x509.NameAttribute(kind, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    end = datetime.now(UTC) + timedelta(days=days)
    serial = x509.random_serial_number()
    issuer, signer = subject, key
    if by is not None:
        issuer = x509.load_pem_x509_certificate(by.cert.read_bytes()).subject
        signed = serialization.load_pem_private_key(by.key.read_bytes(), None)
        assert isinstance(signed, ec.EllipticCurvePrivateKey)
        signer = signed
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(end - timedelta(days=90))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    secrecy = serialization.BestAvailableEncryption(pass_phrase) if pass_phrase else serialization.NoEncryption()
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key", serial)
    pair.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secrecy))
    return pair
