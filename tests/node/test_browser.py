"""A browser and an open node: what is stored there is shown, and never runs as the node's own page."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.node.front.http.server import NO_PAGE
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
OVERRIDE = "response-content-type=text/html"


def page(endpoint: str, then: str = "") -> str:
    """A page that says it ran, and tries to have the node forget a bucket."""
    return f"""<!doctype html><body><p>it is shown</p><script>
    document.body.append("it " + "runs");
    fetch("{endpoint}/-/v1/buckets/victim", {{method: "DELETE"}}).catch(() => 0);
    fetch("{endpoint}/-/v1/evict", {{method: "POST", mode: "no-cors", body: '{{"bucket": "victim"}}'}}).catch(() => 0);
    {then}
    </script></body>"""


@pytest.fixture
def shown(node: Make, tmp_path: Path) -> NodeProcess:
    """An open node with a page among its objects."""
    one = node("--fronts", "1")
    one.endpoint = one.endpoint.replace("127.0.0.1", "localhost")
    for name in ("pages", "victim"):
        (tmp_path / name).mkdir()
        one.add_bucket(name, f"file://{tmp_path}/{name}")
    (tmp_path / "pages" / "page.txt").write_text(page(one.endpoint))
    (tmp_path / "pages" / "large.bin").write_bytes(bytes(300_000))
    return one


def lines(one: NodeProcess, target: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and head of a GET."""
    asked = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-D", "-", *(f"-H{name}: {value}" for name, value in (headers or {}).items()),
         one.endpoint + target],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    ).stdout  # fmt: skip
    return int(asked.split(" ")[1]), asked


def test_every_answer_says_that_it_is_no_page(shown: NodeProcess) -> None:
    for target in (
        "/pages/page.txt", "/pages/page.txt", "/pages/large.bin", "/pages/large.bin", "/pages/page.txt?" + OVERRIDE,
        "/pages/none", "/pages", "/-/v1/objects/pages/page.txt", "/-/openapi.json", "/-/nowhere",
    ):  # fmt: skip
        _, head = lines(shown, target)
        assert NO_PAGE.decode().replace("\r\n", "\n") in head.replace("\r\n", "\n"), target
        assert head.lower().count("content-security-policy") == 1


def test_another_site_cannot_say_what_an_object_is(shown: NodeProcess) -> None:
    target = f"/pages/page.txt?{OVERRIDE}"
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        told = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}
        assert lines(shown, target, told)[0] == status, site
        assert lines(shown, "/pages/page.txt", told)[0] == 200
        assert lines(shown, target, told | {"Sec-Fetch-Mode": "cors"})[0] == 200, "CORS rules say who may read"
    assert lines(shown, target)[0] == 200, "who is no browser says nothing of a site"


@contextmanager
def site(root: Path) -> Iterator[str]:
    """Another site on this machine."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(root))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def browse(url: str, profile: Path) -> str:
    """What a browser made of the page, as HTML, when its scripts had time to run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_a_stored_page_is_shown_and_does_not_run(shown: NodeProcess, tmp_path: Path) -> None:
    for target in (f"/pages/page.txt?{OVERRIDE}", f"/pages/page.txt?{OVERRIDE}&x=1"):
        html = browse(shown.endpoint + target, tmp_path / "profile")
        assert "it is shown" in html
        assert "it runs" not in html
    elsewhere = tmp_path / "site"
    elsewhere.mkdir()
    (elsewhere / "page.html").write_text(page(shown.endpoint))
    link = f'location = "{shown.endpoint}/pages/page.txt?{OVERRIDE}";'
    (elsewhere / "link.html").write_text(page(shown.endpoint, link))
    with site(elsewhere) as address:
        assert "it runs" in browse(f"{address}/page.html", tmp_path / "profile"), "a page of its own site does run"
        html = browse(f"{address}/link.html", tmp_path / "profile")
        assert "it is shown" not in html
        assert "pages of other sites may not say" in html
    assert json.loads(shown.ask("GET", "/-/v1/jobs")[1]) == [], "no page began a job"
    assert shown.ask("GET", "/-/v1/buckets/victim")[0] == 200
