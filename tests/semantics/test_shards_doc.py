"""docs/semantics-shards.md, executed: its stories are told by the client to a real node."""

from __future__ import annotations

import doctest
import gzip
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.core.errors import ForebayError
from forebay.core.types import RangeSpec
from tests.core.archives import files_of, tar_of, zip_of
from tests.s3.real_node import RealNode

PAGE = Path(__file__).parents[2] / "docs" / "semantics-shards.md"
STORY = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def kind(call: Callable[..., Any], *arguments: Any, **more: Any) -> tuple[str, str]:
    """The kind and code of the error that a call ends with."""
    with pytest.raises(ForebayError) as caught:
        call(*arguments, **more)
    return caught.value.kind, caught.value.code


@pytest.fixture
def client(tmp_path: Path) -> Iterator[forebay.Client]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    samples = [("0001.jpg", bytes(3000)), ("0001.cls", b"3"), ("0002.jpg", bytes(range(250)) * 20), ("0002.cls", b"7")]
    (corpus / "train-0.tar").write_bytes(tar_of(samples))
    with RealNode(tmp_path / "node", "--fronts", "1") as node:
        node.add_bucket("corpus", corpus.as_uri())
        node.add_bucket("mine", "local://", write="local")
        with forebay.connect(node.endpoint) as made:
            yield made


@pytest.mark.real
def test_the_stories_of_shards_hold(client: forebay.Client) -> None:
    stories = STORY.findall(PAGE.read_text("utf-8"))
    assert len(stories) >= 6
    names = {
        "client": client, "tar": tar_of, "zip_of": lambda files: zip_of(files, zipfile.ZIP_DEFLATED),
        "tgz": lambda files: gzip.compress(tar_of(files)), "read": files_of, "kind": kind, "RangeSpec": RangeSpec,
    }  # fmt: skip
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    story = doctest.DocTestParser().get_doctest("\n".join(stories), names, PAGE.name, str(PAGE), 0)
    runner.run(story, out=said.append)
    assert runner.tries > 25
    assert runner.failures == 0, "".join(said)
