"""A storm's clients as a crew, and its judgement in quiet moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.patience import until
from tests.storm.clients import Ask, Board, Client, Place, body_of
from tests.storm.history import ABSENT, explain, told

SOURCES = ["source/small", "source/large"]  # what copies are made of: written once, never again
SOURCE_SIZES = [700, 400_000]


class Crew:
    """Some clients on the same keys. Between two quiet moments each key's history has to have an explanation."""

    def __init__(self, ask: Ask, buckets: list[str], seed: int, keys: int = 3, clients: int = 4) -> None:
        self.board = Board()
        self.places: list[Place] = [(bucket, f"k{number}") for bucket in buckets for number in range(keys)]
        self.sources: list[Place] = [(bucket, source) for bucket in buckets for source in SOURCES]
        self.content: dict[Place, set[str]] = {place: {ABSENT} for place in self.places}
        self._ask = ask
        self.clients = [
            Client(ask, self.board, f"client {number}", self.places, SOURCES, seed * 1000 + number)
            for number in range(clients)
        ]
        for (bucket, source), size_bytes in zip(self.sources, SOURCE_SIZES * len(buckets), strict=True):
            label = f"{bucket} {source}"
            self.board.trying((bucket, source), label, size_bytes)
            answer = ask("PUT", f"/{bucket}/{source}", {}, body_of(label, size_bytes))
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
            kept = self.content[place]
            self.board.tried[place] = {k: size for k, size in self.board.tried[place].items() if k in kept}
        return wrong + self.board.wrong[len(wrong) :]
