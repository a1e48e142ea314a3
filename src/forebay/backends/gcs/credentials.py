"""Finds a bearer token for Google Cloud Storage where Google's own tools look for it.

Theory. obstore signs its own requests but does not give out its token, and listings (`s3/listing.py`) need one. So this
module finds tokens once, for both, in Google's order: the option, the environment, application default credentials (a
service account's key file, or `gcloud auth application-default login`), the machine's metadata server. A token is kept
until shortly before it expires.

Rejected: google-auth (a dependency for forty lines). Workload identity federation (`external_account`) needs a chain of
exchanges per identity provider; the error names a way round: a token from `gcloud auth print-access-token`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from forebay.backends.http.tokens import Token, Tokens, ask_for_token
from forebay.core.errors import Denied, Invalid, NotSupported, Unavailable
from forebay.ports.clock import Clock

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
TOKEN_URL = "https://oauth2.googleapis.com/token"
METADATA_HOST = "metadata.google.internal"

OPTIONS = {
    "base_url": "URL of another service that speaks GCS, such as an emulator",
    "service_account": "path of a service account's JSON key",
    "service_account_key": "the JSON itself",
    "application_credentials": "path of application default credentials",
    "bearer_token": "a token, used as it is until it ends",
    "skip_signature": "true: anonymous requests, for public buckets",
}


def find_tokens(
    options: Mapping[str, str], environment: Mapping[str, str], anonymous: bool, clock: Clock
) -> Tokens | None:
    """Where tokens come from by options and environment; None for anonymous requests. Reads key files now."""
    if anonymous:
        return None
    fixed = options.get("bearer_token") or environment.get("GOOGLE_BEARER_TOKEN")
    if fixed:
        token = Token(fixed, None)
        return Tokens(lambda: token, clock)
    text = options.get("service_account_key") or environment.get("GOOGLE_SERVICE_ACCOUNT_KEY")
    path = (
        options.get("service_account")
        or options.get("application_credentials")
        or environment.get("GOOGLE_SERVICE_ACCOUNT")
        or environment.get("GOOGLE_SERVICE_ACCOUNT_PATH")
        or environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    )
    if not text and path:
        text = _read(Path(path).expanduser())
    if not text:
        home = Path(
            environment.get("CLOUDSDK_CONFIG") or Path(environment.get("HOME") or Path.home()) / ".config/gcloud"
        )
        usual = home / "application_default_credentials.json"
        text = _read(usual) if usual.is_file() else ""
    if not text:
        host = environment.get("GCE_METADATA_HOST") or METADATA_HOST
        return Tokens(lambda: _from_metadata(host, clock), clock)
    return Tokens(_from_json(text, clock), clock)


def _from_json(text: str, clock: Clock) -> Callable[[], Token]:
    try:
        secret = json.loads(text)
        kind = secret.get("type", "service_account")
    except (ValueError, AttributeError) as error:
        raise Invalid(
            f"the Google credentials are not JSON ({error}): give the key file as it was downloaded"
        ) from error
    needed = {
        "service_account": ("client_email", "private_key"),
        "authorized_user": ("client_id", "client_secret", "refresh_token"),
    }.get(kind)
    if needed is None:
        raise NotSupported(
            f"Google credentials of type {kind!r} are not read by Forebay: use a service account's key, or the option "
            "bearer_token with what `gcloud auth print-access-token` prints"
        )
    absent = [name for name in needed if not secret.get(name)]
    if absent:
        raise Invalid(f"the Google credentials lack {', '.join(absent)}: give the key file as it was downloaded")
    if kind == "authorized_user":
        return lambda: _from_user(secret, clock)
    return lambda: _from_service_account(secret, clock)


def _from_service_account(secret: Mapping[str, str], clock: Clock) -> Token:
    from awscrt.crypto import RSA, RSASignatureAlgorithm  # the one RSA among the dependencies

    now = int(clock.wall_s())
    url = secret.get("token_uri") or TOKEN_URL
    header = {"alg": "RS256", "typ": "JWT", "kid": secret.get("private_key_id", "")}
    claims = {"iss": secret["client_email"], "scope": SCOPE, "aud": url, "iat": now, "exp": now + 3600}
    signed = ".".join(_base64url(json.dumps(part).encode()) for part in (header, claims))
    try:
        key = RSA.new_private_key_from_pem_data(secret["private_key"])
    except Exception as error:
        raise Invalid(f"the service account's private_key is not an RSA key in PEM ({error})") from error
    digest = hashlib.sha256(signed.encode()).digest()
    signature = _base64url(key.sign(RSASignatureAlgorithm.PKCS1_5_SHA256, digest))
    form = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": f"{signed}.{signature}"}
    return ask_for_token(url, form, clock)


def _from_user(secret: Mapping[str, str], clock: Clock) -> Token:
    form = {name: secret[name] for name in ("client_id", "client_secret", "refresh_token")}
    form["grant_type"] = "refresh_token"
    return ask_for_token(secret.get("token_uri") or TOKEN_URL, form, clock)


def _from_metadata(host: str, clock: Clock) -> Token:
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    try:
        return ask_for_token(url, None, clock, {"Metadata-Flavor": "Google"})
    except Unavailable as error:
        raise Denied(
            "no Google credentials were found in the bucket's options, the environment, gcloud's directory or this "
            f"machine's metadata server: set them, or skip_signature=true for a public bucket ({error.message})"
        ) from error


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise Invalid(f"the Google credentials {path} cannot be read ({error.strerror}): correct the path") from error
