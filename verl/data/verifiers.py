"""Environments of the package verifiers, and their data as rows: `data.train_files=verifiers:NAME`."""

from __future__ import annotations

from typing import Any

from verl.config.sections.rollout import VERIFIERS
from verl.errors import ConfigError, missing_package
from verl.user_code import error_line, import_path, is_file


def load_verifiers(spec: str, key: str) -> Any:
    """What `load_environment` returns of the package, or of the file, that follows the prefix."""
    name, where = spec.removeprefix(VERIFIERS).strip(), f"{key}={spec}"
    try:
        import verifiers
    except ImportError:
        raise missing_package("verifiers", "verifiers", where) from None
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"{where}: the installed version {verifiers.__version__} of verifiers has no load_environment; install one "
            "before 0.4."
        )
    try:
        if is_file(name):
            module, _ = import_path(name, None, key, ConfigError, "load_environment")
            return module.load_environment()
        return verifiers.load_environment(name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: load_environment failed with {type(error).__name__}: {error}{error_line(error)}."
        ) from error


def verifiers_dataset(spec: str, split: str, key: str) -> Any:
    """The environment's own data; that of its evaluation, where it has any, for the split test."""
    environment = load_verifiers(spec, key)
    try:
        return environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except Exception as error:
        raise ConfigError(
            f"{key}={spec}: the environment gave no data: {type(error).__name__}: {error}{error_line(error)}."
        ) from error
