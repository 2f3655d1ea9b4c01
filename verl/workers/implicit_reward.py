"""The implicit reward model of PRIME: a language model whose log-ratio to its start is the reward of each token.

The start is a role of its own: its log-probs of a batch never change, and scoring and training share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from verl.algorithms.advantages import implicit_rewards, outcome_cross_entropy
from verl.algorithms.groups import sequence_scores
from verl.data.proto import DataProto
from verl.errors import ModelError
from verl.observe.metrics import Metric
from verl.workers.roles import RoleWorker

if TYPE_CHECKING:
    from verl.config.roles import Role
    from verl.config.schema import ImplicitRewardConfig, PPOConfig
    from verl.engines.base import ModelOutput


class ImplicitRewardRole(RoleWorker):
    """The model that is trained, on the outcomes of responses."""

    name = "implicit_reward"
    cfg: ImplicitRewardConfig

    def connect(self, role: Role, config: PPOConfig, workers: Mapping[str, RoleWorker], tokens: int) -> None:
        found = self.engine.info.vocab_size
        if found < tokens:
            raise ModelError(
                f"implicit_reward.model.path={self.cfg.model.path} has {found} tokens, fewer than the policy's "
                f"{tokens}: it must be a model with the policy's tokenizer. Leave it out to start from the policy"
            )

    @staticmethod
    def prepare(batch: DataProto, cfg: ImplicitRewardConfig) -> None:
        """`outcome` [B]: whether the response is right."""
        tensors = batch.batch
        scores = sequence_scores(tensors["token_level_scores"], tensors["response_mask"])
        tensors["outcome"] = (scores > cfg.threshold).long()

    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        mask, start = batch.batch["response_mask"], batch.batch["start_log_prob"]
        log_probs = self.engine.log_probs(batch)["log_probs"]
        return {"process_rewards": implicit_rewards(log_probs, start, mask, self.cfg.beta)}

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The mean over the mini-batch's sequences."""
        mask, outcome = micro.batch["response_mask"], micro.batch["outcome"]
        assert out.log_probs is not None
        rewards = implicit_rewards(out.log_probs, micro.batch["start_log_prob"], mask, self.cfg.beta)
        terms, logit = outcome_cross_entropy(rewards, mask, outcome)
        sequences = max(micro.meta_info["global_batch_size"], 1)
        mean, counted = terms.sum() / sequences, mask.bool().any(-1)
        rows = counted.sum()
        # A logit of 0, as of a model that is its own start, is half right.
        right = ((logit.sign() * (2 * outcome - 1) + 1) / 2)[counted]
        return mean * micro.meta_info["dp_size"], {
            f"{self.name}/loss": Metric(mean.detach(), "sum"),
            f"{self.name}/accuracy": Metric(right.sum() / rows.clamp(min=1), "mean", rows),
            f"{self.name}/positive": Metric(
                (outcome.bool() & counted).sum() / rows.clamp(min=1), "mean", rows
            ),
        }
