"""Finds an S3 bucket's endpoint, region and credentials as AWS's own tools do.

Theory. Users have set up AWS for their other tools, and expect that to work here. So each value comes from the first
place that has it: the bucket's options, the environment, the profile in ~/.aws, the default. Two paths of requests
share one `S3Place`, obstore (bodies) and `http/requests.py` (listings, unusual keys), so both reach the same place as
the same caller. Credentials that are not plain keys (profile, SSO, web identity, ECS, EC2) come from AWS's own runtime,
awscrt, which refreshes them. It is imported only then.

Rejected: botocore (a large dependency for one chain); obstore's chain (no profiles, and it does not give out its keys,
with which listings must be signed).

Invariants. (1) Nothing overrides a value given in the options. (2) No message and no `repr` holds a secret.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from forebay.core.errors import Denied, Invalid
from forebay.core.s3rules.sigv4 import signing_key
from forebay.ports.clock import Clock, SystemClock

REGION_DEFAULT = "us-east-1"
CREDENTIALS_TIMEOUT_S = 30.0  # the chain's last link asks EC2's metadata service, which may not exist
KEEP_S = 300.0  # how long credentials without an end are kept before the chain is asked again
EARLY_S = 120.0  # credentials are renewed this long before they end

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

OPTIONS = {
    "region": "the bucket's region (default: environment, profile, us-east-1)",
    "endpoint": "URL of an S3-compatible service, without the bucket",
    "addressing_style": "path or virtual: where the bucket's name goes (default: path with an endpoint, else virtual)",
    "profile": "a profile of ~/.aws/config and ~/.aws/credentials",
    "access_key_id": "access key, with secret_access_key",
    "secret_access_key": "secret key",
    "session_token": "token of temporary keys",
    "skip_signature": "true: anonymous requests, for public buckets",
    "request_payer": "true: the requester pays",
    "look_before_write": "true: look at the object before a conditional write; for services that know no conditions",
}


class Keys(NamedTuple):
    """What signs a request. `expires_s` is Unix time; None for keys that do not end."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None
    expires_s: float | None

    def __repr__(self) -> str:
        return f"Keys({self.access_key_id[:4]}…)"


class Credentials:
    """Keys that are always fresh. `current` may block for a network round trip: call it in a thread."""

    def __init__(self, find: Callable[[], Keys], clock: Clock) -> None:
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._keys: Keys | None = None
        self._until_s = 0.0

    def current(self) -> Keys:
        """Keys good for at least a minute, or `Denied` saying where they were looked for."""
        with self._lock:
            now_s = self._clock.wall_s()
            if self._keys is None or now_s >= self._until_s:
                keys = self._find()
                self._until_s = now_s + KEEP_S if keys.expires_s is None else keys.expires_s - EARLY_S
                self._keys = keys
            return self._keys

    def for_obstore(self) -> dict[str, Any]:
        """The same keys in the shape that obstore's `credential_provider` returns."""
        keys = self.current()
        with self._lock:
            until = datetime.fromtimestamp(max(self._until_s, self._clock.wall_s() + 60.0), UTC)
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.session_token,
            "expires_at": until,
        }


@dataclass(frozen=True)
class S3Place:
    """One bucket of one S3 service. `url` is where keys are appended, without a final slash."""

    bucket: str
    url: str
    region: str
    virtual_host: bool
    request_payer: bool
    credentials: Credentials | None = field(repr=False)  # None: anonymous


def find_place(bucket: str, options: Mapping[str, str], environment: Mapping[str, str], clock: Clock) -> S3Place:
    """Where `bucket` is, by options, environment and profile; `Invalid` for options that contradict each other."""
    profile = _profile(options, environment)
    if "profile" in options and not profile.exists:
        raise Invalid(f"there is no profile {options['profile']!r} in {profile.files}: name one that is there")
    region = (
        options.get("region")
        or environment.get("AWS_REGION")
        or environment.get("AWS_DEFAULT_REGION")
        or profile.get("region")
        or REGION_DEFAULT
    )
    endpoint = _endpoint(options, environment, profile)
    style = options.get("addressing_style") or ("path" if endpoint or "." in bucket else "virtual")
    if style not in ("path", "virtual"):
        raise Invalid(f"option addressing_style is {style!r}: use path or virtual")
    suffix = ".cn" if region.startswith("cn-") else ""
    base = (endpoint or f"https://s3.{region}.amazonaws.com{suffix}").rstrip("/")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise Invalid(f"option endpoint is {base!r}: write it as http://host:port or https://host")
    url = f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}" if style == "virtual" else f"{base}/{bucket}"
    return S3Place(
        bucket,
        url,
        region,
        style == "virtual",
        flag(options, "request_payer"),
        _find_credentials(options, environment, profile, clock),
    )


