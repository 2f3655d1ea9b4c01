"""verl's names for generating ahead of training, where a value must be converted or another key follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.config.schema import ActorConfig
from verl.config.sources import get_path, set_path, take_path
from verl.errors import ConfigError

TRAINER_MODE = "trainer.v1.trainer_mode"
STALENESS = "async_training.staleness_threshold"
PARTIAL = "async_training.partial_rollout"
REQUIRED_BATCHES = "async_training.require_batches"
_THEIR_NAMES = ("staleness_threshold", "trigger_parameter_sync_step", "partial_rollout", "require_batches")
_MODES = {"sync": "off", "colocate_async": "carry_over", "separate_async": "fully_async"}
_MODE = "trainer.async_training.mode"
_BATCH = "data.train_batch_size"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


def converted(name: str, value: Any) -> Any:
    """What the value of another name is in ours."""
    if name == TRAINER_MODE:
        if value not in _MODES:
            known = ", ".join(f"{theirs} ({_MODE}={ours})" for theirs, ours in _MODES.items())
            raise ConfigError(f"'{name}' is {value!r}, which is not known. Known: {known}")
        return _MODES[value]
    if name == STALENESS:
        return math.ceil(_number(name, value, 0.0, "a number, at least 0 (a share of a step's samples)"))
    return value


@dataclass
class AsyncAliases:
    """The names that are no single key of ours: taken from every source, applied to all of them together."""

    seen: bool = False
    batches: int | None = None

    def take(self, tree: dict[str, Any]) -> list[str]:
        """Remove them from a source; returns notices."""
        section, notices = tree.get("async_training"), []
        if not isinstance(section, dict):
            return []
        self.seen = self.seen or any(name in section for name in _THEIR_NAMES)
        found, value = take_path(tree, PARTIAL)
        if found:
            if str(value).lower() not in ("true", "false"):
                raise ConfigError(f"'{PARTIAL}' is {value!r}; it must be true or false")
            notices.append(_partial_notice(value))
        found, value = take_path(tree, REQUIRED_BATCHES)
        if found:
            allowed = "a whole number, at least 1"
            number = _number(REQUIRED_BATCHES, value, 1.0, allowed)
            if number != int(number):
                raise ConfigError(f"'{REQUIRED_BATCHES}' is {value!r}; it must be {allowed}")
            self.batches = int(number)
        return notices

    def finish(self, tree: dict[str, Any]) -> list[str]:
        """Add what follows from them to the values of all sources; returns notices."""
        notices = []
        if self.seen and get_path(tree, _MODE) is None:
            set_path(tree, _MODE, "fully_async")
            notices.append(f"'async_training' without a mode is read as '{_MODE}=fully_async'")
        if self.batches is not None:
            mini = get_path(tree, _MINI_BATCH) or ActorConfig().ppo_mini_batch_size
            size, given = (
                int(_number(_MINI_BATCH, mini, 1.0, "a whole number")) * self.batches,
                get_path(tree, _BATCH),
            )
            if given is not None and given != size:
                raise ConfigError(
                    f"'{REQUIRED_BATCHES}={self.batches}' asks for {self.batches} x {_MINI_BATCH}={mini} = {size} "
                    f"prompts per step, and {_BATCH}={given} is given as well. Keep one of them"
                )
            set_path(tree, _BATCH, size)
            notices.append(f"'{REQUIRED_BATCHES}={self.batches}' is read as '{_BATCH}={size}'")
        return notices


def _partial_notice(value: Any) -> str:
    if str(value).lower() == "true":
        return f"'{PARTIAL}=True' needs no key: with {_MODE}=fully_async running responses always take new weights"
    return (
        f"'{PARTIAL}=False' has no effect: with {_MODE}=fully_async running responses always take new weights. "
        f"{_MODE}=one_step_off sends them only when none is running"
    )


def _number(name: str, value: Any, least: float, allowed: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ConfigError(f"'{name}' is {value!r}; it must be {allowed}")
    return number
