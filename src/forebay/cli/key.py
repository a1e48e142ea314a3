"""`forebay key`: who may do what, in the identities file that `forebay node --identities` reads.

Theory. The file is the truth and the node reads it again when it changes, so this needs no running node. A secret is
shown once, when it is made: of the token only the hash is kept; the S3 secret must be kept (a signature cannot be
verified without it), so the file is for its owner's eyes only (mode 0600).

Invariants. (1) The file is replaced whole or not at all, by one writer at a time. (2) What is written can be read: it
is parsed again before it replaces anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from forebay.cli import local_node, show
from forebay.cli.options import AsJson, Debug, Dir
from forebay.cli.outcome import verb
from forebay.core.access import Grant, Identity, parse_grants, parse_identities
from forebay.core.errors import Exists, Invalid, NotFound
from forebay.ports import chance

app = typer.Typer(
    no_args_is_help=True, help="Make keys for clients of a node.", rich_markup_mode=None, add_completion=False
)
File = Annotated[
    str | None, typer.Option("--file", metavar="FILE", help="The identities file. Default: DIR/identities.json.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who it is for.")]


@app.command("create")
@verb
def create(
    name: Name,
    allow: Annotated[str, typer.Option("--allow", metavar="GRANTS", help="Such as read:corpus,write:ckpt-*.")],
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a key pair and a token, and allow them something."""
    grants = parse_grants(allow)
    key_id, secret, token = f"FB{chance.token_hex(9).upper()}", chance.token_hex(20), chance.token_hex(32)
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        if any(identity.name == name for identity in known):
            raise Exists(f"{name} has a key already: choose another name, or `forebay key rm {name}` first")
        _write(path, [*known, Identity(name, key_id, secret, hashlib.sha256(token.encode()).hexdigest(), grants)])
    made = {"name": name, "access_key_id": key_id, "secret_access_key": secret, "token": token}
    if as_json:
        show.document({**made, "allow": _text(grants), "file": str(path)})
        return
    print(
        f"{name} may {_text(grants)}; these are shown once:\n\n"
        f"  export AWS_ACCESS_KEY_ID={key_id}\n"
        f"  export AWS_SECRET_ACCESS_KEY={secret}\n"
        f"  export FOREBAY_TOKEN={token}\n\n"
        f"A node knows them when it is started with --identities {path}"
    )


@app.command("ls")
@verb
def ls(file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List who has a key, and what it allows; no secrets."""
    path = _path(file, dir)
    known = _read(path)
    if as_json:
        show.document([{"name": i.name, "access_key_id": i.access_key_id, "allow": _text(i.grants)} for i in known])
    elif not known:
        show.note(f"no keys in {path}: make one with `forebay key create NAME --allow read:BUCKET`")
    else:
        rows = [(i.name, i.access_key_id or "-", "yes" if i.token_sha256 else "no", _text(i.grants)) for i in known]
        print(show.columns(("NAME", "ACCESS KEY ID", "TOKEN", "ALLOWS"), rows))


@app.command("rm")
@verb
def rm(name: Name, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Take a key away. A node notices within seconds."""
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        left = [identity for identity in known if identity.name != name]
        if len(left) == len(known):
            raise NotFound(f"{name} has no key in {path}: see `forebay key ls`")
        _write(path, left)
    if as_json:
        show.document({"name": name, "removed": True})
    else:
        print(f"the key of {name} is gone")


def _path(file: str | None, dir: str | None) -> Path:
    return Path(file).expanduser().absolute() if file else local_node.directory(dir) / "identities.json"


def _text(grants: tuple[Grant, ...]) -> str:
    return ",".join(f"{grant.verb}:{grant.pattern}" for grant in grants)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> list[Identity]:
    try:
        return parse_identities(path.read_bytes())
    except FileNotFoundError:
        return []
    except Invalid as error:
        raise Invalid(f"{path}: {error.message}; mend it by hand first") from None


def _write(path: Path, identities: list[Identity]) -> None:
    rows = [
        {
            "name": identity.name,
            "access_key_id": identity.access_key_id,
            "secret_access_key": identity.secret_access_key,
            "token_sha256": identity.token_sha256,
            "allow": _text(identity.grants),
        }
        for identity in identities
    ]
    body = msgspec.json.format(msgspec.json.encode({"identities": rows}), indent=2) + b"\n"
    assert parse_identities(body) == identities, "what is written can be read"
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(fd)
    new.replace(path)
