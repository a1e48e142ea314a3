"""Loader rows: epochs of `forebay.torch` beside the loaders that people use today, on the same samples.

Theory. Every side reads the same JPEG files, in the form that it wants (tar shards, MDS shards, litdata chunks, one
object each), from the same SeaweedFS behind the same link. Every run is a process of its own with empty caches: its
first epoch is cold and its second finds what the peer, or the node, kept on this machine's disk. Forebay is compared
with the *best* peer of each round, whichever that is; one that was far from being it in the first round, in both
epochs, is not run again, and told with that round's numbers (some of them take minutes for an epoch). Decoding, where
it is on, is that of each side's users: ours by the decoder that ships, the peers' by pillow, as their own decoders are
made. What ours leaves to be won is told by the same files read from memory and decoded by it in as many workers.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import load, peers
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import MIB, REPORTED, Objects, Row
from bench.servers import MissingProgram
from bench.stats import compared

SHARD_BYTES = 64 * MIB
BATCH, SEED, EPOCHS = 64, 20261121, 2
PICTURES = 32  # different pictures; each sample has bytes of its own behind one
TIMEOUT_S = 1800.0
RUNS_MAX = 3  # of a peer in one round, if it fails
NEAR = 2.0  # a peer that was slower than the best by more than this in the first round is not run again
PEERS, LIMITS = tuple(peers.PEERS), tuple(peers.LIMITS)


def peers_python() -> str:
    """The interpreter of the environment that has the peers."""
    path = os.environ.get("FOREBAY_BENCH_PEERS", ".venv-peers/bin/python")
    if not Path(path).exists():
        raise MissingProgram("the peers are missing: run `make peers`, or name their python in FOREBAY_BENCH_PEERS")
    return path


def peers_versions(names: Sequence[str] = (*peers.PEERS, "torch")) -> str:
    """Who is compared with, for the notes of a row."""
    told = subprocess.run([peers_python(), peers.__file__, "versions"], capture_output=True, text=True, check=True)
    found = json.loads(told.stdout).items()
    return "peers: " + ", ".join(f"{name} {version}" for name, version in found if name in names)


# --- samples ---------------------------------------------------------------------------------------------------------
def pictures(size_bytes: int) -> list[bytes]:
    """JPEG files of at most `size_bytes`, parts of a real photograph, as large as fits."""
    image = importlib.import_module("PIL.Image")  # of the dev extra, as what the samples are made of
    with importlib.import_module("matplotlib.cbook").get_sample_data("grace_hopper.jpg") as file:
        photo = image.open(file).convert("RGB")
    chance = random.Random(size_bytes)
    found = []
    for _ in range(PICTURES):
        side = min(photo.size)
        while True:
            left, top = (chance.randrange(whole - side + 1) for whole in photo.size)
            out = io.BytesIO()
            photo.crop((left, top, left + side, top + side)).save(out, "JPEG", quality=92)
            if len(out.getvalue()) <= size_bytes - 16:
                break
            side = side * 9 // 10
        found.append(out.getvalue())
    return found


def make_samples(folder: Path, objects: Objects) -> None:
    """`count` files of exactly `size_bytes`: a picture, then bytes of its own, which decoders skip."""
    folder.mkdir(parents=True)
    chance, made = random.Random(objects.name), pictures(objects.size_bytes)
    for index in range(objects.count):
        picture = made[index % len(made)]
        own = chance.randbytes(objects.size_bytes - len(picture))
        (folder / f"{index:07d}.jpg").write_bytes(picture + own)


def make_shards(files: Path, folder: Path, objects: Objects) -> list[str]:
    """Tar shards of the samples, as WebDataset has them; their names."""
    folder.mkdir()
    each = max(1, SHARD_BYTES // objects.size_bytes)
    names = []
    for first in range(0, objects.count, each):
        names.append(f"{first // each:05d}.tar")
        with tarfile.open(folder / names[-1], "w") as shard:
            for index in range(first, min(objects.count, first + each)):
                shard.add(files / f"{index:07d}.jpg", arcname=f"{index:07d}.jpg")
    return names


class Forms:
    """The samples in the bucket, in every form; `name` is the prefix of all of them."""

    def __init__(self, lab: Lab, objects: Objects) -> None:
        self.objects, root = objects, lab.files / f"loader-{objects.name}"
        self.name = root.name
        if root.exists():
            self.shards = sorted(path.name for path in (root / "tar").iterdir())
            return
        make_samples(root / "files", objects)
        self.shards = make_shards(root / "files", root / "tar", objects)
        folders = {form: str(root / form) for form in ("files", "mds", "lit")}
        work = {"samples": objects.count, **folders}
        lines_of([peers_python(), peers.__file__, "prepare"], work, {})
        lab.upload_files([str(path.relative_to(lab.files)) for path in sorted(root.rglob("*")) if path.is_file()])


# --- runs ------------------------------------------------------------------------------------------------------------
def lines_of(
    command: list[str], work: dict[str, Any], env: dict[str, str], begin: str = "epoch"
) -> list[dict[str, float]]:
    """What one process told in lines of JSON that begin with that name. `LoadFailed` with the end of what it said."""
    done = subprocess.run(
        command,
        input=json.dumps(work),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise load.LoadFailed(f"{command[-1]} ended with {done.returncode}: {said[-1] if said else ''}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(f'{{"{begin}"')]


def peer_env(endpoint: str) -> dict[str, str]:
    """What the environment of a peer's process says about the bucket."""
    return {
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _peer(lab: Lab, forms: Forms, name: str, endpoint: str, how: str) -> list[float]:
    """Samples a second of each epoch of a peer."""
    cache = lab.dir / "peer-cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    work = {
        "endpoint": endpoint,
        "bucket": BUCKET,
        "shards": [f"{forms.name}/tar/{name}" for name in forms.shards],
        "mds": f"{forms.name}/mds",
        "lit": f"{forms.name}/lit",
        "objects": f"{forms.name}/files/",
        "cache": str(cache),
        "files": str(lab.files / forms.name / "files"),
        "samples": forms.objects.count,
        **_common(how),
        "workers": 2,
    }
    return _rates(lines_of([peers_python(), peers.__file__, name], work, peer_env(endpoint)), name)


