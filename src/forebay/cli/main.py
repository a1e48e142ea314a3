"""`forebay`: the program. A verb's file is loaded when the verb is used.

Theory. `forebay --help` and Tab must answer at once and without torch, obstore or a node, so the list of verbs is data
(name, file, one line of help) and a verb's file is imported only when that verb runs. What several verbs need is
declared once in `options.py`; how a verb ends is `outcome.py`.

Rejected: importing all verbs to build the program (every start pays for all); plugins by entry points (nobody asked).

Invariants. (1) `forebay --help` imports no verb. (2) The help here is the first line of the verb's own (a test
compares).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import typer.core

import forebay

VERBS: dict[str, tuple[str, str]] = {
    "up": ("up", "Start a node in the background."),
    "down": ("down", "Stop the node that `up` started."),
    "node": ("node", "Run a node in the foreground."),
    "bucket": ("bucket", "Add, show and remove buckets."),
    "ls": ("ls", "List buckets, or the objects of one."),
    "stat": ("stat", "Show what the node knows of an object."),
    "get": ("get", "Copy objects to local files."),
    "put": ("put", "Copy local files to objects."),
    "cp": ("cp", "Copy objects to files, files to objects, or objects to objects."),
    "sync": ("sync", "Make a bucket's folder like a directory here, or the other way."),
    "mv": ("mv", "Move objects to files, files to objects, or objects to objects."),
    "du": ("du", "Sum up objects and bytes of a folder, one level deep."),
    "presign": ("presign", "Print a URL that reads or writes one object without a key."),
    "rm": ("rm", "Delete objects, here and at the backend."),
    "cat": ("cat", "Write an object, or a range of it, to standard output."),
    "prefetch": ("jobs", "Bring objects into the cache."),
    "pin": ("jobs", "Fetch objects and never evict them."),
    "unpin": ("jobs", "Let pinned objects be evicted again."),
    "evict": ("jobs", "Drop objects from the cache."),
    "refresh": ("jobs", "Ask the backend whether cached objects are still current."),
    "flush": ("flush", "Bring to the backends what only nodes have."),
    "lost": ("lost", "List and give up lost objects."),
    "volume": ("volume", "Show, add and give up volumes."),
    "job": ("job", "List, watch and cancel jobs."),
    "key": ("key", "Make keys for clients of a node."),
    "drain": ("drain", "Have a node of the cluster give its keys away and go."),
    "rewarm": ("rewarm", "Fetch what a former cluster had cached."),
    "status": ("status", "Show the node, its volumes and its buckets."),
    "logs": ("logs", "Print the log of the node on this machine."),
    "config": ("config", "Save nodes by name."),
    "top": ("top", "Watch hit ratio, bandwidth and latency live."),
    "ckpt": ("ckpt", "List, verify, copy and prune checkpoints."),
    "shard": ("shard", "Pack files or objects into shards."),
    "offload": ("offload", "Plan what a training step moves to disks, and what it costs."),
    "bench": ("bench", "Measure this machine: warm, cold, epoch or all."),
    "doctor": ("doctor", "Look for what is wrong and say what to change."),
}


class _Verbs(dict[str, Any]):
    """Verb names to commands, each made when it is first asked for."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(VERBS))

    def __getitem__(self, name: str) -> Any:
        command = super().__getitem__(name)
        if command is None:
            module = importlib.import_module(f"forebay.cli.{VERBS[name][0]}")
            command = typer.main.get_command(module.APPS[name] if hasattr(module, "APPS") else module.app)
            command.name = name
            self[name] = command
        return command

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in VERBS else default

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)


class _LazyGroup(typer.core.TyperGroup):
    """The group of all verbs; see the module's header."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = _Verbs()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,  # plain help: rich would take longer than all the rest
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["--help", "-h"]},  # verbs inherit it; where -h means more, it does that
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"forebay {forebay.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="The node, as with each verb that asks one.")
    ] = None,
) -> None:
    """A fast tier of local disks between object storage and GPUs.

    Every verb has --help. Start with: forebay up
    """
    if url is not None:
        os.environ["FOREBAY_URL"] = url  # this process is the program


def run() -> None:
    """The program's entry point."""
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")
    app(prog_name="forebay")


if __name__ == "__main__":
    run()
