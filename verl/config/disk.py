"""The size of a run's checkpoints, and whether the disk holds them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl.config.parallelism import world_size
from verl.config.roles import model_roles
from verl.config.schema import OfflineConfig, PPOConfig
from verl.config.sizes import ModelSizes, gib, roles

HF_BY_DEFAULT_BELOW = 10_000_000_000  # parameters from which on checkpoints leave hf_model out by default


@dataclass(frozen=True)
class DiskVerdict:
    """Why a run cannot save, and why it may not save all it plans to; empty where it can."""

    error: str = ""
    warning: str = ""


def checkpoint_bytes(
    config: PPOConfig | OfflineConfig, sizes: ModelSizes, others: Mapping[str, ModelSizes | None], kind: str
) -> int:
    """Tensors of one checkpoint: master weights, moments and, where they are not hard links to them, full weights."""
    sections = {role.name: role for role in model_roles(config)}
    total = 0
    for role in roles(config, sizes, others, kind):
        if not role.trained:
            continue
        model, settings = sections[role.role].model, sections[role.role].section
        if isinstance(config, OfflineConfig):
            settings = config
        optim, checkpoint = settings.optim, settings.checkpoint
        saved = role.trained if model.lora_rank else role.parameters
        contents = checkpoint.save_contents
        if contents is None:
            contents = ["model", "optimizer", *(["hf_model"] if saved < HF_BY_DEFAULT_BELOW else [])]
        element = role.full_weights // role.parameters
        master = element if optim.stochastic_rounding else 4
        linked = world_size(config) == 1 and master == element and not model.lora_rank and "model" in contents
        total += saved * master if "model" in contents else 0
        total += role.trained * (2 if optim.moments == "int8" else 8) if "optimizer" in contents else 0
        total += role.full_weights if "hf_model" in contents and not linked else 0
    return total


def disk_verdict(
    config: PPOConfig | OfflineConfig,
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
        contents = "checkpoint" if isinstance(config, OfflineConfig) else "actor_rollout_ref.actor.checkpoint"
        return DiskVerdict(
            error=f"{where}: a checkpoint takes about {gib(size)} and {gib(free)} are free. Set "
            f"trainer.default_local_dir to another disk, or {contents}.save_contents=[hf_model], from which a run "
            "in half precision cannot be resumed"
        )
    total_steps, keep = total_steps or trainer.total_training_steps, trainer.max_actor_ckpt_to_keep
    if total_steps is None:
        return DiskVerdict()
    planned = -(-total_steps // trainer.save_freq) if trainer.save_freq > 0 else 1
    if isinstance(config, OfflineConfig) and config.trainer.early_stop_patience and trainer.test_freq > 0:
        planned += total_steps // trainer.test_freq  # at most: one whenever validation is better
    if keep is not None:  # an old one is deleted after the new one is complete
        planned = min(planned, keep + 1 + bool(trainer.keep_best))
    planned -= present
    if planned * size <= free:
        return DiskVerdict()
    fit = free // size
    fewer = f"trainer.max_actor_ckpt_to_keep={fit - 1}" if fit > 1 else "a larger trainer.save_freq"
    return DiskVerdict(
        warning=f"{where}: {planned} checkpoints of about {gib(size)} are planned ({total_steps} "
        f"steps, trainer.save_freq={trainer.save_freq}, trainer.max_actor_ckpt_to_keep={keep}), and {gib(free)} are "
        f"free, enough for {fit}. Set {fewer}, or trainer.default_local_dir to another disk"
    )


def free_bytes(folder: str | Path) -> int | None:
    """Free space where a folder is, or will be; None where the system does not say."""
    path = Path(folder).expanduser().absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
