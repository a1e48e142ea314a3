"""Loads a model with run:ai's streamer: `python streamer_job.py SIDE`, the work as JSON on the first line of
stdin, and then one line for each round.

Theory. The streamer as its documentation shows it: one file, all tensors, into host memory. A round is timed from the
request to the last tensor; the bytes of all tensors are counted, and those of the first are compared once.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time


def main() -> None:
    work = json.loads(sys.stdin.readline())
    streamer_type = importlib.import_module("runai_model_streamer").SafetensorsStreamer
    for _ in sys.stdin:
        began = time.perf_counter()
        size_bytes, digests = 0, {}
        with streamer_type() as streamer:
            streamer.stream_file(work["url"])
            for name, tensor in streamer.get_tensors():
                size_bytes += tensor.nbytes
                if name in work["digests"]:
                    digests[name] = tensor.numpy().tobytes()
        load_s = time.perf_counter() - began
        assert size_bytes == work["size_bytes"], f"{size_bytes} bytes came of {work['size_bytes']}"
        found = {name: hashlib.sha256(data).hexdigest() for name, data in digests.items()}
        assert found == work["digests"], "another tensor came than was written"
        print(json.dumps({"load_s": load_s}), flush=True)


if __name__ == "__main__":
    main()
