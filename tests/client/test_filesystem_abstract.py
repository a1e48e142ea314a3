"""fsspec's own tests of a filesystem, on a real node: a bucket that only it has, and one written through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsspec.tests import abstract

from forebay.fsspec.filesystem import ForebayFileSystem
from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real


class Place(abstract.AbstractFixtures):
    """Where fsspec's tests run. They are handed a path, and remove what they made."""

    bucket = ""

    @pytest.fixture
    def fs(self, file_node: NodeProcess) -> ForebayFileSystem:
        return ForebayFileSystem(endpoint_url=file_node.endpoint)

    @pytest.fixture
    def fs_path(self) -> str:
        return self.bucket

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *names: "/".join(names)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class Scratch(Place):
    bucket = "scratch"


class Lake(Place):
    bucket = "lake/deeper"


def of_all(place: Any) -> dict[str, type]:
    """Each of fsspec's suites at a place, as classes that pytest finds."""
    suites = ("Copy", "Get", "Put", "Open", "Pipe")
    return {
        f"Test{suite}{place.__name__}": type(
            f"Test{suite}{place.__name__}", (place, getattr(abstract, f"Abstract{suite}Tests")), {}
        )
        for suite in suites
    }


globals().update(of_all(Scratch))
globals().update(of_all(Lake))
