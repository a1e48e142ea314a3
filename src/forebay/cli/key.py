"""`forebay key`: who may do what, in the identities file that `forebay node --identities` reads.

Theory. The file (`core/keyfile.py`) is the truth and the node reads it again when it changes, so this needs no running
node. A secret is shown once, when it is made: of the token only the hash is kept; the S3 secret must be kept (a
signature cannot be verified without it), as it is, or sealed once `forebay key seal` was used. Sealing takes only the
public key in the file, so every verb here works where the private key is not.

Invariants. (1) The file is replaced whole or not at all, by one writer at a time. (2) What is written can be read: it
is parsed again before it replaces anything. (3) Proofs whose time is over leave the file with its next change.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Dir
from forebay.cli.outcome import verb
from forebay.client import local_node
from forebay.core.access import OIDC_NAMES, Grant, format_grants, parse_grants
from forebay.core.errors import Exists, Invalid, NotFound
from forebay.core.keyfile import Entry, KeyFile, Proof, Replaced, parse, render
from forebay.core.machines.allowance import Limited
from forebay.core.oidc import LEEWAY_S, Ended, Issuer
from forebay.ports import chance, clock

app = typer.Typer(
    no_args_is_help=True, help="Make keys for clients of a node.", rich_markup_mode=None, add_completion=False
)
SUCH_AS = "Such as read:corpus,write:ckpt-*/team-a/,create:scratch-*; see docs/security.md."
File = Annotated[
    str | None, typer.Option("--file", metavar="FILE", help="The identities file. Default: DIR/identities.json.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Who it is for.")]
Grants = Annotated[str, typer.Argument(metavar="GRANTS", help=SUCH_AS)]
RequestsPerS = Annotated[
    float | None, typer.Option("--requests-per-s", metavar="N", help="At most so many requests a second; 0: no limit.")
]
BytesPerS = Annotated[
    str | None,
    typer.Option("--bytes-per-s", metavar="RATE", help="At most so many bytes, such as 200MiB/s; 0: no limit."),
]
Connections = Annotated[
    int | None, typer.Option("--connections", metavar="N", help="At most so many connections; 0: no limit.")
]
P = TypeVar("P", bound=Proof)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)").fullmatch
KEY_ID = re.compile(r"FBT[A-Z2-7]{17}").fullmatch
_NOTICED = "A node notices within seconds."


@app.command("create")
@verb
def create(
    name: Name,
    allow: Annotated[str, typer.Option("--allow", metavar="GRANTS", help=SUCH_AS)],
    requests_per_s: RequestsPerS = None,
    bytes_per_s: BytesPerS = None,
    connections: Connections = None,
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a key pair and a token, and allow them something."""
    grants = format_grants(parse_grants(allow))
    limits = _limited(None, requests_per_s, bytes_per_s, connections)
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        if any(entry.name == name for entry in known.identities):
            raise Exists(
                f"{name} has a key already: choose another name, replace the key with `forebay key rotate {name}`, or "
                f"`forebay key rm {name}` first"
            )
        made = Made(known.sealed_for)
        new = msgspec.structs.replace(made.entry(name, grants), limits=limits)
        _write(path, _with(known, *known.identities, new))
    made.tell(name, grants, path, as_json=as_json)


@app.command("rotate")
@verb
def rotate(
    name: Name,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="How long the old key still works: 30m, 24h, 7d; 0s is not.")
    ] = "24h",
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Replace a key pair and token; the old ones work on for a while."""
    until_s = clock.wall_s() + _seconds(grace)
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        old = _find(known, name, path)
        made = Made(known.sealed_for)
        fields = {field: getattr(old, field) for field in Proof.__struct_fields__}
        retiring = (*old.retiring, Replaced(**fields, until_s=until_s)) if _seconds(grace) else ()
        retiring = tuple(msgspec.structs.replace(one, until_s=min(one.until_s, until_s)) for one in retiring)
        drawn = made.entry(name, old.allow)
        proof = {field: getattr(drawn, field) for field in Proof.__struct_fields__}
        new = msgspec.structs.replace(old, **proof, retiring=retiring)  # its rights and limits stay
        _write(path, _with(known, *(new if entry.name == name else entry for entry in known.identities)))
    made.tell(name, old.allow, path, as_json=as_json, until_s=until_s if retiring else 0.0)


@app.command("ls")
@verb
def ls(file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List who has a key, and what it allows; no secrets."""
    path = _path(file, dir)
    known = _read(path)
    if as_json:
        show.document([_shown(entry, known) for entry in known.identities])
    elif not known.identities:
        show.note(f"no keys in {path}: make one with `forebay key create NAME --allow read:BUCKET`")
    else:
        rows = [
            (e.name, e.access_key_id or "-", "yes" if e.token_hash else "no", _state(e), _bounds(e), e.allow or "-")
            for e in known.identities
        ]
        print(show.columns(("NAME", "ACCESS KEY ID", "TOKEN", "STATE", "LIMITS", "ALLOWS"), rows))


