"""Opens the backend for a bucket's URL and options.

Theory. The URL gives the kind of storage and the bucket. Options say how to reach it, under the names that each
cloud's own tools use. An unknown option is an error that lists the known ones, because a misspelt option that is
ignored shows up much later, as a wrong answer. Credentials are looked up here once, for obstore and for our own
requests (see `s3/credentials.py`, `gcs/credentials.py`, `azure/container.py`).

    s3://bucket/prefix      S3 and compatible services        file:///srv/data     a directory
    gs://bucket/prefix      Google Cloud Storage              memory://name        this process's memory
    az://container/prefix   Azure Blob Storage                https://host/path/   a web server, read only, no listing
    local://                no backend: the bucket is here alone
    coded://K+M             no backend: objects are erasure-coded over the cluster's nodes (`backends/coded/`)

Opening a backend reads at most a key file and opens no connection.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from forebay.backends.azure import container
from forebay.backends.azure.writing import AzureWrites
from forebay.backends.bounds import Bounds
from forebay.backends.gcs import credentials as google
from forebay.backends.gcs.writing import GoogleWrites
from forebay.backends.http.cloud import Cloud, Unwritten
from forebay.backends.http.requests import Wire, anonymous
from forebay.backends.local import memory
from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.local.empty import LocalBackend
from forebay.backends.s3 import credentials as aws
from forebay.backends.s3 import listing
from forebay.backends.s3.versions import Versions
from forebay.backends.s3.writing import S3Writes
from forebay.backends.seam import Backend
from forebay.core import limits
from forebay.core.cluster.coding import code_of
from forebay.core.errors import Invalid, NotSupported
from forebay.core.s3rules import keeping
from forebay.core.spelling import did_you_mean
from forebay.core.types import AGAIN_HEADER, LOCAL_URL, LOOP_HEADER, PEER_HEADER, Bucket
from forebay.core.versions import whose_versions
from forebay.ports import chance
from forebay.ports.clock import Clock, SystemClock

CLIENT_OPTIONS = {
    "root_certificate": "path of a PEM file with further authorities to trust",
    "allow_invalid_certificates": "true: do not check the server's certificate (only for trying things out)",
    "proxy_url": "HTTP proxy (default: HTTP_PROXY, HTTPS_PROXY, NO_PROXY of the environment)",
}
OPTIONS: dict[str, dict[str, str]] = {
    "s3": {**aws.OPTIONS, **keeping.S3_OPTIONS, **CLIENT_OPTIONS},
    "gs": {**google.OPTIONS, **keeping.GOOGLE_OPTIONS, **CLIENT_OPTIONS},
    "az": {**container.OPTIONS, **keeping.AZURE_OPTIONS, **CLIENT_OPTIONS},
    "http": CLIENT_OPTIONS,
    "https": CLIENT_OPTIONS,
    "file": {},
    "memory": {},
    "local": {},
    "coded": {},
}
GCS_URL = "https://storage.googleapis.com"
# The whole of a request may take as long as its bytes flow: the read timeout finds a stalled one.
REQUEST_TIMEOUT_S = 24 * 3600.0
IDLE_S = 30.0  # connections idle longer are closed: servers close theirs after 5 to 60 s
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NO_RETRY: Any = {"max_retries": 0, "retry_timeout": timedelta(0)}


def check(bucket: Bucket) -> None:
    """`Invalid` if the URL or an option of `bucket` is wrong. Reads no credentials and opens nothing."""
    _parse(bucket)


def same_place(one: Bucket, other: Bucket) -> bool:
    """Whether both buckets hold the same objects: they differ at most in who asks and how. What the environment and
    the profile say counts as it is now."""
    if (one.url, one.options) == (other.url, other.options):
        return True
    return one.url == other.url and _service(one) == _service(other)


def _service(bucket: Bucket) -> tuple[str, ...]:
    options, scheme = bucket.options, bucket.url.partition("://")[0]
    if scheme == "s3":
        return (aws.find_endpoint(options, os.environ),)
    return tuple(options.get(name, "").rstrip("/") for name in ("base_url", "endpoint", "account_name"))


def locate(
    bucket: Bucket, clock: Clock | None = None, node: str = "", bounds: Bounds | None = None, *, peer: str = ""
) -> Backend:
    """The bare backend of `bucket`, which `stack.open_backend` wraps. `Invalid` says what is wrong with it, `Denied`
    that it is not within `bounds`. `node`, if given, is the id of the node that asks: it goes with every request over
    HTTP, and so does `peer`, which requests between nodes say. A bucket of versions (`core/versions.py`) has the
    backend that reads them."""
    clock, bounds, versions = clock or SystemClock(), bounds or Bounds(), bool(whose_versions(bucket.name))
    if versions:
        bucket = msgspec.structs.replace(bucket, name=whose_versions(bucket.name))
    scheme, name, path = _parse(bucket)
    bounds.check(bucket)
    if versions and scheme != "s3":
        raise NotSupported("versions are served of s3:// buckets alone: leave versionId out to mean the current object")
    if scheme == "memory":
        return memory.named(name)
    if scheme == "local":
        return LocalBackend(bucket.name)
    if scheme == "coded":
        raise Invalid(
            f"{bucket.url} is for the nodes of a cluster that know each other: start them with --cluster, and where "
            "they have identities with --peer-key"
        )
    if scheme == "file":
        return DirectoryBackend(path, clock, bounds.paths(bucket))
    client = _client_options(bucket.options)
    client["default_headers"] = ({LOOP_HEADER: node} if node else {}) | (_between_nodes(peer) if peer else {})
    client["dial"] = bounds.dial(bucket)
    environment: Mapping[str, str] = {} if bucket.held else os.environ
    prefix = path.lstrip("/")
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    if scheme == "s3":
        return _s3(name, prefix, bucket.options, client, clock, versions)
    if scheme == "gs":
        return _gcs(name, prefix, bucket.options, environment, client, clock)
    if scheme == "az":
        return _azure(name, prefix, bucket.options, environment, client, clock)
    url = f"{scheme}://{name}"
    open_store = functools.partial(HTTPStore, url, client_options=_for_obstore(client, url), retry_config=_NO_RETRY)
    return Unwritten(scheme, open_store, Wire(url, anonymous, client), prefix, None, clock)


def wire_to(bucket: Bucket, clock: Clock, node: str, peer: str) -> Wire:
    """Requests to the node at which the S3 bucket `bucket` is, as another node (see `locate`)."""
    client = _client_options(bucket.options)
    client["default_headers"] = {LOOP_HEADER: node, **_between_nodes(peer)}
    place = aws.find(bucket.name, bucket.options, clock)
    return Wire(place.url, aws.Signer(place, clock), client, bucket=bucket.name)


def _between_nodes(peer: str) -> dict[str, str]:
    return {PEER_HEADER: peer, AGAIN_HEADER: "1"}


def _parse(bucket: Bucket) -> tuple[str, str, str]:
    """Scheme, bucket or host, and path (decoded for file)."""
    try:
        parts = urlsplit(bucket.url)
    except ValueError as error:
        raise Invalid(f"backend URL {bucket.url!r} is not a URL ({error}): write it as s3://bucket/prefix") from error
    scheme = parts.scheme
    if scheme not in OPTIONS:
        known = ", ".join(f"{name}://" for name in OPTIONS)
        raise Invalid(f"backend URL {bucket.url!r} has no scheme that is known: use one of {known}")
    if parts.query or parts.fragment:
        raise Invalid(f"backend URL {bucket.url!r} has a query or fragment: give settings as options")
    if parts.username or parts.password:
        raise Invalid(f"the backend URL of {bucket.name!r} carries credentials: give them as options instead")
    known_options = OPTIONS[scheme]
    for option in bucket.options:
        if option not in known_options:
            listed = ", ".join(sorted(known_options)) or "(none)"
            meant = did_you_mean(option, known_options)
            raise Invalid(f"option {option!r} is not known for {scheme}://{meant}: known options are {listed}")
    keeping.keeping_of(bucket.options)
    if scheme == "file":
        if parts.netloc or not parts.path.startswith("/"):
            raise Invalid(f"backend URL {bucket.url!r} is not absolute: write it as file:///dir")
        return scheme, "", unquote(parts.path)
    if scheme == "local" and (parts.netloc or parts.path):
        raise Invalid(f"backend URL {bucket.url!r} names something, but a bucket without a backend is just {LOCAL_URL}")
    code_of(bucket.url)
    if scheme in ("s3", "gs", "az") and not _NAME.fullmatch(parts.netloc or "x"):
        raise Invalid(f"backend URL {bucket.url!r} names no bucket that can be: use letters, digits, '.', '-' and '_'")
    for option in ("region", "account_name"):  # parts of a host's name: more than a name would lead elsewhere
        if not _NAME.fullmatch(bucket.options.get(option) or "x"):
            raise Invalid(f"option {option} is {bucket.options[option]!r}: use letters, digits, '.', '-' and '_'")
    if not parts.netloc and scheme not in ("memory", "local"):
        raise Invalid(f"backend URL {bucket.url!r} names no bucket: write it as {scheme}://bucket/prefix")
    path = unquote(parts.path) if scheme in ("http", "https") else parts.path
    if any(segment in (".", "..") for segment in path.split("/")):
        raise Invalid(f"backend URL {bucket.url!r} has '.' or '..' in its path: write the path it stands for")
    return scheme, parts.netloc, path


def _client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """What both HTTP clients need: the certificate's text, not its path."""
    client: dict[str, Any] = {"allow_invalid_certificates": aws.flag(options, "allow_invalid_certificates")}
    if options.get("root_certificate"):
        try:
            client["root_certificate"] = Path(options["root_certificate"]).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"option root_certificate cannot be read ({error}): give the path of a PEM file") from error
    if options.get("proxy_url"):
        client["proxy_url"] = options["proxy_url"]
    return client


