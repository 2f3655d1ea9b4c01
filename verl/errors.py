"""Errors a user can meet.

Every message says what was wrong, the value seen, what is allowed and the key to change.
All of them take one message string, so that they survive pickling between processes.
"""

from __future__ import annotations

import sys

RESUME = "the same command resumes from the last checkpoint (trainer.resume_mode=auto)"
"""Part of every message that ends a run which can simply be started again."""


class VerlError(Exception):
    """Base of everything a user caused or can fix. The commands print its text and exit with `exit_code`."""

    exit_code = 2


class CommandAnswered(SystemExit):
    """A command line that only asked something (--help, --check, --cfg) has its answer."""


class ConfigError(VerlError):
    """A key or a combination of keys that cannot work."""


class MethodError(ConfigError, ValueError):
    """An estimator or a loss that is not known, or a second one of the same name."""


class DataError(VerlError):
    """A file, column or row that cannot be used."""


class ModelError(VerlError):
    """A model or tokenizer folder that cannot be used."""


class RewardError(VerlError):
    """A reward function that cannot be found, called or believed."""


class RolloutError(VerlError):
    """A request an engine cannot serve, or an engine that cannot start."""


class EngineLost(RolloutError):
    """A rollout engine in other processes died or hangs: with `trainer.max_restarts` the run begins again."""

    exit_code = 3


class CheckpointError(VerlError):
    """A checkpoint that is missing, damaged or does not fit."""


class MissingPackage(VerlError):
    """An optional package is needed; the message says how to install it."""


class TrainingHalted(VerlError):
    """Training stopped itself because continuing would do harm (non-finite steps, failing rewards, ...)."""

    exit_code = 3


class ToolsLost(TrainingHalted):
    """A tool server went away and did not come back; the message has its address."""


class RayStartError(VerlError):
    """Ray could not be started or joined."""


class WorkersLost(TrainingHalted):
    """Ranks died or hang: with `trainer.max_restarts` the run starts again from the last checkpoint."""


def missing_package(package: str, extra: str, needed_for: str) -> MissingPackage:
    """In an `except ImportError` it may be that the package is installed and does not go with the others."""
    from verl.requirements import install_command

    error, problem = sys.exception(), "is not installed"
    if isinstance(error, ImportError) and error.name != package.replace("-", "_"):
        problem = f"cannot be imported ({error})"
    return MissingPackage(
        f"{needed_for} needs the package '{package}', which {problem}. "
        f"Install it with: {install_command(extra)}"
    )
