"""`forebay doctor`: what is wrong here, and what to change. See docs/doctor.md."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forebay.cli import node as node_verb
from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Dir, Url
from forebay.cli.outcome import one_line, verb
from forebay.health.findings import Finding, judge, worst

app = typer.Typer(rich_markup_mode=None, add_completion=False)
MARKS = {"ok": "ok  ", "warn": "WARN", "bad": "BAD "}
COLOURS = {"ok": "32", "warn": "33", "bad": "31"}


@app.command("doctor")
@verb
def doctor(
    dir: Dir = None,
    volume: Annotated[
        list[str] | None, typer.Option("--volume", metavar="DIR", help="Look at this directory's disk. Repeatable.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Write 16 MiB to each disk to time it.")
    ] = True,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="ETCD-URL", help="Look at this etcd: etcd://HOST:PORT,HOST:PORT.")
    ] = None,
    cluster_ca: node_verb.ClusterCa = None,
    cluster_cert: node_verb.ClusterCert = None,
    cluster_key: node_verb.ClusterKey = None,
    cluster_user: node_verb.ClusterUser = None,
    cluster_password_file: node_verb.ClusterPassword = None,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Look for what is wrong and say what to change.

    The exit code is 1 if anything is bad, else 0. With --json: {"worst", "findings": [{"check", "level", "subject",
    "what", "change"}]}.
    """
    from forebay.health.facts import collect
    from forebay.meta.etcd_link import Access

    given = (cluster_ca, cluster_cert, cluster_key, cluster_user, cluster_password_file)
    access = Access(*(each or "" for each in given))
    access.check()
    findings = judge(collect(dir, url, volume or (), measure=measure, cluster=cluster, access=access))
    if as_json:
        show.document({"worst": worst(findings), "findings": findings})
    else:
        print(text(findings, colour=sys.stdout.isatty()))
    return 1 if worst(findings) == "bad" else 0


def text(findings: list[Finding], *, colour: bool = False) -> str:
    """The report for people."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        mark = MARKS[finding.level]
        if colour:
            mark = f"\x1b[{COLOURS[finding.level]}m{mark}\x1b[0m"
        lines.append(f"{mark}  {finding.check.ljust(width)}  {one_line(finding.subject)}: {one_line(finding.what)}")
        if finding.change:
            lines.append(f"      {' ' * width}  -> {one_line(finding.change)}")
    counts = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    lines += ["", f"{counts['ok']} ok, {counts['warn']} to look at, {counts['bad']} bad"]
    return "\n".join(lines)
