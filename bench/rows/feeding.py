"""Client rows: what one training process on one core gets from a warm node, beside what its machine could give at most.

Theory. The bytes are in the page cache on both sides, so what is compared is the way they take: over TCP, a socket that
is filled by sendfile at the other end and nothing else; on the node's own host, the same files read by their names; for
tokens, the file mapped into memory. Samples are drawn at random, the same ones for every side of a round. Where the
goal is a number of samples a second, the number is judged, and one GET a sample by boto3 stands beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import signal
import socket
import struct
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import load
from bench.parts import BUCKET, CLIENT_CORE, SERVER_CORE, Lab, Node
from bench.report import Result
from bench.row import KIB, Objects, Row
from bench.stats import bounded, compared
from forebay.client.sync import Client
from forebay.core.messages.batch import Item

BATCH = 256  # samples of one step
SAMPLE_BYTES = 10 * KIB
WINDOW = 4096  # tokens
TOKEN_BYTES = 2
SHARD_MEMBERS = 4096


@contextlib.contextmanager
def _client(node: Node, *, door: bool) -> Iterator[Client]:
    with node.client() as client:
        if not door:
            client.door.off()
        yield client


def _rounds(lab: Lab, row: Row) -> int:
    return 2 if lab.quick else row.rounds


def _rate(work: Callable[[], int], seconds: float) -> float:
    """What `work` counts, a second, over at least so many seconds."""
    done, began_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - began_s) < seconds:
        done += work()
    return done / taken_s


# --- streams ---------------------------------------------------------------------------------------------------------
class RawSender:
    """A process that answers eight bytes, a number, with the file of that number, by sendfile. Not for use by two."""

    def __init__(self, files: list[Path], core: int | None) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self._pid = os.fork()
        if not self._pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            load.pin_self(core)
            try:
                self._serve(listening, files)
            finally:
                os._exit(0)
        self._socket = socket.create_connection(listening.getsockname(), timeout=load.TIMEOUT_S)
        listening.close()

    @staticmethod
    def _serve(listening: socket.socket, files: list[Path]) -> None:
        sock, _ = listening.accept()
        opened = [os.open(path, os.O_RDONLY) for path in files]
        while asked := sock.recv(8, socket.MSG_WAITALL):
            (number,) = struct.unpack("!Q", asked)
            sent, size = 0, os.fstat(opened[number]).st_size
            while sent < size:
                sent += os.sendfile(sock.fileno(), opened[number], sent, size - sent)

    def get_into(self, number: int, buffer: memoryview) -> int:
        self._socket.sendall(struct.pack("!Q", number))
        done = 0
        while done < len(buffer):
            done += self._socket.recv_into(buffer[done:])
        return done

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)


def streams(lab: Lab, row: Row) -> Result:
    """Whole objects into one buffer, over TCP and by descriptors."""
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    keys = [objects.key(index) for index in range(objects.count)]
    files = [lab.files / key for key in keys]
    buffer = memoryview(bytearray(objects.size_bytes))
    rates: dict[str, list[float]] = {"http": [], "raw": [], "door": [], "files": []}
    with lab.node() as node, contextlib.closing(RawSender(files, SERVER_CORE)) as raw:
        node.add_bucket(BUCKET, lab)
        node.prefetch(BUCKET, f"{objects.name}/")
        with _client(node, door=False) as far, _client(node, door=True) as near:
            load.pin_self(CLIENT_CORE)

            def over_http() -> int:
                return sum(far.get_into(BUCKET, key, buffer).body_bytes for key in keys)

            def over_raw() -> int:
                return sum(raw.get_into(number, buffer) for number in range(len(keys)))

            def by_door() -> int:
                return sum(_read_object(near, key, buffer) for key in keys)

            def by_name() -> int:
                return sum(_read_file(path, buffer) for path in files)

            sides = {"http": over_http, "raw": over_raw, "door": by_door, "files": by_name}
            for work in sides.values():
                work()
            if not near.door.connected:
                raise load.LoadFailed("the client did not find the node's door")
            if bytes(buffer) != files[-1].read_bytes():
                raise load.LoadFailed(f"{keys[-1]} does not read back as it is")
            for _ in range(_rounds(lab, row)):
                for side, work in sides.items():
                    rates[side].append(_rate(work, 0.5 if lab.quick else row.seconds))
            load.pin_self(None)
    measures = (
        compared("TCP", "B/s", row.goals["TCP"], rates["http"], rates["raw"], "raw socket"),
        compared("same host", "B/s", row.goals["same host"], rates["door"], rates["files"], "local files"),
    )
    return Result(row, measures)


def _read_object(client: Client, key: str, buffer: memoryview) -> int:
    with client.open(BUCKET, key) as file:
        return _fill(file, buffer)


def _read_file(path: Path, buffer: memoryview) -> int:
    with path.open("rb", buffering=0) as file:
        return _fill(file, buffer)


def _fill(file: Any, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        got = file.readinto(buffer[done:])
        if not got:
            raise load.LoadFailed("a file ended early")
        done += got
    return done


# --- samples ---------------------------------------------------------------------------------------------------------
def samples(lab: Lab, row: Row) -> Result:
    """Batches of random samples: members of shards or objects of their own, over TCP and by descriptors."""
    (objects,) = row.quick if lab.quick else row.objects
    items = _shard_items(lab, objects) if row.name.endswith("members") else _object_items(lab, objects)
    chance = random.Random(row.name)
    rates: dict[str, list[float]] = {"TCP": [], "same host": [], "boto3": []}
    with lab.node() as node:
        node.add_bucket(BUCKET, lab)
        node.prefetch(BUCKET, f"{objects.name}")
        s3 = _boto3(node)
        with _client(node, door=False) as far, _client(node, door=True) as near:
            load.pin_self(CLIENT_CORE)

            def batches(client: Client) -> Callable[[], int]:
                return lambda: len(client.get_many(chance.sample(items, BATCH)))

            def one_by_one() -> int:
                return sum(_get_one(s3, item) for item in chance.sample(items, 16))

            sides = {"TCP": batches(far), "same host": batches(near), "boto3": one_by_one}
            for work in sides.values():
                _rate(work, 0.3)
            _check_samples(lab, far, near, items[:BATCH])
            for _ in range(_rounds(lab, row)):
                for side, work in sides.items():
                    rates[side].append(_rate(work, 0.5 if lab.quick else row.seconds))
            load.pin_self(None)
    measures = []
    for side in ("same host", "TCP"):
        measures.append(bounded(side, "samples/s", row.goals[side], rates[side]))
        name = f"{side} / one GET each"
        measures.append(compared(name, "samples/s", row.goals[name], rates[side], rates["boto3"], "boto3"))
    return Result(row, tuple(measures))


def _object_items(lab: Lab, objects: Objects) -> list[Item]:
    lab.upload(objects)
    return [Item(BUCKET, objects.key(index)) for index in range(objects.count)]


def _shard_items(lab: Lab, objects: Objects) -> list[Item]:
    """Members as a dataset asks for them: ranges of their shards, from the shards' headers."""
    items = []
    for index in range(objects.count):
        key = f"{objects.name}-tar/{index:05d}.tar"
        path = lab.files / key
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(path, "w") as shard:
                for number in range(SHARD_MEMBERS if not lab.quick else BATCH):
                    member = tarfile.TarInfo(f"{number:06d}.bin")
                    member.size = SAMPLE_BYTES
                    shard.addfile(member, io.BytesIO(os.urandom(SAMPLE_BYTES)))
        with tarfile.open(path) as shard:
            for member in shard:
                items.append(Item(BUCKET, key, member.offset_data, member.offset_data + member.size))
    lab.upload_files([f"{objects.name}-tar/{index:05d}.tar" for index in range(objects.count)])
    return items


