"""Where the roles of a run are: in this process, or on Ray when the config asks for several; and restarts.

Errors that a user can correct, or that would happen again, end the run at once; after lost processes it starts again
from the last checkpoint on what is left (`trainer.max_restarts`).
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.resume import Found, resume_newest
from verl.checkpoint.state import capture_rng, check_rng, restore_rng
from verl.checkpoint.steps import TRACKER
from verl.config.checks import rank_errors
from verl.config.parallelism import rollout_pool, world_size
from verl.errors import (
    CheckpointError,
    EngineLost,
    RayStartError,
    TrainingHalted,
    VerlError,
    WorkersLost,
    missing_package,
)
from verl.runtime import StopRequest
from verl.workers.local import LocalGroup

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from verl.config.schema import GenerationConfig, OfflineConfig, PPOConfig
    from verl.reward.base import Backend
    from verl.workers.ray_calls import RankCalls
    from verl.workers.ray_group import RayGroup

logger = logging.getLogger(__name__)

_DRIVER_RANDOM = "controller_random"
Result = TypeVar("Result")


@contextmanager
def device_started(cfg: PPOConfig) -> Iterator[None]:
    """Meanwhile a thread starts the GPU of a run in this process, its library of products and Triton: seconds in which
    the host has other things to do. What fails there is reported by the engine."""
    if world_size(cfg) > 1 or rollout_pool(cfg) or cfg.trainer.device == "cpu":
        yield
        return
    thread = Thread(target=_start_device, name="device")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _start_device() -> None:
    import torch

    from verl.models.kernels import triton_fault

    if torch.cuda.is_available():
        with suppress(Exception):
            device = torch.device("cuda")
            ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            ones @ ones
            triton_fault(device)


def build_group(
    cfg: PPOConfig,
    tokenizer: Any,
    *,
    training_steps: int | None,
    run_folder: Path | None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> LocalGroup | RayGroup:
    """The worker group that `trainer.n_gpus_per_node` and `trainer.nnodes`, and those of rollout, ask for. `optimizer`:
    a user's own, over the parameters of `model`."""
    if world_size(cfg) == 1 and not rollout_pool(cfg):
        return LocalGroup(
            cfg,
            tokenizer,
            training_steps=training_steps,
            model=model,
            optimizer=optimizer,
            run_folder=run_folder,
        )
    require_ray(cfg)
    from verl.workers.ray_group import RayGroup

    return RayGroup(cfg, tokenizer, training_steps=training_steps, run_folder=run_folder, model=model)


def build_reward_model(cfg: PPOConfig) -> Backend:
    """Start the reward model on the GPUs that `reward.reward_model.n_gpus_per_node` gives it."""
    if importlib.util.find_spec("ray") is None:
        asked = f"reward.reward_model.n_gpus_per_node={cfg.reward.reward_model.n_gpus_per_node}"
        raise missing_package("ray", "ray", f"a reward model on separate GPUs ({asked})")
    require_ray(cfg)
    from verl.workers.reward_model_pool import ModelPool, ModelPoolBackend

    return ModelPoolBackend(ModelPool(cfg))


def require_ray(cfg: PPOConfig | OfflineConfig | GenerationConfig) -> None:
    """Before Ray is imported: it is installed, and leaves the reports of dead ranks, nodes and heads to us."""
    if importlib.util.find_spec("ray") is None:
        trainer, rollout = cfg.trainer, getattr(getattr(cfg, "actor_rollout_ref", None), "rollout", None)
        ranks = f"(trainer.n_gpus_per_node={trainer.n_gpus_per_node}, trainer.nnodes={trainer.nnodes})"
        needs = f"training on {world_size(cfg)} processes {ranks}"
        if world_size(cfg) == 1 and rollout is not None and rollout.n_gpus_per_node:
            count = rollout.nnodes * rollout.n_gpus_per_node
            needs = f"generating in {count} separate processes (actor_rollout_ref.rollout.n_gpus_per_node)"
        raise missing_package("ray", "ray", needs)
    reports = "A worker died or was killed|has been marked dead|Raylet is terminated"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", reports)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def build_checkpoints(cfg: PPOConfig, group: LocalGroup | RayGroup, folder: Path) -> Any:
    """What the loop saves to and resumes from, for that group."""
    if isinstance(group, LocalGroup):
        return CheckpointManager.from_config(cfg, folder)
    return RayCheckpoints(group.calls)


def open_checkpoints(
    group: LocalGroup | RayGroup,
    folder: Path,
    settings: dict[str, PartSettings],
    began: int | None = None,
    **options: Any,
) -> CheckpointManager | RayCheckpoints:
    """Those of any folder. `began`: the step from which the group will save to it (`CheckpointManager.start_from`)."""
    if not isinstance(group, LocalGroup):
        checkpoints = RayCheckpoints(group.calls)
        checkpoints.open(folder, settings, began, options)
        return checkpoints
    manager = CheckpointManager(folder, settings, **options)
    if began is not None:
        manager.start_from(began)
    return manager


