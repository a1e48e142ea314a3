"""Locates an Azure container, finds credentials for it, and lists it.

Theory. obstore signs its own requests but does not give out its credentials, and our own listings need them (see
`http/requests.py`). So this module looks them up once, in the order of Azure's own tools, for both. Requests are signed
with the account's key, or carry a shared access signature or a token.

Azure pages by an opaque marker and cannot start after a key. The marker behind a page is remembered under the page's
last key, so the next page costs one request. A position without a marker is found by reading from the start, which is
slow for millions of objects, but right.

Invariants. (1) Keys rise and lie above `start_after`. (2) At most `MARKERS_MAX` markers are remembered. (3) No message
and no `repr` holds a secret.
"""

from __future__ import annotations

import base64
import hmac
import json
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from forebay.backends.http.requests import Wire, anonymous
from forebay.backends.http.tokens import Token, Tokens, ask_for_token
from forebay.backends.pages import HIGHEST, check_limit
from forebay.backends.s3.listing import cut, parse
from forebay.core.errors import Denied, Invalid
from forebay.core.types import ListEntry, ListPage
from forebay.ports.clock import Clock

API_VERSION = "2021-12-02"  # old enough for every region and emulator, new enough for all that is asked here
RESOURCE = "https://storage.azure.com"
MARKERS_MAX = 4096  # remembered positions; a marker has a few hundred bytes
CLI_TIMEOUT_S = 30.0

OPTIONS = {
    "account_name": "the storage account",
    "account_key": "its key",
    "sas_token": "a shared access signature instead of the key",
    "bearer_token": "a token, used as it is until it ends",
    "client_id": "service principal or managed identity",
    "client_secret": "secret of the service principal",
    "tenant_id": "tenant of the service principal",
    "authority_host": "login service (default https://login.microsoftonline.com)",
    "federated_token_file": "token file of a Kubernetes workload identity",
    "use_azure_cli": "true: the token of `az login`",
    "endpoint": "URL of the blob service (default https://ACCOUNT.blob.core.windows.net)",
    "skip_signature": "true: anonymous requests, for public containers",
}

_ENVIRONMENT = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "bearer_token": ("AZURE_STORAGE_TOKEN",),
    "client_id": ("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID"),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET"),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID", "AZURE_TENANT_ID"),
    "authority_host": ("AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST"),
    "federated_token_file": ("AZURE_FEDERATED_TOKEN_FILE",),
    "use_azure_cli": ("AZURE_USE_AZURE_CLI",),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_token",
}


@dataclass(frozen=True)
class AzurePlace:
    """One container. `url` is where keys are appended, without a final slash; one of the last three, or none."""

    container: str
    account: str
    endpoint: str
    url: str
    key: str = field(default="", repr=False)
    sas: str = field(default="", repr=False)
    tokens: Tokens | None = field(default=None, repr=False)

    def for_obstore(self) -> dict[str, Any]:
        """The credentials in the shape that obstore's `credential_provider` returns. Not for anonymous places."""
        if self.key:
            return {"access_key": self.key, "expires_at": None}
        if self.sas:
            return {"sas_token": self.sas, "expires_at": None}
        assert self.tokens is not None
        return self.tokens.for_obstore()

    @property
    def is_anonymous(self) -> bool:
        return not (self.key or self.sas or self.tokens)


def find_place(container: str, options: Mapping[str, str], environment: Mapping[str, str], clock: Clock) -> AzurePlace:
    """Where `container` is, by options, environment and connection string; `Invalid` for what is missing."""
    given: dict[str, str] = {}
    for part in environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";"):
        name, _, value = part.partition("=")
        if name in _CONNECTION_STRING:
            given[_CONNECTION_STRING[name]] = value
    for name, variables in _ENVIRONMENT.items():
        found = next((environment[variable] for variable in variables if environment.get(variable)), "")
        if found:
            given[name] = found
    given |= options
    account = given.get("account_name", "")
    if not account:
        raise Invalid("the storage account is not named: set the option account_name or AZURE_STORAGE_ACCOUNT_NAME")
    endpoint = (given.get("endpoint") or f"https://{account}.blob.core.windows.net").rstrip("/")
    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise Invalid(f"option endpoint is {endpoint!r}: write it as https://host or http://host:port/account")
    place = AzurePlace(container, account, endpoint, f"{endpoint}/{container}")
    if given.get("skip_signature", "false").lower() == "true":
        return place
    return AzurePlace(container, account, endpoint, place.url, **_find_credentials(given, environment, clock))


