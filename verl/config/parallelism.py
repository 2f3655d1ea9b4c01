"""The processes of a run: training ranks, and pools of rollout engines or reward models with their own GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.known import POOL_ASYNC_MODES
from verl.config.schema import GenerationConfig, PPOConfig, SFTConfig

EXTERNAL_ENGINES = ("vllm", "sglang")  # they hold a copy of the weights, which several GPUs can share
ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"


def world_size(config: PPOConfig | SFTConfig | GenerationConfig) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def model_parallel_size(role: Any) -> int:
    """Ranks that work on the same sequences together; `role` has a strategy and its sizes."""
    if role.strategy != "megatron":
        return role.ulysses_sequence_parallel_size
    sizes = role.megatron
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def dp_size(config: PPOConfig | SFTConfig) -> int:
    """Ranks that hold different sequences of a batch."""
    role = config.actor_rollout_ref.actor if isinstance(config, PPOConfig) else config.model
    return max(world_size(config) // model_parallel_size(role), 1)


def divisors(number: int) -> list[int]:
    """Every divisor of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def closest(values: list[int], near: int) -> str:
    """A few of the values, those closest to the one given, as text."""
    chosen = sorted(values, key=lambda value: abs(value - near))[:5]
    return ", ".join(str(value) for value in sorted(chosen))


@dataclass(frozen=True)
class Pool:
    """Processes that are scheduled together, `per_node` GPUs on each of `nodes`; `key` is the section that says so."""

    key: str
    nodes: int
    per_node: int
    gpus_per_process: int = 1  # more than 1 for an engine with tensor parallelism

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node // self.gpus_per_process

    @property
    def asked(self) -> str:
        """The keys and their values."""
        return f"{self.key}.nnodes={self.nodes} {self.key}.n_gpus_per_node={self.per_node}"


def pools(cfg: PPOConfig | SFTConfig | GenerationConfig) -> list[Pool]:
    """The pools of a run; the trainer's is always first."""
    trainer = cfg.trainer
    if isinstance(cfg, GenerationConfig):
        return [Pool("trainer", trainer.nnodes, trainer.n_gpus_per_node, engine_size(cfg))]
    found = [Pool("trainer", trainer.nnodes, trainer.n_gpus_per_node)]
    if isinstance(cfg, PPOConfig):
        rollout, model = cfg.actor_rollout_ref.rollout, cfg.reward.reward_model
        if rollout_pool(cfg):
            found.append(Pool(ROLLOUT, rollout.nnodes, rollout.n_gpus_per_node, engine_size(cfg)))
        if model.enable and model.n_gpus_per_node:
            found.append(Pool(REWARD_MODEL, model.nnodes, model.n_gpus_per_node))
    return found


def engine_size(cfg: PPOConfig | GenerationConfig) -> int:
    """GPUs (or CPU processes) that share one copy of the model while generating."""
    rollout = cfg.actor_rollout_ref.rollout if isinstance(cfg, PPOConfig) else cfg.rollout
    return rollout.tensor_model_parallel_size if rollout.name in EXTERNAL_ENGINES else 1


def engines(cfg: GenerationConfig) -> int:
    """Copies of the model that generate in parallel."""
    return pools(cfg)[0].processes


def dedicated_server(cfg: PPOConfig) -> bool:
    """Whether one trainer process starts one rollout server on other GPUs, which needs no Ray. While it trains it could
    not talk to the server, so that generating ahead takes a pool."""
    rollout = cfg.actor_rollout_ref.rollout
    return (
        world_size(cfg) == 1
        and cfg.trainer.async_training.mode not in POOL_ASYNC_MODES
        and rollout.name in EXTERNAL_ENGINES
        and rollout.mode == "server"
        and rollout.nnodes == 1
        and rollout.n_gpus_per_node == rollout.tensor_model_parallel_size
    )


def rollout_pool(cfg: PPOConfig) -> bool:
    """Whether generation has its own processes on Ray."""
    return cfg.actor_rollout_ref.rollout.n_gpus_per_node > 0 and not dedicated_server(cfg)


def sharing_errors(cfg: PPOConfig | GenerationConfig) -> list[str]:
    """Engines on several GPUs must fill every node evenly: the GPUs that share a copy are on one node."""
    size, key, section = engine_size(cfg), "trainer.n_gpus_per_node", "rollout"
    per_node = cfg.trainer.n_gpus_per_node
    if isinstance(cfg, PPOConfig):
        section = ROLLOUT
        if cfg.actor_rollout_ref.rollout.n_gpus_per_node:
            key, per_node = f"{ROLLOUT}.n_gpus_per_node", cfg.actor_rollout_ref.rollout.n_gpus_per_node
    if per_node % size == 0:
        return []
    return [
        f"'{section}.tensor_model_parallel_size' is {size}, which does not divide {key}={per_node}. Values that work: "
        f"{closest(divisors(per_node), size)}; or {key}={-(-per_node // size) * size}"
    ]
