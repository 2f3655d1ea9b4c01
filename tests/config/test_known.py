"""The names the checks allow are those of the registries."""

from __future__ import annotations

from verl.config import known


def test_kl_estimators() -> None:
    from verl.algorithms.kl import KL_ESTIMATORS

    assert set(known.KL_TYPES) == set(KL_ESTIMATORS)


def test_engines_managers_trackers_and_schedules() -> None:
    from verl.engines import known_strategies
    from verl.engines.optim import SCHEDULES
    from verl.reward.managers import known_reward_managers
    from verl.rollout import known_rollouts

    assert set(known.ROLLOUT_ENGINES) <= set(known_rollouts())
    assert set(known.REWARD_MANAGERS) <= set(known_reward_managers())
    assert set(known.SCHEDULERS) == set(SCHEDULES)
    assert set(known_strategies()) == set(known.STRATEGIES)
