"""The package's public names: all there, and nothing is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forebay


def test_every_public_name_is_there() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None
    assert issubclass(forebay.NotFound, forebay.ForebayError)
    with pytest.raises(AttributeError, match="no_such_name"):
        forebay.no_such_name  # noqa: B018


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    program = "import sys, forebay; print(*[name for name in sys.modules if name.startswith('forebay.')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_asserts_stay_on() -> None:
    refused = subprocess.run([sys.executable, "-O", "-c", "import forebay"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "without -O" in refused.stderr
