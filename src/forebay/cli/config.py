"""`forebay config`: names for nodes, so that a URL is typed once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug
from forebay.cli.outcome import verb
from forebay.client import saved
from forebay.client.connection import parse_url, trust_file
from forebay.core.errors import Invalid, NotFound
from forebay.core.spelling import did_you_mean

app = typer.Typer(no_args_is_help=True, help="Save nodes by name.", rich_markup_mode=None, add_completion=False)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Then `--url NAME` means that node.")]


@app.command("set")
@verb
def set_node(
    name: Name,
    where: Annotated[str, typer.Argument(metavar="URL", help="Where the node is.")],
    ca: Annotated[str, typer.Option("--ca", metavar="FILE", help="Certificates that vouch for it, as PEM.")] = "",
    token: Annotated[bool, typer.Option("--token", help="Keep FOREBAY_TOKEN of this shell for it, too.")] = False,
    debug: Debug = False,
) -> None:
    """Save a node; the first one is used where none is named."""
    if not saved.NAME(name):
        raise Invalid(f"{name!r} is no name: use lower-case letters, digits, - and _")
    proof = os.environ.get("FOREBAY_TOKEN", "") if token else ""
    if token and not proof:
        raise Invalid("FOREBAY_TOKEN is not set in this shell: export it, or leave out --token")
    if ca:
        trust_file(str(Path(ca).expanduser()))
    book = saved.read()
    kept = saved.Saved(parse_url(where).url, str(Path(ca).expanduser().absolute()) if ca else "", proof)
    book = saved.Book({**book.nodes, name: kept}, book.use or name)
    saved.write(book)
    print(f"{name} is {kept.url}{', and used where no node is named' if book.use == name else ''}")


@app.command("use")
@verb
def use(name: Name, debug: Debug = False) -> None:
    """Use a saved node where neither --url nor FOREBAY_URL names one."""
    book = saved.read()
    saved.write(saved.Book(book.nodes, _known(book, name)))
    print(f"{name} ({book.nodes[name].url}) is used where no node is named")


@app.command("ls")
@verb
def ls(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the saved nodes; no tokens."""
    book = saved.read()
    rows = [(name, one, name == book.use) for name, one in sorted(book.nodes.items())]
    if as_json:
        shown = [
            {"name": name, "url": one.url, "ca": one.ca, "token": bool(one.token), "used": used}
            for name, one, used in rows
        ]
        show.document(shown)
    elif not rows:
        show.note("no nodes are saved: `forebay config set NAME URL` saves one")
    else:
        cells = [(name, one.url, one.ca or "-", "yes" if one.token else "no", "*" * used) for name, one, used in rows]
        print(show.columns(("NAME", "URL", "CA", "TOKEN", "USED"), cells))


@app.command("rm")
@verb
def rm(name: Name, debug: Debug = False) -> None:
    """Forget a saved node."""
    book = saved.read()
    _known(book, name)
    nodes = {other: one for other, one in book.nodes.items() if other != name}
    saved.write(msgspec.structs.replace(book, nodes=nodes, use="" if book.use == name else book.use))
    print(f"{name} is forgotten")


def _known(book: saved.Book, name: str) -> str:
    if name not in book.nodes:
        raise NotFound(f"no node {name} is saved{did_you_mean(name, book.nodes)}: see `forebay config ls`")
    return name
