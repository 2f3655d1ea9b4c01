"""Declaring config keys, and walking the schema they form.

A declaration is the only home of a default, its documentation and what the key allows: loading, `--help`, the checks
and the warnings all read the metadata written here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

from verl.config.known import OTHER_NAMES
from verl.config.trl_names import TRL_KEYS

Condition = str | Callable[[str], str]
"""In words of `verl.config.unused_keys`, or a function of the key's name that asks the registered methods."""
Conditions = Condition | tuple[Condition, ...]
Names = tuple[str, ...] | Callable[[], tuple[str, ...]]


def key(
    default: Any,
    doc: str,
    *,
    known: Names | None = None,
    plugin: str | None = None,
    follows: str | None = None,
    used_if: Conditions = (),
    required: bool = False,
    path: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a key.

    known: the values allowed; plugin: the registry whose user-registered names are allowed as well;
    follows: the key whose value this one takes unless the user sets it; used_if: see `verl.config.unused_keys`;
    required: the user must give it; path: a leading ~ means the user's home folder;
    ge, gt, le, lt: bounds (checked for numbers, and for each number of a list; None is never checked).
    """
    metadata = {
        "doc": doc, "known": known, "plugin": plugin, "follows": follows,
        "used_if": used_if, "required": required, "path": path, "ge": ge, "gt": gt, "le": le, "lt": lt,
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: Callable[..., Any], doc: str, *, used_if: Conditions = (), **defaults: Any) -> Any:
    """Declare a nested section; `defaults` are the keys whose default differs from the section's own."""
    metadata = {"doc": doc, "defaults": defaults, "used_if": used_if}
    return field(default_factory=lambda: kind(**deepcopy(defaults)), metadata=metadata)


def shared(
    kind: Any,
    name: str,
    doc: str | None = None,
    used_if: Conditions | None = None,
    follows: str | None = None,
) -> Any:
    """Declare a key that another section declares too: its default and what it allows stay declared there."""
    other = kind.__dataclass_fields__[name]
    changed = {"doc": doc, "used_if": used_if, "follows": follows}
    metadata = other.metadata | {name: value for name, value in changed.items() if value is not None}
    if other.default_factory is not MISSING:
        return field(default_factory=other.default_factory, metadata=metadata)
    return field(default=other.default, metadata=metadata)


class Section:
    """A section that plug-ins get as `config`: keys are attributes, and `get` takes a default for others."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True)
class Key:
    """One key of the schema by its full name, e.g. `actor_rollout_ref.actor.clip_ratio`."""

    name: str
    type: Any
    default: Any
    metadata: Mapping[str, Any]
    used_if: tuple[str, ...]  # the conditions of its sections and its own, with full names

    @property
    def doc(self) -> str:
        return str(self.metadata["doc"])

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


@cache
def field_types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, with annotations evaluated."""
    return get_type_hints(kind)


def sections(kind: Any, prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Every section of a config by its full name: its dataclass and its documentation."""
    found: dict[str, tuple[Any, str]] = {}
    for each in fields(kind):
        inner = field_types(kind)[each.name]
        if is_dataclass(inner):
            found[prefix + each.name] = (inner, each.metadata["doc"])
            found |= sections(inner, f"{prefix}{each.name}.")
    return found


def schema_keys(kind: Any) -> Mapping[str, Key]:
    """Every key of a config by its full name, in the order of the schema."""
    return _schema_keys(kind)  # mypy takes no dataclass for hashable


@cache
def _schema_keys(kind: Any) -> Mapping[str, Key]:
    return MappingProxyType({each.name: each for each in _walk(kind, "", {}, ())})


def resolved(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is declared of the key `name`, with the names and conditions that registered methods give."""
    known, own = metadata.get("known"), metadata["used_if"]
    conditions = own if isinstance(own, tuple) else (own,)
    return {
        **metadata,
        "known": known() if callable(known) else known,
        "used_if": tuple(each(name) if callable(each) else each for each in conditions),
    }


def _walk(kind: Any, prefix: str, defaults: Mapping[str, Any], used_if: tuple[str, ...]) -> Iterator[Key]:
    for each in fields(kind):
        if each.metadata.get("internal"):
            continue
        inner, name = field_types(kind)[each.name], prefix + each.name
        metadata = resolved(each.metadata, each.name)
        conditions = used_if + tuple(_absolute(condition, prefix) for condition in metadata["used_if"])
        if is_dataclass(inner):
            yield from _walk(inner, name + ".", metadata["defaults"], conditions)
            continue
        if each.name in defaults:
            default = defaults[each.name]
        else:
            default = each.default if each.default_factory is MISSING else each.default_factory()
        yield Key(name, inner, default, metadata, conditions)


def _absolute(condition: str, prefix: str) -> str:
    """A condition with full names: `.name` is a key of the section `prefix`, `..name` one of the section around it."""
    around = "".join(re.findall(r"[^.]+\.", prefix)[:-1])
    condition = re.sub(r"(?<![\w.])\.\.(?=\w)", around, condition)
    return re.sub(r"(?<![\w.])\.(?=\w)", prefix, condition)


def get(config: Any, name: str) -> Any:
    """The value of a key by its full name."""
    for attribute in name.split("."):
        config = getattr(config, attribute)
    return config


def put(config: Any, name: str, value: Any) -> None:
    """Set a key by its full name."""
    parent, _, last = name.rpartition(".")
    setattr(get(config, parent) if parent else config, last, value)


def to_dict(config: Any) -> Any:
    """A config, or a section of one, as plain nested dicts, lists and values."""
    if is_dataclass(config) and not isinstance(config, type):
        return {
            field.name: to_dict(getattr(config, field.name))
            for field in fields(config)
            if not field.metadata.get("internal")
        }
    if isinstance(config, dict):
        return {name: to_dict(value) for name, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(each) for each in config]
    return config


def nearest(kind: Any, name: str, limit: int = 3) -> list[str]:
    """The known keys closest to an unknown one: another trainer's name for it, similar ones in its section, the same
    last name elsewhere, similar ones anywhere."""
    keys = list(schema_keys(kind))
    section, _, last = name.rpartition(".")
    if name in sections(kind):
        return [other for other in keys if other.startswith(name + ".")][:limit]
    first = name.partition(".")[0]
    word = last.lower()
    theirs = OTHER_NAMES.get(word.removesuffix("s")) or TRL_KEYS.get(word) or TRL_KEYS.get(f"{word}s", "")
    found = [other for other in theirs.split() if other in keys]
    found.sort(key=lambda other: other.partition(".")[0] != first)
    siblings = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == section}
    found += [siblings[match] for match in difflib.get_close_matches(last, siblings, limit, cutoff=0.7)]
    same_last = [other for other in keys if other.rpartition(".")[2] == last]
    found += sorted(same_last, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    lasts = {other.rpartition(".")[2]: other for other in reversed(keys)}
    found = found or difflib.get_close_matches(name, keys, limit, cutoff=0.75)
    found = found or [lasts[match] for match in difflib.get_close_matches(last, lasts, limit, cutoff=0.6)]
    found = found or difflib.get_close_matches(name, keys, 1, cutoff=0.0)
    return list(dict.fromkeys(found))[:limit]
