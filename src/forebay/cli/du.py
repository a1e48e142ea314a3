"""`forebay du`: how much lies where."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from forebay.cli import address, show
from forebay.cli.get import entries
from forebay.cli.options import Address, AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb

if TYPE_CHECKING:
    from forebay.client.sync import Client

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("du")
@verb
def du(where: Address, url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Sum up objects and bytes of a folder, one level deep.

    With --json one line for each: {"name", "objects", "size_bytes"}, the whole last.
    """
    at = address.parse(where)
    with open_client(url) as client:
        sums = _sums(client, at)
    if not sums:
        raise address.nothing_there(at)
    rows = [*sorted(sums.items()), (str(at), (sum(n for n, _ in sums.values()), sum(b for _, b in sums.values())))]
    if as_json:
        for name, (objects, size_bytes) in rows:
            show.line({"name": name, "objects": objects, "size_bytes": size_bytes})
    else:
        shown = [(show.size(size_bytes), str(objects), one_line(name)) for name, (objects, size_bytes) in rows]
        print(show.columns(("SIZE", "OBJECTS", "NAME"), shown, right=(0, 1)))


def _sums(client: Client, at: address.Address) -> dict[str, tuple[int, int]]:
    """Objects and bytes by the next part of the key below the folder that `at` names, with a slash for a folder."""
    start = at.key.partition("*")[0]
    cut = len(start) + 1 if start == at.key and start and not start.endswith("/") else start.rfind("/") + 1
    objects: Counter[str] = Counter()
    size_bytes: Counter[str] = Counter()
    for entry in entries(client, at):
        head, slash, _ = entry.key[cut:].partition("/")
        name = entry.key[:cut] + head + slash if head or slash else entry.key
        objects[name] += 1
        size_bytes[name] += entry.size_bytes
    return {name: (objects[name], size_bytes[name]) for name in objects}
