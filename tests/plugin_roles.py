"""A plug-in with roles of its own: a frozen judge and a trained imitator, and a policy loss that needs both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl import register_role
from verl.algorithms import agg_loss, register_policy_loss
from verl.config.schema import FrozenRoleConfig, PPOConfig, TrainedRoleConfig
from verl.data.proto import DataProto
from verl.engines.base import ModelOutput
from verl.observe.metrics import Metric
from verl.workers.roles import RoleWorker, denominators


@dataclass
class JudgeConfig(FrozenRoleConfig):
    """The frozen judge."""

    scale: float = 1.0


@dataclass
class ImitatorConfig(TrainedRoleConfig):
    """The model that learns what the policy writes."""


@register_role("judge", columns=("judge_log_prob",), config=JudgeConfig)
class Judge(RoleWorker):
    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        return {"judge_log_prob": self.cfg.scale * self.engine.log_probs(batch)["log_probs"]}


@register_role(
    "imitator",
    columns=("imitator_log_prob",),
    frozen=False,
    inputs=("judge_log_prob",),
    trains_on=("advantages", "judge_log_prob"),
    config=ImitatorConfig,
)
class Imitator(RoleWorker):
    def forward(self, batch: DataProto, columns: Sequence[str]) -> dict[str, torch.Tensor]:
        assert "judge_log_prob" in batch.batch, "what it reads was computed before"
        return {"imitator_log_prob": self.engine.log_probs(batch)["log_probs"]}

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        tensors, info = micro.batch, denominators(micro, self.loss_scale_factor)
        assert out.log_probs is not None and {"advantages", "judge_log_prob"} <= tensors.keys()
        loss = agg_loss(-out.log_probs, tensors["response_mask"], "token-mean", **info)
        return loss, {f"{self.name}/loss": Metric(loss.detach() / info["dp_size"], "sum")}


@register_policy_loss("judged", needs=("judge_log_prob", "imitator_log_prob"))
def judged(log_prob, advantages, response_mask, judge_log_prob, imitator_log_prob):
    gap = (judge_log_prob - imitator_log_prob).exp().clamp(max=2)
    loss = agg_loss(-advantages * log_prob * gap, response_mask, "token-mean")
    return loss, {"judge_mean": (judge_log_prob * response_mask).sum() / response_mask.sum().clamp(min=1)}


def with_roles(cfg: PPOConfig, judge: str, **imitator: object) -> PPOConfig:
    """A config whose loss needs both."""
    cfg.actor_rollout_ref.actor.policy_loss.loss_mode = "judged"
    section = ImitatorConfig(ppo_mini_batch_size=cfg.actor_rollout_ref.actor.ppo_mini_batch_size)
    section.optim.lr = 1e-2
    for name, value in imitator.items():
        setattr(section, name, value)
    vars(cfg).update(judge=JudgeConfig(path=judge, scale=0.5), imitator=section)
    return cfg