def _peer_again(
    lab: Lab, forms: Forms, name: str, endpoint: str, how: str, failed: dict[str, list[str]]
) -> list[float]:
    """As `_peer`; a run that failed is told and done again, since some peers do not always come through."""
    for _ in range(RUNS_MAX - 1):
        try:
            return _peer(lab, forms, name, endpoint, how)
        except load.LoadFailed as error:
            failed.setdefault(name, []).append(str(error))
            print(f"[bench]   {error}: once more", file=sys.stderr, flush=True)
    return _peer(lab, forms, name, endpoint, how)


def _ours(lab: Lab, forms: Forms, kind: str, endpoint: str, how: str) -> list[float]:
    """Samples a second of each epoch through a node that begins empty."""
    with lab.node(core=None) as node:
        node.add_bucket(BUCKET, lab, endpoint)
        work = {
            "url": node.endpoint,
            "kind": kind,
            "place": f"{BUCKET}/{forms.name}/{'files' if kind == 'objects' else 'tar'}/",
            "samples": forms.objects.count,
            **_common(how),
            "workers": 2 if how else 0,
        }
        return _rates(lines_of([sys.executable, "-m", "bench.trainee"], work, {}), f"forebay {kind}")


def _common(how: str) -> dict[str, Any]:
    return {"decode": how, "batch": BATCH, "seed": SEED, "epochs": EPOCHS}


def _rates(epochs: list[dict[str, float]], who: str) -> list[float]:
    if len(epochs) != EPOCHS:
        raise load.LoadFailed(f"{who} told of {len(epochs)} epochs, not {EPOCHS}")
    return [epoch["samples"] / epoch["seconds"] for epoch in epochs]


def epochs(lab: Lab, row: Row) -> Result:
    """Both epochs of every side, each round with empty caches."""
    (objects,) = row.quick if lab.quick else row.objects
    how = "image" if row.decode else ""
    forms = Forms(lab, objects)
    sides = [*PEERS, "shards", "objects", *(LIMITS if row.decode else ())]
    rates: dict[str, list[list[float]]] = {side: [] for side in sides}
    failed: dict[str, list[str]] = {}
    with lab.remote(row.link) as remote:
        for turn in range(1 if lab.quick else row.rounds):
            running = [side for side in sides if side not in PEERS or not turn or _may_be_best(side, rates)]
            for side in running[turn % len(running) :] + running[: turn % len(running)]:
                if side in (*PEERS, *LIMITS):
                    rates[side].append(_peer_again(lab, forms, side, remote.endpoint, how, failed))
                else:
                    rates[side].append(_ours(lab, forms, side, remote.endpoint, how))
                told = " and ".join(f"{rate:,.0f}" for rate in rates[side][-1])
                print(f"[bench]   round {turn + 1}, {side}: {told} a second", file=sys.stderr, flush=True)
    measures = []
    for epoch in range(EPOCHS):
        turns = range(len(rates["shards"]))
        best = [max(rates[peer][turn][epoch] for peer in PEERS if turn < len(rates[peer])) for turn in turns]
        for side in ("shards", "objects"):
            goal = row.goals[f"epoch {epoch + 1}, {side}"]
            mine = [pair[epoch] for pair in rates[side]]
            measures.append(compared(f"epoch {epoch + 1}, {side}", "samples/s", goal, mine, best, "best peer"))
    for limit in LIMITS if row.decode else ():
        mine, its = ([pair[-1] for pair in rates[side]] for side in ("shards", limit))
        measures.append(compared("epoch 2, shards, of decoding alone", "samples/s", REPORTED, mine, its, limit))
    notes = tuple(
        f"{side}: {_median(rates[side], 0):,.0f} and {_median(rates[side], 1):,.0f} a second"
        f"{' (once)' if len(rates[side]) < len(rates['shards']) else ''}"
        for side in sides
    )
    notes += (peers_versions(),)
    notes += tuple(f"{side} failed {len(why)} times, and was run again: {why[0]}" for side, why in failed.items())
    return Result(row, tuple(measures), notes=notes, extra={"rates": rates})


def _may_be_best(peer: str, rates: dict[str, list[list[float]]]) -> bool:
    """Whether a peer came near the best one in either epoch of the first round."""
    firsts = {name: rates[name][0] for name in PEERS}
    return any(firsts[peer][epoch] * NEAR >= max(first[epoch] for first in firsts.values()) for epoch in range(EPOCHS))


def _median(rates: list[list[float]], epoch: int) -> float:
    return statistics.median(pair[epoch] for pair in rates)
