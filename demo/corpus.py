"""The demo's data: fragments of real files that this machine's Python ships, as tar shards of samples.

Every file of the standard library and of the installed packages belongs to a kind by its name: Python, C headers, JSON,
native code, bytecode, compressed data, fonts, images, text. A sample is up to 32 KiB of one file, stored as a member
`<number>.<kind>` of a tar shard of 16 MB. The question for the model: which kind is it, from the bytes alone.
"""

from __future__ import annotations

import io
import random
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

FRAGMENT_BYTES = 32 << 10
SHARD_BYTES = 16_000_000
HELD_OUT = 20  # one file of so many is kept for the test shard, whole: no fragment of it is trained on
KINDS = {
    "python": (".py",),
    "header": (".h", ".hpp", ".cuh"),
    "json": (".json",),
    "native": (".so", ".a"),
    "bytecode": (".pyc",),
    "packed": (".gz", ".npz", ".whl", ".zip"),
    "font": (".ttf", ".otf"),
    "image": (".png", ".jpg", ".jpeg", ".gif", ".ico"),
    "text": (".rst", ".md", ".txt"),
}
SHARE_MAX = 0.30  # no kind fills more than this of the corpus: native code alone would be most of it
NAMES = tuple(KINDS)


def find_files() -> dict[str, list[Path]]:
    """Files by kind, from what is installed here; in an order that does not depend on the machine's mood."""
    roots = {Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))}
    roots |= {path for path in (Path("/usr/share/icons"), Path("/usr/share/pixmaps")) if path.is_dir()}
    kind_of = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    seen: set[Path] = set()
    for root in sorted(roots):
        for path in sorted(root.rglob("*")):
            kind = kind_of.get(path.suffix) or ("native" if ".so." in path.name else None)
            if kind and path.is_file() and not path.is_symlink() and path not in seen:
                seen.add(path)
                found[kind].append(path)
    return found


def fragments(path: Path) -> Iterator[bytes]:
    """The file in pieces; a last piece too small to tell anything is left out."""
    with path.open("rb") as file:
        while len(piece := file.read(FRAGMENT_BYTES)) >= 512:
            yield piece


def make_shards(folder: Path, bytes_wanted: int, say: Callable[[str], None]) -> list[Path]:
    """Write training shards (`train-000.tar`, …) of `bytes_wanted` together and one test shard; return their paths.

    Shards that a former run completed are used again.
    """
    done = folder / f"complete-{bytes_wanted}-{FRAGMENT_BYTES}"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("*.tar"), *folder.glob("complete-*")]:
            old.unlink()
        train, test = _choose(find_files(), bytes_wanted)
        say(
            f"{len(train)} fragments, {sum(map(len, train.values())) / 1e6:.0f} MB, to train on; {len(test)} to test on"
        )
        for number, members in enumerate(_batches(train)):
            _write_tar(folder / f"train-{number:03d}.tar", members)
        _write_tar(folder / "test-000.tar", list(test.items()))
        done.touch()
    return sorted(folder.glob("*.tar"))


def _choose(files: dict[str, list[Path]], bytes_wanted: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Named fragments to train and to test on: every kind in turn, so that none drowns the others."""
    chance = random.Random(1)
    sources = {kind: _fragments_of(paths, chance) for kind, paths in files.items()}
    sizes = dict.fromkeys(sources, 0)
    train: dict[str, bytes] = {}
    test: dict[str, bytes] = {}
    while sources and sum(sizes.values()) < bytes_wanted:
        for kind in list(sources):
            if sizes[kind] > SHARE_MAX * bytes_wanted:
                del sources[kind]
                continue
            for path, piece in sources[kind]:
                held_out = hash_of(path) % HELD_OUT == 0
                (test if held_out else train)[f"{len(train) + len(test):06d}.{kind}"] = piece
                sizes[kind] += 0 if held_out else len(piece)
                break
            else:
                del sources[kind]
    names = list(train)
    chance.shuffle(names)
    kept = sorted(test, key=hash_of)[:1024]
    return {name: train[name] for name in names}, {name: test[name] for name in kept}


def hash_of(name: object) -> int:
    """A number that is the same in every run (Python's own hash of text is not)."""
    return random.Random(str(name)).getrandbits(32)


def _fragments_of(paths: list[Path], chance: random.Random) -> Iterator[tuple[Path, bytes]]:
    paths = list(paths)
    chance.shuffle(paths)
    for path in paths:
        for piece in fragments(path):
            yield path, piece


def _batches(samples: dict[str, bytes]) -> Iterator[list[tuple[str, bytes]]]:
    batch: list[tuple[str, bytes]] = []
    size = 0
    for name, piece in samples.items():
        batch.append((name, piece))
        size += len(piece)
        if size >= SHARD_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, piece in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(piece)
            tar.addfile(entry, io.BytesIO(piece))
