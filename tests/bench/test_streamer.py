"""The `model-streamer` row without its client, which needs the peers' environment."""

from __future__ import annotations

import hashlib
import sys

import pytest

from bench import streamer_job
from bench.load import LoadFailed
from bench.parts import Lab
from bench.peer_process import PeerProcess, last_words
from bench.rows import streamer

safe_open = pytest.importorskip("safetensors").safe_open

SIZE_BYTES = 3 * streamer.TENSOR_BYTES


def test_the_model_is_one_that_safetensors_reads():
    with Lab(quick=True) as lab:
        digests = streamer._write_model(lab, "model/00000", SIZE_BYTES)
        with safe_open(lab.files / "model/00000", "np") as model:
            assert list(model.keys()) == [f"layer.{n}" for n in range(3)]
            for name, digest in digests.items():
                assert hashlib.sha256(model.get_tensor(name).tobytes()).hexdigest() == digest
    assert len(digests) == 1


def test_a_client_that_ends_is_told_with_its_last_words():
    with Lab(quick=True) as lab, PeerProcess(lab, streamer_job, sys.executable, "forebay", {}) as job:
        with pytest.raises(LoadFailed, match=r"(?s)forebay ended with 1: .*runai_model_streamer"):
            job.round()


def test_a_peer_that_ends_says_why():
    log = "Traceback\n  File x\nbotocore.Error: the bucket is full\n    load()\n    ^^^^^^\n"
    assert last_words(log) == "botocore.Error: the bucket is full", "another rank's traceback was cut off below it"
    assert last_words("Killed\n") == "Killed"
