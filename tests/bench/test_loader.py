"""The loader rows: samples that are pictures, and our side's epochs. The peers' side needs their own environment."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench import peers, trainee
from bench.parts import Lab
from bench.row import Objects
from bench.rows import loader
from bench.servers import MissingProgram
from forebay.core.types import FRESH_IMMUTABLE, Bucket

FEW = Objects("few", 20_000, 50)


def test_samples_are_pictures_of_exactly_that_size_and_no_two_are_alike(tmp_path: Path) -> None:
    loader.make_samples(tmp_path / "files", FEW)
    samples = [path.read_bytes() for path in sorted((tmp_path / "files").iterdir())]
    assert [len(sample) for sample in samples] == [20_000] * 50
    assert len(set(samples)) == 50
    image = importlib.import_module("PIL.Image")
    assert min(image.open(io.BytesIO(sample)).size[0] for sample in samples) > 100
    assert all(peers.decode(sample, "image") > 100 for sample in samples)
    assert peers.decode(samples[0], "") == 20_000


def test_shards_hold_every_sample_once(tmp_path: Path) -> None:
    loader.make_samples(tmp_path / "files", FEW)
    (name,) = loader.make_shards(tmp_path / "files", tmp_path / "tar", FEW)
    with tarfile.open(tmp_path / "tar" / name) as shard:
        assert shard.getnames() == [f"{index:07d}.jpg" for index in range(50)]


@pytest.mark.real
@pytest.mark.parametrize("kind", ["objects", "shards"])
@pytest.mark.parametrize("how", ["", "image"])
def test_our_side_tells_of_each_epoch(tmp_path: Path, kind: str, how: str) -> None:
    loader.make_samples(tmp_path / "bucket" / "files", FEW)
    loader.make_shards(tmp_path / "bucket" / "files", tmp_path / "bucket" / "tar", FEW)
    work = {"kind": kind, "place": f"few/{'files' if kind == 'objects' else 'tar'}/", "decode": how, "batch": 8}
    work |= {"seed": 1, "epochs": 2, "workers": 0, "samples": 50}
    with Lab() as lab, lab.node(core=None) as node:
        with node.client() as client:
            client.bucket_put(Bucket("few", f"file://{tmp_path / 'bucket'}", freshness_s=FRESH_IMMUTABLE))
        command = [sys.executable, "-m", "bench.trainee"]
        asked = json.dumps({**work, "url": node.endpoint})
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(epoch["epoch"], epoch["samples"]) for epoch in told] == [(1, 50), (2, 50)]
        assert all(0 < epoch["first_batch_s"] <= epoch["seconds"] for epoch in told)
        short = json.dumps({**work, "url": node.endpoint, "samples": 51})
        done = subprocess.run(command, input=short, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert "gave 50 of 51 samples" in done.stderr


def test_a_package_that_cannot_be_loaded_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "for_another_torch").mkdir()
    (tmp_path / "for_another_torch" / "__init__.py").write_text(
        "from for_another_torch import part\nraise RuntimeError"
    )
    (tmp_path / "for_another_torch" / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not peers.loads("for_another_torch")
    assert not [name for name in sys.modules if name.startswith("for_another_torch")]
    assert peers.loads("json")


def test_the_shipped_decoder_and_that_of_the_limit_decode_as_pillow_does(tmp_path: Path) -> None:
    loader.make_samples(tmp_path / "files", FEW)
    for path in sorted((tmp_path / "files").iterdir())[:3]:
        data = path.read_bytes()
        heights = {peers.decode(data, "image"), peers.decode(data, "fast"), trainee.of_shard(data, "image")}
        assert len(heights) == 1
    assert trainee.of_object("a", b"abc", "") == 3


def test_without_the_peers_the_row_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BENCH_PEERS", "/nowhere/python")
    with pytest.raises(MissingProgram, match="make peers"):
        loader.peers_python()
