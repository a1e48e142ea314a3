"""What was meant."""

from __future__ import annotations

import pytest

from forebay.core.spelling import did_you_mean, known_arguments


def test_a_slip_is_told_from_another_name() -> None:
    assert did_you_mean("corpsu", ["corpus", "ckpt"]) == "; did you mean corpus?"
    assert did_you_mean("else", ["corpus", "ckpt"]) == ""
    assert did_you_mean("x", []) == ""


def test_an_argument_that_is_not_there_names_the_one_that_was_meant() -> None:
    class Loader:
        @known_arguments
        def __init__(self, data: str, *, workers: int = 0) -> None:
            self.said = (data, workers)

    assert Loader("a", workers=2).said == ("a", 2)
    with pytest.raises(TypeError, match=r"Loader has no argument 'num_workers'; did you mean workers\?"):
        Loader("a", num_workers=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing"):
        Loader()  # type: ignore[call-arg]