def find_endpoint(options: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """URL of the S3-compatible service, "" for Amazon's own."""
    return _endpoint(options, environment, _profile(options, environment))


def _endpoint(options: Mapping[str, str], environment: Mapping[str, str], profile: _Profile) -> str:
    found = (
        options.get("endpoint")
        or environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or profile.get("endpoint_url")
    )
    return found.rstrip("/")


def _profile(options: Mapping[str, str], environment: Mapping[str, str]) -> _Profile:
    return _Profile(options.get("profile") or environment.get("AWS_PROFILE") or "default", environment)


class Signer:
    """Signature version 4. A request with a body says in `x-amz-content-sha256` what is signed of it."""

    def __init__(self, place: S3Place, clock: Clock) -> None:
        self._place, self._clock = place, clock

    def __call__(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        """All headers of the request, with Authorization unless the bucket is read anonymously."""
        place = self._place
        sent = dict(headers)
        if place.request_payer:
            sent["x-amz-request-payer"] = "requester"
        if place.credentials is None:
            sent.pop("x-amz-content-sha256", None)
            return sent
        keys = place.credentials.current()
        now = datetime.fromtimestamp(self._clock.wall_s(), UTC).strftime("%Y%m%dT%H%M%SZ")
        payload = sent.setdefault("x-amz-content-sha256", _EMPTY_SHA256)
        sent["x-amz-date"] = now
        if keys.session_token:
            sent["x-amz-security-token"] = keys.session_token
        names = sorted(name for name in sent if name not in ("user-agent", "accept-encoding"))
        listed = ";".join(names)
        lines = [f"{name}:{' '.join(sent[name].split())}" for name in names]
        canonical = "\n".join([method, path, query, *lines, "", listed, ""])
        scope = f"{now[:8]}/{place.region}/s3/aws4_request"
        hashed = hashlib.sha256((canonical + payload).encode()).hexdigest()
        key = signing_key(keys.secret_access_key, now[:8].encode(), place.region.encode())
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}".encode(), "sha256").hex()
        credential = f"Credential={keys.access_key_id}/{scope}, SignedHeaders={listed}, Signature={signature}"
        sent["authorization"] = f"AWS4-HMAC-SHA256 {credential}"
        return sent


def flag(options: Mapping[str, str], name: str) -> bool:
    """A true or false option; anything else is `Invalid`."""
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise Invalid(f"option {name} is {options[name]!r}: use true or false")
    return text == "true"


def _find_credentials(
    options: Mapping[str, str], environment: Mapping[str, str], profile: _Profile, clock: Clock
) -> Credentials | None:
    if flag(options, "skip_signature"):
        return None
    given = [name for name in ("access_key_id", "secret_access_key") if options.get(name)]
    if len(given) == 1:
        raise Invalid(f"option {given[0]} is given alone: access_key_id and secret_access_key go together")
    if given:
        keys = Keys(options["access_key_id"], options["secret_access_key"], options.get("session_token") or None, None)
        return Credentials(lambda: keys, clock)
    # A profile named in the options beats the environment; one named by AWS_PROFILE does not: as the AWS CLI has it.
    if "profile" not in options and environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        keys = Keys(
            environment["AWS_ACCESS_KEY_ID"],
            environment["AWS_SECRET_ACCESS_KEY"],
            environment.get("AWS_SESSION_TOKEN") or None,
            None,
        )
        return Credentials(lambda: keys, clock)
    if profile.get("aws_access_key_id") and profile.get("aws_secret_access_key") and not profile.get("role_arn"):
        # Read again each time it is asked for: tools such as saml2aws rewrite the file with fresh keys.
        return Credentials(profile.keys, clock)
    return Credentials(lambda: _ask_chain(profile, "profile" in options), clock)


class _Profile:
    """One section of the AWS configuration files; credentials win over config, as in the AWS CLI."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        home = Path(environment.get("HOME") or Path.home())
        config = Path(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
        credentials = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
        self._config, self._credentials = config.expanduser(), credentials.expanduser()
        self._values = self._read()

    @property
    def exists(self) -> bool:
        return bool(self._values)

    @property
    def files(self) -> str:
        return f"{self._config} or {self._credentials}"

    def get(self, name: str) -> str:
        return self._values.get(name, "")

    def keys(self) -> Keys:
        self._values = self._read()
        if not self.get("aws_access_key_id") or not self.get("aws_secret_access_key"):
            raise Denied(f"profile {self.name!r} in {self.files} has no keys any more: log in again")
        token = self.get("aws_session_token") or None
        return Keys(self.get("aws_access_key_id"), self.get("aws_secret_access_key"), token, None)

    def _read(self) -> dict[str, str]:
        values: dict[str, str] = {}
        in_config = self.name if self.name == "default" else f"profile {self.name}"
        for path, section in ((self._config, in_config), (self._credentials, self.name)):
            parser = configparser.RawConfigParser(strict=False, default_section="\0")
            try:
                parser.read_string(path.read_text())
            except OSError:
                continue
            except (configparser.Error, UnicodeDecodeError) as error:
                raise Invalid(f"{path} cannot be read as an AWS configuration file ({error}): correct it") from error
            if parser.has_section(section):
                values.update({name: value.strip() for name, value in parser.items(section) if value})
        return values


def _ask_chain(profile: _Profile, named: bool) -> Keys:
    """Keys from awscrt: the named profile, or the default chain (profile, SSO, web identity, ECS, EC2)."""
    from awscrt.auth import AwsCredentialsProvider

    try:
        if profile.get("credential_process"):
            provider = AwsCredentialsProvider.new_process(profile.name)
        elif named:
            provider = AwsCredentialsProvider.new_profile(profile_name=profile.name)
        else:
            provider = AwsCredentialsProvider.new_default_chain()
        found = provider.get_credentials().result(CREDENTIALS_TIMEOUT_S)
    except Exception as error:
        hint = " (an SSO profile is found when it is named by AWS_PROFILE)" if named else ""
        raise Denied(
            f"no AWS credentials in the bucket's options, in the environment of process {os.getpid()} (user "
            f"{os.geteuid()}), its profile {profile.name!r} ({profile.files}) or the machine's metadata service{hint}: "
            "a node has the environment of the shell that started it, so export them there and start it again, or give "
            f"the bucket its own with --option; skip_signature=true is for a public bucket ({error})"
        ) from error
    expires_s = found.expiration.timestamp() if found.expiration else None
    return Keys(found.access_key_id, found.secret_access_key, found.session_token or None, expires_s)


def find(bucket: str, options: Mapping[str, str], clock: Clock | None = None) -> S3Place:
    """`find_place` with this process's environment and clock."""
    return find_place(bucket, options, os.environ, clock or SystemClock())
