"""Where the roles of a run live: in this process, or on Ray when the config asks for several."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import CheckpointManager
from verl.config.pools import rollout_pool
from verl.config.ranks import world_size
from verl.errors import missing_package
from verl.workers.local import LocalGroup

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig
    from verl.reward.base import Backend
    from verl.workers.ray_group import RayGroup


def build_group(
    cfg: PPOConfig,
    tokenizer: Any,
    *,
    training_steps: int,
    run_folder: Path,
    model: nn.Module | None = None,
) -> LocalGroup | RayGroup:
    """The worker group that `trainer.n_gpus_per_node` and `trainer.nnodes`, and those of rollout, ask for."""
    if world_size(cfg) == 1 and not rollout_pool(cfg):
        return LocalGroup(
            cfg,
            tokenizer,
            training_steps=training_steps,
            model=model,
            bad_batch_dir=run_folder / "bad_batches",
        )
    require_ray(cfg)
    from verl.workers.ray_group import RayGroup

    return RayGroup(cfg, tokenizer, training_steps=training_steps, run_folder=run_folder, model=model)


def build_reward_model(cfg: PPOConfig) -> Backend:
    """Start the reward model on the GPUs that `reward.reward_model.n_gpus_per_node` gives it."""
    if importlib.util.find_spec("ray") is None:
        asked = f"reward.reward_model.n_gpus_per_node={cfg.reward.reward_model.n_gpus_per_node}"
        raise missing_package("ray", "ray", f"a reward model on GPUs of its own ({asked})")
    require_ray(cfg)
    from verl.workers.reward_model_pool import ModelPoolBackend

    return ModelPoolBackend.for_run(cfg)


def require_ray(cfg: PPOConfig | SFTConfig | GenerationConfig) -> None:
    """Before Ray is imported: it is there, and says only what we want to hear from it."""
    if importlib.util.find_spec("ray") is None:
        raise missing_package(
            "ray",
            "ray",
            _several(cfg),
        )
    # Our own message names the rank that died; Ray's would stand beside it in its own words.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|has been marked dead")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _several(cfg: PPOConfig | SFTConfig | GenerationConfig) -> str:
    """What needs more than this process."""
    trainer = cfg.trainer
    ranks = f"(trainer.n_gpus_per_node={trainer.n_gpus_per_node}, trainer.nnodes={trainer.nnodes})"
    rollout = getattr(getattr(cfg, "actor_rollout_ref", None), "rollout", None)
    if world_size(cfg) == 1 and rollout is not None and rollout.n_gpus_per_node:
        key = "actor_rollout_ref.rollout"
        return f"generating in {rollout.nnodes * rollout.n_gpus_per_node} processes of its own ({key}.n_gpus_per_node)"
    return f"training on {world_size(cfg)} processes {ranks}"


def build_checkpoints(cfg: PPOConfig, group: LocalGroup | RayGroup, folder: Path) -> Any:
    """What the loop saves to and resumes from, for that group."""
    if isinstance(group, LocalGroup):
        return CheckpointManager.from_config(cfg, folder)
    from verl.workers.ray_checkpoints import RayCheckpoints

    return RayCheckpoints(group.calls)
