"""`python -m verl.trainer.reward_trainer`: a reward model from pairs of a chosen and a rejected answer."""

from __future__ import annotations

import sys

from verl.config.schema import RewardTrainingConfig
from verl.trainer.offline_trainer import command, run

__all__ = ["main", "run"]


def main(argv: list[str] | None = None) -> int:
    return command(RewardTrainingConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
