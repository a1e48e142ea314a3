"""The row of the picture decoder runs with the decoders that are there, and names those that are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.rows import decode, loader
from bench.workloads import BY_NAME


def test_each_decoder_that_is_there_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "PICTURES", 2)
    installed = decode._installed
    monkeypatch.setattr(decode, "_installed", lambda name: None if name == "cv2" else installed(name))
    result = decode.decoders(SimpleNamespace(quick=True), BY_NAME["decode"])
    names = [measure.name for measure in result.measures]
    assert "whole, pillow" in names
    assert "at least 224, pillow" in names
    assert not any("opencv" in name for name in names)
    assert "opencv" in result.notes[0]
    assert all(measure.verdict == "reported" for measure in result.measures)
