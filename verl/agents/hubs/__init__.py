"""Environments of other projects, by name: `rollout.multi_turn.environment=HUB:NAME`. Each hub is a module, loaded when
its prefix is used."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from typing import Any

from verl.agents.base import row_column
from verl.agents.hosted import HostedFactory

KEY = "multi_turn.environment"
HUBS = ("gym", "openenv", "verifiers")


def hub_of(spec: str) -> str | None:
    """The hub that a value of `environment` names; None: it names a class of the user's."""
    hub, colon, _ = spec.partition(":")
    return hub if colon and hub in HUBS else None


def load_hub(spec: str) -> HostedFactory:
    hub, _, name = spec.partition(":")
    factory: HostedFactory = importlib.import_module(f"{__name__}.{hub}").load(name.strip(), f"{KEY}={spec}")
    return factory


def environment_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a row's column of that name. Nulls are left out: a column of objects has every field of each."""
    given = row_column(row, "environment_kwargs")
    if not isinstance(given, Mapping | None):
        raise TypeError(f"the column environment_kwargs has {given!r:.100}, not an object of arguments")
    return {str(name): value for name, value in (given or {}).items() if value is not None}


def group_seed(row: Mapping[str, Any]) -> int:
    """Equal for the samples of a prompt, another in every epoch, and the same after a resume."""
    return int.from_bytes(hashlib.sha256(str(row["uid"]).encode()).digest()[:4], "big") >> 1


def last_integer(text: str) -> int | None:
    """The last whole number in a text: the action, where actions are numbers."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None
