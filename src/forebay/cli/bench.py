"""`forebay bench`: hands its arguments to `bench`, which has its own --help."""

from __future__ import annotations

from typing import Any

import typer

from forebay.cli.outcome import verb
from forebay.core.errors import NotSupported

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(
    "bench",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
@verb
def bench(ctx: typer.Context) -> Any:
    """Measure this machine: warm, cold, epoch or all."""
    try:
        from bench.main import main
    except ModuleNotFoundError:
        raise NotSupported(
            "the benchmark is not in the wheel: clone the repository, run `make venv`, and call its `.venv/bin/forebay`"
        ) from None

    return main(list(ctx.args))
