"""A storm's clients as a crew, and its judgement in quiet moments."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from forebay.sim.clients import Answer, Board, Client, Judge, Place, Sizes
from tests.patience import PATIENCE_S, until

Ask = Callable[[str, str, dict[str, str], bytes | None], Answer]

SOURCES = ["source/small", "source/large"]  # what copies are made of: written once, never again
SOURCE_SIZES = [700, 400_000]
STALL_ASKS = 5
MIB = 1 << 20
Result = TypeVar("Result")
PART_BYTES = 5 * MIB
SIZES = Sizes(
    [100, 900, 9_000, 40_000, 300_000, MIB + 7, 5 * MIB + 17],
    [6, 6, 4, 4, 2, 2, 1],
    PART_BYTES,
    [0, 0, 1, 50, 70_000, MIB],
    [1, 40, 30_000, 2 * MIB],
)
# Where objects may be in slices: most are, and their ranges begin and end in other cells and groups of cells.
SLICED = Sizes(
    [100, 9_000, 300_000, 700_000, MIB + 7, 9 * MIB],
    [6, 4, 8, 4, 4, 1],
    PART_BYTES,
    [0, 0, 1, 70_000, 150_000, MIB // 2, 4 * MIB - 9, 8 * MIB - 9],
    [1, 40, 30_000, 200_000, 2 * MIB],
)
AFTER_UNSURE_S = 0.1  # as a client's own retry would wait


def driven(call: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine comes to whose every wait is over at once."""
    try:
        call.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waits for something")


class Caller(threading.Thread):
    """A client in a thread of its own. Calls until it is told to stop."""

    def __init__(
        self,
        ask: Ask,
        board: Board,
        name: str,
        places: list[Place],
        sources: list[str],
        seed: int,
        *,
        changing: Collection[str] = (),
        sizes: Sizes = SIZES,
    ) -> None:
        super().__init__(daemon=True, name=name)
        self.stopping = threading.Event()
        self.going = threading.Event()
        self.going.set()
        self.resting = threading.Event()
        self._board = board

        async def asked(method: str, target: str, headers: dict[str, str], body: bytes | None) -> Answer:
            return ask(method, target, headers, body)

        async def pause() -> None:
            self.stopping.wait(AFTER_UNSURE_S)

        self.client = Client(asked, pause, board, name, places, sources, seed, sizes, changing=changing)

    def run(self) -> None:
        try:
            self._call_on()
        except Exception as error:  # a client that ended is one that finds nothing
            self._board.complain(f"{self.name} broke: {error!r}")
        finally:
            self.resting.set()

    def _call_on(self) -> None:
        while not self.stopping.is_set() and not self._board.wrong:
            if not self.going.is_set():
                self.resting.set()
                self.going.wait()
                self.resting.clear()
                continue
            driven(self.client.call())

    def rest(self) -> None:
        """No call from now on until `go_on`. Wait for `resting` to know that the last one is over."""
        self.going.clear()

    def go_on(self) -> None:
        self.resting.clear()
        self.going.set()