def _for_obstore(client: Mapping[str, Any], url: str) -> Any:
    timeouts = {
        "connect_timeout": timedelta(seconds=limits.BACKEND_CONNECT_TIMEOUT_S),
        "read_timeout": timedelta(seconds=limits.BACKEND_STALL_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "pool_idle_timeout": timedelta(seconds=IDLE_S),
    }
    # HTTP/1.1 only: one HTTP/2 connection is one TCP window and one core for all parallel ranges.
    known = {name: value for name, value in client.items() if name != "dial"}
    return {**known, **timeouts, "http1_only": True, "allow_http": url.startswith("http://"), "user_agent": "forebay"}


def _s3(
    name: str, prefix: str, options: Mapping[str, str], client: dict[str, Any], clock: Clock, versions: bool
) -> Cloud | Versions:
    place = aws.find(name, options, clock)
    endpoint = place.url if place.virtual_host else place.url.removesuffix(f"/{name}")
    config: Any = {
        "endpoint": endpoint,
        "region": place.region,
        "virtual_hosted_style_request": place.virtual_host,
        "skip_signature": place.credentials is None,
        "request_payer": place.request_payer,
    }
    provider: Any = place.credentials.for_obstore if place.credentials else None
    open_store = functools.partial(
        S3Store,
        name,
        config=config,
        client_options=_for_obstore(client, place.url),
        retry_config=_NO_RETRY,
        credential_provider=provider,
    )
    wire = Wire(place.url, aws.Signer(place, clock), client, bucket=name)
    if versions:
        return Versions("s3", open_store, wire, prefix, _pages(wire), clock)
    kept = keeping.keeping_of(options)
    writes = S3Writes(wire, looks=aws.flag(options, "look_before_write"), keeping=kept)
    cloud = Cloud("s3", open_store, wire, prefix, _pages(wire), writes, clock)
    cloud.tells_keeping = bool(kept)
    return cloud


def _gcs(
    name: str,
    prefix: str,
    options: Mapping[str, str],
    environment: Mapping[str, str],
    client: dict[str, Any],
    clock: Clock,
) -> Cloud:
    base = (options.get("base_url") or os.environ.get("GOOGLE_BASE_URL") or GCS_URL).rstrip("/")
    tokens = google.find_tokens(options, environment, aws.flag(options, "skip_signature"), clock)
    config: Any = {"base_url": base, "skip_signature": tokens is None}
    provider: Any = tokens.for_obstore if tokens else None
    open_store = functools.partial(
        GCSStore,
        name,
        config=config,
        client_options=_for_obstore(client, base),
        retry_config=_NO_RETRY,
        credential_provider=provider,
    )
    authorize = tokens.authorize if tokens else anonymous
    wire = Wire(f"{base}/{name}", authorize, client, bucket=name, meta="x-goog-meta-")
    api = Wire(base, authorize, client)
    writes = GoogleWrites(wire, api, chance.system, keeping.keeping_of(options))
    return Cloud("gs", open_store, wire, prefix, _pages(wire), writes, clock)


def _azure(
    name: str,
    prefix: str,
    options: Mapping[str, str],
    environment: Mapping[str, str],
    client: dict[str, Any],
    clock: Clock,
) -> Cloud:
    place = container.find_place(name, options, environment, clock)
    config: Any = {
        "account_name": place.account,
        "endpoint": place.endpoint,
        "skip_signature": place.is_anonymous,
    }
    provider: Any = None if place.is_anonymous else place.for_obstore
    open_store = functools.partial(
        AzureStore,
        name,
        config=config,
        client_options=_for_obstore(client, place.endpoint),
        retry_config=_NO_RETRY,
        credential_provider=provider,
    )
    wire = container.make_wire(place, client)
    writes = AzureWrites(wire, place.sas, chance.system, clock, keeping.keeping_of(options))
    return Cloud("az", open_store, wire, prefix, container.Lister(wire).list_page, writes, clock)


def _pages(wire: Wire) -> Any:
    return lambda prefix, delimiter, after, limit: listing.list_page(wire, prefix, delimiter, after, limit)