def _find_credentials(given: Mapping[str, str], environment: Mapping[str, str], clock: Clock) -> dict[str, Any]:
    if given.get("bearer_token"):
        token = Token(given["bearer_token"], None)
        return {"tokens": Tokens(lambda: token, clock)}
    if given.get("account_key"):
        try:
            base64.b64decode(given["account_key"], validate=True)
        except ValueError:
            raise Invalid("option account_key is not base64: copy it as the portal shows it") from None
        return {"key": given["account_key"]}
    if given.get("sas_token"):
        return {"sas": given["sas_token"].removeprefix("?")}
    if given.get("use_azure_cli", "false").lower() == "true":
        return {"tokens": Tokens(lambda: _from_cli(clock), clock)}
    has_secret = given.get("client_secret") or given.get("federated_token_file")
    if has_secret and given.get("client_id") and given.get("tenant_id"):
        return {"tokens": Tokens(lambda: _from_login(given, clock), clock)}
    return {"tokens": Tokens(lambda: _from_identity(given, environment, clock), clock)}


def _from_login(given: Mapping[str, str], clock: Clock) -> Token:
    """A service principal by its secret, or a workload identity by its token file (read anew: it is rotated)."""
    host = (given.get("authority_host") or "https://login.microsoftonline.com").rstrip("/")
    form = {"grant_type": "client_credentials", "client_id": given["client_id"], "scope": f"{RESOURCE}/.default"}
    if given.get("client_secret"):
        form["client_secret"] = given["client_secret"]
    else:
        form["client_assertion_type"] = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
        try:
            form["client_assertion"] = Path(given["federated_token_file"]).read_text().strip()
        except OSError as error:
            raise Denied(f"the token file cannot be read ({error}): correct federated_token_file") from error
    return ask_for_token(f"{host}/{given['tenant_id']}/oauth2/v2.0/token", form, clock)


def _from_identity(given: Mapping[str, str], environment: Mapping[str, str], clock: Clock) -> Token:
    """The machine's managed identity: App Service's endpoint where there is one, else the metadata service."""
    client = f"&client_id={given['client_id']}" if given.get("client_id") else ""
    endpoint = environment.get("IDENTITY_ENDPOINT")
    try:
        if endpoint:
            headers = {"X-IDENTITY-HEADER": environment.get("IDENTITY_HEADER", "")}
            url = f"{endpoint}?api-version=2019-08-01&resource={RESOURCE}{client}"
            return ask_for_token(url, None, clock, headers)
        url = (
            f"http://169.254.169.254/metadata/identity/oauth2/token?api-version=2019-08-01&resource={RESOURCE}{client}"
        )
        return ask_for_token(url, None, clock, {"Metadata": "true"})
    except Exception as error:
        raise Denied(
            "no Azure credentials were found in the bucket's options, the environment or this machine's managed "
            f"identity: set them, or skip_signature=true for a public container ({error})"
        ) from error


