"""`python -m verl.trainer.sft_trainer`: supervised fine-tuning."""

from __future__ import annotations

import sys

from verl.config.schema import SFTConfig
from verl.trainer.offline_trainer import command, refuse_conflicts, run, with_sizes

__all__ = ["main", "refuse_conflicts", "run", "with_sizes"]


def main(argv: list[str] | None = None) -> int:
    return command(SFTConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
