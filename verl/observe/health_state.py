"""What the health rules read: settings of the run, metrics so far, and facts of the newest batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.observe.console import validation_summary


@dataclass(frozen=True)
class HealthSettings:
    """The values of the keys that the advice is about."""

    temperature: float = 1.0
    n: int = 1
    adv_estimator: str = "gae"
    actor_lr: float = 1e-6
    entropy_coeff: float = 0.0
    use_kl_in_reward: bool = False
    kl_coef: float = 0.001
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    max_response_length: int = 512
    val_temperature: float = 0.0
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int | None = None
    micro_batch: int | None = None
    max_token_len: int | None = None
    gradient_checkpointing: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    kl_bound: float = 1.0
    probs_diff_bound: float = 0.01

    @classmethod
    def from_config(cls, config: Any) -> HealthSettings:
        """From the resolved PPO configuration (anything with the same attributes)."""
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        return cls(
            temperature=rollout.temperature,
            n=rollout.n,
            adv_estimator=str(config.algorithm.adv_estimator),
            actor_lr=actor.optim.lr,
            entropy_coeff=actor.entropy_coeff,
            use_kl_in_reward=config.algorithm.use_kl_in_reward,
            kl_coef=config.algorithm.kl_ctrl.kl_coef,
            use_kl_loss=actor.use_kl_loss,
            kl_loss_coef=actor.kl_loss_coef,
            max_response_length=config.data.max_response_length,
            val_temperature=rollout.val_kwargs.temperature,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_num_seqs=rollout.max_num_seqs,
            micro_batch=actor.ppo_micro_batch_size_per_gpu,
            max_token_len=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
            gradient_checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
            param_offload=actor.fsdp_config.param_offload,
            optimizer_offload=actor.fsdp_config.optimizer_offload,
            kl_bound=config.trainer.health.kl_bound,
            probs_diff_bound=config.trainer.health.probs_diff_bound,
        )


@dataclass(frozen=True)
class BatchFacts:
    sequences: int
    scores_not_finite: int = 0
    outliers: int = 0
    largest_outlier: float = 0.0
    typical_score: float = 0.0
    groups: int = 0
    constant_groups: int = 0
    empty_share: float = 0.0
    repetitive_share: float = 0.0


@dataclass
class History:
    """Everything a rule may look at: metrics by step, oldest first, and facts of the newest batch."""

    settings: HealthSettings
    steps: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    batch: BatchFacts | None = None

    def latest(self, name: str) -> float | None:
        value = self.steps[-1][1].get(name) if self.steps else None
        return None if value is None else float(value)

    def series(self, name: str) -> list[float]:
        return [float(m[name]) for _, m in self.steps if m.get(name) is not None]

    def validations(self) -> list[tuple[int, float]]:
        """(step, validation score) of every validation so far; the mean over the core metrics."""
        found = [(step, validation_summary(metrics)) for step, metrics in self.steps]
        return [(step, value) for step, value in found if value is not None]
