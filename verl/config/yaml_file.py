"""Reading YAML as people write it, and writing it so that it reads back the same.

Plain YAML 1.1 has surprises that cost runs: `1e-6` is a text, `0.5_2.0` and `1:30` are numbers, a key given twice
keeps the last one, a date becomes an object. Here a number is a decimal number, `1e-6` included; what else looks
like one is a text; a key given twice is an error. Depth and size are limited, with aliases expanded.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from verl.errors import ConfigError
from verl.json_input import MAX_BYTES, MAX_DEPTH, open_regular

MAX_NODES = (
    100_000  # keys and values, an alias counting as often as it is used: a few lines can expand to billions
)
_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with decimal numbers only, keys that must differ, and limits."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """Nodes below each finished node and itself, by its id."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.peek_event()
        if self._depth > MAX_DEPTH:
            raise _problem(f"nested deeper than {MAX_DEPTH} levels", alias)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(alias, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _problem(f"'*{alias.anchor}' is used inside what it names", alias)
            return node
        self._sizes[id(node)] = size = 1 + sum(self._sizes[id(child)] for child in _children(node))
        if size > MAX_NODES:
            raise _problem(f"more than {MAX_NODES:,} keys and values, aliases counted each time", alias)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _problem("a key must be a plain text", key)
            if key.value in seen:
                raise _problem(f"duplicate key '{key.value}'", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _problem(text: str, place: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, place.start_mark)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value)))
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan")),
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text our loader, or any other, would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def dump_yaml(values: Any, width: int) -> str:
    """Plain values as YAML, in their order."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=width
    )


def load_yaml(path: Path) -> dict[Any, Any]:
    """The file's mapping; {} for an empty file."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES:,} bytes")
        loaded = yaml.load(content.decode("utf-8"), Loader=_Loader)
    # PyYAML's own constructors raise the last three for explicit tags, such as `!!bool maybe`.
    except (yaml.YAMLError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        what = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"cannot read '{path}': {what}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"'{path}' must hold keys and values at its top level, not {_kind(loaded)}")
    return loaded


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the value {value!r}"
