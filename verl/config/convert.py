"""From plain values (of YAML, overrides, dicts) to the types of the schema.

Nothing is guessed: a value either has one plain reading in the wanted type, or it is a problem whose text names
the key, the value seen and the type wanted. All problems of a config are collected before one error is raised.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin

from verl.config.keys import field_types, nearest, schema_keys
from verl.config.known import MODEL_DTYPES, ROLLOUT_DTYPES, UNAVAILABLE_FEATURES

DTYPE_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "float8": "fp8",
}  # fmt: skip


class Mismatch(Exception):
    """The value cannot be read as the wanted type."""


@dataclass
class Builder:
    """Fills the dataclass `root` from a nested mapping; `typed` maps our names to those the user typed."""

    root: Any
    typed: Mapping[str, str]
    problems: list[str] = field(default_factory=list)

    def section(self, kind: Any, tree: Mapping[str, Any], prefix: str = "", defaults: Any = None) -> Any:
        values = dict(defaults or {})
        known = {each.name: each for each in fields(kind) if not each.metadata.get("internal")}
        for name, value in tree.items():
            full = f"{prefix}{name}"
            if name not in known:
                self.problems += self._unknown(full, value, ", ".join(known))
                continue
            wanted = field_types(kind)[name]
            if is_dataclass(wanted) and value is None:
                continue
            try:
                if is_dataclass(wanted) and isinstance(value, Mapping):
                    inner = known[name].metadata["defaults"]
                    values[name] = self.section(wanted, value, f"{full}.", inner)
                    continue
                values[name] = self.convert(wanted, value, full)
                if known[name].metadata["known"] in (MODEL_DTYPES, ROLLOUT_DTYPES):
                    values[name] = DTYPE_NAMES.get(values[name], values[name])
            except Mismatch:
                self.problems.append(f"'{self._as_typed(full)}' is {value!r}; it must be {type_name(wanted)}")
        return kind(**values)

    def convert(self, wanted: Any, value: Any, name: str) -> Any:
        """The value in the wanted type, or Mismatch."""
        origin = get_origin(wanted)
        if origin in (Union, types.UnionType):
            return self._union(get_args(wanted), value, name)
        if origin is list:
            (item,) = get_args(wanted)
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            return [self.convert(item, each, f"{name}[{i}]") for i, each in enumerate(items)]
        if origin is not dict and not is_dataclass(wanted):
            return _scalar(wanted, value)
        if not isinstance(value, Mapping):
            raise Mismatch
        return dict(value) if origin is dict else self.section(wanted, value, f"{name}.")

    def _union(self, options: tuple[Any, ...], value: Any, name: str) -> Any:
        if type(None) in options and (value is None or value == "None"):
            return None
        if isinstance(value, str) and "_" in value and str in options:
            return value  # Python would read the bounds 0.5_2 as the number 0.52
        for option in options:
            if option is not type(None):
                with suppress(Mismatch):
                    return self.convert(option, value, name)
        raise Mismatch

    def _unknown(self, name: str, value: Any, known: str) -> list[str]:
        if "[" in name:
            section = name.partition("[")[0]
            return [f"unknown key '{name}' (value {value!r}). Known keys of an item of '{section}': {known}"]
        if isinstance(value, Mapping) and value:
            return [
                line for each, below in value.items() for line in self._unknown(f"{name}.{each}", below, "")
            ]
        shown = self._as_typed(name)
        line = f"unknown key '{shown}'{f' (that is {name!r})' if shown != name else ''} (value {value!r})"
        for feature, names in UNAVAILABLE_FEATURES.items():
            if set(names) & set(name.lower().split(".")):
                return [f"{line}: {feature} is not available in this version"]
        first, *others = nearest(self.root, name)
        section = schema_keys(self.root)[first].section
        where = f"section '{section}'" if section else "the top level"
        alternatives = f", or {' or '.join(repr(each) for each in others)}" if others else ""
        return [f"{line}. Nearest known key: '{first}' in {where}{alternatives}"]

    def _as_typed(self, name: str) -> str:
        """What the user wrote for this key, where an alias was used."""
        for ours, theirs in self.typed.items():
            if name == ours or name.startswith(ours + "."):
                return theirs + name[len(ours) :]
        return name


def _scalar(wanted: Any, value: Any) -> Any:
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif wanted is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        number = _number(value)
        if number is not None and number == int(number):
            return int(number)
    elif wanted is float and not isinstance(value, bool):
        number = _number(value)
        if number is not None:
            return number
    elif wanted is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    raise Mismatch


def _number(value: Any) -> float | None:
    """The value as a finite number."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def type_name(wanted: Any) -> str:
    """A type in words."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if each is type(None) else type_name(each) for each in get_args(wanted))
    if origin is list:
        return f"a list, each item {type_name(get_args(wanted)[0])}"
    if origin is dict:
        return "a mapping of names to values"
    if is_dataclass(wanted):
        return f"a mapping with the keys {', '.join(each.name for each in fields(wanted))}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[wanted]
