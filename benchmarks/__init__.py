"""Benchmarks, run from a checkout: `python -m benchmarks.NAME --help` or `make bench BENCH=NAME`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def command(
    name: str,
    about: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the arguments of one benchmark, run it, and return its exit code."""
    from verl.runtime import run_command

    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))
