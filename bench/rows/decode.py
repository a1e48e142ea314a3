"""The row of the picture decoder: what ships, beside each decoder that is installed here, at its own best settings.

Processor time of one thread, the same pictures, sides in turn. `whole` is all pixels; `at least 224` scales down while
decoding where a side can. Every side ends with an array of its own; ours with a tensor of 3 x height x width.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable
from typing import Any

from bench.parts import Lab
from bench.report import Result
from bench.row import Row
from bench.rows.loader import pictures
from bench.stats import faster

SIZE = 224
Decode = Callable[[bytes], Any]


def decoders(lab: Lab, row: Row) -> Result:
    """Time of a picture, ours beside each peer's."""
    found = pictures(row.objects[0].size_bytes)
    ours = importlib.import_module("forebay.torch").Pictures
    measures, absent = [], []
    for said, size in (("whole", None), (f"at least {SIZE}", SIZE)):
        for name, peer in peers(size).items():
            if peer is None:
                absent.append(name)
                continue
            for decode in (ours(size), peer):  # each loads something at its first picture
                decode(found[0])
            times = [
                (_each_ms(ours(size), found), _each_ms(peer, found)) for _ in range(2 if lab.quick else row.rounds)
            ]
            mine, theirs = ([pair[side] for pair in times] for side in (0, 1))
            measures.append(faster(f"{said}, {name}", "ms", row.goals[said], mine, theirs))
    without = f"; not installed: {', '.join(dict.fromkeys(absent))}" if absent else ""
    mean_bytes = sum(map(len, found)) // len(found)
    return Result(row, tuple(measures), notes=(f"{len(found)} JPEGs of {mean_bytes // 1000} KB{without}",))


def _each_ms(decode: Decode, data: list[bytes]) -> float:
    began_s = time.thread_time()  # other work on the machine does not count
    for one in data:
        decode(one)
    return (time.thread_time() - began_s) * 1e3 / len(data)


def peers(size: int | None) -> dict[str, Decode | None]:
    """Each peer's fastest way to at least `size` pixels (None: all); None where it is not installed."""
    numpy = importlib.import_module("numpy")
    image, turbo, cv2, torchvision = (
        _installed(name) for name in ("PIL.Image", "simplejpeg", "cv2", "torchvision.io")
    )  # fmt: skip

    def by_pillow(data: bytes) -> Any:
        with image.open(io.BytesIO(data)) as opened:
            if size is not None:
                opened.draft("RGB", (size, size))
            return numpy.array(opened.convert("RGB"))

    def by_simplejpeg(data: bytes) -> Any:
        least = {} if size is None else {"min_height": size, "min_width": size}
        return turbo.decode_jpeg(data, fastdct=True, fastupsample=True, **least)

    def by_opencv(data: bytes) -> Any:
        return cv2.imdecode(numpy.frombuffer(data, numpy.uint8), cv2.IMREAD_COLOR_RGB)

    def by_torchvision(data: bytes) -> Any:
        torch = importlib.import_module("torch")
        return torchvision.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    if cv2 is not None:
        cv2.setNumThreads(1)
    return {
        "pillow": by_pillow if image else None,
        "simplejpeg, fast and rough": by_simplejpeg if turbo else None,
        "opencv": by_opencv if cv2 else None,
        "torchvision": by_torchvision if torchvision else None,
    }


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
