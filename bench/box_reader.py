"""Reads or writes objects over and over from a host of a box, and says what it saw.

    python -m bench.box_reader --at-once 8 (--sdk URL --bucket NAME [--write] | --http URL…)

The first line of its input is a JSON list of keys (`--sdk`) or paths (`--http`); it reads until its input ends. With
`--once` it reads each of them once. Its output is one line of JSON: `reads` as [begin, end, key], and `errors` as
[when, key, message]; times are those of the machine's monotonic clock. After a read that fails the next one waits.

With `--write` each read is a write, of the next version of its key, and no two threads write one key. The body begins
with the version (`body_of`); `versions` are the greatest that were acknowledged, by key.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import sys
import threading
import time
from collections.abc import Callable

from bench import load
from bench.parts import TOKEN
from forebay.client.sync import connect
from forebay.core.errors import ForebayError

PAUSE_S = 0.1  # after an error
WRITTEN_BYTES = 4096
Read = Callable[[str], int]


def body_of(version: int) -> bytes:
    """What is written as this version."""
    return f"{version} ".encode().ljust(WRITTEN_BYTES, b".")


def version_of(body: bytes) -> int:
    """Of what was read."""
    return int(body.partition(b" ")[0])


class Versions:
    """What one thread writes: `write` does so, of keys that only it has."""

    def __init__(self, write: Callable[[str, bytes], object]) -> None:
        self._write = write
        self._sent: dict[str, int] = {}
        self.acknowledged: dict[str, int] = {}

    def __call__(self, key: str) -> int:
        version = self._sent[key] = self._sent.get(key, 0) + 1
        self._write(key, body_of(version))
        self.acknowledged[key] = version
        return WRITTEN_BYTES


class Readers:
    """So many threads that read."""

    def __init__(self, keys: list[str], once: bool) -> None:
        self._left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._keys, self._once = keys, once
        for key in keys if once else ():
            self._left.put(key)
        self.stop = threading.Event()
        self.reads: list[tuple[float, float, str]] = []
        self.errors: list[tuple[float, str, str]] = []

    def run(self, read: Read, seed: int, own: slice) -> None:
        """Read with `read` until there is nothing left, or `stop`: of the keys these."""
        keys = self._keys[own]
        order = random.Random(seed).sample(keys, len(keys))
        for key in itertools.cycle(order):
            if self._once:
                try:
                    key = self._left.get_nowait()
                except queue.Empty:
                    return
            if self.stop.is_set():
                return
            began = time.monotonic()
            try:
                read(key)
            except (ForebayError, load.LoadFailed, OSError) as error:
                self.errors.append((time.monotonic(), key, str(error)[:200]))
                self.stop.wait(PAUSE_S)
            else:
                self.reads.append((began, time.monotonic(), key))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.box_reader")
    parser.add_argument("--sdk", default="")
    parser.add_argument("--bucket", default="")
    parser.add_argument("--http", nargs="*", default=[])
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    readers = Readers(json.loads(sys.stdin.readline()), given.once)
    client = connect(given.sdk, token=TOKEN) if given.sdk else None

    versions: list[Versions] = []

    def reader_of(number: int) -> Read:
        if client is not None and given.write:
            versions.append(Versions(lambda key, body: client.put(given.bucket, key, body)))
            return versions[-1]
        if client is not None:
            return lambda key: len(client.get(given.bucket, key))
        plain = load.Reader(given.http[number % len(given.http)])

        def read(path: str) -> int:
            try:
                return plain.get(path, {"Authorization": f"Bearer {TOKEN}"}).size_bytes
            except OSError:
                plain.close()
                raise

        return read

    threads = [
        threading.Thread(
            target=readers.run,
            args=(
                reader_of(number),
                given.seed * 1000 + number,
                slice(number, None, given.at_once) if given.write else slice(None),
            ),
            daemon=True,
        )
        for number in range(given.at_once)
    ]
    for thread in threads:
        thread.start()
    if not given.once:
        sys.stdin.read()
        readers.stop.set()
    for thread in threads:
        thread.join(None if given.once else 2 * PAUSE_S)  # one that hangs in a read has said what it saw
    newest = {key: version for each in versions for key, version in list(each.acknowledged.items())}
    said = {"reads": list(readers.reads), "errors": list(readers.errors), "versions": newest}
    print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
