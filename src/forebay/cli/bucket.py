"""`forebay bucket`: the buckets a node serves, and where their bytes come from."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, BucketName, Debug, Url, open_client
from forebay.cli.outcome import verb
from forebay.core.errors import Exists, Invalid
from forebay.core.types import Bucket, WriteMode, check_bucket_name, format_freshness, parse_freshness

app = typer.Typer(
    no_args_is_help=True, help="Add, show and remove buckets.", rich_markup_mode=None, add_completion=False
)
SCHEMES = ("s3", "gs", "az", "http", "https", "file", "memory")


def parse_option(text: str) -> tuple[str, str]:
    """`key=value` of --option."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Invalid(f"--option {text!r} is not NAME=VALUE: write it like --option region=eu-central-1")
    return name.strip(), value


def check_url(url: str) -> str:
    """A backend URL whose scheme is served, made absolute if it is a file URL; else `Invalid`."""
    scheme, marks, rest = url.partition("://")
    if not marks or scheme not in SCHEMES:
        raise Invalid(
            f"the backend URL {url!r} is not served: use s3://NAME[/PREFIX], gs://NAME, az://CONTAINER, "
            "https://HOST/PATH, file:///DIRECTORY or memory://NAME"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise Invalid(f"the backend URL {url!r} names no absolute directory: write it like file:///data/corpus")
    if not rest:
        raise Invalid(f"the backend URL {url!r} names no bucket: write it like s3://NAME")
    return url


@app.command("add")
@verb
def add(
    name: BucketName,
    address: Annotated[str, typer.Argument(metavar="BACKEND", help="s3://, gs://, az://, https://, file:// …")],
    write: Annotated[str, typer.Option("--write", help="through, back or local; kept until writing is served.")] = (
        "through"
    ),
    freshness: Annotated[
        str, typer.Option("--freshness", help="immutable, always, or a time such as 60s, 5m, 2h.")
    ] = "60s",
    quota: Annotated[
        str | None, typer.Option("--quota", metavar="SIZE", help="At most this much disk, such as 200GiB.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="For the backend: endpoint, region, profile … Repeatable."),
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Ask the backend first.")] = True,
    replace: Annotated[bool, typer.Option("--replace", help="Change the bucket if it is there.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve the objects at BACKEND as the bucket NAME."""
    if write not in ("through", "back", "local"):
        raise Invalid(f"--write {write!r} is not known: use through, back or local")
    bucket = Bucket(
        check_bucket_name(name),
        check_url(address),
        parse_freshness(freshness),
        cast(WriteMode, write),
        parse_quota(quota),
        options=dict(parse_option(text) for text in option or ()),
    )
    with open_client(url) as client:
        there = {found.name: found for found in client.buckets()}.get(name)
        if there is not None and not replace:
            raise Exists(f"bucket {name} is there already, from {there.url}: choose another name, or add --replace")
        kept = client.bucket_put(bucket, check=check)
    if as_json:
        show.document(kept)
    else:
        print(f"bucket {kept.name} serves {kept.url}\n\n  forebay ls {kept.name}/")


def parse_quota(text: str | None) -> int | None:
    """--quota as bytes."""
    if text is None:
        return None
    from forebay.node.settings import parse_size

    return parse_size(text)


@app.command("ls")
@verb
def ls(url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the buckets."""
    with open_client(url) as client:
        found = client.buckets()
    if as_json:
        show.document(found)
    elif not found:
        show.note("no buckets yet: add one with `forebay bucket add NAME s3://…`")
    else:
        rows = [(b.name, b.url, format_freshness(b.freshness_s), b.write, _quota(b)) for b in found]
        print(show.columns(("NAME", "BACKEND", "FRESHNESS", "WRITE", "QUOTA"), rows, right=(4,)))


def _quota(bucket: Bucket) -> str:
    return "-" if bucket.quota_bytes is None else show.size(bucket.quota_bytes)


@app.command("show")
@verb
def show_bucket(name: BucketName, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show one bucket's settings."""
    with open_client(url) as client:
        bucket = client.bucket(name)
    if as_json:
        show.document(bucket)
        return
    print(f"bucket {bucket.name}")
    pairs = [
        ("backend", bucket.url),
        ("freshness", format_freshness(bucket.freshness_s)),
        ("write", bucket.write),
        ("quota", _quota(bucket)),
        ("pinned", ", ".join(prefix or "(all)" for prefix in bucket.pinned) or "-"),
        ("added", show.moment(bucket.created_s)),
    ]
    print(show.fields(pairs + [(f"option {name}", value) for name, value in sorted(bucket.options.items())]))


@app.command("rm")
@verb
def rm(name: BucketName, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Forget a bucket and evict what is cached of it; the backend keeps everything."""
    with open_client(url) as client:
        client.bucket_delete(name)
    if as_json:
        show.document({"name": name, "removed": True})
    else:
        print(f"bucket {name} is forgotten here; its backend is as it was")
