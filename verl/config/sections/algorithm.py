"""From scores to advantages."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, key, section
from verl.config.methods import ADV_ESTIMATOR, builtin_names, needed_by, read_by
from verl.errors import ConfigError

_estimator_reads = read_by(ADV_ESTIMATOR)

KL_BASE = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = KL_BASE + tuple(f"{name}+" for name in KL_BASE)
FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
ROLLOUT_RS = tuple(
    f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")
)
PF_PPO_METHODS = ("pow", "max_min", "max_random")


@dataclass
class KLControlConfig:
    """The weight of the KL in the reward over time."""

    type: str = key("fixed", "controller", known=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL (the first one, when adaptive)", ge=0)
    horizon: int = key(10000, "adaptive: steps over which the weight adapts", ge=1, used_if=".type=adaptive")
    target_kl: float = key(0.1, "adaptive: the KL aimed at", gt=0, used_if=".type=adaptive")


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: drop prompts whose responses all score the same (DAPO), or whose mean score is out of bounds
    (PRIME), and draw others."""

    enable: bool = key(False, "drop such groups and refill the batch")
    metric: str = key("seq_reward", "what must differ in a group", known=FILTER_METRICS, used_if=".enable")
    accuracy_lower_bound: float | None = key(None, "least mean of metric in a group", used_if=".enable")
    accuracy_upper_bound: float | None = key(None, "largest mean of metric in a group", used_if=".enable")
    max_num_gen_batches: int = key(0, "generation rounds per step; 0: no limit", ge=0, used_if=".enable")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        lower, upper = self.accuracy_lower_bound, self.accuracy_upper_bound
        if lower is not None and upper is not None and lower >= upper:
            yield (
                f"'{name}.accuracy_lower_bound' is {lower:g}; it must be below {name}.accuracy_upper_bound={upper:g}, "
                "e.g. 0.2 and 0.8"
            )


REINFORCE_LOSS = "gpg"
"""The policy loss that `rollout_correction.loss_type=reinforce` weighs."""


@dataclass
class RolloutCorrectionConfig:
    """Importance weights and rejection between the rollout engine's and the trainer's probabilities."""

    rollout_is: str | None = key(
        None,
        "importance weights per token or sequence",
        known=("token", "sequence"),
        used_if="!.bypass_mode or .loss_type=reinforce",
    )
    rollout_is_threshold: float | str = key(
        2.0, "truncate above; 'lo_hi': drop outside", used_if=".rollout_is"
    )
    rollout_is_batch_normalize: bool = key(False, "scale weights to mean 1", used_if=".rollout_is")
    rollout_rs: str | None = key(None, "rejection rules, e.g. seq_mean_k1,token_k2")
    rollout_rs_threshold: float | str | None = key(
        None, "their bounds: a number, 'lo_hi', or one each, comma separated", used_if=".rollout_rs"
    )
    bypass_mode: bool = key(False, "take the rollout engine's log-probs as the old ones (saves a pass)")
    loss_type: str = key(
        "ppo_clip",
        "ppo_clip: as policy_loss.loss_mode says; reinforce: policy gradient times the weights of rollout_is",
        known=("ppo_clip", "reinforce"),
        used_if=".bypass_mode",
    )

    @property
    def reinforces(self) -> bool:
        """Whether the loss is a policy gradient with importance weights."""
        return self.bypass_mode and self.loss_type == "reinforce"

    @property
    def weighs_updates(self) -> bool:
        """Whether each update weighs its tokens by the policy it begins with."""
        return self.bypass_mode and bool(self.rollout_rs or (self.rollout_is and self.reinforces))

    @property
    def normalises_updates(self) -> bool:
        """Whether these weights are divided by their mean over a mini-batch."""
        return self.reinforces and bool(self.rollout_is and self.rollout_is_batch_normalize)

    @property
    def weighs_sequences(self) -> bool:
        """Whether what happens to a token depends on its whole sequence."""
        return self.rollout_is == "sequence" or "seq_" in str(self.rollout_rs)

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        for read in (lambda: rejection_rules(self), lambda: Bounds.parse(self.rollout_is_threshold, "is")):
            try:
                read()
            except ConfigError as error:
                yield str(error)


