"""How a config key is declared: its default, its one line of documentation and what it allows.

The declaration is the only home of a default. Loading, `--help`, the checks and the docs all read the
metadata written here, so none of them can disagree with the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, field
from typing import Any


def key(
    default: Any,
    doc: str,
    *,
    known: tuple[str, ...] | None = None,
    plugin: str | None = None,
    follows: str | None = None,
    required: bool = False,
    path: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Any:
    """Declare a key.

    known: the values allowed; plugin: the registry whose user-registered names are allowed as well;
    follows: the key whose value this one takes unless the user sets it; required: the user must give it;
    path: a leading ~ means the user's home folder;
    ge, gt, le: bounds (checked for numbers, and for each number of a list; None is never checked).
    """
    metadata = {
        "doc": doc,
        "known": known,
        "plugin": plugin,
        "follows": follows,
        "required": required,
        "path": path,
        "ge": ge,
        "gt": gt,
        "le": le,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: Callable[..., Any], doc: str, **defaults: Any) -> Any:
    """Declare a nested section; `defaults` are the keys whose default differs here from the section's own."""
    return field(
        default_factory=lambda: kind(**deepcopy(defaults)), metadata={"doc": doc, "defaults": defaults}
    )


def shared(kind: Any, name: str, doc: str | None = None) -> Any:
    """Declare a key that another section has too: its default and what it allows stay declared there."""
    other = kind.__dataclass_fields__[name]
    metadata = dict(other.metadata) if doc is None else {**other.metadata, "doc": doc}
    if other.default_factory is not MISSING:
        return field(default_factory=other.default_factory, metadata=metadata)
    return field(default=other.default, metadata=metadata)
