"""`forebay top`: the node live, drawn once a second; or as lines for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.cli.view import Latency, View, look
from forebay.ports import clock

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("top")
@verb
def top(
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then exit.")] = False,
    count: Annotated[int, typer.Option("--count", metavar="N", min=0, help="So many looks; 0 is for ever.")] = 0,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Watch hit ratio, bandwidth and latency live.

    Ctrl-C ends it. With --json one line for each look; the fields are listed in docs/cli.md.
    """
    count = 1 if once else count
    with open_client(url) as client:
        views = _looks(client, interval_s, count)
        try:
            if as_json:
                for view in views:
                    show.line(view)
                    sys.stdout.flush()
            elif count or not sys.stdout.isatty():
                for view in views:
                    print(text(view), end="\n\n" if count != 1 else "\n", flush=True)
            else:
                draw(map(text, views))
        except KeyboardInterrupt:
            if count:
                raise


def _looks(client: Client, interval_s: float, count: int) -> Iterator[View]:
    before, before_s = client.metrics(), clock.monotonic_s()
    number = 0
    while not count or number < count:
        time.sleep(interval_s)
        after, after_s = client.metrics(), clock.monotonic_s()
        yield look(before, after, after_s - before_s, client.status())
        before, before_s = after, after_s
        number += 1


def draw(texts: Iterator[str]) -> None:
    """Show one text after the other on the whole terminal."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text("looking …"), screen=True, auto_refresh=False) as live:
        for shown in texts:
            live.update(Text(shown), refresh=True)


def text(view: View) -> str:
    """One look for people."""
    backend = f"{show.rate(view.backend_bytes_s)} in {view.backend_requests_s:.0f} requests/s"
    full = f"{show.size(view.used_bytes)} of {show.size(view.capacity_bytes)}"
    share = show.percent(view.used_bytes, view.capacity_bytes)
    head = [
        ("hits", f"{_ratio(view.hit_ratio)} of reads, {_ratio(view.hit_ratio_bytes)} of bytes"),
        (
            "requests",
            f"{view.requests_s:.0f}/s over {show.counted(view.connections, 'connection')}; failed reads: {view.errors}",
        ),
        ("to clients", f"{show.rate(view.hit_bytes_s)} from disk, {show.rate(view.miss_bytes_s)} from backends"),
        ("from backends", f"{backend}, {show.counted(view.flights, 'flight')}; {view.backend_errors} failed"),
        ("cache", f"{full} ({share}); {view.evictions} evicted, {show.rate(view.evicted_bytes_s)}"),
        ("jobs", str(view.jobs_running)),
    ]
    if view.passed_bytes_s:
        head.append(("passing by", f"{show.rate(view.passed_bytes_s)}, for want of a disk"))
    latencies = [
        ("hit", view.hit),
        ("miss, first byte", view.miss_first_byte),
        ("backend, first byte", view.backend_first_byte),
    ]
    parts = [
        f"forebay top  {view.endpoint}  over {show.duration(view.interval_s)}",
        show.fields(head),
        "",
        show.columns(
            ("LATENCY", "COUNT", "P50 <", "P90 <", "P99 <"),
            [(name, str(latency.count), *_bounds(latency)) for name, latency in latencies],
            right=(1, 2, 3, 4),
        ),
    ]
    if view.buckets:
        rows = [
            (
                bucket.name,
                show.size(bucket.cached_bytes),
                show.rate(bucket.backend_bytes_s),
                f"{bucket.backend_requests_s:.0f}/s",
                str(bucket.backend_errors),
                one_line(bucket.error) or "ok",
            )
            for bucket in view.buckets
        ]
        head_line = ("BUCKET", "CACHED", "BACKEND", "REQUESTS", "FAILED", "LAST ANSWER")
        parts += ["", show.columns(head_line, rows, right=(1, 2, 3, 4))]
    return "\n".join(parts)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _bounds(latency: Latency) -> tuple[str, str, str]:
    return tuple(  # type: ignore[return-value]
        "-" if value is None else show.duration(value) for value in (latency.p50_s, latency.p90_s, latency.p99_s)
    )
