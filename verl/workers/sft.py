"""The role of supervised fine-tuning: the engine, its loss, one optimiser step; the same on one rank and on many.

Every rank is given the whole batch and trains on its shard. The model learns from response tokens only, each with the
same weight in its batch, however the batch is cut into micro-batches and shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.algorithms import agg_loss
from verl.algorithms.aggregation import batch_counts
from verl.config.parallelism import offload_section
from verl.config.schema import ActorConfig
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.observe.metrics import Metric
from verl.watchdog import Heartbeat
from verl.workers.local import choose_device
from verl.workers.shard_batch import pad_rows, shard_rows

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.engines.base import ModelOutput, TrainEngine

_INPUTS = ("input_ids", "attention_mask", "response_mask")


class SFTRole:
    """The model that learns, or this rank's shard of it."""

    def __init__(self, cfg: SFTConfig, *, training_steps: int, bad_batch_dir: Path) -> None:
        _, self._offload_keys = offload_section(cfg.model)
        self.device = choose_device(cfg.trainer.device)
        self.engine: TrainEngine = build_engine(
            "actor",
            cfg.model,
            actor_section(cfg),
            device=self.device,
            total_steps=training_steps,
            seed=cfg.trainer.seed,
            max_skipped_steps=cfg.trainer.health.max_skipped_steps,
            bad_batch_dir=bad_batch_dir,
        )
        info = self.engine.info
        self.rank, self._layout = info.rank, info.layout
        self._heartbeat = Heartbeat.start() if info.world_size > 1 else None
        self._offload()

    def train(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on the whole batch: `train/{loss,grad_norm,lr,skipped_updates}`."""
        metrics = self.engine.forward_backward(self._shard(batch), response_loss)
        update = self.engine.optimizer_step()
        self._offload()
        loss = metrics.get("train/loss")
        return {
            "train/loss": self._reported_sum(0.0 if loss is None else float(loss.value)),
            "train/grad_norm": float(update["grad_norm"]),
            "train/lr": float(update["lr"]),
            "train/skipped_updates": float(update["skipped"]),
        }

    def response_log_prob(self, batch: DataProto) -> float:
        """The sum over all response tokens of the whole batch."""
        shard = self._shard(batch)
        log_probs = self.engine.log_probs(shard)["log_probs"].double()
        self._offload()
        return self._reported_sum(float((log_probs * shard.batch["response_mask"]).sum()))

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is true on one of the ranks; all ranks call it."""
        return self._sum(float(flag)) > 0

    def checkpoint_parts(self) -> dict[str, Any]:
        return {"actor": self.engine}

    def close(self) -> None:
        self.engine.close()

    def _shard(self, batch: DataProto) -> DataProto:
        """The rows this rank works on, with the counts of the whole batch."""
        shards = self._layout.dp
        if self._layout.world_size == 1:
            return batch
        padded = pad_rows({name: batch.batch[name] for name in _INPUTS}, shards)
        rows = shard_rows(
            padded["attention_mask"], shards, balance=True, hidden_size=self.engine.info.hidden_size
        )[self._layout.data_rank(self.rank)]
        counts = {**batch_counts(batch.batch["response_mask"]), "dp_size": shards}
        return DataProto.from_dict(
            tensors={name: tensor[rows] for name, tensor in padded.items()}, meta_info=counts
        )

    def _reported_sum(self, number: float) -> float:
        """The sum over shards: ranks that work on the same rows count once."""
        return self._sum(number if self._layout.reports(self.rank) else 0.0)

    def _sum(self, number: float) -> float:
        if self._heartbeat is None:
            return number
        total = torch.tensor([number], dtype=torch.float64)
        with self._heartbeat.naming_dead_peers():
            dist.all_reduce(total)
        return float(total)

    def _offload(self) -> None:
        """Move to host memory what the config wants there; the engine loads back what it works with."""
        keys = self._offload_keys
        if self.device.type != "cpu" and (keys.param_offload or keys.optimizer_offload):
            self.engine.offload(model=keys.param_offload, optimizer=keys.optimizer_offload)


def response_loss(out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Minus the log-probability of the response tokens, averaged over those of the whole batch."""
    assert out.log_probs is not None
    counts = {name: micro.meta_info[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    loss = agg_loss(-out.log_probs, micro.batch["response_mask"], "token-mean", **counts)
    return loss, {"train/loss": Metric(loss.detach() / counts["dp_size"], "sum")}


def actor_section(cfg: SFTConfig) -> ActorConfig:
    """The keys of fine-tuning under the names the engine reads them by."""
    data, model = cfg.data, cfg.model
    return ActorConfig(
        strategy=model.strategy,
        optim=cfg.optim,
        ppo_micro_batch_size_per_gpu=data.micro_batch_size_per_gpu,
        use_dynamic_bsz=data.use_dynamic_bsz,
        ppo_max_token_len_per_gpu=data.max_token_len_per_gpu,
        grad_clip=cfg.optim.grad_clip,
        use_torch_compile=model.use_torch_compile,
        ulysses_sequence_parallel_size=model.ulysses_sequence_parallel_size,
        fsdp_config=model.fsdp_config,
        megatron=model.megatron,
        checkpoint=cfg.checkpoint,
    )