_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """What is kept; `low` is None where only one number was given."""

    low: float | None
    high: float

    @classmethod
    def parse(cls, value: Any, of: str) -> Bounds:
        """A number, or "lo_hi"; `of`: is or rs."""
        try:
            parts = [float(part) for part in str(value).strip().split("_")]
        except ValueError:
            parts = []
        if len(parts) == 1 and parts[0] > 0:
            return cls(None, parts[0])
        if len(parts) == 2 and 0 <= parts[0] < parts[1]:
            return cls(parts[0], parts[1])
        raise ConfigError(
            f"'{_CORRECTION}.rollout_{of}_threshold' is '{value}'; it must be a number above 0, or two as lo_hi with "
            "0 <= lo < hi, e.g. 0.5_2.0"
        )


def rejection_rules(config: Any) -> list[tuple[str, Bounds]]:
    """The rules of `rollout_rs`, each with its bounds."""
    names = [
        name.strip() for name in str(getattr(config, "rollout_rs", None) or "").split(",") if name.strip()
    ]
    unknown = [name for name in names if name not in ROLLOUT_RS]
    if unknown:
        raise ConfigError(
            f"'{_CORRECTION}.rollout_rs' names '{', '.join(unknown)}'; allowed, comma separated: "
            f"{', '.join(ROLLOUT_RS)}"
        )
    threshold = getattr(config, "rollout_rs_threshold", None)
    if not names:
        return []
    if threshold is None:
        raise ConfigError(
            f"'{_CORRECTION}.rollout_rs' needs '{_CORRECTION}.rollout_rs_threshold', e.g. 0.5_2.0"
        )
    bounds = [Bounds.parse(part, "rs") for part in str(threshold).split(",")]
    if len(bounds) not in (1, len(names)):
        raise ConfigError(
            f"'{_CORRECTION}.rollout_rs_threshold' has {len(bounds)} bounds for {len(names)} rules; give one, or one "
            "each"
        )
    return list(zip(names, bounds * (len(names) if len(bounds) == 1 else 1), strict=True))


@dataclass
class PFPPOConfig:
    """Reweighting by resampling (policy-filtration PPO)."""

    reweight_method: str = key("pow", "how scores become sampling weights", known=PF_PPO_METHODS)
    weight_pow: float = key(2.0, "exponent of the pow method", ge=0, used_if=".reweight_method=pow")


@dataclass
class PRIMEConfig:
    """How the estimator prime weighs the outcome against the rewards of an implicit reward model."""

    outcome_coef: float = key(5.0, "weight of the outcome", ge=0)
    process_coef: float = key(5.0, "weight of the token rewards", ge=0)

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if not (self.outcome_coef or self.process_coef):
            yield (
                f"'{name}.outcome_coef' and '{name}.process_coef' are both 0: nothing is left to learn from; 5 is usual"
            )


@dataclass
class AlgorithmConfig(Section):
    """From scores to advantages."""

    adv_estimator: str = key(
        "gae", "advantage estimator", known=lambda: builtin_names(ADV_ESTIMATOR), plugin="adv_est"
    )
    gamma: float = key(1.0, "discount per token", ge=0, le=1, used_if=_estimator_reads)
    lam: float = key(1.0, "lambda of gae", ge=0, le=1, used_if=_estimator_reads)
    norm_adv_by_std_in_grpo: bool = key(
        True, "divide by the group's standard deviation; False: Dr.GRPO", used_if=_estimator_reads
    )
    gdpo_reward_keys: list[str] = key(
        [], "keys of the reward function's dict, normalised separately", used_if=_estimator_reads
    )
    gdpo_reward_weights: list[float] = key([], "their weights; default: 1", used_if=_estimator_reads)
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = key("kl", "estimator of that KL", known=KL_TYPES, used_if=".use_kl_in_reward")
    kl_ctrl: KLControlConfig = section(KLControlConfig, "weight of that KL", used_if=".use_kl_in_reward")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    filter_overlong_responses: bool = key(False, "mask responses cut at the longest length out of the loss")
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "rollout correction")
    prime: PRIMEConfig = section(
        PRIMEConfig, "weights of prime", used_if=needed_by(ADV_ESTIMATOR, "process_rewards")
    )
    use_pf_ppo: bool = key(False, "resample responses by score before the update (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "PF-PPO's weights", used_if=".use_pf_ppo")
