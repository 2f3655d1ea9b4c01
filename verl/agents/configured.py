"""Tools and interactions that a YAML file names by class (`tool_config_path`, `interaction_config_path`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.agents.base import Message, Schema, ToolFailed, row_column
from verl.agents.hosted import (
    Called,
    Hosted,
    HostedFactory,
    HostedInfo,
    as_reward,
    as_text,
    finished,
    parameters_of,
)
from verl.agents.schemas import fit_arguments, schema_problem, without_nulls
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import TOOL_KEYS, Entry, make_tool, read_entries
from verl.user_code import error_line

# ---- tools


def load_tools_yaml(path: str, key: str) -> HostedFactory:
    entries = read_entries(path, key, "tools", TOOL_KEYS, "execute")
    tools: dict[str, tuple[Entry, Schema]] = {}
    for entry in entries:
        schema = _schema_of(entry)
        name = schema["function"]["name"]
        if name in tools:
            raise ConfigError(f"{entry.where} has the name {name!r} again; rename one.")
        if "agent_data" in parameters_of(entry.kind.execute, method=True).required:  # type: ignore[attr-defined]
            raise ConfigError(
                f"{entry.where}: execute asks for agent_data, an agent loop's object; there is none here."
            )
        tools[name] = (entry, schema)
    kinds = [entry.kind for entry in entries]
    scored = any(getattr(kind, "calc_reward", None) not in (None, BaseTool.calc_reward) for kind in kinds)
    info = HostedInfo(
        name=path,
        schemas=[schema for _, schema in tools.values()],
        hooks=("reset", *(("reward",) if scored else ())),
        stateful=True,
        replaceable=not scored,  # calc_reward scores what a process that ended knew
    )
    return HostedFactory(info, functools.partial(HostedTools, tools))


def _schema_of(entry: Entry) -> Schema:
    """That of the file, else that of an instance of the class."""
    schema: Any = entry.schema
    if schema is None:
        try:
            schema = make_tool(entry, None).get_openai_tool_schema()
        except Exception as error:
            raise ConfigError(
                f"{entry.where} has no tool_schema, and asking {entry.kind.__name__} for it failed with "
                f"{type(error).__name__}: {error}{error_line(error)}."
            ) from error
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_none=True, exclude_unset=True)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{entry.where}.tool_schema is not {{type: function, function: {{name, description, parameters}}}}."
        )
    schema = {"type": "function", **without_nulls(schema)}
    if problem := schema_problem(schema):
        raise ConfigError(
            f"{entry.where}.tool_schema: the parameters of {function['name']} are no valid JSON schema ({problem})."
        )
    return schema


class HostedTools(Hosted):
    """The tools of a file for one conversation, each created at its first call."""

    def __init__(self, tools: Mapping[str, tuple[Entry, Schema]]) -> None:
        self._schemas = {name: schema for name, (_, schema) in tools.items()}
        self._tools: dict[str, Any] = {name: make_tool(*entry) for name, entry in tools.items()}
        self._instances: dict[str, str] = {}
        self._kwargs: Mapping[str, Any] = {}

    async def reset(self, row: dict[str, Any]) -> str | None:
        kwargs = row_column(row, "tools_kwargs")
        self._kwargs = kwargs if isinstance(kwargs, Mapping) else {}
        return None

    async def call(self, name: str, arguments: dict[str, Any]) -> Called:
        if name not in self._tools:
            raise ToolFailed(f"There is no tool {name!r}. Tools: {', '.join(self._tools)}.", "unknown")
        arguments, tool = fit_arguments(self._schemas[name], arguments, patterns=True), self._tools[name]
        if name not in self._instances:
            self._instances[name] = await self._create(name)
        kwargs = self._kwargs_of(name, "execute_kwargs")
        answer = await finished(tool.execute(self._instances[name], arguments, **kwargs))
        response, reward = (*answer, None)[:2] if isinstance(answer, tuple) else (answer, None)
        return response_text(response, name), as_reward(reward, f"execute of {name}")

    async def reward(self) -> float | None:
        total = 0.0
        for name, instance in self._instances.items():
            if callable(score := getattr(self._tools[name], "calc_reward", None)):
                value = await finished(score(instance, **self._kwargs_of(name, "calc_reward_kwargs")))
                total += as_reward(value, f"calc_reward of {name}") or 0.0
        return total

    async def close(self) -> None:
        while self._instances:
            name, instance = self._instances.popitem()
            if callable(release := getattr(self._tools[name], "release", None)):
                await finished(release(instance, **self._kwargs_of(name, "release_kwargs")))

    async def _create(self, name: str) -> str:
        instance, create = uuid4().hex, getattr(self._tools[name], "create", None)
        if not callable(create):
            return instance
        kwargs = self._kwargs_of(name, "create_kwargs")
        takes = parameters_of(create)
        # Both are in use: the arguments one by one, and all of them as create_kwargs.
        if "create_kwargs" in takes.names and not takes.takes_any:
            kwargs = {key: value for key, value in kwargs.items() if key in takes.names} | {
                "create_kwargs": kwargs
            }
        elif takes.takes_any:
            kwargs = {**kwargs, "create_kwargs": kwargs}
        made = await finished(create(instance, **kwargs))
        made = made[0] if isinstance(made, tuple) else made
        return instance if made is None else made

    def _kwargs_of(self, name: str, which: str) -> dict[str, Any]:
        return dict((self._kwargs.get(name) or {}).get(which) or {})


def response_text(response: Any, name: str) -> str:
    if isinstance(response, dict) and "text" in response:
        response = ToolResponse(**response)
    if not hasattr(response, "text"):
        return as_text(response)
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise ToolFailed(f"{name} answered with an image or a video; only texts can be shown.")
    return response.text or ""


# ---- interactions


def load_interactions_yaml(path: str, key: str) -> list[HostedFactory]:
    entries = read_entries(path, key, "interaction", ("name", "class_name", "config"), "generate_response")
    factories: dict[str, HostedFactory] = {}
    for entry in entries:
        name = entry.name or entry.kind.__name__.removesuffix("Interaction").lower()
        if name in factories:
            raise ConfigError(f"{entry.where} has the name {name!r} again; rename one.")
        info = HostedInfo(name=name, schemas=[], hooks=("reset", "user", "turn_reward"), stateful=True)
        factories[name] = HostedFactory(
            info, functools.partial(HostedInteraction, entry.kind, entry.config, name)
        )
    return list(factories.values())


class HostedInteraction(Hosted):
    """An interaction in one conversation."""

    def __init__(self, kind: type[BaseInteraction], config: Mapping[str, Any], name: str) -> None:
        self._interaction = kind(config={"name": name, **copy.deepcopy(dict(config))})
        self._instance: str | None = None
        self._kwargs: dict[str, Any] = {}
        self._turn_reward: float | None = None

    async def reset(self, row: dict[str, Any]) -> str | None:
        kwargs, instance = row_column(row, "interaction_kwargs"), uuid4().hex
        self._kwargs = dict(kwargs) if isinstance(kwargs, Mapping) else {}
        made = await finished(self._interaction.start_interaction(instance, **self._kwargs))
        self._instance = made if isinstance(made, str) else instance
        return None

    async def user(self, reply: str, messages: list[Message]) -> str | None:
        answer = self._interaction.generate_response(self._instance or "", messages, **self._kwargs)
        ends, text, reward, *_ = await finished(answer)
        self._turn_reward = as_reward(reward, "generate_response")
        return None if ends else response_text(text, "generate_response")

    async def turn_reward(self) -> float | None:
        reward, self._turn_reward = self._turn_reward, None
        return reward

    async def close(self) -> None:
        if self._instance is not None and callable(
            finalize := getattr(self._interaction, "finalize_interaction", None)
        ):
            takes = parameters_of(finalize)
            await finished(finalize(*((self._instance,) if takes.names or takes.any_number else ())))
            self._instance = None