class RayCheckpoints:
    """As the loop uses `CheckpointManager`: every rank saves and loads its shards in a folder all nodes see."""

    def __init__(self, calls: RankCalls) -> None:
        from verl.workers.train_rank import TrainRank  # what a run in one process does not need

        self._calls, self._rank = calls, TrainRank
        self.failure: str | None = None
        """Why the last save that failed did."""

    def open(
        self, folder: Path, settings: dict[str, PartSettings], began: int | None, options: dict[str, Any]
    ) -> None:
        self._calls.all(self._rank.do_open_checkpoints, folder, settings, began, options)

    def rehearse(
        self, parts: Mapping[str, Any], trainer_state: Mapping[str, Any], *, tokenizer: Any = None
    ) -> None:
        """As `CheckpointManager.rehearse`; `parts` and `tokenizer` are those of the ranks."""
        self._calls.all(self._rank.do_rehearse_save, dict(trainer_state))

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        trainer_state: Mapping[str, Any],
        *,
        tokenizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """As `CheckpointManager.save`; `parts` and `tokenizer` are those of the ranks."""
        state = {**trainer_state, _DRIVER_RANDOM: capture_rng()}
        saved, self.failure = self._calls.all(self._rank.do_save, step, state, dict(metrics or {}))[0]
        return saved

    def wait(self) -> Path | None:
        saved, self.failure = self._calls.all(self._rank.do_wait_for_save)[0]
        return saved

    def resume(
        self, parts: Mapping[str, Any], take: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> dict[str, Any] | None:
        """As `CheckpointManager.resume`; `take` is called in this process, which has its own random states."""

        def take_all(state: dict[str, Any]) -> None:
            # A checkpoint of one process has none: its random state is rank 0's.
            if _DRIVER_RANDOM in state:
                check_rng(state[_DRIVER_RANDOM])
            take(state)

        state = resume_newest(self._find, lambda: all(self._calls.all(self._rank.do_load_found)), take_all)
        if state is not None and _DRIVER_RANDOM in state:
            restore_rng(state.pop(_DRIVER_RANDOM))
        return state

    def _find(self, below: int | None) -> Found | None:
        found = self._calls.all(self._rank.do_find_checkpoint, below)
        if len({step for step, _ in found}) > 1:
            raise CheckpointError(
                "the ranks do not see the same checkpoints: trainer.default_local_dir must be a folder that every "
                "node shares"
            )
        return found[0][1]


def with_restarts(cfg: PPOConfig | OfflineConfig, body: Callable[[], Result], stop: StopRequest) -> Result:
    """Run `body` (a whole run as `cfg` says), again where processes were lost, unless it was asked to stop. `cfg` is
    changed to what is left."""
    started, restarts = time.time(), 0
    loss: WorkersLost | EngineLost | None = None
    while True:
        try:
            if loss is not None:
                _prepare_restart(cfg, started, loss)
                logger.warning(
                    "restart %d of %d (trainer.max_restarts) on %d x %d processes",
                    restarts,
                    cfg.trainer.max_restarts,
                    cfg.trainer.nnodes,
                    cfg.trainer.n_gpus_per_node,
                )
            return body()
        except (WorkersLost, EngineLost) as error:
            loss, problem = error, str(error)
        except RayStartError as error:
            if loss is None:
                raise
            problem = f"restart {restarts} failed: {error}"
            loss = type(loss)(f"{loss}\n{problem}")
        if stop.asked or restarts >= cfg.trainer.max_restarts:
            raise loss
        restarts += 1
        logger.error("%s", problem)


def _prepare_restart(cfg: PPOConfig | OfflineConfig, started: float, loss: VerlError) -> None:
    """`loss` is raised where the cluster has no place for the run any more."""
    if world_size(cfg) > 1:
        try:
            _fit(cfg)
        except RayStartError:
            raise
        except VerlError as error:
            raise TrainingHalted(f"{loss}\nThe run cannot be restarted: {error}") from error
    # Whatever the first start began from, a restart begins from what this run has saved.
    trainer = cfg.trainer
    tracker = Path(trainer.default_local_dir) / TRACKER
    if trainer.resume_mode != "auto" and tracker.is_file() and tracker.stat().st_mtime >= started:
        trainer.resume_mode = "auto"


def _fit(cfg: PPOConfig | OfflineConfig) -> None:
    """Fewer nodes, or fewer ranks on the last one, where a node does not come back."""
    from verl.workers.ray_cluster import Cluster
    from verl.workers.ray_group import START_S

    def fits(nodes: int, per_node: int) -> bool:
        smaller = copy.deepcopy(cfg)
        smaller.trainer.nnodes, smaller.trainer.n_gpus_per_node = nodes, per_node
        return not rank_errors(smaller)

    cluster = Cluster(cfg)
    cluster.connect()
    try:
        found = cluster.capacity(cfg.trainer.restart_wait_s, START_S, fits)
        cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node = found
    finally:
        cluster.close()
