"""`forebay presign`: a URL that gives one request on one object to whoever has it."""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import quote

import typer

from forebay.cli import address
from forebay.cli.options import Address, Debug, Url, open_client
from forebay.cli.outcome import verb
from forebay.core.errors import Denied
from forebay.core.s3rules.presign import presign as signed
from forebay.core.types import parse_freshness
from forebay.ports import clock

app = typer.Typer(rich_markup_mode=None, add_completion=False)
DEFAULT_PORTS = {"http": 80, "https": 443}


@app.command("presign")
@verb
def presign(
    where: Address,
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="Such as 15m, 1h, 7d.")] = "1h",
    put: Annotated[bool, typer.Option("--put", help="For writing the object instead of reading it.")] = False,
    url: Url = None,
    debug: Debug = False,
) -> None:
    """Print a URL that reads or writes one object without a key.

    It is signed with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, which `forebay key create` shows.
    """
    at = address.parse_object(where)
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        raise Denied(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set: export a key of the node (`forebay key create` "
            "shows one); a node without identities needs no signature"
        )
    with open_client(url) as client:
        place = client.endpoint
    host = place.authority
    if place.port == DEFAULT_PORTS[place.scheme]:
        host = host.rpartition(":")[0]  # as HTTP clients send it
    path = quote(f"/{at.bucket}/{at.key}", safe="/-_.~")
    query = signed(
        "PUT" if put else "GET",
        host,
        path,
        key_id,
        secret,
        now_s=clock.wall_s(),
        expires_s=int(parse_freshness(expires)) if expires not in ("immutable", "always") else 0,
        region=os.environ.get("AWS_REGION") or "us-east-1",
    )
    print(f"{place.scheme}://{host}{path}?{query}")
