"""`forebay shard`: shards of samples, made of files or objects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli import show
from forebay.cli.cp import SCHEMES
from forebay.cli.jobs import Quiet
from forebay.cli.options import AsJson, Debug, Url
from forebay.cli.outcome import Interrupted, one_line, verb
from forebay.cli.progress import Progress
from forebay.core.quantity import parse_size
from forebay.ports import clock

app = typer.Typer(
    no_args_is_help=True, help="Pack files or objects into shards.", rich_markup_mode=None, add_completion=False
)


@app.callback()
def _group() -> None:
    """Pack files or objects into shards."""


@app.command("pack")
@verb
def pack(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/prefix, or a local directory.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The same: empty, or begun by this command.")],
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="At most, of a shard.")] = "256MiB",
    samples: Annotated[int | None, typer.Option("--samples", metavar="N", min=1, help="At most, in a shard.")] = None,
    parts: Annotated[str, typer.Option("--parts", metavar="jpg,cls", help="Take these extensions alone.")] = "",
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Pack files or objects into tar shards, with their index.

    Files that differ in their extension alone are one sample. A packing that was cut short goes on when the same
    command is given again. With --json: {"shards", "samples", "size_bytes", "seconds", "target"}.
    """
    from forebay.client.shards.packing import pack as pack_all

    began_s = clock.monotonic_s()
    with Progress(one_line(target), quiet=quiet or as_json) as progress:
        try:
            shards = pack_all(
                *(place if place.startswith(SCHEMES) else Path(place) for place in (source, target)),
                parts=[part for part in parts.split(",") if part],
                shard_bytes=parse_size(shard_size),
                samples_max=samples,
                url=url,
                progress=progress.at,
            )
        except KeyboardInterrupt:
            raise Interrupted("interrupted: whole shards are kept; the same command goes on with them") from None
    seconds = max(clock.monotonic_s() - began_s, 1e-9)
    count, size_bytes = sum(shard.nsamples for shard in shards), sum(shard.filesize for shard in shards)
    if as_json:
        show.document(
            {
                "shards": len(shards),
                "samples": count,
                "size_bytes": size_bytes,
                "seconds": round(seconds, 6),
                "target": target,
            }
        )
    else:
        print(
            f"{one_line(source)} -> {one_line(target)}: {show.counted(count, 'sample')} in "
            f"{show.counted(len(shards), 'shard')}, "
            f"{show.size(size_bytes)} in {show.duration(seconds)}"
        )
