"""Names for the versions of objects: apart from each other, and from all that clients can name."""

from __future__ import annotations

import pytest

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.types import check_bucket_name, check_key
from forebay.core.versions import name_of_version, split_name, versions_of, whose_versions


def test_a_name_tells_key_and_version() -> None:
    for key in ("a", "a\0b", "ü/ ", "a\0"):
        name = name_of_version(key, "3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY+MTRCxf3vjVBH40Nr8X8gdRQBpUMLUo")
        assert name == check_key(name)
        assert split_name(name)[0] == key
    assert name_of_version("a\0b", "c") != name_of_version("a", "b")


def test_no_client_names_the_bucket_of_versions() -> None:
    assert whose_versions(versions_of("corpus")) == "corpus"
    assert whose_versions("corpus") == whose_versions("-members") == ""
    with pytest.raises(Invalid):
        check_bucket_name(versions_of("corpus"))


def test_what_can_be_no_version_is_refused() -> None:
    for version_id in ("", "two words", "a\0b", "ü", "x" * 1025):
        with pytest.raises(Invalid, match="Invalid version id"):
            name_of_version("key", version_id)
    assert name_of_version("k" * (limits.KEY_BYTES_MAX - 2), "x")
    with pytest.raises(Invalid, match="together"):
        name_of_version("k" * (limits.KEY_BYTES_MAX - 1), "x")
