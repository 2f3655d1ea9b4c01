"""Eight responses to two prompts with planted scores and log-probs, taken through the loop's own advantages and the
actor's own loss under the config of a recipe."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from verl.algorithms import get_kl_controller
from verl.config.load import load_ppo_config
from verl.config.methods import call_with_known, get_policy_loss_prepare, needed_columns
from verl.config.schema import PPOConfig
from verl.data.proto import DataProto
from verl.engines.base import ModelOutput
from verl.observe.metrics import Timer
from verl.trainer.loop import RLLoop
from verl.workers.roles import ActorRole

LENGTHS = torch.tensor([1, 4, 2, 3, 4, 1, 3, 2])
SCORES = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 3.0, -1.0, 1.0])
GROUPS = ["a"] * 4 + ["b"] * 4
GREEDY = torch.tensor([0.25] * 4 + [1.5] * 4)
PROCESS = torch.linspace(-0.3, 0.5, 32).view(8, 4)
MASK = (torch.arange(4) < LENGTHS.unsqueeze(-1)).to(torch.int64)
OLD = torch.linspace(-3.0, -0.5, 32).view(8, 4)
REF = OLD - torch.linspace(-0.4, 0.8, 32).view(8, 4)


def config(name: str, *keys: str) -> PPOConfig:
    """What `verl train recipe=NAME KEYS` would run."""
    return load_ppo_config(
        [
            f"recipe={name}",
            "actor_rollout_ref.model.path=model",
            "data.train_files=train.parquet",
            "trainer.device=cpu",
            *keys,
        ]
    )


def token_scores() -> torch.Tensor:
    """The scores, on the last token of each response."""
    last = torch.arange(4) == LENGTHS.unsqueeze(-1) - 1
    return torch.where(last, SCORES.unsqueeze(-1), 0.0)


class PlantedWorkers:
    """Answers the loop's questions about log-probs."""

    policy_version = 0

    def __init__(self, cfg: PPOConfig) -> None:
        self.columns = frozenset(needed_columns(cfg))

    def add_columns(self, batch: DataProto, columns: Collection[str], timer: Timer) -> dict[str, float]:
        planted = {"old_log_probs": OLD, "ref_log_prob": REF}
        batch.batch |= {name: planted[name] for name in columns if name in planted}
        return {}


def learn(cfg: PPOConfig) -> DataProto:
    """The batch an update would get: rewards, advantages, and what resampling left of it."""
    batch = DataProto.from_dict(
        {
            "token_level_scores": token_scores(),
            "response_mask": MASK,
            "rollout_log_probs": OLD,
            "reward_baselines": GREEDY,
            "values": torch.zeros(8, 4),
            "process_rewards": PROCESS,
        },
        {"uid": GROUPS, "reward_error": [None] * 8},
    )
    loop: Any = SimpleNamespace(
        cfg=cfg,
        workers=PlantedWorkers(cfg),
        kl_controller=get_kl_controller(cfg.algorithm.kl_ctrl),
        generator=torch.Generator().manual_seed(0),
    )
    RLLoop.final_rewards(loop, batch, Timer())
    return RLLoop.advantages(loop, batch)[0]


def gradient(
    cfg: PPOConfig,
    ratio: torch.Tensor,
    advantages: torch.Tensor | None = None,
    kl: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of the actor's loss with respect to the log-prob of each token at these ratios [8, 4] to the old policy; with
    `kl`, the planted KL to a teacher, with respect to that."""
    log_prob = (OLD + ratio.log()).requires_grad_()
    counts = {"dp_size": 1, "batch_num_tokens": int(MASK.sum()), "global_batch_size": 8}
    batch = DataProto.from_dict(
        {
            "old_log_probs": OLD,
            "ref_log_prob": REF,
            "advantages": torch.zeros(8, 4) if advantages is None else advantages,
            "response_mask": MASK,
            "token_level_rewards": token_scores(),
            "from_data": torch.tensor([False, False, True, False, True, False, False, False]),
        },
        {"uid": GROUPS},
        counts,
    )
    no_engine: Any = None
    actor = cfg.actor_rollout_ref.actor
    role = ActorRole(no_engine, actor, loss_scale_factor=cfg.data.max_response_length)
    prepare = get_policy_loss_prepare(actor.policy_loss.loss_mode)
    if prepare is not None:
        offered = {"log_prob": log_prob, "response_mask": MASK, "config": actor, "batch": batch}
        prepared = call_with_known(prepare, offered, "the prepare hook")
        batch.batch |= {f"prepared.{name}": values for name, values in prepared.items()}
    output, by = ModelOutput(log_probs=log_prob), log_prob
    if kl is not None:
        output.kl = by = kl.clone().requires_grad_()  # type: ignore[attr-defined]
    loss, _ = role.loss(output, batch)
    (found,) = torch.autograd.grad(loss, by, materialize_grads=True)
    return found


def rows(values: list[float]) -> torch.Tensor:
    """One value for all tokens of each response."""
    return torch.tensor(values).unsqueeze(-1).expand(8, 4).contiguous()


def group_mean(values: torch.Tensor) -> torch.Tensor:
    return values.view(2, 4).mean(-1).repeat_interleave(4)


def spread(values: torch.Tensor) -> torch.Tensor:
    """On all policy tokens of each response."""
    return values.unsqueeze(-1) * MASK
