"""docs/semantics-uploads.md, executed: its stories are told by boto3 and our own client to a real node."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import pytest
from botocore.exceptions import ClientError

from forebay.client.sync import Client
from tests.s3.real_node import RealNode

PAGE = Path(__file__).parents[2] / "docs" / "semantics-uploads.md"
STORY = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the stories speak of."""
    with RealNode(tmp_path / "node", "--fronts", "1") as node:
        for name, write in (("kept", "back"), ("straight", "through")):
            (tmp_path / name).mkdir()
            node.add_bucket(name, (tmp_path / name).as_uri(), write=write)
        s3 = boto3.client(
            "s3",
            endpoint_url=node.endpoint,
            aws_access_key_id="any",
            aws_secret_access_key="any",
            region_name="us-east-1",
            config=botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )
        with Client(node.endpoint) as client:
            yield {"s3": s3, "client": client, "code": code}
        s3.close()


def code(call: Any, **arguments: Any) -> str:
    """The error code that a call ends with."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return str(caught.value.response["Error"]["Code"])


@pytest.mark.real
def test_the_stories_of_uploads_hold(names: dict[str, Any]) -> None:
    text = PAGE.read_text("utf-8")
    stories = STORY.findall(text)
    assert len(stories) >= 6
    whole = "\n".join(stories)  # one after the other: a later one may go on with what an earlier one made
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    story = doctest.DocTestParser().get_doctest(whole, names, PAGE.name, str(PAGE), 0)
    runner.run(story, out=said.append)
    assert runner.tries > 25
    assert runner.failures == 0, "".join(said)
