"""`forebay bucket`: the buckets a node serves, where their bytes come from, and how they are written.

`add` and `set` take the same options: `add` gives defaults to those left out, `set` leaves them as they are.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli import show
from forebay.cli.options import AsJson, BucketName, Debug, Here, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.backend_options import HIDDEN, is_secret
from forebay.core.cluster.coding import code_of
from forebay.core.errors import Exists, Invalid
from forebay.core.messages.calls import CachedEntry
from forebay.core.quantity import parse_size
from forebay.core.types import (
    COPIES_MAX,
    LOCAL_URL,
    Bucket,
    CorsRule,
    check_bucket_name,
    format_freshness,
    parse_freshness,
)

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(
    no_args_is_help=True, help="Add, show and remove buckets.", rich_markup_mode=None, add_completion=False
)
SCHEMES = ("s3", "gs", "az", "http", "https", "file", "memory")
NONE = "none"  # of --quota, --dirty-bytes-max and --cors: no bound, a quarter of the capacity, no rules

Write = Annotated[
    str | None,
    typer.Option("--write", help="through (default), back, or local (with the BACKEND local://)."),
]
Freshness = Annotated[
    str | None, typer.Option("--freshness", help="immutable, always, or a time such as 60s (default), 5m, 2h.")
]
Quota = Annotated[str | None, typer.Option("--quota", metavar="SIZE", help="At most this much disk, such as 200GiB.")]
Durability = Annotated[
    str | None,
    typer.Option("--durability", help="What only the node has is on disk (default) or in memory before a write ends."),
]
DirtyBytesMax = Annotated[
    str | None,
    typer.Option("--dirty-bytes-max", metavar="SIZE", help="At most this much unflushed; else writes wait."),
]
DirtyAgeMax = Annotated[
    str | None,
    typer.Option(
        "--dirty-age-max", metavar="TIME", help="Nothing unflushed for longer, such as 10m; else writes wait."
    ),
]
Conflict = Annotated[
    str | None,
    typer.Option("--conflict", help="When the backend changed before a flush: keep-both (default), ours or theirs."),
]
NodeCopies = Annotated[
    str | None,
    typer.Option(
        "--copies",
        help="In a cluster: on how many nodes a write is before the answer that no backend has (default: 2).",
    ),
]
Acl = Annotated[
    str | None, typer.Option("--acl", help="private (default), or public-read: reading and listing need no key.")
]
Cors = Annotated[
    str | None, typer.Option("--cors", metavar="FILE", help="CORS rules as `aws s3api put-bucket-cors` takes them.")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="For the backend: endpoint, region … A secret: =@FILE or =env:VAR."
    ),
]


Force = Annotated[
    bool, typer.Option("--force", help="Give up what the node alone has, if that is in the way; it is listed.")
]


def parse_option(text: str) -> tuple[str, str]:
    """Name and value of an --option: NAME=VALUE, NAME=@FILE, NAME=env:VARIABLE, or the NAME of a secret alone, which is
    asked for. Warns of a secret that stands in the command line."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals and name and is_secret(name, "") and sys.stdin.isatty():
        return name, getpass.getpass(f"{name}: ")
    if not equals or not name:
        also = f", or {name}=@FILE, {name}=env:VARIABLE" if is_secret(name, "") else ""
        raise Invalid(f"--option {text!r} is not NAME=VALUE: write it like --option region=eu-central-1{also}")
    if value.startswith("@"):
        return name, _read_value(name, value[1:])
    if value.startswith("env:"):
        found = os.environ.get(value[4:], "")
        if not found:
            raise Invalid(f"--option {text}: there is no {value[4:]!r} in the environment: export it")
        return name, found
    if value and value != HIDDEN and is_secret(name, value):
        print(
            f"warning: the value of {name} stands in the command line, where others on this machine read it: write "
            f"{name}=@FILE or {name}=env:VARIABLE, or leave the value out to be asked",
            file=sys.stderr,
        )
    return name, value


def _read_value(name: str, file: str) -> str:
    try:
        found = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"--option {name}=@{file} cannot be read ({error}): name a text file") from None
    value = found.removesuffix("\n").removesuffix("\r")
    if not value:
        raise Invalid(f"--option {name}=@{file}: the file is empty: write the value into it")
    return value


def check_url(url: str) -> str:
    """A backend URL whose scheme is served; else `Invalid`."""
    if url == LOCAL_URL or code_of(url) is not None:
        return url
    scheme, marks, rest = url.partition("://")
    if not marks or scheme not in SCHEMES:
        raise Invalid(
            f"the backend URL {url!r} is not served: use s3://NAME[/PREFIX], gs://NAME, az://CONTAINER, "
            "https://HOST/PATH, file:///DIRECTORY, memory://NAME, or for none local://, in a cluster also coded://K+M"
        )
    if scheme == "file" and not rest.startswith("/"):
        raise Invalid(f"the backend URL {url!r} names no absolute directory: write it like file:///data/corpus")
    if not rest:
        raise Invalid(f"the backend URL {url!r} names no bucket: write it like s3://NAME")
    return url


