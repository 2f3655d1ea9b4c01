"""Batches with advantages in which most groups have equal rewards, and training steps on them; no pytest in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl.config.methods import needed_columns
from verl.data.proto import DataProto
from verl.observe.metrics import Timer
from verl.trainer import advantage

PROMPTS, N, P, T = 10, 4, 3, 5


def scored(step: int) -> DataProto:
    """Responses of which seven of ten groups have equal rewards, one response is masked and lengths differ."""
    generator = torch.Generator().manual_seed(step)
    rows = PROMPTS * N
    prompts = torch.randint(3, 10, (PROMPTS, P), generator=generator).repeat_interleave(N, 0)
    responses = torch.randint(3, 10, (rows, T), generator=generator)
    mask = (torch.arange(T) < torch.randint(1, T + 1, (rows, 1), generator=generator)).long()
    attended = torch.cat([torch.ones(rows, P, dtype=torch.long), mask], 1)
    mask[5] = 0
    scores = torch.rand(rows, generator=generator)
    group = torch.arange(rows) // N
    scores = torch.where(group < 7, (group % 2).float(), scores)
    last = torch.nn.functional.one_hot(mask.sum(-1).clamp(min=1) - 1, T) * mask
    drawn = -torch.rand(rows, T, generator=generator) * mask
    uids = [f"p{row // N}" for row in range(rows)]
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attended,
            "responses": responses,
            "response_mask": mask,
            "token_level_rewards": scores.unsqueeze(-1) * last,
            "token_level_scores": scores.unsqueeze(-1) * last,
            "rollout_log_probs": drawn,
            "reward_baselines": (group % 2).float(),
            "process_rewards": scores.unsqueeze(-1) * mask / 9,
            "values": torch.zeros(rows, T),
            "sum_pi_squared": torch.full((rows, T), 0.3),
        },
        {
            "uid": uids,
            "reward_extra": [{"a": float(score), "b": 0.0} for score in scores],
            "reward_error": [None] * rows,
        },
        {"temperature": 1.0},
    )


def trained(group: Any, batch_of: Callable[[int], DataProto] = scored) -> list[dict[str, float]]:
    """Three steps of the loop from advantages on, the same batches each time."""
    found = []
    for step in range(3):
        batch = batch_of(step)
        if "old_log_probs" in needed_columns(group.cfg):
            batch.batch |= group.forward("actor", batch, ("old_log_probs",)).batch
        advantage.estimate(batch, group.cfg.algorithm)
        group.prepare_update(batch, Timer())
        found.append(group.update("actor", batch))
    return found


def weights_of(group: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in group.actor_engine.saved_weights().values()])
