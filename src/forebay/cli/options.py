"""What several verbs take, declared once, and how a verb gets its client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.complete import addresses, bucket_names

if TYPE_CHECKING:
    from forebay.client.sync import Client

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
BucketName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=bucket_names, help="The bucket's name.")]


def open_client(url: str | None) -> Client:
    """The client of the node that the user means."""
    from forebay.client.sync import connect

    return connect(url)
