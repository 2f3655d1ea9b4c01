"""The names the checks allow are those of the registries."""

from __future__ import annotations

from verl.config import known


def test_losses_estimators_and_their_kin() -> None:
    from verl.algorithms import LOSS_AGG_MODES, registry
    from verl.algorithms.kl import KL_ESTIMATORS
    from verl.algorithms.rollout_correction import REJECTION_RULES
    from verl.algorithms.sampling import FILTER_METRICS, PF_PPO_METHODS

    assert set(known.ESTIMATORS) <= set(registry.adv_estimator_names())
    assert set(known.POLICY_LOSSES) <= set(registry.policy_loss_names())
    assert set(known.LOSS_AGG_MODES) == set(LOSS_AGG_MODES)
    assert set(known.KL_TYPES) == set(KL_ESTIMATORS)
    assert set(known.ROLLOUT_RS) == set(REJECTION_RULES)
    assert set(known.FILTER_METRICS) == set(FILTER_METRICS)
    assert set(known.PF_PPO_METHODS) == set(PF_PPO_METHODS)


def test_subsets_are_subsets() -> None:
    assert set(known.GROUP_ESTIMATORS) <= set(known.ESTIMATORS)
    assert set(known.CRITIC_ESTIMATORS) <= set(known.ESTIMATORS)
    assert set(known.CLIPPING_LOSSES) <= set(known.POLICY_LOSSES)


def test_engines_managers_trackers_and_schedules() -> None:
    from verl.engines import known_strategies
    from verl.engines.optim import SCHEDULES
    from verl.reward.managers import known_reward_managers
    from verl.rollout import known_rollouts

    assert set(known.ROLLOUT_ENGINES) <= set(known_rollouts())
    assert set(known.REWARD_MANAGERS) <= set(known_reward_managers())
    assert set(known.SCHEDULERS) == set(SCHEDULES)
    assert set(known_strategies()) == set(known.STRATEGIES)
