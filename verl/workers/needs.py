"""Which roles and passes a config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config.known import CRITIC_ESTIMATORS, ESTIMATORS

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig


def needs_critic(cfg: PPOConfig) -> bool:
    if cfg.critic.enable is not None:
        return cfg.critic.enable
    return cfg.algorithm.adv_estimator in CRITIC_ESTIMATORS


def needs_reference(cfg: PPOConfig) -> bool:
    return cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward


def corrects_rollout(cfg: PPOConfig) -> bool:
    """In bypass form there is nothing to correct: the update's own ratio is taken to the rollout policy."""
    correction = cfg.algorithm.rollout_correction
    return not correction.bypass_mode and bool(correction.rollout_is or correction.rollout_rs)


def needs_old_log_probs(cfg: PPOConfig, sequences: int) -> bool:
    """False when a batch is one optimiser step and nothing before it asks for log-probs: then the update's own
    forward pass gives them, and a pass is saved. A user's own estimator may ask for them and gets them."""
    actor, estimator = cfg.actor_rollout_ref.actor, cfg.algorithm.adv_estimator
    per_update = actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n
    one_update = actor.ppo_epochs == 1 and per_update >= sequences
    by_estimator = estimator == "optimal_token_baseline" or estimator not in ESTIMATORS
    return not one_update or by_estimator or cfg.algorithm.use_kl_in_reward or corrects_rollout(cfg)
