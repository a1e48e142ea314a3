"""`forebay ckpt` on the checkpoints of a run, and the script of the manual."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.checkpoint.pictures import DAMAGED, SIZE
from forebay.client.sync import Client
from forebay.core.checkpoint import blob_name
from tests.checkpoint.conftest import ckpt
from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real
MANUAL = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def run(node: NodeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FOREBAY_URL": node.endpoint}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_the_manuals_script_saves_and_goes_on_and_the_verbs_tend_what_it_saved(node: NodeProcess, tmp_path: Path):
    script = tmp_path / "train.py"
    found = re.search(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL)
    assert found is not None
    script.write_text(found[1].replace("corpus/runs/example", "runs/manual"))
    for _ in range(2):
        ended = run(node, str(script))
        assert ended.returncode == 0, ended.stderr
    as_a_process = run(node, "-m", "forebay.cli.main", "ckpt", "ls", "runs/manual", "--json")
    assert as_a_process.returncode == 0, as_a_process.stderr
    listed = [json.loads(line) for line in as_a_process.stdout.splitlines()]
    assert listed[0]["step"] == 20
    assert [each["problem"] for each in listed] == [""] * len(listed)
    assert 1 <= len(listed) <= 3
    assert "##########" in ckpt(node, "ls", "s3://runs/manual/")
    drawn = tmp_path / "run.svg"
    ckpt(node, "ls", "runs/manual", "--picture", str(drawn))
    assert drawn.read_text().count(SIZE) == len(listed), "a bar for each"
    assert DAMAGED not in drawn.read_text()
    tested = json.loads(ckpt(node, "restore-test", "runs/manual", "--json"))
    assert (tested["step"], tested["damaged"]) == (20, {})
    assert "step 20: " in ckpt(node, "restore-test", "runs/manual")
    assert "all as they were saved" in ckpt(node, "verify", "runs/manual")
    assert json.loads(ckpt(node, "cp", "runs/manual", "runs/manual-copy", "--json"))["sequence"] == 1
    assert "all as they were saved" in ckpt(node, "verify", "runs/manual-copy", "--step", "20")
    assert json.loads(ckpt(node, "goodput", "runs/manual", "--json"))["saves"] >= 2
    assert "productive" in ckpt(node, "goodput", "runs/manual")
    assert 'forebay_run_seconds{run="runs/manual",part="lost"}' in ckpt(node, "goodput", "runs/manual/", "--prometheus")

    with Client(node.endpoint) as client:
        body = client.get("runs", f"manual-copy/manifests/{1:012}")
        token = json.loads(body.partition(b"\n")[0])["token"]
        name = "manual-copy/" + blob_name(1, token, 0, 0)
        damaged = bytearray(client.get("runs", name))
        damaged[70] ^= 1
        client.put("runs", name, bytes(damaged))
        assert "do not match their digest" in ckpt(node, "verify", "runs/manual-copy", status=EXIT_CORRUPT)
        assert "nothing can be restored" in ckpt(node, "restore-test", "runs/manual-copy", status=EXIT_CORRUPT)
        ckpt(node, "cp", "runs/manual", "runs/manual-copy")
        client.put("runs", f"manual-copy/manifests/{3:012}", b"torn")
        said = ckpt(node, "restore-test", "runs/manual-copy", status=EXIT_CORRUPT)
        assert "a restore takes step 20" in said
        assert "a manifest is damaged" in said
        for sequence in (2, 3):
            client.delete("runs", f"manual-copy/manifests/{sequence:012}")
        client.delete("runs", name)
    assert "is missing" in ckpt(node, "ls", "runs/manual-copy", "--picture", str(drawn))
    assert DAMAGED in drawn.read_text()
    assert "is missing" in ckpt(node, "cp", "runs/manual-copy", "runs/other", status=EXIT_CORRUPT)


def test_what_is_not_there_is_said(node: NodeProcess):
    assert "no checkpoints" in ckpt(node, "ls", "runs/nobody")
    drawn = ("ls", "runs/nobody", "--picture")
    assert "nothing to draw" in ckpt(node, *drawn, "run.png", status=EXIT_NOT_FOUND)
    assert "must end in .png, .svg, .pdf" in ckpt(node, *drawn, "run.gif", status=EXIT_INVALID)
    assert "there is no checkpoint under runs/nobody" in ckpt(node, "verify", "runs/nobody", status=EXIT_NOT_FOUND)
    assert "does not name a run" in ckpt(node, "ls", "runs", status=EXIT_INVALID)
    assert "there is no checkpoint under runs/nobody" in ckpt(
        node, "restore-test", "runs/nobody", status=EXIT_NOT_FOUND
    )
    assert "no run has saved" in ckpt(node, "goodput", "runs/nobody", status=EXIT_NOT_FOUND)


EXIT_INVALID, EXIT_NOT_FOUND, EXIT_CORRUPT = 2, 3, 7
