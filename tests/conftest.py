"""Real servers and free ports for every room's tests.

Each server is started once per session, on first use, and stopped at its end. A program that is absent skips the tests
that need it on a developer's machine; where `CI=true` it fails them, so that a green run means they ran.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from bench import servers

# Whoever runs the suite in the background of a script has its programs ignore Ctrl-C: they inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Taken out of the environment: where pytest sees it, bodies of megabytes that differ are compared line by line. The
# processes that run the tests begin after that, and are told under another name.
if os.environ.pop("CI", "") == "true":
    os.environ["TESTS_RUN_IN_CI"] = "true"
RUNS_IN_CI = "TESTS_RUN_IN_CI" in os.environ
# Images set it; then each process that a test starts compiles the product anew, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, cores are busy, and threads that wait for work spin
# No limits of time anywhere: how long an example takes to make says how busy the machine is.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("ci" if RUNS_IN_CI else "patient")  # "ci": examples that do not change


ServerT = TypeVar("ServerT", bound=servers.Server | servers.EtcdCluster)


def pytest_collection_finish() -> None:
    """What was imported stays: nobody looks through these millions of objects again in each collection of garbage."""
    gc.collect()
    gc.freeze()


def _serve(make: Callable[[], ServerT]) -> Iterator[ServerT]:
    try:
        server = make()
        server.start()
    except servers.MissingProgram as missing:
        if RUNS_IN_CI:
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[servers.SeaweedFS]:
    """An S3 server open to anonymous clients. Make your own bucket: `seaweed.create_bucket(name)`."""
    yield from _serve(servers.SeaweedFS)


@pytest.fixture(scope="session")
def seaweed_keys() -> Iterator[servers.SeaweedFS]:
    """An S3 server that only its two keys open (`access_key`, `secret_key`)."""
    yield from _serve(lambda: servers.SeaweedFS("AKIDTESTTESTTESTTEST", "secret/of+tests", anonymous_reads=False))


@pytest.fixture(scope="session")
def azurite() -> Iterator[servers.Azurite]:
    """An Azure Blob server. Make your own container: `azurite.create_container(name)`."""
    yield from _serve(servers.Azurite)


@pytest.fixture(scope="session")
def gcs() -> Iterator[servers.FakeGCS]:
    """A Google Cloud Storage server for reading; put objects with `gcs.put(bucket, key, data)`."""
    yield from _serve(servers.FakeGCS)


@pytest.fixture(scope="module")
def etcd() -> Iterator[servers.EtcdCluster]:
    """An etcd of three members. Take a namespace of your own, and bring back the members that you stop. Each module
    has its own: idle it takes 7 % of a core, and a session's would for as long as other tests run."""
    yield from _serve(lambda: servers.EtcdCluster(3))


@pytest.fixture(scope="module")
def issuer() -> Iterator[servers.Issuer]:
    """An OIDC issuer; `issuer.token(name, audience)` for `ann` (group `team-a`), `bob` (groups `team-b`, `ops`) and
    `eve` (none)."""
    people: dict[str, dict[str, object]] = {
        "ann": {"groups": ["team-a"]},
        "bob": {"groups": ["team-b", "ops"]},
        "eve": {},
    }
    yield from _serve(lambda: servers.Issuer(people))


@pytest.fixture(scope="session")
def http_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    """nginx over the directory `http_server.root`, which tests fill (each under a folder of its own)."""
    root: Path = tmp_path_factory.mktemp("http-root")
    yield from _serve(lambda: servers.Nginx(root))


@pytest.fixture
def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    return servers.free_ports(1)[0]


@pytest.fixture(scope="session")
def able() -> None:
    """Skips where nobody could make a box: most containers may not make namespaces, nor load what a kernel lacks."""
    name = f"fb-{os.getpid()}"
    shape = "rate 1mbit burst 4k latency 1s"
    commands = (
        f"ip netns add {name}",
        f"ip -n {name} link add switch type bridge",
        f"ip -n {name} link add one type veth peer two",
        f"ip link add {name[:15]} type veth peer far netns {name}",
        f"tc -n {name} qdisc add dev one root tbf {shape}",
        f"nsenter --net=/run/netns/{name} true",
    )
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no box can be made here: {command}: {done.stderr.strip()}")
    except FileNotFoundError as error:
        pytest.skip(f"no box can be made here: {error}")
    finally:
        with suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
