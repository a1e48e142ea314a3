"""What several verbs take, declared once, and how a verb gets its client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.complete import addresses, bucket_names
from forebay.core.errors import ForebayError, NotFound
from forebay.core.spelling import did_you_mean

if TYPE_CHECKING:
    from forebay.client.sync import Client

_BUCKET = re.compile(r"bucket '?([a-z0-9.-]+)'?")
Here = Annotated[bool, typer.Option("--here", help="Only at the node that is asked, not at all of its cluster.")]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", envvar="FOREBAY_URL", help="The node. Default: http://127.0.0.1:9400."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")]
Dir = Annotated[
    str | None,
    typer.Option("--dir", metavar="DIR", envvar="FOREBAY_DIR", help="The node's directory. Default: ~/.forebay."),
]
Address = Annotated[
    str, typer.Argument(metavar="ADDRESS", autocompletion=addresses, help="s3://bucket/key or bucket/key.")
]
Source = Annotated[str, typer.Argument(metavar="SOURCE", help="s3://bucket/key, or a local path.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="s3://bucket/key, or a local path.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="All in the folder or directory.")]
Threads = Annotated[int, typer.Option("--threads", "-j", min=1, max=64, help="With -r, objects at once.")]
BucketName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=bucket_names, help="The bucket's name.")]


@contextmanager
def open_client(url: str | None) -> Iterator[Client]:
    """The client of the node that the user means. A bucket that is not there is named with one that may be meant."""
    from forebay.client.sync import connect

    with connect(url) as client:
        try:
            yield client
        except NotFound as error:
            named = _BUCKET.search(error.message) if error.code == "NoSuchBucket" else None
            with suppress(ForebayError):
                error.message += did_you_mean(named[1], [b.name for b in client.buckets()]) if named else ""
            raise
