"""The table of clients in docs/s3.md, row by row: the real client, told of the node by that row's own line.

Each client runs as users run it: in a process of its own, with nothing but credentials and the line. The node has the
bucket's only bytes, and its counters must show that they were asked of it. `make clients` sets FOREBAY_CLIENTS to the
Python that has the heavy clients; without it their rows are not collected, as the table says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from forebay.client.sync import Client
from tests.patience import until
from tests.s3.client_rows import BUCKET, ROWS
from tests.s3.real_node import RealNode

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("client_rows.py")
KEY_ID, SECRET, TOKEN = "AKIDTABLE", "secret/of+table", "operator-token"
ADDRESS = "127.0.0.1:9400"  # in the documentation
ENVIRONMENT = re.compile(r"[A-Z0-9_]+=\S+")
CLIENTS = os.environ.get("FOREBAY_CLIENTS", "")
ROW_TIMEOUT_S = 280.0  # torch alone can take a minute to import on a busy machine


class Row(NamedTuple):
    """One row of the table. `lines` are the code of its second cell."""

    client: str
    version: str
    lines: tuple[str, ...]
    target: str

    @property
    def python(self) -> str:
        return CLIENTS if self.target == "make clients" else sys.executable


def table() -> list[Row]:
    """The rows of the documentation."""
    page = (ROOT / "docs" / "s3.md").read_text("utf-8")
    section = page.partition("\n## Clients\n")[2].partition("\n## ")[0]
    rows = []
    for line in section.splitlines():
        if line.startswith("| `"):
            name, needs, target, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            client, _, version = name.partition("` ")
            rows.append(
                Row(client.strip("`"), version, tuple(re.findall(r"`([^`]+)`", needs)), target.strip("`").strip())
            )
    return rows


def pins() -> dict[str, dict[str, str]]:
    """What is installed for each target, and its version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    script = (ROOT / "scripts" / "setup").read_text("utf-8").partition("\nmake_clients()")[2].partition("\n}")[0]
    found = {
        "make test": [*project["dependencies"], *project["optional-dependencies"]["dev"]],
        "make clients": re.findall(r"[\w.\[\]-]+==[\w.]+", script),
    }
    parsed = {target: [re.split(r"(?:\[.*\])?(?===|>=)", pin, maxsplit=1) for pin in found[target]] for target in found}
    return {target: {name: pin.removeprefix("==") for name, pin in pairs} for target, pairs in parsed.items()}


def test_the_table_and_what_is_installed_say_the_same() -> None:
    rows, installed = table(), pins()
    assert sorted(row.client for row in rows) == sorted(ROWS)
    for row in rows:
        assert (row.client, row.version) in installed[row.target].items(), row
        assert row.lines, row


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """A node with keys, and a bucket that is nowhere else."""
    folder = tmp_path_factory.mktemp("table")
    allow = f"read:{BUCKET},write:{BUCKET}"
    identities = [
        {"name": "client", "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow": allow},
        {"name": "operator", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "allow": "admin:*"},
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    flags = ("--identities", str(folder / "identities.json"), "--fronts", "1")
    with RealNode(folder / "node", *flags, token=TOKEN) as running:
        running.add_bucket(BUCKET, "local://", write="local")
        yield running


def counted(node: RealNode) -> tuple[float, float]:
    """How many writes the node has answered so far, and how many bytes of objects it has sent."""
    lines = node.ask("GET", "/-/metrics", {"authorization": f"Bearer {TOKEN}"})[2].decode().splitlines()
    counts = [(line.rpartition(" ")[0], float(line.rpartition(" ")[2])) for line in lines if line[:1] != "#"]
    writes = sum(count for name, count in counts if re.match(r'forebay_requests_total\{.*"(PUT|POST)".*"2xx"', name))
    return writes, sum(count for name, count in counts if name.startswith("forebay_read_bytes_total{"))


def environment(row: Row, node: RealNode, home: Path) -> dict[str, str]:
    """Credentials and the row's line. What would leave for AWS finds a proxy that does not exist."""
    address = node.endpoint.removeprefix("http://")
    lines = [
        line.replace(ADDRESS, address)
        .replace("ID 'any'", f"ID '{KEY_ID}'")
        .replace("SECRET 'any'", f"SECRET '{SECRET}'")
        for line in row.lines
    ]
    programs = f"{Path(row.python).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"PATH": programs, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    known |= {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "HTTPS_PROXY": "http://127.0.0.1:9"}
    known |= {"LINE": "\n".join(line for line in lines if not ENVIRONMENT.fullmatch(line))}
    return known | dict(line.split("=", 1) for line in lines if ENVIRONMENT.fullmatch(line))


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", [each for each in table() if each.target == "make test" or CLIENTS], ids=lambda r: r[0])
def test_a_client_that_is_told_so_goes_through_the_node(row: Row, node: RealNode, tmp_path: Path) -> None:
    before = counted(node)
    command = [str(ROOT / row.python), "-P", "-W", "ignore", str(PROGRAM), row.client]
    done = subprocess.run(
        command,
        env=environment(row, node, tmp_path),
        cwd=tmp_path,
        capture_output=True,
        timeout=ROW_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stderr + done.stdout).decode()[-4000:]
    read_bytes = json.loads(done.stdout.splitlines()[-1])

    def arrived() -> bool:
        writes, sent_bytes = counted(node)
        return writes > before[0] and sent_bytes - before[1] >= read_bytes

    until(arrived, "what the client read was sent by the node")


@pytest.mark.real
@pytest.mark.parametrize("program", ["aws", "rclone"])
def test_the_first_lines_of_the_page_work_as_they_stand(program: str, node: RealNode, tmp_path: Path) -> None:
    block = (ROOT / "docs" / "s3.md").read_text("utf-8").partition("```sh\n")[2].partition("```")[0]
    (line,) = [one for one in block.splitlines() if one.startswith(program)]
    with Client(node.endpoint, token=TOKEN) as client:
        client.put(BUCKET, "first-lines", b"x" * 100)
    line = line.replace(ADDRESS, node.endpoint.removeprefix("http://")).replace("corpus", BUCKET)
    known = environment(Row(program, "", (), "make test"), node, tmp_path)
    done = subprocess.run(["bash", "-c", line], env=known, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "first-lines" in done.stdout) == (0, True), f"{line}\n{done.stdout}{done.stderr}"
