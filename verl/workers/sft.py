"""Supervised fine-tuning: the model learns from response tokens only, each with the same weight in its batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl.algorithms import agg_loss
from verl.data.proto import DataProto
from verl.observe.metrics import Metric
from verl.workers.offline import OfflineRole

if TYPE_CHECKING:
    import torch

    from verl.engines.base import ModelOutput


class SFTRole(OfflineRole):
    """The model that is fine-tuned."""

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Minus the log-probability of the response tokens, averaged over those of the whole batch."""
        assert out.log_probs is not None
        counts = {
            name: micro.meta_info[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")
        }
        loss = agg_loss(-out.log_probs, micro.batch["response_mask"], "token-mean", **counts)
        return loss, {"loss": Metric(loss.detach() / counts["dp_size"], "sum")}

    def evaluate(self, batch: DataProto) -> dict[str, float]:
        tokens = float(batch.batch["response_mask"].sum())
        return {"loss": -float(self.log_prob_sums(batch).sum()), "tokens": tokens}

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["tokens"]
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 700.0))}
