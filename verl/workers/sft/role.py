"""Fine-tuning on one rank: the engine, its loss, and one optimiser step.

What always holds: the model learns from response tokens only, each with the same weight in its batch, however the
batch is cut into micro-batches and dealt out to ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.algorithms import agg_loss
from verl.config.schema import ActorConfig
from verl.engines import build_engine
from verl.observe.metrics import Metric
from verl.workers.local import choose_device

if TYPE_CHECKING:
    import torch

    from verl.config.schema import SFTConfig
    from verl.data.proto import DataProto
    from verl.engines.base import ModelOutput, TrainEngine

DEFAULT_HIDDEN_SIZE = 1024
"""For an engine that does not show its model."""


class SFTRole:
    """The model that learns, or this rank's shards of it."""

    def __init__(self, cfg: SFTConfig, *, training_steps: int, bad_batch_dir: Path) -> None:
        self._fsdp = cfg.model.fsdp_config
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
        self._rest()

    def train(self, batch: DataProto) -> dict[str, Metric]:
        """One optimiser step. On several ranks `batch` is this rank's share, with the counts of the whole."""
        metrics = self.engine.forward_backward(batch, response_loss)
        update = self.engine.optimizer_step()
        self._rest()
        return {
            **metrics,
            "train/grad_norm": Metric(update["grad_norm"]),
            "train/lr": Metric(update["lr"], "max"),
            "train/skipped_updates": Metric(update["skipped"], "sum"),
        }

    def response_log_prob(self, batch: DataProto) -> float:
        """The sum over all response tokens."""
        log_probs = self.engine.log_probs(batch)["log_probs"].double()
        self._rest()
        return float((log_probs * batch.batch["response_mask"]).sum())

    def checkpoint_parts(self) -> dict[str, Any]:
        return {"actor": self.engine}

    def hidden_size(self) -> int:
        """What the work of a sequence is estimated by."""
        return self.engine.info.hidden_size

    def close(self) -> None:
        self.engine.close()

    def _rest(self) -> None:
        """Move to host memory what the config wants there; the engine brings back what it works with."""
        fsdp = self._fsdp
        if self.device.type != "cpu" and (fsdp.param_offload or fsdp.optimizer_offload):
            self.engine.offload(model=fsdp.param_offload, optimizer=fsdp.optimizer_offload)


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
