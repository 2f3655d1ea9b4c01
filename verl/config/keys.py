"""Walking the schema: every key by its full name, with its type, default and documentation."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

from verl.config.synonyms import meant


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str
    """The full name, e.g. `actor_rollout_ref.actor.clip_ratio`."""
    type: Any
    default: Any
    doc: str
    metadata: Mapping[str, Any]

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


def sections(kind: Any) -> dict[str, tuple[Any, str]]:
    """Every section of a config by its full name: its dataclass and its documentation."""
    found: dict[str, tuple[Any, str]] = {}

    def walk(kind: Any, prefix: str) -> None:
        for field in fields(kind):
            inner = field_types(kind)[field.name]
            if is_dataclass(inner):
                found[prefix + field.name] = (inner, field.metadata["doc"])
                walk(inner, f"{prefix}{field.name}.")

    walk(kind, "")
    return found


def schema_keys(kind: Any) -> Mapping[str, Key]:
    """Every key of a config by its full name, in the order of the schema."""
    return _schema_keys(kind)


@cache
def _schema_keys(kind: Any) -> Mapping[str, Key]:
    return MappingProxyType({key.name: key for key in _walk(kind, "", {})})


def _walk(kind: Any, prefix: str, defaults: Mapping[str, Any]) -> Iterator[Key]:
    for field in fields(kind):
        if field.metadata.get("internal"):
            continue
        inner = field_types(kind)[field.name]
        name = prefix + field.name
        if is_dataclass(inner):
            yield from _walk(inner, name + ".", field.metadata["defaults"])
            continue
        if field.name in defaults:
            default = defaults[field.name]
        elif field.default is not MISSING:
            default = field.default
        else:
            assert field.default_factory is not MISSING  # `key` gives every field one or the other
            default = field.default_factory()
        yield Key(name, inner, default, field.metadata["doc"], field.metadata)


def get(config: Any, name: str) -> Any:
    """The value of a key by its full name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def put(config: Any, name: str, value: Any) -> None:
    """Set a key by its full name."""
    *parents, last = name.split(".")
    for part in parents:
        config = getattr(config, part)
    setattr(config, last, value)


def nearest(kind: Any, name: str, limit: int = 3) -> list[str]:
    """The known keys closest to an unknown one: meant by another trainer's word, spelt alike in its section, of its
    last name, of its whole name."""
    keys = list(schema_keys(kind))
    section, _, last = name.rpartition(".")
    if name in sections(kind):
        return [other for other in keys if other.startswith(name + ".")][:limit]
    beside = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == section}
    found = meant(name, keys)
    found += [beside[match] for match in difflib.get_close_matches(last, beside, limit, cutoff=0.7)]
    same_last = [other for other in keys if other.rpartition(".")[2] == last]
    found += sorted(same_last, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    if not found:
        found += difflib.get_close_matches(name, keys, limit, cutoff=0.75)
    if not found:
        lasts = {other.rpartition(".")[2]: other for other in reversed(keys)}
        found += [lasts[match] for match in difflib.get_close_matches(last, lasts, limit, cutoff=0.6)]
    if not found:
        found += difflib.get_close_matches(name, keys, 1, cutoff=0.0)
    return list(dict.fromkeys(found))[:limit]
