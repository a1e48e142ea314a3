"""What a node is told when it starts: one frozen value, made once, passed to every process of the node.

Theory. Settings are data; nothing reads the environment or a file later. They come from defaults, then a TOML file
(`--config`), then flags, each replacing the one before; an unknown name in the file is an error, since a setting that
is silently ignored is worse than none. The supervisor resolves what depends on the machine (how many fronts, which
port) and hands the result to its children as one line of JSON. One thing is looked for in the environment, once, by
`load`: where systemd put the credential with the identity key.

Invariants. (1) A `Settings` that exists is valid. (2) Without identities the address is loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.quantity import parse_size
from forebay.core.reach import Reach
from forebay.core.spelling import did_you_mean
from forebay.meta.etcd import parse_url as parse_etcd_url
from forebay.meta.etcd_link import Access

FRONTS_DEFAULT_MAX = 8  # a front fills a core at 100 k requests/s; more cores than this serve the trainer better
PORT_DEFAULT = 9400
HUNG_AFTER_MAX_S = 3600.0
FLUSH_TIMEOUT_MAX_S = 7 * 86400.0
LEASE_MIN_S, LEASE_MAX_S = 2.0, 300.0  # etcd gives no shorter ones; a longer one leaves keys without a home for minutes
LOG_BYTES_LEAST = 64 * 1024  # of a log that is put aside when it is full
IDENTITY_CREDENTIAL = "forebay-identity-key"  # its name for systemd's LoadCredentialEncrypted=
CLUSTER_FILES = ("cluster_ca", "cluster_cert", "cluster_key", "cluster_password_file", "peer_key", "peer_ca")
PATHS = ("dir", "identities", "identity_key", "tls_cert", "tls_key", *CLUSTER_FILES)


def parse_listen(text: str, flag: str = "--listen") -> tuple[str, int]:
    """`HOST:PORT`, `[IPv6]:PORT`, `HOST` or `:PORT` as (host, port); else `Invalid`."""
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, port = text, str(PORT_DEFAULT)
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or int(port) > 65535:
        raise Invalid(f"{flag} {text!r} is not HOST:PORT: the port is a number from 0 (any free one) to 65535")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is reachable from this machine only."""
    try:
        addresses = [ipaddress.ip_address(host)]
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Invalid(f"--listen: the host {host!r} cannot be resolved ({error}): use an address") from None
        addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return bool(addresses) and all(address.is_loopback for address in addresses)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module's header; `docs/operating.md` explains each field.

    `fronts`: front processes; 0 runs all in one process, None chooses by cores. `capacity_bytes` bounds all volumes
    together (None: what the filesystems have). `volumes` are directories; none means DIR/volumes/v0. `domain` is the
    suffix of virtual-host bucket names. `auto_buckets`: an unknown bucket is looked for at s3:// with the environment's
    credentials. `log_to_file` sends the log to DIR/log/node.log instead of stderr; the file is put aside when it has
    `log_bytes_max` (0: never). `log_format`: lines of text, or of JSON. `audit`: what each front tells of in its audit
    log: nothing, changes, calls of admins and denials, or reads too. `identity_key` is the file that opens sealed
    secrets of `identities`. With `tls_cert` the node speaks TLS and nothing else; `tls_key` is its private key, "" when
    it stands in the same file. `flush_timeout_s`: how long a stop may take to bring to the backends what only the node
    has; 0 leaves it for the next start. `hung_after_s`: a process that gives no sign of life for so long is replaced
    (`core/machines/pulse.py`); 0 is never. `loosen`: the node may let in who was not let in at its last start
    (`node/last_start.py`). `connections_share`: the part of a front's connections that one client address may hold.
    `allow_backends`: patterns of the backends that identities without `admin:*` may give to their buckets
    (`core/reach.py`). `cluster` is the URL of the etcd where nodes agree, with the cluster's name; `advertise` is where
    other nodes reach this one; `lease_s` is how long they wait for it once it is silent; with
    `take_over` they then take over what it had, where that is kept twice. A volume that is missing for
    `volume_lost_after_s` is given up when other nodes have sent back what it owed; 0 is never. `cluster_ca`,
    `cluster_cert` and `cluster_key` are files for TLS with that etcd; `cluster_password_file` has the password of its
    `cluster_user`.
    `peer_key` is a file by which nodes know each other, `peer_ca` says who vouches for the others' certificates.
    """

    dir: str
    listen: str = f"127.0.0.1:{PORT_DEFAULT}"
    fronts: int | None = None
    capacity_bytes: int | None = None
    volumes: tuple[str, ...] = ()
    identities: str = ""
    domain: str = ""
    auto_buckets: bool = True
    scrub_bytes_s: float = 20e6
    log_to_file: bool = False
    log_format: Literal["text", "json"] = "text"
    log_bytes_max: int = 64 * limits.MIB
    audit: Literal["off", "changes", "reads"] = "off"
    identity_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    flush_timeout_s: float = 60.0
    hung_after_s: float = 10.0
    loosen: bool = False
    connections_share: float = limits.ADDRESS_SHARE
    allow_backends: tuple[str, ...] = ()
    cluster: str = ""
    advertise: str = ""
    lease_s: float = 10.0
    take_over: bool = True
    volume_lost_after_s: float = 120.0  # mounts come late at a boot, and keys are refused meanwhile
    cluster_ca: str = ""
    cluster_cert: str = ""
    cluster_key: str = ""
    cluster_user: str = ""
    cluster_password_file: str = ""
    peer_key: str = ""
    peer_ca: str = ""

    def __post_init__(self) -> None:
        if not self.dir:
            raise Invalid("the node needs a directory: give --dir DIR")
        if self.fronts is not None and not 0 <= self.fronts <= limits.FRONTS_MAX:
            raise Invalid(
                f"--fronts {self.fronts} is outside 0 to {limits.FRONTS_MAX}: about one for each core is enough"
            )
        if len(self.volumes) > limits.VOLUMES_MAX:
            raise Invalid(f"{len(self.volumes)} volumes are more than {limits.VOLUMES_MAX}: put disks together")
        if self.capacity_bytes is not None and self.capacity_bytes < 2 * limits.BLOCK_BYTES:
            raise Invalid(f"--capacity {self.capacity_bytes} is less than two blocks: give at least 8MiB")
        if self.scrub_bytes_s < 0:
            raise Invalid("scrub_bytes_s is negative: 0 switches scrubbing off")
        if not 0 <= self.flush_timeout_s <= FLUSH_TIMEOUT_MAX_S:
            raise Invalid(f"--flush-timeout {self.flush_timeout_s:g} is outside 0 (do not flush) to a week, in seconds")
        if not 0 <= self.volume_lost_after_s <= FLUSH_TIMEOUT_MAX_S:
            raise Invalid(f"volume_lost_after {self.volume_lost_after_s:g} is outside 0 (never) to a week, in seconds")
        if self.hung_after_s and not 1 <= self.hung_after_s <= HUNG_AFTER_MAX_S:
            raise Invalid(f"hung_after_s {self.hung_after_s:g} is neither 0 (never) nor from 1 to an hour, in seconds")
        if self.log_bytes_max and self.log_bytes_max < LOG_BYTES_LEAST:
            raise Invalid(f"log_size {self.log_bytes_max} is neither 0 (never put aside) nor 64KiB or more")
        if not 0 < self.connections_share <= 1:
            raise Invalid(f"connections_share {self.connections_share:g} is no part of all: give more than 0, up to 1")
        Reach(self.allow_backends)
        if not LEASE_MIN_S <= self.lease_s <= LEASE_MAX_S:
            raise Invalid(f"lease {self.lease_s:g} is outside {LEASE_MIN_S:g} to {LEASE_MAX_S:g}, in seconds")
        if self.cluster:
            parse_etcd_url(self.cluster)
            if parse_listen(self.listen)[0] in ("0.0.0.0", "::") and not self.advertise:
                raise Invalid("the node listens at every address: say with --advertise HOST:PORT where others reach it")
        elif any(self.access) or self.peer_key or self.peer_ca:
            raise Invalid("files, a user or a key of a cluster are given without --cluster: say which cluster")
        if self.peer_key and not self.identities:
            raise Invalid("--peer-key is for nodes with identities: others listen on loopback, and ask without a key")
        if self.advertise:
            host, port = parse_listen(self.advertise, "--advertise")
            if not port or host in ("0.0.0.0", "::"):
                raise Invalid(f"--advertise {self.advertise} is no place to reach the node at: give HOST:PORT")
        host, _ = parse_listen(self.listen)
        if not self.identities and not is_loopback(host):
            raise Invalid(
                f"the node has no identities, so it listens on loopback only, and {host} is not loopback: make a key "
                "with `forebay key create` and give --identities FILE, or listen on 127.0.0.1"
            )
        if self.tls_key and not self.tls_cert:
            raise Invalid("--tls-key is given without --tls-cert: give the certificate's file too")

    @property
    def host(self) -> str:
        return parse_listen(self.listen)[0]

    @property
    def port(self) -> int:
        return parse_listen(self.listen)[1]

    @property
    def endpoint(self) -> str:
        """The URL that clients use."""
        host = self.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return self._url(host, self.port)

    @property
    def advertised(self) -> str:
        """The URL that other nodes use."""
        if not self.advertise:
            return self.endpoint
        return self._url(*parse_listen(self.advertise))

    def _url(self, host: str, port: int) -> str:
        scheme = "https" if self.tls_cert else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def access(self) -> Access:
        """How etcd knows this node."""
        return Access(
            self.cluster_ca, self.cluster_cert, self.cluster_key, self.cluster_user, self.cluster_password_file
        )

    @property
    def fronts_resolved(self) -> int:
        if self.fronts is not None:
            return self.fronts
        return max(1, min(len(os.sched_getaffinity(0)), FRONTS_DEFAULT_MAX))

    @property
    def run_dir(self) -> Path:
        return Path(self.dir) / "run"

    @property
    def engine_socket(self) -> Path:
        return self.run_dir / "engine.sock"

    def door_socket(self, number: int) -> Path:
        """Where front `number` has its door for clients on this host (`node/front/door.py`)."""
        return self.run_dir / f"door-{number}.sock"

    @property
    def lock_file(self) -> Path:
        return Path(self.dir) / "node.lock"

    @property
    def children_lock(self) -> Path:
        """Every child of a supervisor shares a lock on it for as long as it lives (`node/process/child.py`)."""
        return self.run_dir / "children.lock"

    @property
    def meta_file(self) -> Path:
        return Path(self.dir) / "meta.sqlite"

    @property
    def node_file(self) -> Path:
        return self.run_dir / "node.json"

    @property
    def no_flush_file(self) -> Path:
        """While it is there, a node that stops does not wait for its flush (`forebay down --no-flush`)."""
        return self.run_dir / "no-flush"

    @property
    def owed_file(self) -> Path:
        """What the last stop left unflushed: JSON with `objects` and `bytes`; not there when that was nothing."""
        return self.run_dir / "owed.json"

    @property
    def settings_file(self) -> Path:
        """What the last start said of who may get in (`node/last_start.py`)."""
        return Path(self.dir) / "settings.json"

    @property
    def log_file(self) -> Path:
        return Path(self.dir) / "log" / "node.log"

    def audit_file(self, number: int) -> Path:
        """Where front `number` has its audit log (`node/front/audit`)."""
        return Path(self.dir) / "log" / f"audit-{number}.jsonl"

    @property
    def volume_dirs(self) -> list[Path]:
        return [Path(volume) for volume in self.volumes] or [Path(self.dir) / "volumes" / "v0"]

    @property
    def own_folders(self) -> list[str]:
        """Folders that are no bucket's."""
        return [self.dir, *map(str, self.volume_dirs)]

    @property
    def own_files(self) -> list[str]:
        """Files that are no bucket's, since they hold secrets."""
        files = (self.identities, self.identity_key, self.tls_key or self.tls_cert)
        of_cluster = (self.cluster_key or self.cluster_cert, self.cluster_password_file, self.peer_key)
        return [path for path in (*files, *of_cluster) if path]

    def to_json(self) -> bytes:
        """One line, for a child process."""
        return msgspec.json.encode(self)


