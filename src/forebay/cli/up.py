"""`forebay up`: a node in the background, with nothing to configure.

Theory. `up` starts `forebay node` as a process of its own session with its output in DIR/log, and waits until it says
that it is ready or has ended. Running it twice is the same as once. What it refuses it explains: a directory whose node
listens elsewhere, a port that somebody else holds.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli import node as node_verb
from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Dir
from forebay.cli.outcome import Interrupted, one_line, verb
from forebay.client import local_node
from forebay.core.errors import Exists, Invalid, Unavailable
from forebay.ports import clock

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SYSTEM_DIR = "/var/lib/forebay"
LOOK_S = 0.05
FRONTS_END_S = 10.0  # they notice at once, and finish what they are sending
_ABOUT_CHILDREN = re.compile(r"see its message above|starting it again in")  # the supervisor's; the child said why
_LOG_PREFIX = re.compile(r"^forebay: |^[\d-]+ [\d:,]+ [A-Z]+ [\w.]+: ")


@app.command("up")
@verb
def up(
    dir: Dir = None,
    listen: node_verb.Listen = None,
    fronts: node_verb.Fronts = None,
    capacity: node_verb.Capacity = None,
    volume: node_verb.Volumes = None,
    config: node_verb.Config = None,
    identities: node_verb.Identities = None,
    identity_key: node_verb.IdentityKey = None,
    tls_cert: node_verb.TlsCert = None,
    tls_key: node_verb.TlsKey = None,
    domain: node_verb.Domain = None,
    allow_backend: node_verb.AllowBackends = None,
    auto_buckets: node_verb.AutoBuckets = None,
    cluster: node_verb.Cluster = None,
    advertise: node_verb.Advertise = None,
    cluster_ca: node_verb.ClusterCa = None,
    cluster_cert: node_verb.ClusterCert = None,
    cluster_key: node_verb.ClusterKey = None,
    cluster_user: node_verb.ClusterUser = None,
    cluster_password_file: node_verb.ClusterPassword = None,
    peer_key: node_verb.PeerKey = None,
    peer_ca: node_verb.PeerCa = None,
    flush_timeout: node_verb.FlushTimeout = None,
    loosen: node_verb.Loosen = False,
    audit: node_verb.Audit = None,
    log_format: node_verb.LogFormat = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait until it is ready.")
    ] = 60.0,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Print a unit with which systemd runs this node, and start nothing.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start a node in the background.

    Does nothing if it runs already. With --json: {"endpoint", "pid", "dir", "log", "started"}.
    """
    given = node_verb.settings_among(locals())
    from forebay.node import last_start, settings

    if systemd:
        print(_unit(given, config, chosen=dir is not None), end="")
        return
    wanted = settings.load(config, **given)
    at = Path(wanted.dir)
    if at.exists() and not at.is_dir():
        raise Invalid(f"{at} is no directory: name one with --dir, which the node may fill")
    there = _wait(at, None, wanted.endpoint, timeout_s) if local_node.running(at) else None
    started = there is None
    if there is None:
        if wanted.port == 0:
            raise Invalid("--listen with port 0 is for `forebay node`: name a port, so that clients can find it")
        last_start.check_not_looser(wanted)
        _check_port(wanted.host, wanted.port)
        there = _start(at, given, config, wanted.endpoint, timeout_s)
    elif listen is not None and there.endpoint != wanted.endpoint:
        raise Exists(
            f"a node runs from {at} already and listens at {there.endpoint}: use it there, or stop it with "
            f"`forebay down{_dir_flag(dir)}` and start it again"
        )
    if as_json:
        said = {"endpoint": there.endpoint, "pid": there.pid, "dir": str(at), "log": str(wanted.log_file)}
        show.document({**said, "started": started})
    else:
        print(welcome(there, at, dir, started=started, identities=bool(wanted.identities), certificate=wanted.tls_cert))


def _unit(given: dict[str, object], config: str | None, *, chosen: bool) -> str:
    """The unit. What root makes runs as a user of its own, from a directory that such a user can have."""
    from forebay.node import settings, systemd_unit

    is_root = os.geteuid() == 0
    if is_root and not chosen and config is None:
        given["dir"] = SYSTEM_DIR
    wanted = settings.load(config, **given)
    if wanted.port == 0:
        raise Invalid("--listen with port 0 is for tests: name a port, so that clients can find the service")
    given["dir"] = wanted.dir
    command = [sys.executable, "-m", "forebay.cli.main", "node", *_arguments(given, config)]
    user = "forebay" if is_root else pwd.getpwuid(os.geteuid()).pw_name
    return systemd_unit.unit(wanted, command, user, make_user=is_root)


