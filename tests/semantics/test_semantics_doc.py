"""docs/semantics.md, executed: every example on the page is run, against the S3 handler and against a real node."""

from __future__ import annotations

import doctest
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from forebay.core.types import LOCAL_URL, parse_freshness
from tests.node.lossy import Lossy
from tests.patience import PATIENCE_S
from tests.s3.fake_front import MODIFIED_S, Front, Object
from tests.s3.real_node import RealNode

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One `http` block. `target` and header values may hold `{name}`; `body` is None where none is shown, `sent` where
    the request has none."""

    line: int
    method: str
    target: str
    headers: dict[str, str]
    status: int
    expected: dict[str, str]
    body: str | None
    sent: bytes | None


def _blocks(kind: str) -> Iterator[tuple[int, str]]:
    text = PAGE.read_text("utf-8")
    for match in BLOCK.finditer(text):
        if match[1] == kind:
            yield text.count("\n", 0, match.start()) + 1, match[2]


def _headers(lines: list[str]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines)


def _examples() -> list[Example]:
    found = []
    for line, text in _blocks("http"):
        asked, answered, *body = text.rstrip("\n").split("\n\n", 2)
        (request, *asked_lines), (status, *answered_lines) = asked.splitlines(), answered.splitlines()
        sent = [line.removeprefix("> ") for line in asked_lines if line.startswith("> ")]
        asked_lines = [line for line in asked_lines if not line.startswith("> ")]
        method, target = request.split(" ", 1)
        found.append(
            Example(
                line,
                method,
                target,
                _headers(asked_lines),
                int(status),
                _headers(answered_lines),
                body[0] if body else None,
                "\n".join(sent).encode() if sent else None,
            )
        )
    return found


def _objects() -> dict[str, bytes]:
    """The bucket that the page shows: key, two or more spaces, content."""
    (_, text), *_ = _blocks("objects")
    objects = {}
    for line in text.splitlines():
        key, _, content = line.partition("  ")
        objects[key] = content.strip().encode()
    return objects


Ask = Callable[[str, str, dict[str, str], bytes | None], tuple[int, dict[str, str], bytes]]


def _fill(directory: Path) -> None:
    for key, content in _objects().items():
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (MODIFIED_S, MODIFIED_S))


@pytest.fixture(scope="session")
def handler() -> Ask:
    """The S3 handler alone."""
    front = Front(corpus={key: Object(content) for key, content in _objects().items()}, drafts={})

    def ask(method: str, target: str, headers: dict[str, str], body: bytes | None) -> tuple[int, dict[str, str], bytes]:
        answer = front.ask(method, target, headers, body)
        return answer.status, {"content-length": str(len(answer.body)), **answer.headers}, answer.body

    return ask


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """A real node in front of a directory that holds the page's bucket."""
    bucket = tmp_path_factory.mktemp("corpus")
    _fill(bucket)
    with RealNode(tmp_path_factory.mktemp("node"), "--fronts", "1") as running:
        running.add_bucket("corpus", bucket.as_uri())
        running.add_bucket("drafts", LOCAL_URL, write="local")
        yield running


def _pattern(text: str, known: dict[str, str]) -> str:
    """A regular expression for a value of the page: `…` is anything, `{name}` is remembered or repeated."""
    parts = []
    for piece in re.split(r"(…|\{\w+\})", text):
        if piece == "…":
            parts.append(".*?")
        elif piece.startswith("{") and piece.endswith("}"):
            name = piece[1:-1]
            if name in known:
                parts.append(re.escape(known[name]))
            elif f"(?P<{name}>" in "".join(parts):
                parts.append(f"(?P={name})")
            else:
                parts.append(f"(?P<{name}>.+?)")
        else:
            parts.append(re.escape(piece))
    return "".join(parts)


def _check(example: Example, ask: Ask, known: dict[str, str]) -> None:
    values = known | {"too-long": "x" * 2048}
    headers = {name.lower(): re.sub(r"\{([\w-]+)\}", lambda m: values[m[1]], v) for name, v in example.headers.items()}
    status, answered, body = ask(example.method, example.target, headers, example.sent)
    where = f"docs/semantics.md:{example.line}: {example.method} {example.target}"
    assert status == example.status, f"{where}: {status} {body!r}"
    local: dict[str, str] = {}
    for name, value in example.expected.items():
        scope = known if name == "ETag" else local
        match = re.fullmatch(_pattern(value, scope), answered.get(name.lower(), "(absent)"))
        assert match, f"{where}: {name} is {answered.get(name.lower())!r}, not {value!r}"
        scope |= match.groupdict()
    if example.method == "HEAD" or example.body is None:
        return
    text = body.decode("utf-8")
    if example.body.startswith(("<", "…<")):  # markup: line breaks of the page mean nothing
        ElementTree.fromstring(text)
        text = re.sub(r">\s+<", "><", text)
        wanted = example.body.replace("\n", "")
    else:
        wanted = example.body
    assert re.fullmatch(_pattern(wanted, local), text, re.DOTALL), f"{where}: body is {text!r}"


