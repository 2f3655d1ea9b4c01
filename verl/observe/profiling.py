"""Traces of torch's profiler around the steps that `trainer.profile` chooses, one file per step and rank.

A profiler that fails loses its trace, never the step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from verl.config.sections.trainer import ProfileConfig

logger = logging.getLogger(__name__)


@contextmanager
def profiled(cfg: ProfileConfig, step: int, rank: int, run_folder: Path) -> Iterator[None]:
    """Profile the block where `cfg` chooses this step and rank. A block that raises leaves no trace.

    The profiler sees the thread that enters the block, and the backward passes that this thread starts."""
    if step not in cfg.steps or rank not in cfg.ranks:
        yield
        return
    profiler = _start()
    try:
        yield
    except BaseException:
        if profiler is not None:
            _stop(profiler, None)
        raise
    if profiler is not None:
        _stop(profiler, run_folder / "profile" / f"step_{step}_rank_{rank}.json.gz")


def _start() -> profile | None:
    activities = [ProfilerActivity.CPU]
    if (
        torch.cuda.is_initialized()
    ):  # else the profiler itself would take memory of a GPU that the run does not use
        activities.append(ProfilerActivity.CUDA)
    try:
        profiler = profile(activities=activities)
        profiler.start()
    except Exception as error:  # of drivers and of another profiler in this process
        logger.warning("torch's profiler could not start: %s. The step is not profiled", error)
        return None
    return profiler


def _stop(profiler: profile, file: Path | None) -> None:
    try:
        profiler.stop()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}")  # its suffix makes torch compress it
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, file)
            logger.info("profile: %s", file)
    except Exception as error:  # a full disk, and whatever the profiler meets
        logger.warning("the profile of a step could not be written: %s. The run continues", error)
