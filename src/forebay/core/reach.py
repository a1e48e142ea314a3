"""Where a bucket may send the node, if somebody set it who may not do everything here.

Theory. A bucket's URL and options decide where the node connects, and with whose credentials. Whoever holds `admin:*`
decides that freely. The bucket of anybody else is *held*: to the places that the node's settings allow
(`--allow-backend`), with credentials that came with the bucket. This is judged when the bucket is set, and again
whenever its backend is opened, so a list that shrinks holds for the buckets that are there.

A pattern is the beginning of a URL: a scheme, a name, maybe a path. `*` stands for any run of characters in the name,
and of anything in the path; `{bucket}` for the bucket's own name, so that one pattern gives each team its own folder.
Names and paths end where a pattern ends: `s3://team` is not `s3://team-b`. An option that names another service
(`endpoint`, `base_url`) is held to the same list: `https://minio.corp:9000` there allows it.

A name says nothing about where it leads: its owner may make it lead to 127.0.0.1, today or while it is in use. So each
address that a held backend connects to is judged (`is_inner`), after the name was resolved and before anything is sent.
An inner address is reached only if a pattern names just it. The services that the node itself is set to use are exempt.

Options are allowed one by one: one that reads a file of the node, or uses its profiles and identities, is not.

Rejected: to judge URLs as text (`https://allowed@other`, `..`, ports); a list of forbidden names (there are too many
spellings of an address); a list for each identity (`{bucket}` says it, since grants are on names of buckets).

Invariants. (1) What no pattern allows is refused; an empty list allows buckets without a backend alone. (2) No answer
depends on the spelling of a host: case, final dots, brackets, default ports.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote

from forebay.core.errors import Denied, Invalid
from forebay.core.types import Bucket

_URL = re.compile(r"([a-z0-9]+)://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._*{}-]*)(?::([0-9]+|\*))?(/[^\\?#]*)?")
_PORTS: Final = {"http": "80", "https": "443"}
_HOSTS: Final = ("http", "https")  # of these a name is that of a machine
_SCHEMES: Final = ("s3", "gs", "az", "http", "https", "file", "memory")
_SERVICES: Final = {"s3": "endpoint", "gs": "base_url", "az": "endpoint"}  # the option that names another service
_OPTIONS: Final = {
    "s3": {"region", "addressing_style", "access_key_id", "secret_access_key", "session_token", "skip_signature",
           "request_payer", "look_before_write", "storage_class", "server_side_encryption", "sse_kms_key_id"},
    "gs": {"service_account_key", "bearer_token", "skip_signature", "storage_class"},
    "az": {"account_name", "account_key", "sas_token", "bearer_token", "client_id", "client_secret", "tenant_id",
           "skip_signature", "access_tier"},
}  # fmt: skip
_CREDENTIALS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {  # one of these, whole
    "s3": (("access_key_id", "secret_access_key"),),
    "gs": (("service_account_key",), ("bearer_token",)),
    "az": (("account_key",), ("sas_token",), ("bearer_token",), ("client_id", "client_secret", "tenant_id")),
}
_METADATA: Final = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
        "fd00:ec2::/32",
        "fd20:ce::/32",
    )
)
_CARRIERS: Final = tuple(ipaddress.ip_network(text) for text in ("::ffff:0:0/96", "64:ff9b::/96", "::/96"))
_GOOGLE_TOKENS: Final = ("https://oauth2.googleapis.com/token", "https://accounts.google.com/o/oauth2/token")


class Place(NamedTuple):
    """A URL, or the pattern of one, taken apart: the same for every spelling. A path has no final slash."""

    scheme: str
    name: str
    port: str
    path: str


def place_of(url: str) -> Place:
    """`Invalid` for what is not `scheme://name[:port][/path]` and nothing else."""
    found = _URL.fullmatch(url) if url.isprintable() else None
    if found is None or found[1] not in _SCHEMES:
        raise Invalid(f"{url!r} is not scheme://name/path, with one of {', '.join(_SCHEMES)}: correct it")
    scheme, name, port, path = found[1], found[2], found[3] or "", (found[4] or "").rstrip("/")
    if scheme in (*_HOSTS, "file"):
        path = unquote(path).rstrip("/")
    if scheme in _HOSTS:
        name, port = host_of(name), port or _PORTS[scheme]
    elif port:
        raise Invalid(f"{url!r} has a port, which {scheme}:// has not: leave it out")
    if bool(name) == (scheme == "file"):
        raise Invalid(f"{url!r} names {'a host' if name else 'nothing'}: write it like s3://name or file:///dir")
    if any(segment in (".", "..") for segment in path.split("/")):
        raise Invalid(f"{url!r} has '.' or '..' in its path: write the path that it stands for")
    return Place(scheme, name, port, path)


def host_of(text: str) -> str:
    """A host as it is compared: without brackets, final dots and capitals, an address in its shortest form."""
    name = text.strip("[]").rstrip(".").lower()
    return str(ipaddress.ip_address(name)) if _is_address(name) else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Reach:
    """Where held buckets may lead: `patterns` as `--allow-backend` takes them. `Invalid` for one that is none."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [place_of(pattern) for pattern in patterns]

    def allows(self, bucket: str, url: str) -> bool:
        """Whether a pattern allows `url` to the bucket of that name. `Invalid` for what is no URL."""
        place = place_of(url)
        return any(_fits(pattern, place, bucket) for pattern in self._patterns)

    def allows_path(self, bucket: str, path: str) -> bool:
        """Whether a pattern allows this directory, links resolved, or one above it."""
        place = Place("file", "", "", path.rstrip("/"))
        return any(_fits(pattern, place, bucket) for pattern in self._patterns)

    def allows_inner(self, host: str, port: int) -> bool:
        """Whether a pattern names this very host, an address or `localhost`, with nothing left open."""
        name = host_of(host)
        if name != "localhost" and not _is_address(name):
            return False
        return any(
            pattern.scheme in _HOSTS and pattern.name == name and pattern.port in ("*", str(port))
            for pattern in self._patterns
        )

    def check(self, bucket: Bucket) -> None:
        """Return if a held bucket may be as it is. `Denied` for a place that is not allowed, `Invalid` for options."""
        if bucket.is_of_nodes:
            return
        scheme = place_of(bucket.url).scheme
        if not self.allows(bucket.name, bucket.url):
            raise _not_allowed(bucket.url)
        service = _SERVICES.get(scheme, "")
        for option, value in bucket.options.items():
            if option == service and value:
                if not self.allows(bucket.name, value):
                    raise _not_allowed(value)
            elif option not in _OPTIONS.get(scheme, ()):
                raise Denied(
                    f"the option {option} takes admin:*: leave it out, or have whoever holds that set the bucket",
                    code="AccessDenied",
                )
        _check_credentials(scheme, bucket.options)

    def is_watched(self, bucket: Bucket) -> bool:
        """Whether each connection of a held bucket is judged by its address: those to hosts that it names itself."""
        scheme = bucket.url.partition(":")[0]
        return scheme in _HOSTS or bool(bucket.options.get(_SERVICES.get(scheme, "")))


