"""Keys the user set that have no effect with the other settings, each with the reason; and advice.

A key that has the value it would have anyway is never reported: it changes nothing either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from verl.config import known
from verl.config.evaluation import EVALUATION_RULES
from verl.config.finalize import finalize
from verl.config.generation import GENERATION_RULES, generation_advice
from verl.config.keys import get, put, schema_keys
from verl.config.schema import AnyConfig, EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.config.unused_device import (
    GENERATION_DEVICE_RULES,
    PPO_DEVICE_RULES,
    SFT_DEVICE_RULES,
    slow_dtypes,
)
from verl.config.unused_rules import PPO_RULES, SFT_RULES, Rule

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

RULES: dict[type, tuple[Rule, ...]] = {
    PPOConfig: PPO_RULES + PPO_DEVICE_RULES,
    SFTConfig: SFT_RULES + SFT_DEVICE_RULES,
    GenerationConfig: GENERATION_RULES + GENERATION_DEVICE_RULES,
    EvaluationConfig: EVALUATION_RULES,
}


def unused_keys(config: AnyConfig) -> list[str]:
    """One line for each key that was set and does nothing."""
    lines: dict[str, str] = {}
    keys = schema_keys(type(config))
    for rule in RULES[type(config)]:
        # The rule comes last: those about the device look at the machine.
        names = [name for name in _set_keys(config, rule.keys) if get(config, name) != keys[name].default]
        if not names or rule.unless(config):
            continue
        for name in names:
            if not _would_be(config, name):
                lines.setdefault(name, f"'{name}'={_shown(get(config, name))} has no effect: {rule.why}")
    slow = [] if isinstance(config, EvaluationConfig) else slow_dtypes(config)
    return [*lines.values(), *slow, *_advice(config)]


def _set_keys(config: AnyConfig, names: Iterable[str]) -> list[str]:
    return sorted(
        given for given in config.user_set for name in names if given == name or given.startswith(f"{name}.")
    )


def _would_be(config: AnyConfig, name: str) -> bool:
    """Whether the key would have this value anyway, because it follows another."""
    without = deepcopy(config)
    without.user_set = config.user_set - {name}
    put(without, name, schema_keys(type(config))[name].default)
    finalize(without)
    return bool(get(without, name) == get(config, name))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _advice(config: AnyConfig) -> list[str]:
    if isinstance(config, PPOConfig):
        return _ppo_advice(config)
    return generation_advice(config) if isinstance(config, GenerationConfig) else []


def _ppo_advice(config: PPOConfig) -> list[str]:
    """Settings that work but rarely do what was meant."""
    lines: list[str] = []
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    val = rollout.val_kwargs
    if val.n > 1 and not val.do_sample and config.data.val_files:
        lines.append(
            f"'{_ROLLOUT}.val_kwargs.n'={val.n} greedy responses are all the same; "
            f"set {_ROLLOUT}.val_kwargs.do_sample=True"
        )
    if rollout.temperature > 1.5:
        lines.append(
            f"'{_ROLLOUT}.temperature'={rollout.temperature:g} is high: responses tend to degenerate above 1.5"
        )
    if config.actor_rollout_ref.actor.use_kl_loss and algorithm.use_kl_in_reward:
        lines.append(
            f"the KL to the reference counts twice: {_ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both True"
        )
    without_critic = set(known.ESTIMATORS) - set(known.CRITIC_ESTIMATORS)
    if config.critic.enable and algorithm.adv_estimator in without_critic:
        lines.append(
            f"'critic.enable'=True trains a critic that algorithm.adv_estimator={algorithm.adv_estimator} never asks"
        )
    return lines
