"""What the loop sees of the workers: batches in, batches or metrics out, wherever the roles run.

An update is cut into mini-batches here, once, for every placement; a placement (in process, on Ray) adds only
how one call reaches the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.registry import Prepare, get_policy_loss_prepare
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
    def sync_weights(self) -> None:
        """Let the rollout engine generate from the actor's current weights, as `policy_version`."""

    def rollout_metrics(self) -> dict[str, float]:
        """What the rollout engine reports about its weights; over several engines, the worst."""
        return {}

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
        self.sync_weights()
        return metrics | self.rollout_metrics()

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        critic = self.cfg.critic
        size = critic.ppo_mini_batch_size * self.cfg.actor_rollout_ref.rollout.n
        return self._update("critic", batch, size, critic.ppo_epochs)

    def _update(self, role: str, batch: DataProto, size: int, epochs: int) -> dict[str, float]:
        seed = self.cfg.data.seed + self.policy_version
        prepare = None
        if role == "actor":
            prepare = get_policy_loss_prepare(self.cfg.actor_rollout_ref.actor.policy_loss.loss_mode)
        parts = []
        for number, mini in enumerate(mini_batches(batch, size, epochs, seed=seed)):
            if mini.meta_info["batch_num_tokens"] == 0:
                continue
            if prepare is not None:
                self._add_prepared(mini, prepare, number)
            parts.append(self.train_mini_batch(role, mini))
        return average_metrics(parts)

    def _add_prepared(self, mini: DataProto, prepare: Prepare, number: int) -> None:
        """What a loss chooses by comparing tokens across the mini-batch is chosen here, where all of it is at hand:
        no micro-batch and no rank could do it alone."""
        actor = self.cfg.actor_rollout_ref.actor
        log_prob = self.log_probs(mini, with_entropy=False).batch["old_log_probs"]
        # A seed per mini-batch instead of a generator's state: a resumed run draws the same tokens.
        drawn = [actor.policy_loss.seed, self.policy_version, number]
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(drawn).generate_state(1)[0]))
        prepared = prepare(
            old_log_prob=mini.batch.get("old_log_probs", log_prob),
            log_prob=log_prob,
            advantages=mini.batch["advantages"],
            response_mask=mini.batch["response_mask"],
            config=actor,
            generator=generator,
        )
        mini.batch.update({f"prepared.{name}": value for name, value in prepared.items()})
