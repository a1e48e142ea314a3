"""`forebay bench`: run rows of the speed table, print them with their peers and verdicts, keep them as JSON.

    forebay bench warm|cold|epoch|…|all [--row NAME]… [--quick] [--out FILE] [--list]

Exit status: 0 when every row ran (reached or missed: a miss is a finding, not a failure), 1 when a row could not be
measured, 2 for wrong arguments. `--quick` shrinks sizes, seconds and rounds until a row takes seconds: it shows that
the benchmark works, its numbers mean little.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import report
from bench.load import LoadFailed
from bench.parts import Lab
from bench.report import Result
from bench.row import Row
from bench.servers import MissingProgram, ServerFailed
from bench.workloads import BY_NAME, GROUPS, ROWS
from forebay.core.errors import ForebayError

OUT = "bench-out"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    rows = [BY_NAME[name] for name in arguments.row] or [row for row in ROWS if arguments.group in ("all", row.group)]
    if arguments.list:
        for row in rows:
            print(f"{row.name:15} {row.group:6} {row.what}: {', '.join(f'{k} {v}' for k, v in row.goals.items())}")
        return 0
    out = Path(arguments.out or f"{OUT}/{arguments.group if not arguments.row else '-'.join(arguments.row)}.json")
    out.parent.mkdir(parents=True, exist_ok=True)

    def keep(so_far: Sequence[Result]) -> None:  # after each row: hours of measuring may be interrupted
        out.write_text(report.as_json(so_far, quick=arguments.quick, wall_s=time.time()))

    say = functools.partial(print, file=sys.stderr, flush=True)
    results = run_rows(rows, quick=arguments.quick, say=say, keep=keep)
    print(report.table(results))
    print(report.notes(results))
    print(report.summary(results))
    print(f"written to {out}")
    return 1 if any(result.error for result in results) else 0


def run_rows(
    rows: Sequence[Row],
    *,
    quick: bool,
    say: Callable[[str], None],
    keep: Callable[[Sequence[Result]], None] = lambda so_far: None,
) -> list[Result]:
    """Every row once, in one lab. A row that cannot be measured becomes a result with an error. After each row `keep`
    gets what there is so far."""
    results: list[Result] = []
    with Lab(quick=quick) as lab:
        for row in rows:
            say(f"[bench] {row.name}: {row.what}")
            started = time.perf_counter()
            result = run_row(lab, row)
            results.append(report.timed(result, time.perf_counter() - started))
            keep(results)
            for measure in result.measures:
                say(
                    f"[bench]   {measure.name}: {report.number(measure.value)} (goal {measure.goal}): {measure.verdict}"
                )
            if result.error:
                say(f"[bench]   could not be measured: {result.error}")
    return results


def run_row(lab: Lab, row: Row) -> Result:
    module, _, function = row.run.partition(":")
    run: Callable[[Lab, Row], Result] = getattr(importlib.import_module(module), function)
    try:
        return run(lab, row)
    except (LoadFailed, ServerFailed, MissingProgram, ForebayError, OSError) as error:
        return Result(row, error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    finally:
        lab.unpin()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forebay bench", description="Speed rows, each against its peer or limit.")
    parser.add_argument("group", nargs="?", default="all", choices=[*GROUPS, "all"], help="which rows (default: all)")
    parser.add_argument("--row", action="append", default=[], choices=sorted(BY_NAME), metavar="NAME", help="only this")
    parser.add_argument("--quick", action="store_true", help="seconds a row: does it work at all?")
    parser.add_argument("--out", metavar="FILE", help=f"JSON file (default: {OUT}/GROUP.json)")
    parser.add_argument("--list", action="store_true", help="print the rows and their goals")
    return parser