def from_json(line: bytes) -> Settings:
    """The settings that `to_json` wrote."""
    return msgspec.json.decode(line, type=Settings)


_FILE_NAMES = {  # what people write -> the field
    "capacity": "capacity_bytes",
    "flush_timeout": "flush_timeout_s",
    "lease": "lease_s",
    "log_size": "log_bytes_max",
    "volume_lost_after": "volume_lost_after_s",
}
_SIZES = ("capacity_bytes", "log_bytes_max")


def load(config: str | Path | None = None, **flags: Any) -> Settings:
    """Settings from a TOML file and flags; a flag of None leaves the file's value. Sizes may be text such as `100GiB`.

    Field names are those of `Settings`, and `capacity` for `capacity_bytes`, `log_size` for `log_bytes_max`. `Invalid`
    for anything unknown.
    """
    values: dict[str, Any] = {}
    if config is not None:
        try:
            values = tomllib.loads(Path(config).read_text("utf-8"))
        except FileNotFoundError:
            raise NotFound(f"there is no configuration file {config}: check --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise Invalid(f"the configuration file {config} cannot be read: {error}") from None
    values |= {name: value for name, value in flags.items() if value is not None and value != ()}
    named = {_FILE_NAMES.get(name, name).replace("-", "_"): value for name, value in values.items()}
    for name in _SIZES:
        if isinstance(named.get(name), str):
            named[name] = parse_size(named[name])
    for name in named.keys() - set(Settings.__struct_fields__):
        meant = did_you_mean(name, [*Settings.__struct_fields__, *_FILE_NAMES])
        raise Invalid(f"there is no setting {name}{meant}: see docs/operating.md")
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    if not named.get("identity_key") and credentials and (Path(credentials) / IDENTITY_CREDENTIAL).is_file():
        named["identity_key"] = str(Path(credentials) / IDENTITY_CREDENTIAL)
    for name in PATHS:
        if named.get(name):
            path = Path(named[name]).expanduser()
            # what is replaced while the node runs may be a link that is turned: it is followed each time, not once
            named[name] = str(path.resolve() if name == "dir" else path.absolute())
    named["volumes"] = [str(Path(path).expanduser().resolve()) for path in named.get("volumes", ())]
    try:
        return msgspec.convert(named, Settings)
    except msgspec.ValidationError as error:
        raise Invalid(_misfit(str(error), named)) from None


def _misfit(error: str, named: dict[str, Any]) -> str:
    """What msgspec says of a setting, as people say it."""
    text, _, name = error.rstrip("`").rpartition(" - at `$.")
    kinds = get_type_hints(Settings)
    choices = [one for one in get_args(kinds.get(name)) if isinstance(one, str)]
    value = named.get(name)
    if choices and isinstance(value, str):
        return f"{name} is {value!r}{did_you_mean(value, choices)}: choose one of {', '.join(choices)}"
    return f"the setting {name or 'file'} does not fit ({text or error}): see docs/operating.md"