class Crew:
    """Some clients on the same keys. Between two quiet moments each key's history has to have an explanation."""

    def __init__(
        self,
        ask: Ask,
        buckets: list[str],
        seed: int,
        keys: int = 3,
        clients: int = 4,
        *,
        changing: Collection[str] = (),
        sizes: Sizes = SIZES,
    ) -> None:
        """`changing`: buckets where the ETag of one body may become another."""
        self.board = Board(time.monotonic)
        self.places: list[Place] = [(bucket, f"k{number}") for bucket in buckets for number in range(keys)]
        self.sources: list[Place] = [(bucket, source) for bucket in buckets for source in SOURCES]
        self._judge = Judge(self.board, self.places)
        self._ask = ask
        self._kinds: dict[str, Any] = {"changing": changing, "sizes": sizes}
        self.clients = [
            Caller(ask, self.board, f"client {number}", self.places, SOURCES, seed * 1000 + number, **self._kinds)
            for number in range(clients)
        ]
        for (bucket, source), size_bytes in zip(self.sources, SOURCE_SIZES * len(buckets), strict=True):
            label = f"{bucket} {source}"
            answer = ask("PUT", f"/{bucket}/{source}", {}, self.board.new((bucket, source), label, size_bytes))
            assert answer.status == 200, answer
            self._judge.content[bucket, source] = {label}

    @contextmanager
    def at_work(self) -> Iterator[None]:
        for client in self.clients:
            client.start()
        try:
            yield
        finally:
            for client in self.clients:
                client.stopping.set()
                client.go_on()
            for client in self.clients:
                client.join(90)

    def rest(self) -> None:
        """Have no client begin another call until `go_on`."""
        for client in self.clients:
            client.rest()

    def quiet(self) -> None:
        """The same; return when no client is in a call."""
        self.rest()
        for client in self.clients:
            until(lambda client=client: client.resting.is_set() or not client.is_alive(), f"{client.name} rests")

    def go_on(self) -> None:
        for client in self.clients:
            client.go_on()

    def judge(self, everywhere: Mapping[str, Ask] | None = None) -> list[str]:
        """In a quiet moment, with the node settled: read every key, and find what cannot be explained. With
        `everywhere`, read and list them at each of these nodes.

        Afterwards the history begins anew with what was read.
        """
        readers = {"": self.clients[0].client}
        if everywhere is not None:
            readers = {
                at: Caller(ask, self.board, f"{at}'s reader", self.places, SOURCES, 0, **self._kinds).client
                for at, ask in everywhere.items()
            }
        wrong = list(self.board.wrong)
        for at, reader in readers.items():
            for place in [*self.places, *self.sources]:
                self._answered(lambda place=place, reader=reader: driven(reader.read(place, whole=True)), place, at)
            for bucket in {bucket for bucket, _ in self.places} if everywhere is not None else ():
                place = (bucket, "")
                self._answered(lambda place=place, reader=reader: driven(reader.list_bucket(place)), place, at)
        for place in [*self.places, *self.sources]:
            wrong += self._judge.judge(place)
        return wrong + self.board.wrong[len(wrong) :]

    def _answered(self, call: Callable[[], object], place: Place, at: str) -> None:
        until(lambda: self.board.wrong or call(), f"an answer of {'/'.join(place)} {at and f'at {at}'}")


def abort_uploads(ask: Ask, buckets: Collection[str]) -> None:
    """What clients began and did not hear the end of: uploads fill a small disk otherwise."""
    for bucket in buckets:
        target = f"/{bucket}?uploads"
        answer = until(lambda target=target: (a := ask("GET", target, {}, None)).status == 200 and a, target)
        for key, upload in re.findall(rb"<Key>([^<]+)</Key><UploadId>([^<]+)</UploadId>", answer.body):
            target = f"/{bucket}/{quote(key.decode())}?uploadId={quote(upload.decode())}"
            # 404: it was completed or aborted, of which its client did not hear
            until(lambda target=target: ask("DELETE", target, {}, None).status in (204, 404), f"an end of {target}")


def stalled(asks: Mapping[str, Callable[[], bool]], patience_s: float = PATIENCE_S) -> list[str]:
    """The names of those that are not answered, or not rightly (then with what came), each asked several times beside
    the others."""
    right: set[str] = set()
    came: dict[str, str] = {}

    def ask(name: str) -> None:
        try:
            if all(asks[name]() for _ in range(STALL_ASKS)):
                right.add(name)
        except (OSError, AssertionError, http.client.HTTPException) as error:
            came[name] = f" ({error!r})"[:500]

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in asks]
    for thread in threads:
        thread.start()
    with contextlib.suppress(AssertionError):
        until(lambda: not any(thread.is_alive() for thread in threads), timeout_s=patience_s)
    return sorted(name + came.get(name, "") for name in set(asks) - right)
