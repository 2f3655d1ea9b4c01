"""A reward model learns from pairs: the chosen answer's reward should exceed the rejected one's (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from verl.algorithms.preference import share_right
from verl.data.proto import DataProto
from verl.observe.metrics import Metric
from verl.workers.offline import OfflineRole

if TYPE_CHECKING:
    from verl.engines.base import ModelOutput


class RewardRole(OfflineRole):
    """A language model with one number for the last token of a conversation."""

    kind: ClassVar[Literal["actor", "critic", "reward"]] = "reward"
    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "margin", "reward")

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The mean over the pairs of the whole batch."""
        assert out.values is not None
        mask = micro.batch["response_mask"].bool()
        rewards = torch.where(mask, out.values, 0.0).sum(-1)
        found = self._terms(rewards, mask.any(-1), micro.batch["margin"])
        pairs, dp_size = micro.meta_info["global_batch_size"] / 2, micro.meta_info["dp_size"]
        metrics = {name: Metric(value.detach() / pairs, "sum") for name, value in found.items()}
        return found["loss"] / pairs * dp_size, metrics

    def _terms(
        self, rewards: torch.Tensor, valid: torch.Tensor, margin: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The sums of `names` over pairs, without padding rows."""
        algorithm = self.cfg.algorithm
        chosen, rejected, valid = rewards[::2], rewards[1::2], valid[::2]
        wanted = margin[::2].to(rewards) + algorithm.margin
        loss = -logsigmoid(chosen - rejected - wanted)
        if algorithm.center_rewards_coefficient:
            loss = loss + algorithm.center_rewards_coefficient * (chosen + rejected).square()
        found = {
            "loss": loss,
            "accuracy": share_right(chosen - rejected),
            "margin": chosen - rejected,
            "reward": (chosen + rejected) / 2,
        }
        return {name: torch.where(valid, value, 0.0).sum() for name, value in found.items()}

    def evaluate(self, batch: DataProto) -> dict[str, float]:
        shard, rows = self.shard(batch)
        values = self.engine.values(shard).double()
        self._offload()
        rewards = self.row_values((values * shard.batch["response_mask"]).sum(-1), rows, len(batch))
        found = self._terms(rewards, torch.ones(len(batch), dtype=torch.bool), batch.batch["margin"])
        return {"pairs": len(batch) / 2, **{name: float(value) for name, value in found.items()}}

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"val/{name}": sums[name] / sums["pairs"] for name in self.names}