def _from_cli(clock: Clock) -> Token:
    command = ["az", "account", "get-access-token", "--resource", RESOURCE, "--output", "json"]
    try:
        found = subprocess.run(command, capture_output=True, check=True, timeout=CLI_TIMEOUT_S)
        token = json.loads(found.stdout)["accessToken"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise Denied(f"the Azure CLI gives no token ({error}): run `az login`") from error
    return Token(token, clock.wall_s() + 300.0)  # it keeps its own tokens fresh: ask again soon


# --- requests --------------------------------------------------------------------------------------------------------
class Signer:
    """Authorises requests for `wire.Wire`."""

    def __init__(self, place: AzurePlace) -> None:
        self._place = place

    def __call__(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        sent = {**headers, "x-ms-version": API_VERSION, "x-ms-date": formatdate(usegmt=True)}
        if self._place.tokens is not None:
            sent["authorization"] = f"Bearer {self._place.tokens.current().text}"
        elif self._place.key:
            sent["authorization"] = f"SharedKey {self._place.account}:{self._signature(method, path, query, sent)}"
        return sent

    def _signature(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> str:
        length = headers.get("content-length", "")
        body = ["" if length == "0" else length, headers.get("content-md5", ""), headers.get("content-type", "")]
        conditions = [headers.get(name, "") for name in ("if-modified-since", "if-match", "if-none-match")]
        lines = [method, "", "", *body, "", *conditions, "", headers.get("range", "")]
        lines += [f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-ms-")]
        lines.append(f"/{self._place.account}{path}")
        lines += [f"{name}:{value}" for name, value in sorted(parse_qsl(query, keep_blank_values=True))]
        key = base64.b64decode(self._place.key)
        return base64.b64encode(hmac.digest(key, "\n".join(lines).encode(), "sha256")).decode()


def make_wire(place: AzurePlace, client: Mapping[str, Any]) -> Wire:
    """The wire to a container. A shared access signature travels in the query of every request."""
    authorize = anonymous if place.is_anonymous else Signer(place)
    query = parse_qsl(place.sas, keep_blank_values=True)
    return Wire(place.url, authorize, client, bucket=place.container, meta="x-ms-meta-", query=query)


class Lister:
    """Pages of one container."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._markers: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        """The page after `start_after`; see `Backend.list_page`. Blocks."""
        check_limit(limit)
        with self._lock:
            marker = self._markers.get((prefix, delimiter, start_after), "")
        while True:
            query = [("restype", "container"), ("comp", "list"), ("maxresults", str(limit))]
            for name, value in (("prefix", prefix), ("delimiter", delimiter), ("marker", marker)):
                if value:
                    query.append((name, value))
            answer = self._wire.ask(query)
            root = parse(answer, self._wire.url, "EnumerationResults")
            page = _read_page(root, prefix, start_after)
            following = root.findtext("NextMarker") or ""
            if len(page.entries) + len(page.prefixes) > limit:
                page = cut(page, limit)
                self._remember((prefix, delimiter, page.next_after), marker)
                return page
            if not following:
                return ListPage(page.entries, page.prefixes)
            if page.next_after:
                self._remember((prefix, delimiter, page.next_after), following)
                return page
            marker = following

    def _remember(self, position: tuple[str, str, str], marker: str) -> None:
        with self._lock:
            self._markers[position] = marker
            self._markers.move_to_end(position)
            while len(self._markers) > MARKERS_MAX:
                self._markers.popitem(last=False)


def _read_page(root: Any, prefix: str, start_after: str) -> ListPage:
    """An answer as a page; `next_after` is its last item, "" if nothing of it is after `start_after`."""
    folded = start_after.removesuffix(HIGHEST) if start_after.endswith(HIGHEST) else ""
    entries, prefixes = [], []
    for item in root.iterfind("Blobs/Blob"):
        key = _name(item)
        is_directory = item.findtext("Properties/ResourceType") == "directory"  # of a hierarchical namespace
        if key > start_after and key.startswith(prefix) and not is_directory:
            size = int(item.findtext("Properties/Content-Length") or 0)
            modified = item.findtext("Properties/Last-Modified")
            modified_s = parsedate_to_datetime(modified).timestamp() if modified else 0.0
            entries.append(ListEntry(key, size, (item.findtext("Properties/Etag") or "").strip('"'), modified_s))
    for item in root.iterfind("Blobs/BlobPrefix"):
        common = _name(item)
        if common != folded and common.startswith(prefix) and common + HIGHEST > start_after:
            prefixes.append(common)
    last_key, last_prefix = (entries[-1].key if entries else ""), (prefixes[-1] if prefixes else "")
    last = last_prefix + HIGHEST if last_prefix > last_key else last_key
    return ListPage(sorted(entries), sorted(prefixes), last)


def _name(item: Any) -> str:
    name = item.find("Name")
    text = (name.text or "") if name is not None else ""
    return unquote(text) if name is not None and name.get("Encoded") == "true" else text
