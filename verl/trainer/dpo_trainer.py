"""`python -m verl.trainer.dpo_trainer`: training on pairs of a chosen and a rejected answer (DPO and its relatives)."""

from __future__ import annotations

import sys

from verl.config.schema import DPOConfig
from verl.trainer.offline_trainer import command, run

__all__ = ["main", "run"]


def main(argv: list[str] | None = None) -> int:
    return command(DPOConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
