"""The plot of the loader rows: samples a second by the latency of the bucket, from what `forebay bench loader` wrote.

A panel for each size of sample and epoch, a line for each loader: the median of its rounds. Rows that decode are left
out: most of them are measured at the ends only, and they show the processor. The scale is logarithmic, since what
is compared are ratios.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from forebay.bench.workloads import BY_NAME

COLOURS = {
    "webdataset": "#b08d57",
    "mosaicml-streaming": "#8a7fb5",
    "litdata": "#6f9f6a",
    "s3torchconnector": "#9a9a9a",
    "objects": "#79b4c9",
    "shards": "#1f6f8b",
}
OURS = {"shards": "forebay, shards", "objects": "forebay, objects"}
INK, FAINT = "#222222", "#dddddd"

Lines = dict[str, list[tuple[float, float]]]  # by side: (latency in ms, samples a second)


def series(document: dict[str, Any]) -> dict[tuple[int, int], Lines]:
    """What is drawn, by (bytes of a sample, epoch). `ValueError` if the document has no loader rows, or is of a run
    with `--quick`, whose numbers mean nothing."""
    if document["quick"]:
        raise ValueError("this is a --quick run: run `forebay bench loader` without it")
    found: dict[tuple[int, int], Lines] = {}
    for told in document["rows"]:
        row = BY_NAME.get(told["row"])
        if row is None or row.group != "loader" or row.decode or told["error"]:
            continue
        for side, rounds in told["extra"]["rates"].items():
            for epoch, rates in enumerate(zip(*rounds, strict=True), 1):
                lines = found.setdefault((row.objects[0].size_bytes, epoch), {})
                lines.setdefault(side, []).append((row.link.latency_s * 1000, statistics.median(rates)))
    if not found:
        raise ValueError("there are no loader rows in it: run `forebay bench loader`")
    return {panel: {side: sorted(points) for side, points in found[panel].items()} for panel in sorted(found)}


def draw(document: Path, path: Path) -> None:
    """Read the JSON `document` and write the picture `path`. `ValueError` as `series` says."""
    import matplotlib as mpl

    panels = series(json.loads(document.read_text("utf-8")))
    mpl.use("Agg")
    from matplotlib import pyplot

    sizes, epochs = (sorted({panel[index] for panel in panels}) for index in (0, 1))
    with pyplot.rc_context({"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}):
        figure, grid = pyplot.subplots(
            len(sizes), len(epochs), figsize=(5 * len(epochs), 3.6 * len(sizes)), squeeze=False, sharex=True
        )
        for (size_bytes, epoch), lines in panels.items():
            axes = grid[sizes.index(size_bytes)][epochs.index(epoch)]
            _panel(axes, lines, f"{size_bytes // 1000} KB samples, epoch {epoch}")
        for axes in grid[-1]:
            axes.set_xlabel("latency of the bucket, ms")
        for row in grid:
            row[0].set_ylabel("samples/s")
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="lower center", ncols=len(names), frameon=False, fontsize=9)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _panel(axes: Any, lines: Lines, title: str) -> None:
    for side in sorted(lines, key=lambda side: (side in OURS, side)):  # ours last, and so on top
        at, rates = zip(*lines[side], strict=True)
        width = 2.4 if side in OURS else 1.6
        colour = COLOURS.get(side, INK)
        axes.plot(at, rates, "o-", color=colour, linewidth=width, markersize=4, label=OURS.get(side, side))
    axes.set_yscale("log")
    axes.set_xticks(sorted({latency for points in lines.values() for latency, _ in points}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
    axes.grid(axis="y", which="both", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, which="both")
