"""What a dataset reads from ends with it."""

from __future__ import annotations

import gc
import pickle

import pytest

from forebay.client.sync import Client
from forebay.torch.source import NodeSource


class Connection:
    """What a client keeps open; says, when it is taken apart, whether it was closed before."""

    ended: list[bool] = []

    def __init__(self) -> None:
        self.closed = False

    def __del__(self) -> None:
        Connection.ended.append(self.closed)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_source_in_a_cycle_closes_its_client_before_that_is_taken_apart(
    monkeypatch: pytest.MonkeyPatch, pickled: bool
):
    monkeypatch.setattr(Client, "close", lambda self: setattr(self.kept, "closed", True))
    Connection.ended.clear()
    connection = Connection()  # the oldest, so that the collector would come to it first
    source = NodeSource("http://127.0.0.1:9")
    source._client.kept = connection  # type: ignore[attr-defined]
    if pickled:
        source = pickle.loads(pickle.dumps(source))
        source._client.kept = connection  # type: ignore[attr-defined]
    source.itself = source  # type: ignore[attr-defined]
    del connection, source
    gc.collect()
    assert Connection.ended == [True]