def welcome(
    there: local_node.Running, at: Path, dir: str | None, *, started: bool, identities: bool, certificate: str
) -> str:
    """Where the node is, and what to do next."""
    from forebay.client.sync import DEFAULT_URL

    word = "is ready" if started else "runs already"
    steps = [(f"export AWS_ENDPOINT_URL={there.endpoint}", "S3 clients now read through it")]
    if there.endpoint != DEFAULT_URL:
        steps.append((f"export FOREBAY_URL={there.endpoint}", "and so does forebay"))
    if there.endpoint.startswith("https:"):
        file = certificate or "CERTIFICATE"
        steps.append((f"export FOREBAY_CA={file} AWS_CA_BUNDLE={file}", "unless this machine trusts it by itself"))
    if identities:
        steps.append(("export FOREBAY_TOKEN=TOKEN", "one that `forebay key create` showed"))
    steps += [
        ("forebay bucket add NAME s3://NAME", "serve a bucket"),
        ("forebay top", "watch it"),
        (f"forebay down{_dir_flag(dir)}", "stop it"),
    ]
    head = f"the node {word} at {there.endpoint} (pid {there.pid}, directory {at})"
    width = max(len(step) for step, _ in steps)
    lines = [head, "", *(f"  {step.ljust(width)}   {why}" for step, why in steps)]
    if started and _is_named_by_environment(there.endpoint):
        lines += [
            "",
            "WARNING: AWS_ENDPOINT_URL of this shell names the node itself, so s3:// buckets without the option",
            "endpoint have no backend now. For Amazon's, start it again without:",
            f"  forebay down{_dir_flag(dir)} && env -u AWS_ENDPOINT_URL forebay up{_dir_flag(dir)}",
        ]
    return "\n".join(lines)


def _is_named_by_environment(endpoint: str) -> bool:
    from forebay.health.facts import same_url

    return same_url(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "", endpoint)


def _dir_flag(dir: str | None) -> str:
    return f" --dir {dir}" if dir else ""


def _check_port(host: str, port: int) -> None:
    """`Exists` if somebody else listens there. Fronts of a node that was killed are given time to notice and end."""
    give_up_s = clock.monotonic_s() + FRONTS_END_S
    while local_node.port_taken(host, port):
        holder = local_node.holder(host, port)
        if "forebay.node.process.front" in holder.command and clock.monotonic_s() < give_up_s:
            time.sleep(LOOK_S)
            continue
        free = next((other for other in range(port + 1, port + 50) if not local_node.port_taken(host, other)), None)
        offer = f", or choose another: forebay up --listen {host}:{free}" if free else ""
        raise Exists(f"port {port} is taken by {holder}: stop that{offer}", code="PortTaken")


def _start(
    at: Path, given: dict[str, object], config: str | None, endpoint: str, timeout_s: float
) -> local_node.Running:
    log = at / "log"
    log.mkdir(parents=True, exist_ok=True)
    output = log / "up.log"
    with output.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "forebay.cli.main", "node", *_arguments(given, config), "--log-to-file"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    try:
        there = _wait(at, child, endpoint, timeout_s)
        assert there is not None, "a child that ends before it is ready is an error"
        return there
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped waiting; the node (pid {child.pid}) goes on starting: `forebay up` again tells"
        ) from None


def _arguments(given: dict[str, object], config: str | None) -> list[str]:
    from forebay.node.settings import PATHS

    out: list[str] = []
    for name, value in given.items():
        if name == "auto_buckets":
            out += [] if value is None else ["--auto-buckets" if value else "--no-auto-buckets"]
        elif name == "loosen":
            out += ["--loosen"] if value else []
        elif name == "allow_backends" and isinstance(value, tuple):
            for each in value:
                out += ["--allow-backend", each]
        elif isinstance(value, tuple):
            for each in value:
                out += ["--volume", str(Path(each).absolute())]
        elif value is not None:
            text = str(Path(str(value)).expanduser().absolute()) if name in PATHS else str(value)
            out += [f"--{name.replace('_', '-')}", text]
    return out if config is None else [*out, "--config", str(Path(config).absolute())]


def _wait(
    at: Path, child: subprocess.Popen[bytes] | None, endpoint: str, timeout_s: float
) -> local_node.Running | None:
    """Until the node of `at` is ready; `Unavailable` with the log's last words if it ends or takes too long.

    Without `child` it is one that was running before, and None if it was just stopping.
    """
    give_up_s = clock.monotonic_s() + timeout_s
    while True:
        if child is None:
            there = local_node.running(at)
        else:  # its lock is not probed: that could meet the moment in which it takes it
            found = local_node.said(at)
            there = found if found.pid == child.pid else None
        if there is not None and there.endpoint and local_node.is_ready(there.endpoint):
            return there
        if child is not None and child.poll() is not None:
            raise Unavailable(
                f"the node ended with status {child.returncode} before it was ready: {last_words(at)} "
                f"(more in {at / 'log'}); `forebay doctor` looks for the cause"
            )
        if child is None and there is None:
            return None
        if clock.monotonic_s() > give_up_s:
            raise Unavailable(
                f"the node at {endpoint} is not ready after {timeout_s:g} s, and goes on trying; its log ends with: "
                f"{last_words(at)} (more in {at / 'log'}); wait longer with --timeout, or stop it with `forebay down`"
            )
        time.sleep(LOOK_S)


def last_words(at: Path) -> str:
    """What a node said last before it ended: its output, or its log."""
    for name in ("up.log", "node.log"):
        try:
            size = os.path.getsize(at / "log" / name)
            with (at / "log" / name).open("rb") as file:
                file.seek(max(0, size - 4096))
                lines = file.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            continue
        lines = [line for line in lines if line.strip() and not _ABOUT_CHILDREN.search(line)]
        if lines:
            return one_line(_message(lines[-1]))
    return "it said nothing"


def _message(line: str) -> str:
    """What a line of the log says, without when and where."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["message"])
    return _LOG_PREFIX.sub("", line)