def _check_samples(lab: Lab, far: Client, near: Client, items: list[Item]) -> None:
    for client in (far, near):
        for item, got in zip(items, client.get_many(items), strict=True):
            with (lab.files / item.key).open("rb") as file:
                file.seek(item.start)
                if file.read(SAMPLE_BYTES) != got:
                    raise load.LoadFailed(f"{item} does not read back as it is")


def _boto3(node: Node) -> Any:
    boto3, config = importlib.import_module("boto3"), importlib.import_module("botocore.config")
    return boto3.client(
        "s3",
        endpoint_url=node.endpoint,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=config.Config(signature_version=importlib.import_module("botocore").UNSIGNED),
    )


def _get_one(s3: Any, item: Item) -> int:
    ranged = {"Range": f"bytes={item.start}-{item.end - 1}"} if item.end is not None else {}
    body = s3.get_object(Bucket=item.bucket, Key=item.key, **ranged)["Body"].read()
    return 1 if len(body) == SAMPLE_BYTES else 0


# --- tokens ----------------------------------------------------------------------------------------------------------
def tokens(lab: Lab, row: Row) -> Result:
    """Batches of random windows of a token file, beside the same windows of the file mapped into memory, each put
    together in its own way: by the loader's collation, and by `torch.stack` as training scripts with a map do it."""
    (objects,) = row.quick if lab.quick else row.objects
    np, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    dataset_type = importlib.import_module("forebay.torch").TokenDataset
    collate = importlib.import_module("forebay.torch.fetching").collate
    lab.upload(objects)
    mapped = np.memmap(lab.files / objects.key(0), dtype=np.uint16, mode="r")
    rates: tuple[list[float], list[float]] = ([], [])
    with lab.node() as node:
        node.add_bucket(BUCKET, lab)
        node.prefetch(BUCKET, f"{objects.name}/")
        dataset = dataset_type(f"{BUCKET}/{objects.name}/", WINDOW, url=node.endpoint)
        chance = random.Random(WINDOW)
        load.pin_self(CLIENT_CORE)

        def drawn() -> list[int]:
            return [chance.randrange(len(dataset)) for _ in range(64)]

        def of_node(indices: list[int]) -> Any:
            return collate(dataset.__getitems__(indices))

        def of_map(indices: list[int]) -> Any:
            windows = [mapped[index * WINDOW : (index + 1) * WINDOW].astype(np.int64) for index in indices]
            return torch.stack([torch.from_numpy(window) for window in windows])

        for _ in range(20):
            indices = drawn()
            if not torch.equal(of_node(indices), of_map(indices)):
                raise load.LoadFailed("windows differ from those of the file")
        for _ in range(_rounds(lab, row)):
            for side, work in enumerate((of_node, of_map)):
                rates[side].append(_rate(lambda: len(work(drawn())), 0.5 if lab.quick else row.seconds))  # noqa: B023
        load.pin_self(None)
    return Result(row, (compared("windows", "windows/s", row.goals["windows"], *rates, "np.memmap"),))


# --- state -----------------------------------------------------------------------------------------------------------
def state(lab: Lab, row: Row) -> Result:
    """A loader whose state is saved at every step, beside one whose state is not."""
    (objects,) = row.quick if lab.quick else row.objects
    feeding = importlib.import_module("forebay.torch")
    lab.upload(objects)
    rates: tuple[list[float], list[float]] = ([], [])
    with lab.node(core=None) as node:
        node.add_bucket(BUCKET, lab)
        node.prefetch(BUCKET, f"{objects.name}/")
        dataset = feeding.ObjectDataset(f"{BUCKET}/{objects.name}/", url=node.endpoint)
        with feeding.DataLoader(dataset, 32, collate=list) as batches:

            def epoch(*, saved: bool) -> float:
                began_s = time.perf_counter()
                for _ in batches:
                    if saved:
                        batches.state_dict()
                return objects.count / (time.perf_counter() - began_s)

            epoch(saved=True)
            for turn in range(2 * _rounds(lab, row)):
                for saved in (True, False) if turn % 2 else (False, True):
                    rates[0 if saved else 1].append(epoch(saved=saved))
    return Result(row, (compared("with state", "samples/s", row.goals["with state"], *rates, "without"),))