@app.command("rm")
@verb
def rm(name: Name, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Take a key away. A node notices within seconds."""
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        gone = _find(known, name, path)
        _write(path, _with(known, *(entry for entry in known.identities if entry is not gone)))
    if as_json:
        show.document({"name": name, "removed": True})
    else:
        print(f"the key of {name} is gone")


@app.command("disable")
@verb
def disable(name: Name, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Let a key prove nothing for now; `enable` takes it back. A node notices within seconds."""
    _change(name, file, dir, as_json, disabled=True)


@app.command("enable")
@verb
def enable(name: Name, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Let a disabled key work again."""
    _change(name, file, dir, as_json, disabled=False)


@app.command("grant")
@verb
def grant(
    name: Name, grants: Grants, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Allow a key more. A node notices within seconds."""
    _change(name, file, dir, as_json, add=parse_grants(grants))


@app.command("revoke")
@verb
def revoke(
    name: Name, grants: Grants, file: File = None, dir: Dir = None, as_json: AsJson = False, debug: Debug = False
) -> None:
    """Allow a key less: grants it has, as `forebay key ls` shows them. A node notices within seconds."""
    _change(name, file, dir, as_json, take=parse_grants(grants))


@app.command("end")
@verb
def end(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="FBT…, the id of temporary keys, or oidc:ISSUER:SUBJECT, a person.")
    ],
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """End temporary keys, or all that a person of an issuer has, before their time. A node notices within seconds."""
    path, at_s = _path(file, dir), float(int(clock.wall_s()))
    is_key = KEY_ID(what) is not None
    of, _, subject = what.removeprefix(OIDC_NAMES).partition(":")
    if not is_key and (not what.startswith(OIDC_NAMES) or not of or not subject):
        raise Invalid(
            f"{what!r} is neither temporary keys (FBT and 17 characters) nor a person (oidc:ISSUER:SUBJECT, as logs "
            "and jobs name them); to end a key of the file, use `forebay key disable`, `rotate` or `rm`"
        )
    with _locked(path):
        known = _read(path)
        names = [issuer.name for issuer in known.oidc]
        if not names or (not is_key and of not in names):
            raise NotFound(f"no issuer {'' if is_key else of + ' '}is in {path}: it has {', '.join(names) or 'none'}")
        one = Ended(at_s=at_s, access_key_id=what) if is_key else Ended(at_s=at_s, subject=subject)
        _write(path, msgspec.structs.replace(known, oidc=tuple(_ending(i, one, of) for i in known.oidc)))
    if as_json:
        show.document({"ended": what, "at_s": at_s})
    elif is_key:
        print(f"the temporary keys {what} are worth nothing. {_NOTICED}")
    else:
        print(
            f"what {subject} got until now is worth nothing: tokens, temporary keys, URLs signed with them. {_NOTICED} "
            f"What they get from {LEEWAY_S:.0f} s from now on works."
        )


@app.command("limit")
@verb
def limit(
    name: Name,
    requests_per_s: RequestsPerS = None,
    bytes_per_s: BytesPerS = None,
    connections: Connections = None,
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Bound what a key may do in a second; what is not given stays as it is. A node notices within seconds."""
    if requests_per_s is None and bytes_per_s is None and connections is None:
        raise Invalid("name what to bound: --requests-per-s, --bytes-per-s or --connections; 0 takes a limit away")
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        old = _find(known, name, path)
        new = msgspec.structs.replace(old, limits=_limited(old.limits, requests_per_s, bytes_per_s, connections))
        _write(path, _with(known, *(new if entry is old else entry for entry in known.identities)))
    if as_json:
        show.document(_shown(new, known))
    else:
        print(f"{name} may do {_bounds(new) if new.limits else 'as much as there is'}. {_NOTICED}")


@app.command("seal")
@verb
def seal(
    key: Annotated[
        str, typer.Argument(metavar="KEYFILE", help="The private key; made when it is not there. Not on DIR's disk.")
    ],
    old_key: Annotated[
        str | None, typer.Option("--from", metavar="KEYFILE", help="The private key that opens what is sealed now.")
    ] = None,
    file: File = None,
    dir: Dir = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Encrypt the secrets in the identities file, now and from now on, for a key that is kept elsewhere."""
    from forebay.node import sealed_secrets

    path, key_path = _path(file, dir), Path(key).expanduser().absolute()
    with _locked(path):
        known = _read(path)
        opener = sealed_secrets.read_key(Path(old_key).expanduser()) if old_key else None
        if known.is_sealed and opener is None:
            raise Invalid(
                f"the secrets in {path} are sealed already: give the private key that opens them with --from KEYFILE"
            )
        made = not key_path.exists()
        recipient = (sealed_secrets.make_key(key_path) if made else sealed_secrets.read_key(key_path)).public

        def sealed(proof: P) -> P:
            secret = proof.secret_access_key
            if proof.secret_sealed:
                assert opener is not None
                secret = opener.open(proof.secret_sealed, proof.access_key_id)
            box = sealed_secrets.seal(recipient, secret, proof.access_key_id) if secret else ""
            return msgspec.structs.replace(proof, secret_access_key="", secret_sealed=box)

        entries = []
        for entry in known.identities:
            retiring = tuple(sealed(old) for old in entry.retiring)
            entries.append(msgspec.structs.replace(sealed(entry), retiring=retiring))
        _write(path, msgspec.structs.replace(known, identities=tuple(entries), sealed_for=recipient))
    if as_json:
        show.document({"file": str(path), "key": str(key_path), "made": made, "sealed_for": recipient})
        return
    print(f"the secrets in {path} are sealed; a node opens them with --identity-key {key_path}")
    if key_path.stat().st_dev == path.stat().st_dev:
        show.note(
            "the key lies on the same file system as the secrets, so a copy of it holds both: move it to another disk, "
            "or let systemd keep it (docs/security.md)"
        )


class Made:
    """A key pair and a token that were just drawn, to be sealed for `sealed_for` if that is not empty."""

    def __init__(self, sealed_for: str) -> None:
        self.key_id = f"FB{chance.token_hex(9).upper()}"
        self.secret = chance.token_hex(20)
        self.token = chance.token_hex(32)
        self._sealed_for = sealed_for

    def entry(self, name: str, allow: str) -> Entry:
        """What the file keeps of them."""
        digest = Proof(token=self.token).token_hash
        entry = Entry(name=name, allow=allow, access_key_id=self.key_id, token_sha256=digest)
        if not self._sealed_for:
            return msgspec.structs.replace(entry, secret_access_key=self.secret)
        from forebay.node.sealed_secrets import seal

        return msgspec.structs.replace(entry, secret_sealed=seal(self._sealed_for, self.secret, self.key_id))

    def tell(self, name: str, allow: str, path: Path, *, as_json: bool, until_s: float = 0.0) -> None:
        if as_json:
            made = {"access_key_id": self.key_id, "secret_access_key": self.secret, "token": self.token}
            more = {"old_until_s": until_s} if until_s else {}
            show.document({"name": name, **made, "allow": allow, "file": str(path), **more})
            return
        print(
            f"{name} may {allow or 'do nothing yet'}; these are shown once:\n\n"
            f"  export AWS_ACCESS_KEY_ID={self.key_id}\n"
            f"  export AWS_SECRET_ACCESS_KEY={self.secret}\n"
            f"  export FOREBAY_TOKEN={self.token}\n"
            "  unset AWS_SESSION_TOKEN AWS_PROFILE\n\n"
            "They are for clients, not for the shell that starts the node: it would ask its backends with them."
        )
        if until_s:
            print(f"The old ones work until {_when(until_s)}. {_NOTICED}")
        else:
            print(f"A node knows them when it is started with --identities {path}")


def _change(
    name: str,
    file: str | None,
    dir: str | None,
    as_json: bool,
    *,
    disabled: bool | None = None,
    add: tuple[Grant, ...] = (),
    take: tuple[Grant, ...] = (),
) -> None:
    """Change one entry, and say how it is now."""
    path = _path(file, dir)
    with _locked(path):
        known = _read(path)
        old = _find(known, name, path)
        grants = parse_grants(old.allow) if old.allow else ()
        missing = [one for one in take if one not in grants]
        if missing:
            raise NotFound(f"{name} has no grant {format_grants(missing)}: it has {old.allow or 'none'}")
        grants = tuple(one for one in dict.fromkeys((*grants, *add)) if one not in take)
        flag = old.disabled if disabled is None else disabled
        new = msgspec.structs.replace(old, allow=format_grants(grants), disabled=flag)
        _write(path, _with(known, *(new if entry is old else entry for entry in known.identities)))
    if as_json:
        show.document(_shown(new, known))
    else:
        print(f"{name} {'is disabled, and ' if new.disabled else ''}may {new.allow or 'do nothing'}. {_NOTICED}")


def _ending(issuer: Issuer, one: Ended, of: str) -> Issuer:
    """The issuer with what was ended. Whose temporary keys are, their id does not say, so every issuer has that."""
    if one.subject and issuer.name != of:
        return issuer
    now_s = clock.wall_s()
    others = (
        old for old in issuer.ended
        if not old.is_past(now_s) and (old.access_key_id, old.subject) != (one.access_key_id, one.subject)
    )  # fmt: skip
    return msgspec.structs.replace(issuer, ended=(*others, one))


def _shown(entry: Entry, known: KeyFile) -> dict[str, object]:
    retiring = [{"access_key_id": old.access_key_id, "until_s": old.until_s} for old in _current(entry)]
    return {
        "name": entry.name,
        "access_key_id": entry.access_key_id,
        "allow": entry.allow,
        "disabled": entry.disabled,
        "limits": entry.limits,
        "sealed": bool(entry.secret_sealed),
        "retiring": retiring,
    }


def _limited(
    old: Limited | None, requests_per_s: float | None, bytes_per_s: str | None, connections: int | None
) -> Limited | None:
    """The limits with those that are given; None for none. `Invalid` for what can be no limit."""
    given = {"requests_per_s": requests_per_s, "bytes_per_s": bytes_per_s, "connections": connections}
    if given["bytes_per_s"] == "0":
        given["bytes_per_s"] = 0.0
    limited = msgspec.structs.replace(old or Limited(), **{name: n for name, n in given.items() if n is not None})
    limited.read()
    return limited if limited != Limited() else None


def _bounds(entry: Entry) -> str:
    """An entry's limits in words."""
    if entry.limits is None:
        return "-"
    limits = entry.limits.read()
    words = {
        f"{limits.requests_per_s:g} requests/s": limits.requests_per_s,
        show.rate(limits.bytes_per_s): limits.bytes_per_s,
        f"{limits.connections} connections": limits.connections,
    }
    return ", ".join(word for word, bound in words.items() if bound)


def _state(entry: Entry) -> str:
    if entry.disabled:
        return "disabled"
    old = _current(entry)
    return f"old until {_when(max(one.until_s for one in old))}" if old else "ok"


def _current(entry: Entry) -> tuple[Replaced, ...]:
    now_s = clock.wall_s()
    return tuple(old for old in entry.retiring if old.until_s >= now_s)


def _when(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _seconds(text: str) -> float:
    match = _TIME(text)
    if match is None:
        raise Invalid(f"--grace {text!r} is not a time: use 30m, 24h or 7d, or 0s for none")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _path(file: str | None, dir: str | None) -> Path:
    return Path(file).expanduser().absolute() if file else local_node.directory(dir) / "identities.json"


def _find(known: KeyFile, name: str, path: Path) -> Entry:
    for entry in known.identities:
        if entry.name == name:
            return entry
    raise NotFound(f"{name} has no key in {path}: see `forebay key ls`")


def _with(known: KeyFile, *entries: Entry) -> KeyFile:
    return msgspec.structs.replace(known, identities=tuple(entries))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _read(path: Path) -> KeyFile:
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return KeyFile(())
    except Invalid as error:
        raise Invalid(f"{path}: {error.message}; mend it by hand first") from None


def _write(path: Path, file: KeyFile) -> None:
    """Replace the file: tokens as hashes, without proofs whose time is over."""
    entries = []
    for entry in file.identities:
        retiring = tuple(_hashed(old) for old in _current(entry))
        entries.append(msgspec.structs.replace(_hashed(entry), retiring=retiring))
    body = render(msgspec.structs.replace(file, identities=tuple(entries)))
    target = Path(os.path.realpath(path))  # a link stays one
    new = target.with_name(f".{target.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as out:
        with contextlib.suppress(OSError):
            at = target.stat()
            os.fchown(fd, at.st_uid, at.st_gid)  # root changes the keys of a node that runs as another user
        out.write(body)
        out.flush()
        os.fsync(fd)
    new.replace(target)


def _hashed(proof: P) -> P:
    return msgspec.structs.replace(proof, token="", token_sha256=proof.token_hash)
