"""The `model-streamer` row: run:ai's model streamer loads a safetensors file from a warm node, SeaweedFS and nginx.

Theory. vLLM and others load models with it. Its own threads are what limits it on few cores, so what a server can do is
not to be slower than any other: nginx serves the file as fast as files are served, without S3. Each server has one
core, and the client takes what it gets of both. The first round warms and is not counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random

from bench import streamer_job
from bench.parts import BUCKET, SERVER_CORE, Lab, pin
from bench.peer_process import PeerProcess
from bench.report import Result
from bench.row import MIB, Row
from bench.rows.loader import peer_env, peers_python
from bench.stats import compared

TENSOR_BYTES = 16 * MIB
OURS = "forebay"


def load(lab: Lab, row: Row) -> Result:
    """Bytes a second from each server, round by round in turn."""
    (objects,) = row.quick if lab.quick else row.objects
    python = peers_python()
    key, digests = objects.key(0), _write_model(lab, objects.key(0), objects.size_bytes)
    lab.upload_files([key])
    pin(lab.weed.pid, SERVER_CORE)
    folder, _, name = key.partition("/")
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(lab.node())
        node.add_bucket(BUCKET, lab)
        places = {
            OURS: (node.endpoint, f"s3://{BUCKET}/{key}"),
            "seaweedfs": (lab.weed.endpoint, f"s3://{BUCKET}/{key}"),
            "nginx": (lab.nginx.url, f"s3://{folder}/{name}"),
        }
        sides = {}
        for side, (endpoint, url) in places.items():
            work = {"url": url, "size_bytes": objects.size_bytes, "digests": digests}
            env = {**peer_env(endpoint), "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
            sides[side] = stack.enter_context(PeerProcess(lab, streamer_job, python, side, work, env))
        for turn in range(1 + (2 if lab.quick else row.rounds)):
            for side, job in sides.items():
                lab.prime_memory(objects.size_bytes)
                load_s = job.round()["load_s"]
                if turn:
                    rates.setdefault(side, []).append(objects.size_bytes / load_s)
    measures = [
        compared(f"rate / {peer}", "B/s", row.goals[f"rate / {peer}"], rates[OURS], rates[peer], peer)
        for peer in places
        if peer != OURS
    ]
    return Result(row, tuple(measures))


def _write_model(lab: Lab, key: str, size_bytes: int) -> dict[str, str]:
    """A safetensors file with `size_bytes` of tensors; returns the digest of one of them."""
    path = lab.files / key
    path.parent.mkdir(parents=True, exist_ok=True)
    count = size_bytes // TENSOR_BYTES
    assert count * TENSOR_BYTES == size_bytes, "whole tensors"
    head = {
        f"layer.{n}": {
            "dtype": "F32",
            "shape": [TENSOR_BYTES // 4],
            "data_offsets": [n * TENSOR_BYTES, (n + 1) * TENSOR_BYTES],
        }
        for n in range(count)
    }
    chosen = random.Random(key).randrange(count)
    digests = {}
    with path.open("wb") as file:
        encoded = json.dumps(head).encode()
        encoded += b" " * (-len(encoded) % 8)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for n in range(count):
            data = os.urandom(TENSOR_BYTES)
            file.write(data)
            if n == chosen:
                digests[f"layer.{n}"] = hashlib.sha256(data).hexdigest()
    return digests
