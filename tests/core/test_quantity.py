"""Rates as people write them; sizes are tested where nodes take them."""

import pytest

from forebay.core.errors import Invalid
from forebay.core.quantity import parse_rate, parse_size


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 << 30), ("1.5GB", 1_500_000_000), ("512M", 512 << 20)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "rate"), [("3GB/s", 3e9), ("3 GB", 3e9), ("500MiB/s", 500 * 1024**2), ("10", 10.0)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "3GB/min", "-1GB/s", ""])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not known: write it as 3GB/s"):
        parse_rate(text)
