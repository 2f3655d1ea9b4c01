"""What the loop sees of the workers: batches in, batches or metrics out, wherever the roles run.

An update is cut into mini-batches here, once, for every placement; a placement (in process, on Ray) adds only
how one call reaches the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from verl.data.proto import DataProto
from verl.observe.metrics import Metric, average_metrics
from verl.workers.mini_batches import mini_batches
from verl.workers.rollout import GenerationSettings, OnFinish

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig


class WorkerGroup(ABC):
    """The roles of one run."""

    def __init__(self, cfg: PPOConfig) -> None:
        self.cfg = cfg
        self.policy_version = 0

    @abstractmethod
    def generate(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish | None = None
    ) -> DataProto:
        """`settings.n` responses for each prompt from the current policy; `on_finish` hears of each as it ends."""

    @abstractmethod
    def log_probs(
        self, batch: DataProto, *, with_entropy: bool, with_sum_pi_squared: bool = False
    ) -> DataProto:
        """`old_log_probs` and, where asked, `entropys` and `sum_pi_squared`."""

    @abstractmethod
    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """`ref_log_prob`."""

    @abstractmethod
    def values(self, batch: DataProto) -> DataProto:
        """`values`."""

    @abstractmethod
    def train_mini_batch(self, role: str, mini: DataProto) -> dict[str, Metric]:
        """One optimiser step of `role` (actor or critic) on one mini-batch, over all ranks."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Let the rollout engine generate from the actor's current weights, as `policy_version`."""

    @abstractmethod
    def checkpoint_parts(self) -> dict[str, Any]:
        """The engines whose state a checkpoint holds, by name (actor, critic)."""

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes."""

    def update_actor(self, batch: DataProto) -> dict[str, float]:
        actor = self.cfg.actor_rollout_ref.actor
        size = actor.ppo_mini_batch_size * self.cfg.actor_rollout_ref.rollout.n
        metrics = self._update("actor", batch, size, actor.ppo_epochs)
        self.policy_version += 1
        self.publish_weights()
        return metrics

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        critic = self.cfg.critic
        size = critic.ppo_mini_batch_size * self.cfg.actor_rollout_ref.rollout.n
        return self._update("critic", batch, size, critic.ppo_epochs)

    def _update(self, role: str, batch: DataProto, size: int, epochs: int) -> dict[str, float]:
        seed = self.cfg.data.seed + self.policy_version
        parts = []
        for mini in mini_batches(batch, size, epochs, seed=seed):
            if mini.meta_info["batch_num_tokens"] > 0:
                parts.append(self.train_mini_batch(role, mini))
        return average_metrics(parts)
