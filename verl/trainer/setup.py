"""What every training program does before its loop: seeds and the run folder."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from verl.observe.run_folder import RunFolder, default_run_path

if TYPE_CHECKING:
    from verl.config.schema import BaseTrainerConfig


def seed_everything(seed: int) -> None:
    """Every global generator, for whatever a model or a user's function draws from them."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def quiet_transformers() -> None:
    """No progress bars and no reports on loading and saving weights: they tear the display, and what is wrong
    with a model folder is said by our own errors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def prometheus_address(cfg: BaseTrainerConfig) -> tuple[str, int] | None:
    """Where metrics are served, when they are."""
    return (cfg.prometheus.host, cfg.prometheus.port) if cfg.prometheus.enable else None


def open_run_folder(cfg: BaseTrainerConfig) -> RunFolder:
    """The folder `trainer.default_local_dir` names, made, checked and locked."""
    path = cfg.default_local_dir or default_run_path(cfg.project_name, cfg.experiment_name)
    return RunFolder(
        path,
        rollout_dir=getattr(cfg, "rollout_data_dir", None),
        validation_dir=getattr(cfg, "validation_data_dir", None),
    )
