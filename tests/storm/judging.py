"""A storm's clients as a crew, and its judgement in quiet moments."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from tests.patience import PATIENCE_S, until
from tests.storm.clients import Ask, Board, Client, Place
from tests.storm.history import ABSENT, explain, told

SOURCES = ["source/small", "source/large"]  # what copies are made of: written once, never again
SOURCE_SIZES = [700, 400_000]
STALL_ASKS = 5


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
    ) -> None:
        """`changing`: buckets where the ETag of one body may become another."""
        self.board = Board()
        self.places: list[Place] = [(bucket, f"k{number}") for bucket in buckets for number in range(keys)]
        self.sources: list[Place] = [(bucket, source) for bucket in buckets for source in SOURCES]
        self.content: dict[Place, set[str]] = {place: {ABSENT} for place in self.places}
        self._ask = ask
        self.clients = [
            Client(ask, self.board, f"client {number}", self.places, SOURCES, seed * 1000 + number, changing=changing)
            for number in range(clients)
        ]
        for (bucket, source), size_bytes in zip(self.sources, SOURCE_SIZES * len(buckets), strict=True):
            label = f"{bucket} {source}"
            answer = ask("PUT", f"/{bucket}/{source}", {}, self.board.new((bucket, source), label, size_bytes))
            assert answer.status == 200, answer
            self.content[bucket, source] = {label}

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

    def quiet(self) -> None:
        """Return when no client is in a call."""
        for client in self.clients:
            client.rest()
        for client in self.clients:
            until(lambda client=client: client.resting.is_set() or not client.is_alive(), f"{client.name} rests")

    def go_on(self) -> None:
        for client in self.clients:
            client.go_on()

    def judge(self) -> list[str]:
        """In a quiet moment, with the node settled: read every key, and find what cannot be explained.

        Afterwards the history begins anew with what was read.
        """
        reader = self.clients[0]
        wrong = list(self.board.wrong)
        for place in [*self.places, *self.sources]:
            until(lambda place=place: self.board.wrong or reader.read(place, whole=True), f"an answer of {place}")
            calls = self.board.calls.pop(place, [])
            self.board.open.pop(place, None)
            after = explain(calls, self.content[place])
            if not after:
                before = " or ".join(sorted(each or "nothing" for each in self.content[place]))
                wrong.append(f"{place[0]}/{place[1]}: nothing explains this, where {before} was:\n{told(calls)}")
            self.content[place] = after or self.content[place]
            self.board.forget(place, self.content[place])
        return wrong + self.board.wrong[len(wrong) :]


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
