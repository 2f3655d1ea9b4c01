"""Which processes of a run generate: the trainer's own, groups of them, or processes beside them. Pure arithmetic."""

from __future__ import annotations

from verl.config.ranks import divisors, some_near, world_size
from verl.config.schema import PPOConfig

EXTERNAL_ENGINES = ("vllm", "sglang")
"""Engines that keep a copy of the weights and can share it out over several GPUs."""
_KEY = "actor_rollout_ref.rollout"


def engine_size(cfg: PPOConfig) -> int:
    """GPUs (or CPU processes' places) that share one copy of the model while generating."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size if rollout.name in EXTERNAL_ENGINES else 1


def own_server(cfg: PPOConfig) -> bool:
    """One trainer process, and one server it starts itself on GPUs of its own: no Ray is needed for that."""
    rollout = cfg.actor_rollout_ref.rollout
    return (
        world_size(cfg) == 1
        and rollout.name in EXTERNAL_ENGINES
        and rollout.mode == "server"
        and rollout.nnodes == 1
        and rollout.n_gpus_per_node == rollout.tensor_model_parallel_size
    )


def rollout_pool(cfg: PPOConfig) -> bool:
    """Whether generation has processes of its own on Ray."""
    return cfg.actor_rollout_ref.rollout.n_gpus_per_node > 0 and not own_server(cfg)


def sharing_errors(cfg: PPOConfig) -> list[str]:
    """Engines on several GPUs that do not fill nodes evenly."""
    rollout, size = cfg.actor_rollout_ref.rollout, engine_size(cfg)
    pool = rollout.n_gpus_per_node > 0
    per_node = rollout.n_gpus_per_node if pool else cfg.trainer.n_gpus_per_node
    if per_node % size == 0:
        return []
    key = f"{_KEY}.n_gpus_per_node" if pool else "trainer.n_gpus_per_node"
    return [
        f"'{_KEY}.tensor_model_parallel_size' is {size}, which does not divide the {per_node} GPUs for rollout on each "
        f"node ({key}): the GPUs that share a copy of the model must be on one node. Values that work: "
        f"{some_near(divisors(per_node), size)}; or {key}={-(-per_node // size) * size}"
    ]