class _CorsRule(msgspec.Struct, forbid_unknown_fields=True):
    AllowedOrigins: list[str]
    AllowedMethods: list[str]
    AllowedHeaders: list[str] = []
    ExposeHeaders: list[str] = []
    MaxAgeSeconds: int | None = None
    ID: str = ""


class _Cors(msgspec.Struct, forbid_unknown_fields=True):
    CORSRules: list[_CorsRule]


def read_cors(file: str) -> tuple[CorsRule, ...]:
    """The rules in a JSON file of the shape that Amazon's command line takes."""
    from forebay.core.s3rules.compat.cors import check_rules

    try:
        found = msgspec.json.decode(Path(file).read_bytes(), type=_Cors)
    except OSError as error:
        raise Invalid(f"--cors {file} cannot be read ({error.strerror}): name a JSON file, or none") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Invalid(
            f"--cors {file} does not fit ({error}): it is JSON such as "
            '{"CORSRules": [{"AllowedOrigins": ["https://app.example"], "AllowedMethods": ["GET"]}]}'
        ) from None
    rules = tuple(
        CorsRule(
            tuple(rule.AllowedOrigins),
            tuple(rule.AllowedMethods),
            tuple(rule.AllowedHeaders),
            tuple(rule.ExposeHeaders),
            rule.MaxAgeSeconds,
            rule.ID,
        )
        for rule in found.CORSRules
    )
    check_rules(rules)
    return rules


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise Invalid(f"{option} {value!r} is not known: use {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value


def _age(text: str) -> float:
    if text in ("immutable", "always"):
        raise Invalid(f"--dirty-age-max {text!r} is no time: use one like 60s, 10m, 2h, 1d")
    return parse_freshness(text)


def changes(options: list[str] | None, **given: str | None) -> dict[str, Any]:
    """Fields of `Bucket` from the options that were given (None: it was not)."""
    readers: dict[str, Any] = {
        "write": lambda text: _one_of("--write", text, ("through", "back", "local")),
        "freshness_s": parse_freshness,
        "quota_bytes": parse_quota,
        "durability": lambda text: _one_of("--durability", text, ("disk", "memory")),
        "copies": lambda text: int(_one_of("--copies", text, tuple(map(str, range(1, COPIES_MAX + 1))))),
        "dirty_bytes_max": parse_quota,
        "dirty_age_max_s": _age,
        "conflict": lambda text: _one_of("--conflict", text, ("keep-both", "ours", "theirs")),
        "acl": lambda text: _one_of("--acl", text, ("private", "public-read")),
        "cors": lambda text: () if text == NONE else read_cors(text),
    }
    found = {name: readers[name](text) for name, text in given.items() if text is not None}
    if options:
        found["options"] = dict(parse_option(text) for text in options)
    return found


def parse_quota(text: str) -> int | None:
    """A size as bytes; None for `none`."""
    if text == NONE:
        return None
    return parse_size(text)


@app.command("add")
@verb
def add(
    name: BucketName,
    address: Annotated[
        str, typer.Argument(metavar="BACKEND", help="s3://, gs://, az://, https://, file://, local://, coded://K+M …")
    ],
    write: Write = None,
    freshness: Freshness = None,
    quota: Quota = None,
    durability: Durability = None,
    copies: NodeCopies = None,
    dirty_bytes_max: DirtyBytesMax = None,
    dirty_age_max: DirtyAgeMax = None,
    conflict: Conflict = None,
    acl: Acl = None,
    cors: Cors = None,
    option: Options = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Ask the backend first.")] = True,
    replace: Annotated[bool, typer.Option("--replace", help="Change the bucket if it is there.")] = False,
    here: Here = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Serve the objects at BACKEND as the bucket NAME; local:// for objects that are on this node alone, coded://4+2
    for objects that are on the nodes of the cluster, erasure-coded."""
    fields = changes(
        option, write=write, freshness_s=freshness, quota_bytes=quota, durability=durability, copies=copies,
        dirty_bytes_max=dirty_bytes_max, dirty_age_max_s=dirty_age_max, conflict=conflict, acl=acl, cors=cors,
    )  # fmt: skip
    if address == LOCAL_URL:
        fields.setdefault("write", "local")
    if code_of(address) is not None:
        fields = {"write": "back", "copies": 2} | fields
    bucket = _checked(Bucket(check_bucket_name(name), check_url(address), **fields))
    with open_client(url) as client:
        there = {found.name: found for found in client.buckets()}.get(name)
        if there is not None and not replace:
            raise Exists(f"bucket {name} is there already, from {there.url}: choose another name, or add --replace")
        kept = client.bucket_put(bucket, check=check, here=here)
    if as_json:
        show.document(kept)
    else:
        print(f"bucket {kept.name} serves {kept.url}\n\n  forebay ls {kept.name}/")


@app.command("set")
@verb
def change(
    name: BucketName,
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="BACKEND", help="Another backend; what is cached goes.")
    ] = None,
    write: Write = None,
    freshness: Freshness = None,
    quota: Quota = None,
    durability: Durability = None,
    copies: NodeCopies = None,
    dirty_bytes_max: DirtyBytesMax = None,
    dirty_age_max: DirtyAgeMax = None,
    conflict: Conflict = None,
    acl: Acl = None,
    cors: Cors = None,
    option: Options = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Ask the backend first.")] = True,
    force: Force = False,
    here: Here = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Change settings of the bucket NAME; those that are not given stay. `--option NAME=` takes one away."""
    fields = changes(
        option, write=write, freshness_s=freshness, quota_bytes=quota, durability=durability, copies=copies,
        dirty_bytes_max=dirty_bytes_max, dirty_age_max_s=dirty_age_max, conflict=conflict, acl=acl, cors=cors,
    )  # fmt: skip
    if backend is not None:
        fields["url"] = check_url(backend)
    if not fields:
        raise Invalid("nothing to change is given: see `forebay bucket set --help`")
    with open_client(url) as client:
        old = client.bucket(name)
        if "options" in fields:
            fields["options"] = {n: v for n, v in (old.options | fields["options"]).items() if v}
        wanted = _checked(msgspec.structs.replace(old, **fields))
        mine = only_here(client, old) if force else []
        kept = client.bucket_put(wanted, check=check, force=force, here=here)
        if (old.url, old.options, old.write) != (kept.url, kept.options, kept.write):
            _tell_given_up(name, mine, only_here(client, kept))
    if as_json:
        show.document(kept)
    else:
        print(f"bucket {kept.name}\n{show.fields(settings_of(kept))}")


def _checked(bucket: Bucket) -> Bucket:
    """The bucket, if its backend and its write mode go together."""
    if (bucket.url == LOCAL_URL) != (bucket.write == "local"):
        raise Invalid(
            f"{LOCAL_URL} and --write local go together: a bucket with a backend is written through or back, one "
            "without is local"
        )
    return bucket


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
    print(f"bucket {bucket.name}\n{show.fields(settings_of(bucket))}")


def settings_of(bucket: Bucket) -> list[tuple[str, str]]:
    """What people want to see of a bucket: what cannot matter in its write mode is left out."""
    pairs = [
        ("backend", bucket.url),
        ("freshness", format_freshness(bucket.freshness_s)),
        ("write", bucket.write),
    ]
    if bucket.write != "through":
        pairs.append(("durability", bucket.durability))
        pairs.append(("copies", str(max(bucket.copies, 1))))
    if bucket.write == "back":
        most = bucket.dirty_bytes_max
        pairs += [
            ("dirty at most", "a quarter of the capacity" if most is None else show.size(most)),
            ("dirty for", show.duration(bucket.dirty_age_max_s)),
            ("conflict", bucket.conflict),
        ]
    pairs += [
        ("quota", _quota(bucket)),
        ("pinned", ", ".join(prefix or "(all)" for prefix in bucket.pinned) or "-"),
        ("acl", bucket.acl),
        ("cors", f"{len(bucket.cors)} rule{'s' if len(bucket.cors) > 1 else ''}" if bucket.cors else "-"),
        ("added", show.moment(bucket.created_s)),
    ]
    return pairs + [(f"option {name}", value) for name, value in sorted(bucket.options.items())]


@app.command("rm")
@verb
def rm(
    name: BucketName,
    force: Force = False,
    here: Here = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Forget a bucket and evict what is cached of it; the backend keeps everything."""
    with open_client(url) as client:
        mine = only_here(client, client.bucket(name)) if force else []
        client.bucket_delete(name, force=force, here=here)
        _tell_given_up(name, mine, [])
    if as_json:
        show.document({"name": name, "removed": True})
    else:
        print(f"bucket {name} is gone; what it may have had in a backend is there as it was")


def only_here(client: Client, bucket: Bucket) -> list[CachedEntry]:
    """The objects of the bucket that no backend has."""
    found: list[CachedEntry] = []
    after = ""
    while bucket.write != "through":
        page = client.cached_page(bucket.name, start_after=after)
        found += [entry for entry in page.entries if entry.dirty or bucket.write == "local"]
        after = page.next_after
        if not after:
            break
    return found


def _tell_given_up(name: str, before: list[CachedEntry], after: list[CachedEntry]) -> None:
    kept = {entry.key for entry in after}
    for entry in before:
        if entry.key not in kept:
            show.note(f"given up: {one_line(f'{name}/{entry.key}')} ({show.size(entry.size_bytes)})")
