"""The critic role: values and their update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl.algorithms import compute_value_loss
from verl.data.proto import DataProto
from verl.observe.metrics import Metric
from verl.workers.actor import step_metrics

if TYPE_CHECKING:
    from verl.config.schema import CriticConfig
    from verl.engines.base import ModelOutput, TrainEngine


class CriticRole:
    """Wraps a TrainEngine with a value head; one per rank."""

    def __init__(self, engine: TrainEngine, cfg: CriticConfig, *, loss_scale_factor: int) -> None:
        self.engine = engine
        self.cfg = cfg
        self._loss_scale_factor = loss_scale_factor

    def values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"values": self.engine.values(batch)})

    def train_mini_batch(self, mini: DataProto) -> dict[str, Metric]:
        metrics = self.engine.forward_backward(mini, self._micro_batch_loss)
        return {**metrics, **step_metrics("critic", self.engine.optimizer_step())}

    def _micro_batch_loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        mask = micro.batch["response_mask"]
        assert out.values is not None
        info = {key: micro.meta_info[key] for key in ("dp_size", "batch_num_tokens", "global_batch_size")}
        loss, clipfrac = compute_value_loss(
            vpreds=out.values,
            returns=micro.batch["returns"],
            values=micro.batch["values"],
            response_mask=mask,
            cliprange_value=self.cfg.cliprange_value,
            loss_agg_mode=self.cfg.loss_agg_mode,
            loss_scale_factor=self._loss_scale_factor,
            **info,
        )
        tokens = mask.sum()
        mean = (out.values.detach() * mask).sum() / tokens.clamp(min=1)
        return loss, {
            "critic/vf_loss": Metric(loss.detach() / info["dp_size"], "sum"),
            "critic/vf_clipfrac": Metric(clipfrac, "mean", tokens),
            "critic/vpred_mean": Metric(mean, "mean", tokens),
        }