def test_the_page_has_its_examples() -> None:
    examples = _examples()
    assert len(examples) >= 30
    assert {example.status for example in examples} >= {200, 206, 304, 400, 404, 412, 416, 501}
    assert sum(text.count(">>>") for _, text in _blocks("pycon")) >= 12
    assert not [
        kind for _, kind in re.findall(r"(^|\n)```(\w+)", PAGE.read_text()) if kind not in ("http", "pycon", "objects")
    ]


def test_the_examples_hold_for_the_s3_handler(handler: Ask) -> None:
    known: dict[str, str] = {}
    for example in _examples():
        _check(example, handler, known)
    assert known["etag"]


@pytest.mark.real
def test_the_examples_hold_for_a_real_node_cold_and_warm(node: RealNode) -> None:
    """Twice: the first round is mostly misses, the second mostly hits; nobody can tell them apart."""
    known: dict[str, str] = {}
    for _ in range(2):
        for example in _examples():
            _check(example, node.ask, known)


class _Helpers:
    """What the page calls `node`."""

    def __init__(self, node: RealNode, root: Path, ends: ExitStack) -> None:
        self._node = node
        self._root = root
        self._ends = ends
        self._slow: tuple[RealNode, Lossy] | None = None  # a server of S3, and what its answers come through

    def bucket(self, name: str, freshness: str) -> None:
        (self._root / name).mkdir()
        self._node.add_bucket(name, (self._root / name).as_uri(), parse_freshness(freshness))

    def slow_bucket(self, name: str, freshness: str) -> None:
        server = self._ends.enter_context(RealNode(self._root / "server", "--fronts", "1"))
        server.add_bucket(name, LOCAL_URL, write="local")
        relay = self._ends.enter_context(closing(Lossy(server.endpoint)))
        options = {"endpoint": relay.endpoint, "skip_signature": "true"}
        self._node.add_bucket(name, f"s3://{name}", parse_freshness(freshness), options)
        self._slow = server, relay

    @contextmanager
    def writing(self, bucket: str, key: str, text: str) -> Iterator[None]:
        assert self._slow is not None
        done, go_on = threading.Event(), threading.Event()

        def held_up(line: str) -> bool:
            if line.startswith("PUT ") and f"/{key}" in line:
                done.set()
                assert go_on.wait(PATIENCE_S)
            return False

        self._slow[1].lose = held_up
        statuses: list[int] = []
        put = threading.Thread(
            target=lambda: statuses.append(self._node.ask("PUT", f"/{bucket}/{key}", None, text.encode())[0])
        )
        put.start()
        try:
            assert done.wait(PATIENCE_S)
            yield
        finally:
            go_on.set()
            put.join(PATIENCE_S)
        assert statuses == [200]

    def look(self, bucket: str, key: str) -> int:
        return int(json.loads(self._node.ask("GET", f"/-/v1/stat/{bucket}/{key}?revalidate=1")[2])["size_bytes"])

    def put(self, bucket: str, key: str, text: str) -> None:
        if (self._root / bucket).exists():
            (self._root / bucket / key).write_text(text)
            return
        assert self._slow is not None
        assert self._slow[0].ask("PUT", f"/{bucket}/{key}", None, text.encode())[0] == 200

    def delete(self, bucket: str, key: str) -> None:
        (self._root / bucket / key).unlink()

    def get(self, target: str) -> str:
        status, _, body = self._node.ask("GET", target)
        if status == 200:
            return body.decode()
        return f"{status} {ElementTree.fromstring(body).findtext('Code')}"


@pytest.mark.real
def test_the_stories_of_change_hold_for_a_real_node(node: RealNode, tmp_path: Path) -> None:
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    with ExitStack() as ends:
        helpers = _Helpers(node, tmp_path, ends)
        for line, text in _blocks("pycon"):
            story = doctest.DocTestParser().get_doctest(
                text, {"node": helpers}, f"semantics.md:{line}", str(PAGE), line
            )
            runner.run(story, out=said.append)
    assert runner.tries > 0
    assert runner.failures == 0, "".join(said)
