"""Keys that are known but whose feature this version does not have: refused, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig


def refuse_unavailable(cfg: PPOConfig) -> None:
    """Raise ConfigError for the first setting that asks for something that is not here yet."""
    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    processes = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    not_here = [
        (
            processes > 1,
            f"trainer.n_gpus_per_node={cfg.trainer.n_gpus_per_node} x trainer.nnodes={cfg.trainer.nnodes}: training "
            "on several processes",
            "trainer.n_gpus_per_node=1 trainer.nnodes=1",
        ),
        (rollout.multi_turn.enable, "rollout.multi_turn.enable=True", "rollout.multi_turn.enable=False"),
        (rollout.mode == "server", "rollout.mode=server", "rollout.mode=inprocess"),
        (
            rollout.tensor_model_parallel_size > 1,
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} on one process",
            "rollout.tensor_model_parallel_size=1",
        ),
        (
            rollout.n_gpus_per_node > 0 or cfg.reward.reward_model.n_gpus_per_node > 0,
            "separate GPUs for rollout or reward model (n_gpus_per_node)",
            "rollout.n_gpus_per_node=0 reward.reward_model.n_gpus_per_node=0",
        ),
        (
            actor.ulysses_sequence_parallel_size > 1,
            "actor.ulysses_sequence_parallel_size above 1",
            "actor.ulysses_sequence_parallel_size=1",
        ),
        (
            cfg.ray_kwargs.timeline_json_file is not None,
            "ray_kwargs.timeline_json_file",
            "~ray_kwargs.timeline_json_file",
        ),
    ]
    for asked, what, instead in not_here:
        if asked:
            raise ConfigError(f"{what} is not available in this version; set {instead}")
