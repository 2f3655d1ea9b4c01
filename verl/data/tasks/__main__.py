"""`python -m verl.data.tasks NAME --to DIR`: write train.parquet and test.parquet of a procedural task."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.data.tasks import get_task, known_tasks
from verl.data.tasks.base import Split
from verl.data.tasks.files import write_parquet

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"{', '.join(known_tasks())}, or gym/<dataset of reasoning-gym>")
    parser.add_argument("--to", required=True, type=Path, help="folder for train.parquet and test.parquet")
    parser.add_argument("--train", type=int, default=8000, help="training problems (default 8000)")
    parser.add_argument("--test", type=int, default=500, help="test problems (default 500)")
    parser.add_argument("--difficulty", type=int, default=1, help="1 (easiest, default) to 5")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    task = get_task(args.name)
    counts: dict[Split, int] = {"train": args.train, "test": args.test}
    for split, count in counts.items():
        file = args.to / f"{split}.parquet"
        write_parquet(task.rows(count, args.seed, args.difficulty, split), file)
        logger.info("%s: %d problems of %s, difficulty %d", file, count, args.name, args.difficulty)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    from verl.runtime import run_command

    parser = argparse.ArgumentParser(prog="python -m verl.data.tasks", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