def _fits(pattern: Place, place: Place, bucket: str) -> bool:
    if pattern.scheme != place.scheme or pattern.port not in ("*", place.port):
        return False
    if re.fullmatch(_glob(pattern.name, "[^/]*", bucket), place.name) is None:
        return False
    return re.fullmatch(_glob(pattern.path, ".*", bucket) + "(?:/.*)?", place.path, re.DOTALL) is not None


def _glob(text: str, star: str, bucket: str) -> str:
    return re.escape(text).replace(r"\*", star).replace(r"\{bucket\}", re.escape(bucket))


def _check_credentials(scheme: str, options: Mapping[str, str]) -> None:
    """`Invalid` unless the bucket brings credentials of its own, or is read without any."""
    ways = _CREDENTIALS.get(scheme)
    if ways is None or options.get("skip_signature", "").lower() == "true":
        return
    if not any(all(options.get(name) for name in way) for way in ways):
        listed = ", or ".join(" and ".join(way) for way in ways)
        raise Invalid(f"the node's own credentials are not for this bucket: give it {listed}, or skip_signature=true")
    if scheme == "gs" and options.get("service_account_key"):
        try:
            secret = json.loads(options["service_account_key"])
            asked = secret.get("token_uri") or _GOOGLE_TOKENS[0]
        except (ValueError, AttributeError):
            return  # whoever opens the backend says what is wrong with it
        if asked not in _GOOGLE_TOKENS:
            raise Denied(
                f"the service account's token_uri is {asked!r}, not Google's: correct it, or have whoever holds "
                "admin:* set the bucket",
                code="AccessDenied",
            )


def _not_allowed(url: str) -> Denied:
    return Denied(
        f"{url} is not among the backends that the node allows: have whoever holds admin:* set the bucket, or start "
        "the node with --allow-backend",
        code="AccessDenied",
    )


def is_inner(address: str) -> bool:
    """Whether an address is this machine, its link, or what tells machines of a cloud their secrets. An IPv6 address
    that carries an IPv4 address is judged by that too."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.sixtofour
        if any(ip in network for network in _CARRIERS):
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried is not None and is_inner(str(carried)):
            return True
    if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return True
    return any(ip in network for network in _METADATA)
