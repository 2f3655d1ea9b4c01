"""The arguments of TRL's configs in Python, and the keys they are here.

Names, their keys and their defaults are in `trl_names.json`, the table that the command line answers from, too. Every
argument is converted, is a notice why it needs nothing, or is refused with the reason; an unknown one is an error that
names the nearest.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from verl.config import schema
from verl.config.keys import schema_keys, trl_names
from verl.config.trl_values import CONVERTERS, plain, steps
from verl.errors import ConfigError

log = logging.getLogger(__name__)

_ACTOR = "actor_rollout_ref.actor"
_BY_TRAINER = ("resume_from_checkpoint", "reward_weights")
"""Keys that the trainer sets, from other objects as well."""
_BATCH = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "num_mini_batches", "total_episodes",
)  # fmt: skip
_CONVERTED = (*_BATCH, "eval_strategy", "save_strategy")
_IN_PYTHON = "in Python alone"


class TrainingArguments:
    """Arguments of one of TRL's configs, by their names there. Unset ones have TRL's defaults where these shape the
    training (batch, schedule, epochs, seed), and otherwise those of the keys.

    Args:
        output_dir: The run folder.
        overrides: Any key of the configuration reference; goes before the other arguments.
        arguments: Those of TRL's class of this name.

    Raises:
        ConfigError: For an argument that is unknown, or asks for what there is not.
    """

    trl_name: ClassVar[str]
    """Of the class in TRL, by which users import this one."""
    kind: ClassVar[type[Any]]
    adv_estimator: ClassVar[str] = ""
    kl_in_loss: ClassVar[bool] = False
    """Whether the KL is a term of the loss; otherwise it is part of the reward."""
    cuts_batches: ClassVar[bool] = False
    """Whether a batch is cut into mini-batches; otherwise gradients of several are accumulated."""

    def __init__(
        self, output_dir: str | None = None, *, overrides: Mapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        if output_dir is not None:
            arguments["output_dir"] = str(output_dir)
        self.overrides = dict(overrides or {})
        self.given = {name: value for name, value in arguments.items() if value is not None}
        for name in arguments:
            self._require_known(name)
        if metric := self.given.get("metric_for_best_model"):
            self.given.setdefault("greater_is_better", not metric.endswith(("loss", "perplexity")))
        self._unused = [line for name, value in self.given.items() if (line := self._note(name, value))]
        self.keys()

    def __getattr__(self, name: str) -> Any:
        """The value of an argument; None for one that is not set and has no default."""
        if name.startswith("_") or not self._knows(name):
            raise AttributeError(f"{self.trl_name} has no argument '{name}'")
        return self.given.get(name, self._defaults().get(name))

    def __repr__(self) -> str:
        shown = {**self.given, **({"overrides": self.overrides} if self.overrides else {})}
        shown = {name: "***" if name == "hub_token" else value for name, value in shown.items()}
        return f"{self.trl_name}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def to_dict(self) -> dict[str, Any]:
        """The arguments that were given, and TRL's defaults."""
        return {**self._defaults(), **self.given}

    def keys(self, *, devices: int = 1, epoch_steps: Callable[[int], int] | None = None) -> dict[str, Any]:
        """The keys that the arguments are; `epoch_steps` says how many steps of a batch size an epoch has."""
        values: dict[str, Any] = {**self._batch(devices)}
        updates = values.pop("updates", 1)
        if self.adv_estimator:
            values["algorithm.adv_estimator"] = self.adv_estimator
        for name, value in self.to_dict().items():
            key = self._key(name)
            if key is None or name in _BATCH or name in _BY_TRAINER:
                continue
            if name in ("max_steps", "save_steps", "eval_steps"):
                values |= {key: steps(name, value, updates)} if value and value > 0 else {}
            elif name in CONVERTERS:
                values |= CONVERTERS[name](self, key, value)
            else:
                values[key] = value
        values |= self._strategies(values["data.train_batch_size"], epoch_steps)
        return values

    def say_unused(self) -> None:
        """Log which arguments have no effect here, and why, in one line."""
        if self._unused:
            log.warning("%s: %s", self.trl_name, "; ".join(self._unused))

    def default(self, name: str, otherwise: Any) -> Any:
        value = getattr(self, name)
        return otherwise if value is None else value

    def refuse(self, name: str, value: Any, reason: str) -> ConfigError:
        return ConfigError(f"{self.trl_name}({name}={value!r}): {reason}")

    def _defaults(self) -> dict[str, Any]:
        defaults: dict[str, Any] = trl_names()["defaults"][self.trl_name]
        return defaults

    def _key(self, name: str) -> str | None:
        """The first key of a name that this command has."""
        keys = schema_keys(self.kind)
        return next((key for key in trl_names()["keys"].get(name, ()) if key in keys), None)

    def _knows(self, name: str) -> bool:
        return self._key(name) is not None or self._reason(name) is not None

    def _reason(self, name: str) -> str | None:
        """Why a name has no key here."""
        offline = {} if self.kind is schema.PPOConfig else trl_names()["offline"]
        reason: str | None = trl_names()["notes"].get(name, offline.get(name))
        return reason

    def _require_known(self, name: str) -> None:
        if self._knows(name):
            return
        table = trl_names()
        known = sorted(each for each in (*table["keys"], *table["notes"]) if self._knows(each))
        close = difflib.get_close_matches(name, known, 3, cutoff=0.6)
        nearest = f"; nearest: {', '.join(close)}" if close else ""
        command = f"; {self.trl_name} has no such setting" if name in table["keys"] else ""
        raise ConfigError(
            f"{self.trl_name} got an unknown argument {name!r}{command}{nearest}. Keys of the configuration "
            "reference are given as overrides={'section.key': ...}"
        )

    def _note(self, name: str, value: Any) -> str:
        """Why an argument has no effect; ConfigError where it asks for what there is not."""
        note = self._reason(name)
        if note is None or self._key(name) or note.startswith(_IN_PYTHON) or name in _CONVERTED:
            return ""
        accepted = trl_names()["values"].get(name)
        if accepted is not None:
            if value not in accepted:
                raise self.refuse(name, value, note)
            return ""
        if not note.startswith("not available"):
            return f"{name} has no effect: {note}"
        if value not in (None, False, 0, 0.0, "", "none", "no", [], {}):
            raise self.refuse(name, value, note)
        return ""

    def _batch(self, devices: int) -> dict[str, Any]:
        """TRL counts the completions of a device, the keys prompts of all devices (`updates`: optimiser steps in one of
        ours); fine-tuning counts rows in both."""
        accumulated = self.gradient_accumulation_steps
        rows = self.per_device_train_batch_size * accumulated * devices
        if self.kind is not schema.PPOConfig:
            return {"data.train_batch_size": rows}
        n = self.overrides.get("actor_rollout_ref.rollout.n", self.num_generations)
        if self.cuts_batches:
            parts, count = self.num_mini_batches, rows
            if rows % parts:
                raise self.refuse("num_mini_batches", parts, f"it must divide the {rows} prompts of a step")
            mini = rows // parts
            episodes = {} if self.total_episodes is None else {
                "trainer.total_training_steps": max(1, math.ceil(self.total_episodes / rows))
            }  # fmt: skip
        else:
            per_step = (
                self.per_device_train_batch_size * devices * self.default("steps_per_generation", accumulated)
            )
            if self.generation_batch_size is not None and self.steps_per_generation is not None:
                raise self.refuse(
                    "generation_batch_size",
                    self.generation_batch_size,
                    "give it or steps_per_generation, not both",
                )
            count, mini, episodes = self.default("generation_batch_size", per_step), rows, {}
            for total, what in ((rows, "an optimiser step"), (count, "a generation")):
                if total % n:
                    raise self.refuse(
                        "num_generations", n, f"it must divide the {total} completions of {what} "
                        "(per_device_train_batch_size x gradient_accumulation_steps x devices)"
                    )  # fmt: skip
            count, mini = count // n, rows // n
        iterations = self.default("num_iterations", 1) if not self.cuts_batches else 1
        return {
            "data.train_batch_size": count,
            f"{_ACTOR}.ppo_mini_batch_size": min(mini, count),
            "updates": max(1, count // mini) * iterations,
            **episodes,
        }

    def _strategies(self, batch: int, epoch_steps: Callable[[int], int] | None) -> dict[str, Any]:
        """`save_strategy` and `eval_strategy`: never, in steps, or once per epoch."""
        values: dict[str, Any] = {}
        for name, key in (("save_strategy", "trainer.save_freq"), ("eval_strategy", "trainer.test_freq")):
            value = plain(getattr(self, name))
            if value == "no":
                values[key] = -1
            elif value == "epoch":
                values |= {} if epoch_steps is None else {key: epoch_steps(batch)}
            elif value == "steps" and name == "eval_strategy" and self.eval_steps is None:
                values[key] = self.default("logging_steps", 500)
            elif value not in (None, "steps"):
                raise self.refuse(
                    name, value, "it must be no, steps or epoch; trainer.keep_best keeps the best one"
                )
        return values


class GRPOArguments(TrainingArguments):
    """Arguments of TRL's GRPOConfig."""

    trl_name = "GRPOConfig"
    kind = schema.PPOConfig
    adv_estimator = "grpo"
    kl_in_loss = True


class RLOOArguments(TrainingArguments):
    """Arguments of TRL's RLOOConfig; the KL is in the reward, as there."""

    trl_name = "RLOOConfig"
    kind = schema.PPOConfig
    adv_estimator = "rloo"


class PPOArguments(TrainingArguments):
    """Arguments of TRL's PPOConfig, and those of generation that GRPOConfig has."""

    trl_name = "PPOConfig"
    kind = schema.PPOConfig
    adv_estimator = "gae"
    cuts_batches = True


class SFTArguments(TrainingArguments):
    """Arguments of TRL's SFTConfig."""

    trl_name = "SFTConfig"
    kind = schema.SFTConfig


class DPOArguments(TrainingArguments):
    """Arguments of TRL's DPOConfig."""

    trl_name = "DPOConfig"
    kind = schema.DPOConfig


class KTOArguments(TrainingArguments):
    """Arguments of TRL's KTOConfig."""

    trl_name = "KTOConfig"
    kind = schema.DPOConfig


class RewardArguments(TrainingArguments):
    """Arguments of TRL's RewardConfig."""

    trl_name = "RewardConfig"
    kind = schema.RewardTrainingConfig


GRPOConfig = GRPOArguments
RLOOConfig = RLOOArguments
PPOConfig = PPOArguments
SFTConfig = SFTArguments
DPOConfig = DPOArguments
KTOConfig = KTOArguments
RewardConfig = RewardArguments
