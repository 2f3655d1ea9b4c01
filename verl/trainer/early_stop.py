"""Whether validations still improve: the best one so far, and how many have passed since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from verl.config.sections.trainer import OfflineTrainerConfig


@dataclass
class EarlyStop:
    """Counts validations in a row that are no better than the best. Without `patience` it never ends a run."""

    metric: str
    mode: str
    patience: int | None
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    @classmethod
    def from_config(cls, trainer: OfflineTrainerConfig) -> EarlyStop:
        return cls(trainer.keep_best or "", trainer.keep_best_mode, trainer.early_stop_patience)

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether this validation is better than all before; one that is not a number is not."""
        if self.metric not in metrics:
            measured = ", ".join(sorted(name for name in metrics if name.startswith("val/")))
            raise ConfigError(
                f"trainer.early_stop_patience={self.patience} needs trainer.keep_best={self.metric}, which validation "
                f"does not measure; measured: {measured}"
            )
        value = metrics[self.metric]
        if math.isnan(value) or self.best is None:
            return not math.isnan(value)
        return value < self.best if self.mode == "min" else value > self.best

    def add(self, step: int, metrics: Mapping[str, float], improved: bool) -> None:
        """Count a validation; `improved` as all ranks agreed."""
        if improved:
            self.best, self.best_step, self.waited = metrics[self.metric], step, 0
        else:
            self.waited += 1

    @property
    def reached(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def notice(self, step: int) -> str:
        best = (
            f"the best was {self.best:.6g} at step {self.best_step}"
            if self.best is not None
            else "none was a number"
        )
        return (
            f"ended early after step {step}: {self.metric} has not improved in {self.waited} validations ({best}). To "
            "continue, start again with a larger trainer.early_stop_patience"
        )

    def state_dict(self) -> dict[str, Any]:
        counted = {} if self.best is None else {"best": self.best, "best_step": self.best_step}
        return {"metric": self.metric, "mode": self.mode, "waited": self.waited, **counted}

    def load_state_dict(self, state: Any) -> None:
        """Continue counting; the count of another metric is dropped. Where `state` cannot be used, nothing changes."""
        if not isinstance(state, Mapping):
            raise CheckpointError("its count of validations is no mapping")
        if (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return
        best, step, waited = state.get("best"), state.get("best_step", 0), state.get("waited")
        if (
            not (best is None or isinstance(best, float))
            or not isinstance(step, int)
            or not isinstance(waited, int)
        ):
            raise CheckpointError(f"its count of validations cannot be read: {dict(state)}")
        self.best, self.best_step, self.waited = best, step, waited
