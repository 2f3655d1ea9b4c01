"""Reading YAML as people write it, and writing it so that it reads back the same.

Plain YAML 1.1 has surprises that cost runs: `1e-6` is a text, `0.5_2.0` and `1:30` are numbers, a key given twice
keeps the last one, a date becomes an object. Here a number is a decimal number, `1e-6` included; what else looks
like one is a text; a key given twice is an error.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from verl.errors import ConfigError

_INT = re.compile(r"^[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with decimal numbers only, and keys that must differ."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key '{key.value}'", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


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
        with path.open(encoding="utf-8") as file:
            loaded = yaml.load(file, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, ValueError) as error:
        raise ConfigError(f"cannot read '{path}': {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"'{path}' must hold keys and values at its top level, not {_kind(loaded)}")
    return loaded


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the value {value!r}"
