"""The program as a whole: help at once, every way to fail, completion, and a manual that leaves nothing out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from forebay.cli import outcome
from forebay.cli.main import VERBS, app
from forebay.core.errors import KINDS, Bug, Corrupt
from forebay.core.messages.node_state import NodeState
from forebay.core.types import Bucket
from forebay.health import findings
from tests.cli.conftest import COMMAND, Program
from tests.client.fake_node import FakeNode

MANUAL = Path(__file__).parents[2] / "docs" / "cli.md"
HEAVY = ("torch", "numpy", "obstore", "uvloop", "lmdb", "rich", "ssl", "asyncio", "forebay.node", "forebay.backends")


# --- help and speed --------------------------------------------------------------------------------------------------
def loaded_by(*args: str) -> set[str]:
    """The modules that a call of the program imports."""
    code = (
        "import sys\nsys.argv = ['forebay', *sys.argv[1:]]\nfrom forebay.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit:\n    pass\nprint('MODULES', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())


def test_help_lists_every_verb_and_loads_none() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    for name, (_, text) in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", done.stdout, re.MULTILINE), name
    loaded = loaded_by("--help")
    assert not {f"forebay.cli.{file}" for file, _ in VERBS.values()} & loaded
    assert not [name for name in HEAVY if name in loaded]


def test_h_is_help_and_url_may_stand_first(program: Program, node: FakeNode, alone: Program) -> None:
    for name in VERBS:
        if name != "ls":  # there it means what it means to ls
            assert "usage: forebay" in program(name, "-h").stdout.lower(), name
    assert "Usage: forebay" in program("bucket", "add", "-h").stdout
    assert "Usage: forebay" in program("-h").stdout
    assert "corpus" in alone("--url", node.url, "ls").stdout
    for name, group in app_commands():
        asks = name.split()[0] not in ("up", "down", "node", "key", "offload", "bench", "logs", "config")
        assert asks == any("--url" in param.opts for param in group.params), name


def app_commands() -> list[tuple[str, Any]]:
    """Every verb that does something: `bucket add` and not `bucket`."""
    root: Any = typer.main.get_command(app)
    found = []
    for name in VERBS:
        command = root.commands[name]
        below = getattr(command, "commands", {})
        found += [(f"{name} {each}", below[each]) for each in below] or [(name, command)]
    return found


def test_the_verbs_help_loads_nothing_heavy() -> None:
    """All in one process: what any of them loads would be seen."""
    verbs = [name for name in VERBS if name != "bench"]  # its help is the benchmark's own
    code = (
        "import sys\nfrom forebay.cli.main import app\n"
        "for verb in sys.argv[1:]:\n"
        "    try:\n        app([verb, '--help'], prog_name='forebay')\n    except SystemExit as end:\n"
        "        assert not end.code, verb\n"
        "print('MODULES', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *verbs], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("MODULES ")[2].split())
    assert {f"forebay.cli.{VERBS[name][0]}" for name in verbs} <= loaded
    assert not [name for name in HEAVY if name in loaded]


def test_reading_verbs_load_nothing_heavy(program: Program) -> None:
    loaded = loaded_by("ls", "--url", program.env["FOREBAY_URL"], "corpus")
    assert "forebay.cli.ls" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_help_imports_little_more_than_its_framework() -> None:
    """Imports are what a short call waits for, and a count of them is the same on a busy machine."""
    code = "import sys, typer.main, typer.core, msgspec; print(*sys.modules)"
    floor = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded_by("--help") - set(floor)) <= 20


def test_the_list_of_verbs_says_what_the_verbs_say() -> None:
    group = typer.main.get_command(app)
    for name, (_, text) in VERBS.items():
        command = group.commands[name]  # type: ignore[attr-defined]
        assert command.help.splitlines()[0] == text, name


def test_the_version_is_printed() -> None:
    assert (
        subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True).stdout == "forebay 0.1.0\n"
    )


# --- errors ----------------------------------------------------------------------------------------------------------
ON_A_NODE = [
    ("ls",),
    ("ls", "corpus"),
    ("stat", "corpus/a"),
    ("get", "corpus/a", "nothing-here"),
    ("get", "-r", "corpus/a", "."),
    ("prefetch", "corpus"),
    ("pin", "corpus"),
    ("unpin", "corpus"),
    ("evict", "corpus"),
    ("refresh", "corpus"),
    ("flush", "corpus"),
    ("flush",),
    ("job", "ls"),
    ("job", "watch", "x"),
    ("job", "show", "x"),
    ("job", "cancel", "x"),
    ("status",),
    ("top", "--once"),
    ("bucket", "ls"),
    ("bucket", "show", "corpus"),
    ("bucket", "add", "corpus", "s3://x"),
    ("bucket", "rm", "corpus"),
]


@pytest.mark.parametrize("args", ON_A_NODE, ids=" ".join)
def test_without_a_node_every_verb_says_how_to_get_one(alone: Program, args: tuple[str, ...]) -> None:
    error = alone(*args, code=6).stderr
    assert error.startswith("forebay: no node answers at http://127.0.0.1:")
    assert "forebay up" in error
    assert len(error.splitlines()) == 1
    said = json.loads(alone(*args, "--json", code=6).stderr)["error"]
    assert (said["kind"], said["code"], said["exit_code"]) == ("Unavailable", "NoNode", 6)


@pytest.mark.parametrize("args", ON_A_NODE, ids=" ".join)
def test_a_wrong_url_and_a_wrong_option_are_usage_errors(alone: Program, args: tuple[str, ...]) -> None:
    assert "http://127.0.0.1:9400" in alone(*args, "--url", "ftp://x", code=2).stderr
    assert "No such option" in alone(*args, "--no-such-option", code=2).stderr


@pytest.mark.parametrize("args", [("stat",), ("get",), ("cat",), ("mv", "x"), ("job", "show"), ("bucket", "add", "x")])
def test_a_missing_argument_is_a_usage_error(alone: Program, args: tuple[str, ...]) -> None:
    assert "Missing argument" in alone(*args, code=2).stderr


def test_a_mistyped_verb_is_a_usage_error(alone: Program) -> None:
    assert "No such command" in alone("prefetsch", code=2).stderr
    assert "No such command" in alone("job", "shw", code=2).stderr


def test_a_node_that_hangs_up_or_talks_nonsense(program: Program, node: FakeNode) -> None:
    node.answer_raw = b"SSH-2.0-OpenSSH_9.2\r\n\r\n"
    assert "not HTTP/1.1" in program("status", code=7).stderr
    node.answer_raw = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    assert "expected shape" in program("status", code=7).stderr
    node.answer_raw = b""
    assert "without an answer" in program("status", code=6).stderr
    node.answer_raw = b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"
    assert "status 500" in program("status", code=1).stderr


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_error_has_its_exit_code(program: Program, node: FakeNode, kind: str) -> None:
    node.fail_next = [KINDS[kind]("it went wrong: do something")]
    result = program("status", code=outcome.EXITS[kind])
    assert result.stderr == "forebay: it went wrong: do something\n"


def test_errors_are_one_line_whatever_is_in_them(program: Program, node: FakeNode) -> None:
    node.fail_next = [Corrupt("a\nb\x1b[2Jc")]
    assert program("status", code=7).stderr == "forebay: a b\N{REPLACEMENT CHARACTER}[2Jc\n"


def test_debug_prints_the_traceback(node: FakeNode, program: Program) -> None:
    node.fail_next = [Bug("oh")]
    done = program.process("status", "--debug")
    _, err = done.communicate(timeout=60)
    assert b"Traceback" in err
    assert err.rstrip().endswith(b"forebay: oh")


def test_what_nobody_foresaw_asks_for_a_report() -> None:
    @outcome.verb
    def broken(as_json: bool = False, debug: bool = False) -> None:
        raise ZeroDivisionError("by zero")

    with pytest.raises(typer.Exit) as caught:
        broken(as_json=True)
    assert caught.value.exit_code == 1


# --- completion ------------------------------------------------------------------------------------------------------
def complete(program: Program, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    env = {
        **program.environment(),
        "_FOREBAY_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["forebay", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(COMMAND, env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_verbs_buckets_and_keys_are_completed(program: Program, node: FakeNode) -> None:
    node.settings["corpse"] = Bucket("corpse", "s3://corpse")
    assert complete(program, "pref") == ["prefetch"]
    assert complete(program, "ls", "cor") == ["corpse/", "corpus/"]
    assert complete(program, "stat", "corpus/") == ["corpus/readme", "corpus/train/", "corpus/val/"]
    assert complete(program, "stat", "corpus/train/a") == ["corpus/train/a.tar"]
    assert complete(program, "get", "s3://corpus/tr") == ["s3://corpus/train/"]
    assert complete(program, "get", "//corpus/tr") == ["//corpus/train/"], "bash breaks words at the colon"
    assert "corpus" in complete(program, "bucket", "show", "cor")
    assert complete(program, "job", "s") == ["show"]
    assert "--recursive" in complete(program, "ls", "--rec")


def test_completion_without_a_node_is_empty_and_silent(alone: Program) -> None:
    assert complete(alone, "stat", "cor") == []
    assert complete(alone, "bucket", "show", "") == []


# --- the manual ------------------------------------------------------------------------------------------------------
def options(command: Any) -> set[str]:
    found: set[str] = set()
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found |= {*parameter.opts, *parameter.secondary_opts}
    for sub in getattr(command, "commands", {}).values():
        found |= options(sub)
    return found


def test_every_verb_option_and_exit_code_is_in_the_manual() -> None:
    manual = MANUAL.read_text("utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", manual, re.MULTILINE | re.DOTALL))
    shared = (
        manual[: manual.index("## A node on this machine")]
        + manual[manual.index("## What is cached") : manual.index("### prefetch")]
    )
    group = typer.main.get_command(app)
    for name in VERBS:
        assert name in sections, f"docs/cli.md has no section '### {name}'"
        assert re.search(rf"^forebay {name}\b", sections[name], re.MULTILINE), f"{name} has no example"
        command = group.commands[name]  # type: ignore[attr-defined]
        node_too = sections["node"] if name == "up" else ""
        for option in options(command) - {"--help"}:
            where = sections[name] + shared + node_too
            assert f"`{option}" in where or f" {option} " in where, f"docs/cli.md: {name} lacks {option}"
        for sub in getattr(command, "commands", {}):
            assert f"forebay {name} {sub}" in sections[name], f"docs/cli.md: no example of {name} {sub}"
    for kind, code in outcome.EXITS.items():
        assert re.search(rf"^\| {code} \| .*`{kind}`", manual, re.MULTILINE), f"docs/cli.md: {kind} is not at {code}"


def test_the_manual_names_no_option_that_does_not_exist() -> None:
    group = typer.main.get_command(app)
    known = options(group)
    for word in re.findall(r"`?(--[a-z][a-z-]+)", MANUAL.read_text("utf-8")):
        assert word in known | {"--help"}, word


def test_the_json_fields_of_the_manual_are_those_of_the_values() -> None:
    from forebay.cli.view import BucketView, Latency, View
    from forebay.core.messages import calls

    manual = MANUAL.read_text("utf-8")
    for struct in (calls.ObjectState, calls.JobState, NodeState, View, BucketView, Latency, calls.CachedEntry):
        for field in struct.__struct_fields__:
            assert f"`{field}`" in manual, f"docs/cli.md: {struct.__name__}.{field} is missing"


def test_the_doctors_page_has_every_check() -> None:
    text = (MANUAL.parent / "doctor.md").read_text("utf-8")
    source = Path(findings.__file__).read_text("utf-8")
    checks = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    assert len(checks) >= 16
    for check in checks:
        assert f"| `{check}` |" in text, f"docs/doctor.md: {check} is missing"
