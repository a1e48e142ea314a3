"""`forebay node`: a node in the foreground, as a service manager runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from forebay.cli.options import Debug, Dir
from forebay.cli.outcome import verb

app = typer.Typer(rich_markup_mode=None, add_completion=False)

Listen = Annotated[
    str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen. Default: 127.0.0.1:9400.")
]
Fronts = Annotated[
    int | None, typer.Option("--fronts", metavar="N", help="Reader processes; 0 is all in one. Default: by cores.")
]
Capacity = Annotated[
    str | None, typer.Option("--capacity", metavar="SIZE", help="Disk to use, such as 100GiB. Default: what is free.")
]
Volumes = Annotated[
    list[str] | None, typer.Option("--volume", metavar="DIR", help="A disk's directory. Repeatable. Default: in DIR.")
]
Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help="Settings as TOML; flags override it.")]
Identities = Annotated[
    str | None, typer.Option("--identities", metavar="FILE", help="Who may do what; needed beyond loopback.")
]
IdentityKey = Annotated[
    str | None, typer.Option("--identity-key", metavar="FILE", help="What opens sealed secrets of the identities.")
]
TlsCert = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate and chain as PEM: speak TLS.")
]
TlsKey = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key as PEM. Default: in the same file.")
]
AllowBackends = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-backend",
        metavar="PATTERN",
        help="Backends that identities without admin:* may use, such as s3://team-*. Repeatable. Default: none.",
    ),
]
Domain = Annotated[
    str | None, typer.Option("--domain", metavar="NAME", help="Suffix of virtual-host bucket names: BUCKET.NAME.")
]
AutoBuckets = Annotated[
    bool | None,
    typer.Option("--auto-buckets/--no-auto-buckets", help="Look for unknown buckets at s3:// under their own name."),
]

Cluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="ETCD-URL", help="Be one of many nodes: etcd://HOST:PORT,HOST:PORT/NAME."),
]
Advertise = Annotated[
    str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where other nodes reach this one.")
]
ClusterCa = Annotated[
    str | None, typer.Option("--cluster-ca", metavar="FILE", help="Who vouches for etcd's members, as PEM: use TLS.")
]
ClusterCert = Annotated[
    str | None, typer.Option("--cluster-cert", metavar="FILE", help="The certificate to show to etcd, as PEM.")
]
ClusterKey = Annotated[
    str | None, typer.Option("--cluster-key", metavar="FILE", help="Its private key. Default: in the same file.")
]
ClusterUser = Annotated[str | None, typer.Option("--cluster-user", metavar="NAME", help="etcd's user.")]
ClusterPassword = Annotated[
    str | None,
    typer.Option(
        "--cluster-password-file", metavar="FILE", help="The user's password. Default: $FOREBAY_CLUSTER_PASSWORD."
    ),
]
PeerKey = Annotated[
    str | None, typer.Option("--peer-key", metavar="FILE", help="A secret by which nodes of a cluster know each other.")
]
PeerCa = Annotated[
    str | None, typer.Option("--peer-ca", metavar="FILE", help="Who vouches for the other nodes' certificates, as PEM.")
]
FlushTimeout = Annotated[
    float | None,
    typer.Option(
        "--flush-timeout",
        metavar="SECONDS",
        help="How long a stop may flush; 0 leaves it for the next start. Default: 60.",
    ),
]

Loosen = Annotated[
    bool, typer.Option("--loosen", help="Let in who was not let in at the last start: no identities, no TLS, wider.")
]


LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="FORMAT", help="Log lines as text or json. Default: text.")
]


Audit = Annotated[
    str | None,
    typer.Option("--audit", metavar="WHAT", help="Audit log: off, changes, or reads (those too). Default: off."),
]


# fmt: off
_AS_THEY_ARE = (
    "listen", "fronts", "capacity", "identities", "identity_key", "tls_cert", "tls_key", "domain", "auto_buckets",
    "flush_timeout", "log_format", "audit", "cluster", "advertise",
    "cluster_ca", "cluster_cert", "cluster_key", "cluster_user", "cluster_password_file", "peer_key", "peer_ca",
)
# fmt: on


def settings_among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the arguments of `node` or `up` say of the node's settings, as `settings.load` takes it; None is "not
    given". Without a directory and a file of settings it is the usual directory."""
    from forebay.client import local_node

    given = {name: arguments[name] for name in _AS_THEY_ARE}
    given["dir"] = arguments["dir"] or None
    if given["dir"] is None and arguments["config"] is None:
        given["dir"] = str(local_node.directory(None))
    given["volumes"] = tuple(arguments["volume"] or ())
    given["allow_backends"] = tuple(arguments["allow_backend"] or ())
    given["loosen"] = arguments["loosen"] or None
    return given


@app.command("node")
@verb
def node(
    dir: Dir = None,
    listen: Listen = None,
    fronts: Fronts = None,
    capacity: Capacity = None,
    volume: Volumes = None,
    config: Config = None,
    identities: Identities = None,
    identity_key: IdentityKey = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    domain: Domain = None,
    allow_backend: AllowBackends = None,
    auto_buckets: AutoBuckets = None,
    cluster: Cluster = None,
    advertise: Advertise = None,
    cluster_ca: ClusterCa = None,
    cluster_cert: ClusterCert = None,
    cluster_key: ClusterKey = None,
    cluster_user: ClusterUser = None,
    cluster_password_file: ClusterPassword = None,
    peer_key: PeerKey = None,
    peer_ca: PeerCa = None,
    flush_timeout: FlushTimeout = None,
    loosen: Loosen = False,
    audit: Audit = None,
    log_format: LogFormat = None,
    log_to_file: Annotated[bool, typer.Option("--log-to-file", help="Log to DIR/log/node.log, not stderr.")] = False,
    debug: Debug = False,
) -> int:
    """Run a node in the foreground.

    Ctrl-C or SIGTERM stops it.
    """
    given = settings_among(locals())
    from forebay.node import settings

    loaded = settings.load(config, **given, log_to_file=log_to_file or None)
    from forebay.node.process.app import run

    return run(loaded)
