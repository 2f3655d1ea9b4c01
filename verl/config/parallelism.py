"""The processes of a run: training ranks, and pools of rollout engines or reward models with their own GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl.config.capabilities import engine_spec, strategy_spec
from verl.config.methods import needed_columns
from verl.config.schema import GenerationConfig, OfflineConfig, PPOConfig
from verl.config.sections.trainer import POOL_ASYNC_MODES

ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"
TEACHER = "actor_rollout_ref.teacher"


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one model; the product of the first four is the number of ranks.

    Rank = tp + TP * (cp + CP * (dp + DP * pp)): ranks that split a matrix are neighbours, pipeline stages are furthest
    apart. `cp` ranks split each sequence (Ulysses, context parallelism). The experts of a mixture are split over `ep`
    of all ranks of a stage."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows together."""
        return self.tp * self.pp * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def shards(self) -> str:
        """Those that hold different rows of a batch, in words."""
        if self.model_ranks == 1:
            return f"{self.dp} ranks"
        return f"{self.dp} groups of {self.model_ranks} ranks"

    def data_rank(self, rank: int) -> int:
        """Which of the `dp` shards of a batch a rank works on."""
        return rank // (self.tp * self.cp) % self.dp

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.stage_ranks

    def reports(self, rank: int) -> bool:
        """Whether a rank's results are the ones to take: of ranks with the same rows, the first of the last stage."""
        return rank % (self.tp * self.cp) == 0 and self.stage(rank) == self.pp - 1

    def reporters(self) -> list[int]:
        """The reporting rank of each shard, in the order of shards."""
        first = (self.pp - 1) * self.dp * self.tp * self.cp
        return [first + shard * self.tp * self.cp for shard in range(self.dp)]


def layout_of(role: Any, world: int) -> Layout:
    """The layout of a role's engine on `world` ranks; `role` has a strategy and its sizes."""
    layout = Layout(**strategy_spec(role.strategy).layout(role))
    return replace(layout, dp=max(world // layout.model_ranks, 1))


def offload_section(role: Any) -> tuple[str, Any]:
    """The name of a role's section with `param_offload` and `optimizer_offload`, and the section."""
    name = strategy_spec(role.strategy).section
    return name, getattr(role, name)


def bubble_share(pp: int, micro_batches: int) -> float:
    """Share of a pass in which a pipeline stage waits, with stages that take equally long."""
    return (pp - 1) / (micro_batches + pp - 1)


def world_size(config: PPOConfig | OfflineConfig | GenerationConfig) -> int:
    """Processes that train."""
    return config.trainer.n_gpus_per_node * config.trainer.nnodes


def needs_teacher(config: PPOConfig) -> bool:
    """Whether the policy is distilled from another model."""
    return any(column.startswith("teacher_") for column in needed_columns(config))


def divisors(number: int) -> list[int]:
    """Every divisor of a number, ascending."""
    return sorted({d for n in range(1, math.isqrt(number) + 1) if number % n == 0 for d in (n, number // n)})


def closest(values: list[int], near: int) -> str:
    """A few of the values, those closest to the one given, as text."""
    chosen = sorted(values, key=lambda value: abs(value - near))[:5]
    return ", ".join(str(value) for value in sorted(chosen))


def counted(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}{'s' if number > 1 else ''}"


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


def pools(cfg: PPOConfig | OfflineConfig | GenerationConfig) -> list[Pool]:
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
    return rollout.tensor_model_parallel_size if engine_spec(rollout.name).tensor_parallel else 1


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
        and engine_spec(rollout.name).server
        and rollout.mode == "server"
        and rollout.nnodes == 1
        and rollout.n_gpus_per_node == rollout.tensor_model_parallel_size
    )


def rollout_pool(cfg: PPOConfig) -> bool:
    """Whether generation has its own processes on Ray."""
    return cfg.actor_rollout_ref.rollout.n_gpus_per_node > 0 and not dedicated_server(cfg)


def sharing_errors(cfg: PPOConfig | GenerationConfig) -> Iterator[str]:
    """Engines on several GPUs must fill every node evenly: the GPUs that share a copy are on one node."""
    size, key, section = engine_size(cfg), "trainer.n_gpus_per_node", "rollout"
    per_node = cfg.trainer.n_gpus_per_node
    if isinstance(cfg, PPOConfig):
        section = ROLLOUT
        if cfg.actor_rollout_ref.rollout.n_gpus_per_node:
            key, per_node = f"{ROLLOUT}.n_gpus_per_node", cfg.actor_rollout_ref.rollout.n_gpus_per_node
    if per_node % size:
        yield (
            f"'{section}.tensor_model_parallel_size' is {size}, which does not divide {key}={per_node}. Values that "
            f"work: {closest(divisors(per_node), size)}; or {key}={-(-per_node // size) * size}"
        )
