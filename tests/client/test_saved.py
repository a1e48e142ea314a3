"""Nodes that are saved by name, as the Python clients see them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from forebay.client import saved
from forebay.client.calling import DEFAULT_URL
from forebay.client.sync import Client


def test_a_client_finds_a_saved_node_and_takes_it_to_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("FOREBAY_URL", "FOREBAY_TOKEN", "FOREBAY_CA"):
        monkeypatch.delenv(name, raising=False)
    with Client() as client:
        assert client.url == DEFAULT_URL
    prod = saved.Saved("https://prod.example:9400", "/ca.pem", "secret")
    saved.write(saved.Book({"prod": prod, "here": saved.Saved(DEFAULT_URL)}, use="here"))
    with Client("prod") as client, pickle.loads(pickle.dumps(client)) as twin:
        assert (client.url, twin.url) == (prod.url, prod.url)
        assert twin._made_of == client._made_of == (prod.url, "secret", None, "/ca.pem")
    with Client(prod.url) as client:
        assert client._made_of == (prod.url, "", None, None), "what is saved is for its name"
    monkeypatch.setenv("FOREBAY_URL", "prod")
    monkeypatch.setenv("FOREBAY_TOKEN", "mine")
    with Client() as client:
        assert client._made_of[:2] == (prod.url, "mine")
    with Client("some-host") as client:
        assert client.url == "http://some-host:9400", "a name that is not saved is a host"
