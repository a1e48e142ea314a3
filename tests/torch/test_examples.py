"""The examples do what they say, against a real node."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.archives import tar_of
from tests.node.conftest import NodeProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with what each of the examples reads, in the bucket `corpus`."""
    folder = tmp_path_factory.mktemp("examples")
    chance = np.random.default_rng(0)
    image = pytest.importorskip("PIL.Image")
    for name, color in (("cat", (200, 30, 30)), ("dog", (30, 30, 200))):
        (folder / "bucket" / "photos" / name).mkdir(parents=True)
        for number in range(40):
            image.new("RGB", (40, 30), color).save(folder / "bucket" / "photos" / name / f"{number:03d}.jpg")
    (folder / "bucket" / "photos" / "dog" / "broken.jpg").write_bytes(b"no picture")
    (folder / "bucket" / "train").mkdir()
    for number in range(3):
        (folder / "bucket" / "train" / f"{number}.tar").write_bytes(tar_of(labelled(chance, 50)))
    (folder / "bucket" / "tokens").mkdir()
    (folder / "bucket" / "tokens" / "a.bin").write_bytes((np.arange(30_000) * 7 % 256).astype("<u2").tobytes())
    running = NodeProcess(folder / "node-0", "--fronts", "1")
    running.start()
    running.add_bucket("corpus", f"file://{folder}/bucket")
    yield running
    running.stop()


def labelled(chance: np.random.Generator, samples: int) -> Iterator[tuple[str, bytes]]:
    """Numbers whose label can be learned."""
    for number in range(samples):
        label = number % 4
        file = io.BytesIO()
        np.save(file, chance.normal(0, 0.1, 16) + (np.arange(16) % 4 == label))
        yield f"{number:04d}.npy", file.getvalue()
        yield f"{number:04d}.cls", b"%d" % label


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_from_objects(
    node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FOREBAY_URL", node.endpoint)
    example = load("images_from_objects")
    state = tmp_path / "run.pt"
    assert example.main("corpus/photos/", str(state), workers=0) < 0.6
    said = capsys.readouterr().out
    assert "epoch 1: loss" in said
    assert "skipped 2, first corpus/photos/dog/broken.jpg" in said
    example.main("corpus/photos/", str(state), workers=0)
    assert capsys.readouterr().out == "", "both epochs are done"


def test_samples_from_shards(node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FOREBAY_URL", node.endpoint)
    assert load("samples_from_shards").main("corpus/train/") < 1.2
    assert "3 shards, " in capsys.readouterr().out


def test_windows_of_tokens(node: NodeProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FOREBAY_URL", node.endpoint)
    assert load("windows_of_tokens").main("corpus/tokens/", steps=60) < 1.0
    assert "60 steps, epoch 2" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_read_in_one_sitting(path: Path):
    assert len(path.read_text().splitlines()) <= 90


def test_a_transformer_trains_in_less_memory_than_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("offload").main(tmp_path / "not" / "there")
    told = capsys.readouterr().out
    losses = [float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] / 2
    assert "needs 2" in told
    assert "budget 18.0 MiB" in told
    assert "moves planned" in told
    assert "optimizer state: " in told
    assert {path.name for path in (tmp_path / "not" / "there").iterdir()} == {"memory.png", "lifetimes.png"}
