"""Learning rate as a pure function of the optimiser step: warm-up, then constant, cosine or linear."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.errors import ConfigError

KINDS = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Schedule:
    """`total_steps` is needed by cosine and linear only."""

    lr: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"optim.lr_scheduler_type={self.kind!r} is unknown; allowed: {', '.join(KINDS)}"
            )
        if self.kind != "constant" and self.total_steps is None:
            raise ConfigError(
                f"optim.lr_scheduler_type={self.kind!r} needs the number of optimiser steps; set "
                "trainer.total_training_steps, or optim.lr_scheduler_type=constant"
            )

    @classmethod
    def from_config(cls, optim: Any, total_steps: int | None) -> Schedule:
        warmup = int(optim.lr_warmup_steps)
        ratio = float(optim.lr_warmup_steps_ratio)
        if warmup < 0:
            if ratio > 0 and total_steps is None:
                raise ConfigError(
                    f"optim.lr_warmup_steps_ratio={ratio} needs the number of optimiser steps; set "
                    "trainer.total_training_steps or optim.lr_warmup_steps"
                )
            warmup = int(ratio * (total_steps or 0))
        return cls(
            lr=float(optim.lr),
            kind=optim.lr_scheduler_type,
            warmup_steps=warmup,
            total_steps=total_steps,
            min_lr_ratio=float(optim.min_lr_ratio),
        )

    def at(self, step: int) -> float:
        """The rate of optimiser step `step` (the first is 0). Warm-up ends at the full rate, never starts at 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        length = max(self.total_steps - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / length, 1.0)
        share = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)
