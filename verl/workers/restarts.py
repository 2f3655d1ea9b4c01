"""`trainer.max_restarts`: start again from the last checkpoint after processes were lost, on what is left.

Errors that a user can correct, or that would happen again, end the run at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from verl.checkpoint.steps import TRACKER
from verl.config.parallelism import world_size
from verl.errors import EngineLost, WorkersLost
from verl.observe.run_folder import default_run_path

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig, SFTConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def with_restarts(cfg: PPOConfig | SFTConfig, body: Callable[[], Result]) -> Result:
    """Run `body` (a whole run as `cfg` says), again where processes were lost. `cfg` is changed to what is left."""
    started = time.time()
    for restart in range(1, cfg.trainer.max_restarts + 1):
        try:
            return body()
        except (WorkersLost, EngineLost) as error:
            logger.error("%s", error)
            if world_size(cfg) > 1:
                _fit(cfg)
            _resume_own_checkpoint(cfg, started)
            logger.warning(
                "restart %d of %d (trainer.max_restarts) on %d x %d processes",
                restart,
                cfg.trainer.max_restarts,
                cfg.trainer.nnodes,
                cfg.trainer.n_gpus_per_node,
            )
    return body()


def _fit(cfg: PPOConfig | SFTConfig) -> None:
    """Fewer nodes, or fewer ranks on the last one, where a node is gone for good."""
    from verl.workers.ray_cluster import Cluster

    cluster = Cluster(cfg)
    cluster.connect()
    try:
        cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node = cluster.capacity()
    finally:
        cluster.close()


def _resume_own_checkpoint(cfg: PPOConfig | SFTConfig, started: float) -> None:
    """Whatever the first start began from, a restart begins from what this run has saved."""
    trainer = cfg.trainer
    folder = trainer.default_local_dir or default_run_path(trainer.project_name, trainer.experiment_name)
    tracker = Path(folder) / TRACKER
    if trainer.resume_mode != "auto" and tracker.is_file() and tracker.stat().st_mtime >= started:
        trainer.resume_mode = "auto"
