"""The implicit reward model of PRIME as a role: a trained language model and its frozen start.

The start's log-probs of a batch never change: they are computed once per step, and scoring and training share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl.algorithms.groups import sequence_scores
from verl.algorithms.prime import implicit_rewards, outcome_cross_entropy
from verl.data.proto import DataProto
from verl.engines import build_engine
from verl.errors import ModelError
from verl.observe.metrics import Metric
from verl.workers.roles import step_metrics

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import ImplicitRewardConfig
    from verl.engines.base import ModelOutput, TrainEngine
    from verl.observe.metrics import Timer
    from verl.workers.group import WorkerGroup

PART, START = "implicit_reward", "implicit_reward_start"
"""The engine that is trained, and in checkpoints; the frozen one."""


class ImplicitRewardRole:
    """Wraps a TrainEngine and its frozen start (None under LoRA: adapters off); one per rank."""

    def __init__(self, engine: TrainEngine, start: TrainEngine | None, cfg: ImplicitRewardConfig) -> None:
        self.engine = engine
        self.start = start
        self.cfg = cfg

    def log_probs(self, batch: DataProto) -> torch.Tensor:
        return self.engine.log_probs(batch)["log_probs"]

    def start_log_probs(self, batch: DataProto) -> torch.Tensor:
        if self.start is None:
            return self.engine.reference_log_probs(batch)
        return self.start.log_probs(batch)["log_probs"]

    def scores(self, batch: DataProto) -> torch.Tensor:
        """The reward of each token [B, T]; `batch` has `start_log_prob`."""
        mask, start = batch.batch["response_mask"], batch.batch["start_log_prob"]
        return implicit_rewards(self.log_probs(batch), start, mask, self.cfg.beta)

    def train_mini_batch(self, mini: DataProto) -> dict[str, Metric]:
        """One optimiser step. `mini` is this rank's share, with `start_log_prob` and `outcome`; its meta_info holds the
        whole mini-batch's counts."""
        metrics = self.engine.forward_backward(mini, self.loss)
        return {**metrics, **step_metrics(PART, self.engine.optimizer_step())}

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
            f"{PART}/loss": Metric(mean.detach(), "sum"),
            f"{PART}/accuracy": Metric(right.sum() / rows.clamp(min=1), "mean", rows),
            f"{PART}/positive": Metric((outcome.bool() & counted).sum() / rows.clamp(min=1), "mean", rows),
        }


def build_implicit_reward(
    cfg: ImplicitRewardConfig,
    *,
    models: tuple[nn.Module | None, nn.Module | None],
    total_steps: int,
    tokens: int,
    **common: Any,
) -> ImplicitRewardRole:
    """The role with its engines. `models`: objects to use instead of loading `cfg.model.path`, for the engine and its
    start; `tokens`: of the policy's vocabulary."""
    if common.get("bad_batch_dir") is not None:
        common["bad_batch_dir"] = common["bad_batch_dir"] / PART
    engine = build_engine(
        "actor", cfg.model, cfg, model=models[0], total_steps=total_steps, log_prob_cfg=cfg, **common
    )
    if engine.info.vocab_size < tokens:
        raise ModelError(
            f"implicit_reward.model.path={cfg.model.path} has {engine.info.vocab_size} tokens, fewer than the policy's "
            f"{tokens}: it must be a model with the policy's tokenizer. Leave it out to start from the policy"
        )
    start = None
    if cfg.model.lora_rank == 0:
        start = build_engine("ref", cfg.model, cfg, model=models[1], total_steps=None, **common)
    return ImplicitRewardRole(engine, start, cfg)


def reward_tokens(
    workers: WorkerGroup, batch: DataProto, cfg: ImplicitRewardConfig, timer: Timer
) -> dict[str, float]:
    """Add `process_rewards` to a scored batch, and train the model on its outcomes, before or after (`cfg.update`)."""
    tensors, metrics = batch.batch, {}
    scores = sequence_scores(tensors["token_level_scores"], tensors["response_mask"])
    tensors["outcome"] = (scores > cfg.threshold).long()
    with timer("implicit_reward"):
        tensors |= workers.start_log_probs(batch).batch
    if cfg.update == "before":
        with timer("update_implicit_reward"):
            metrics = workers.update(PART, batch)
    with timer("implicit_reward"):
        tensors |= workers.implicit_rewards(batch).batch
    if cfg.update == "after":
        with timer("update_implicit_reward"):
            metrics = workers.update(PART, batch)
    return metrics
