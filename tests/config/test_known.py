"""The names the checks allow are those of the registries."""

from __future__ import annotations

from verl.config.capabilities import ENGINES, STRATEGIES
from verl.config.sections.algorithm import KL_TYPES
from verl.config.sections.reward import REWARD_MANAGERS


def test_kl_estimators() -> None:
    from verl.algorithms.aggregation import KL_ESTIMATORS

    assert set(KL_TYPES) == set(KL_ESTIMATORS)


def test_engines_managers_and_strategies() -> None:
    from verl.engines import known_strategies
    from verl.reward.managers import known_reward_managers
    from verl.rollout import known_rollouts

    assert set(ENGINES) <= set(known_rollouts())
    assert set(REWARD_MANAGERS) <= set(known_reward_managers())
    assert set(known_strategies()) == set(STRATEGIES)
