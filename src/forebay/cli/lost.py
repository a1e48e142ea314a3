"""`forebay lost`: what was acknowledged and is gone, until somebody says that it may be."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli import address, show
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.errors import Invalid
from forebay.core.volumes import LostObject

app = typer.Typer(
    no_args_is_help=True, help="List and give up lost objects.", rich_markup_mode=None, add_completion=False
)


@app.command("ls")
@verb
def ls(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADDRESS]", autocompletion=complete_addresses, help="A bucket or prefix. Default: all buckets."
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List objects that were acknowledged, that no backend has, and whose bytes are gone.

    With --json a list of LostObject (docs/protocol.md).
    """
    with open_client(url) as client:
        if where is not None:
            at = address.parse(where)
            found = list(client.lost(at.bucket, at.key))
        else:
            names = [bucket.name for bucket in client.status().buckets if bucket.lost_objects]
            found = [lost for name in names for lost in client.lost(name)]
    if as_json:
        show.document(found)
    elif not found:
        show.note("nothing is lost")
    else:
        rows = [(_name(each), show.size(each.size_bytes), show.moment(each.modified_s), each.problem) for each in found]
        print(show.columns(("OBJECT", "BYTES", "WRITTEN", "WHY"), rows, right=(1,)))


@app.command("give-up")
@verb
def give_up(
    where: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", autocompletion=complete_addresses, help="An object, or with -r a folder."),
    ],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All that is lost in the folder.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Give up lost objects: their keys are then what the backend has, or nothing.

    With --json a list of LostObject (docs/protocol.md).
    """
    at = address.parse(where) if recursive else address.parse_object(where)
    given: list[LostObject] = []
    with open_client(url) as client:
        if not recursive:
            given = client.lost_give_up(at.bucket, keys=(at.key,))
            if not given:
                raise Invalid(f"{where} is not lost: `forebay lost ls` lists what is")
        else:
            key, prefix = address.selection(at)
            given += client.lost_give_up(at.bucket, keys=(key,)) if key else []
            while found := client.lost_give_up(at.bucket, prefix):
                given += found
    if as_json:
        show.document(given)
    elif not given:
        show.note(f"nothing is lost at {one_line(where)}")
    else:
        for each in given:
            print(f"given up: {_name(each)} ({show.size(each.size_bytes)}; {each.problem})")


def _name(lost: LostObject) -> str:
    return one_line(f"{lost.bucket}/{lost.key}")
