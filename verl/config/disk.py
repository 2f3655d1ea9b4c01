"""What the checkpoints of a run take on the disk, against what is free there. Pure arithmetic, but for `free_bytes`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.memory import gib, ppo_roles, sft_roles
from verl.config.model_shape import ModelShape
from verl.config.ranks import world_size
from verl.config.schema import PPOConfig, SFTConfig

HF_BY_DEFAULT_BELOW = 10_000_000_000
"""Parameters from which on whole weights are left out of checkpoints by default."""
_ADVICE = "Free some space, or set trainer.default_local_dir to a folder on another disk"


@dataclass(frozen=True)
class DiskVerdict:
    """Why a run cannot save, and why it may not save all it plans to; empty where it can."""

    error: str = ""
    warning: str = ""


def checkpoint_bytes(
    config: PPOConfig | SFTConfig, shape: ModelShape, critic_shape: ModelShape | None, kind: str
) -> int:
    """Tensors of one checkpoint: master weights, moments and, where they are no second name of the same file, whole
    weights."""
    world = world_size(config)
    sections: list[tuple[Any, Any, Any]]
    if isinstance(config, SFTConfig):
        roles = sft_roles(config, shape, world, kind)
        sections = [(config.model, config.optim, config.checkpoint)]
    else:
        roles = ppo_roles(config, shape, critic_shape, world, kind)
        policy, critic = config.actor_rollout_ref, config.critic
        sections = [
            (policy.model, policy.actor.optim, policy.actor.checkpoint),
            (critic.model, critic.optim, critic.checkpoint),
        ]
    total = 0
    for role, (model, optim, checkpoint) in zip([r for r in roles if r.trained], sections, strict=False):
        saved = (
            role.trained if model.lora_rank else role.parameters
        )  # the weights below an adapter stay as they are
        contents = checkpoint.save_contents
        if contents is None:
            contents = ["model", "optimizer", *(["hf_model"] if saved < HF_BY_DEFAULT_BELOW else [])]
        element = role.whole_weights // role.parameters
        master = element if optim.stochastic_rounding else 4
        linked = world == 1 and master == element and not model.lora_rank and "model" in contents
        total += saved * master if "model" in contents else 0
        total += role.trained * (2 if optim.moments == "int8" else 8) if "optimizer" in contents else 0
        total += role.parameters * element if "hf_model" in contents and not linked else 0
    return total


def saves(config: PPOConfig | SFTConfig, total_steps: int) -> int:
    """Checkpoints a run of so many steps makes."""
    every = config.trainer.save_freq
    return -(-total_steps // every) if every > 0 else 1


def disk_verdict(
    config: PPOConfig | SFTConfig,
    size: int,
    free: int,
    *,
    total_steps: int | None = None,
    present: int = 0,
) -> DiskVerdict:
    """`size`: bytes of one checkpoint; `present`: checkpoints the run folder holds already."""
    trainer = config.trainer
    where = f"trainer.default_local_dir={trainer.default_local_dir}"
    if size > free:
        contents = "checkpoint" if isinstance(config, SFTConfig) else "actor_rollout_ref.actor.checkpoint"
        return DiskVerdict(
            error=f"{where}: a checkpoint takes about {gib(size)} and {gib(free)} are free, so nothing this run learns "
            f"could be saved. {_ADVICE}; {contents}.save_contents=[hf_model] keeps the weights alone"
        )
    total_steps = total_steps or trainer.total_training_steps
    if total_steps is None:
        return DiskVerdict()
    planned, keep = saves(config, total_steps), trainer.max_actor_ckpt_to_keep
    if keep is not None:  # an old one goes after the new one is there
        planned = min(planned, keep + 1 + bool(trainer.keep_best))
    planned -= present
    if planned * size <= free:
        return DiskVerdict()
    room = free // size
    fewer = f"trainer.max_actor_ckpt_to_keep={room - 1}" if room > 1 else "a larger trainer.save_freq"
    now = f"trainer.save_freq={trainer.save_freq}, trainer.max_actor_ckpt_to_keep={keep}"
    return DiskVerdict(
        warning=f"{where}: {planned} checkpoints of about {gib(size)} are planned ({now}, {total_steps} steps) and "
        f"{gib(free)} are free, room for {room}. Set {fewer}, or trainer.default_local_dir to a folder on another disk"
    )


def free_bytes(folder: str | Path) -> int | None:
    """What may still be written where a folder is, or will be; None where the system does not say."""
    place = Path(folder).expanduser().absolute()
    while not place.exists() and place.parent != place:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
