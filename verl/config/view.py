"""A config as plug-ins written for verl read it: by attributes, items and `get`, under verl's names and ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from verl.config.aliases import full_name, has_key, our_name, verl_names
from verl.config.keys import to_dict


class ConfigView(Mapping[str, Any]):
    """One section of a resolved config; the whole config without a `name`. A name of verl that is a key here has the
    value of this key, another one verl's default."""

    def __init__(self, config: Any, name: str = "") -> None:
        self._config, self._name = config, name

    def __getitem__(self, key: str) -> Any:
        kind, typed = type(self._config), f"{self._name}.{key}" if self._name else key
        ours = our_name(kind, full_name(kind, typed))
        if has_key(kind, ours):
            value = self._value(ours)
            return ConfigView(self._config, ours) if _has_names(value) else value
        row = verl_names().get(typed)
        if row is not None and row.default and row.default[0] != "*":
            return row.default[0]
        if any(name.startswith(f"{typed}.") for name in verl_names()):
            return ConfigView(self._config, typed)
        raise KeyError(typed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            key = f"{self._name}.{name}" if self._name else name
            raise AttributeError(f"there is no key {key!r}, neither here nor in verl") from None

    def __iter__(self) -> Iterator[str]:
        known = not self._name or has_key(type(self._config), self._name)
        return iter(to_dict(self._value(self._name)) if known else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _value(self, name: str) -> Any:
        value = self._config
        for part in name.split(".") if name else ():
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        return value


def _has_names(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, Mapping)
