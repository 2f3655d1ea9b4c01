"""Reads the YAML files that list tools or interactions by class, and makes the tools of one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.user_code import attribute, import_path, make_importable

TOOL_KEYS = ("class_name", "config", "tool_schema")
_KEY = "actor_rollout_ref.rollout.multi_turn.tools"


def initialize_tools_from_config(tools_config_file: str | Sequence[str]) -> list[Any]:
    """An instance of each tool that the files list, as an agent loop uses them in its own process."""
    files = [tools_config_file] if isinstance(tools_config_file, str) else tools_config_file
    entries = [entry for file in files for entry in read_entries(file, _KEY, "tools", TOOL_KEYS, "execute")]
    return [make_tool(entry, entry.schema) for entry in entries]


def make_tool(entry: Entry, schema: Any) -> Any:
    given = None if schema is None else OpenAIFunctionToolSchema.model_validate(copy.deepcopy(schema))
    return entry.kind(config=copy.deepcopy(entry.config), tool_schema=given)


@dataclass(frozen=True)
class Entry:
    kind: type
    config: dict[str, Any]
    schema: Any
    name: str | None
    where: str
    """For messages."""


def read_entries(path: str, key: str, section: str, keys: Sequence[str], method: str) -> list[Entry]:
    """The classes a file lists under `section`."""
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.to_container(OmegaConf.load(Path(path).expanduser()), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{key}={path} does not exist.") from None
    except Exception as error:
        raise ConfigError(f"{key}={path} cannot be read: {error}") from error
    listed = content.get(section) if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        there = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{key}={path} has no list '{section}' of mappings; it has: {there or 'nothing'}.")
    found = []
    for number, each in enumerate(listed):
        where = f"{key}={path}, {section}[{number}]"
        config = each.get("config") or {}
        if "mcp" in each or (isinstance(config, dict) and config.get("type") == "mcp"):
            raise ConfigError(
                f"{where} describes an MCP server; give its address or command in multi_turn.mcp."
            )
        if unknown := sorted(map(str, each.keys() - set(keys))):
            raise ConfigError(f"{where} has the key {unknown[0]!r}; known keys: {', '.join(keys)}.")
        name = each.get("class_name")
        if not isinstance(name, str) or not isinstance(config, dict):
            raise ConfigError(
                f"{where} needs class_name (pkg.module.Class) and, if at all, config as a mapping."
            )
        found.append(
            Entry(
                import_class(name, path, f"{where}.class_name", method),
                config,
                each.get("tool_schema"),
                each.get("name"),
                where,
            )
        )
    return found


def import_class(name: str, path: str, where: str, method: str) -> type:
    """`name` is pkg.module.Class or file.py:Class; both are also looked for in the YAML file's folder."""
    folder = Path(path).expanduser().resolve().parent
    make_importable(folder)
    source, _, inside = name.rpartition(":")
    if source.endswith(".py"):
        source = str(folder / source)
    module, qualname = import_path(source or inside, inside if source else None, where, ConfigError, "Class")
    kind = attribute(module, qualname) if qualname else None
    if not inspect.isclass(kind):
        raise ConfigError(f"{where}={name}: there is no such class in {module.__name__}.")
    if not callable(getattr(kind, method, None)):
        raise ConfigError(f"{where}={name}: the class has no method {method}.")
    return kind
