"""From scores to advantages."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from verl.config import known
from verl.config.field import key, section


@dataclass
class KLControlConfig:
    """The weight of the KL in the reward over time."""

    type: str = key("fixed", "controller", known=known.KL_CONTROLLERS)
    kl_coef: float = key(0.001, "weight of the KL (the first one, when adaptive)", ge=0)
    horizon: int = key(10000, "adaptive: steps over which the weight adapts", ge=1)
    target_kl: float = key(0.1, "adaptive: the KL aimed at", gt=0)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: drop prompts whose responses all score the same, and draw others (DAPO)."""

    enable: bool = key(False, "drop such groups and refill the batch")
    metric: str = key("seq_reward", "what must differ within a group", known=known.FILTER_METRICS)
    max_num_gen_batches: int = key(0, "generation rounds per step before giving up; 0: no limit", ge=0)


@dataclass
class RolloutCorrectionConfig:
    """Importance weights and rejection between the rollout engine's and the trainer's probabilities."""

    rollout_is: str | None = key(
        None, "importance weights per token or per sequence; default: none", known=known.ROLLOUT_IS
    )
    rollout_is_threshold: float | str = key(
        2.0, "truncate weights above this; 'lo_hi': drop what lies outside"
    )
    rollout_is_batch_normalize: bool = key(False, "scale the weights to mean 1 over the batch")
    rollout_rs: str | None = key(
        None, "rejection rules, comma separated, e.g. seq_mean_k1,token_k2; default: none"
    )
    rollout_rs_threshold: float | str | None = key(
        None, "bounds of these rules, one number, 'lo_hi', or one each, comma separated"
    )
    bypass_mode: bool = key(
        False, "take the rollout engine's log-probs as the old ones (saves a forward pass)"
    )


@dataclass
class PFPPOConfig:
    """Reweighting by resampling (policy-filtration PPO)."""

    reweight_method: str = key("pow", "how scores become sampling weights", known=known.PF_PPO_METHODS)
    weight_pow: float = key(2.0, "exponent of the pow method", ge=0)


@dataclass
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = key("gae", "advantage estimator", known=known.ESTIMATORS, plugin="adv_est")
    gamma: float = key(1.0, "discount per token", ge=0, le=1)
    lam: float = key(1.0, "lambda of gae", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation; False: Dr.GRPO")
    gdpo_reward_keys: list[str] = key(
        [], "gdpo: the keys of the reward function's dict that are normalised each on its own"
    )
    gdpo_reward_weights: list[float] = key([], "gdpo: their weights; default: 1 each")
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = key("kl", "estimator of that KL", known=known.KL_TYPES)
    kl_ctrl: KLControlConfig = section(KLControlConfig, "weight of that KL")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    filter_overlong_responses: bool = key(False, "mask responses cut at the longest length out of the loss")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "rollout correction")
    use_pf_ppo: bool = key(False, "resample responses by score before the update (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "PF-PPO's weights")
