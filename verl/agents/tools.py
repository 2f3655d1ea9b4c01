"""Tools, environments and users that are Python code: how a user marks them, and loading them by path.

A tool is a function with type hints and a docstring. An environment is a class, one instance per conversation: its
public methods are tools, apart from the hooks `reset`, `user`, `turn_reward`, `reward` and `close`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar, overload

from verl.agents.base import Schema
from verl.agents.hosted import (
    HOOKS,
    HostedFactory,
    HostedFunctions,
    HostedInfo,
    HostedObject,
    parameters_of,
)
from verl.agents.hubs import hub_of, load_hub
from verl.agents.schemas import NoSchema, ToolFunction
from verl.errors import ConfigError
from verl.user_code import attribute, import_path

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__verl_tool__"
"""The attribute of a marked function: its name and its description as a tool, where they are not its own."""


@overload
def tool(function: _Function) -> _Function: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[_Function], _Function]: ...
def tool(function: Any = None, *, name: str | None = None, description: str | None = None) -> Any:
    """Mark a function or a method as a tool. Where something is marked, what is not marked is no tool.

    `name` and `description` replace those of the function and of its docstring."""

    def mark(target: _Function) -> _Function:
        setattr(getattr(target, "__func__", target), _MARK, (name, description))  # or a static method's
        return target

    return mark if function is None else mark(function)


class Environment:
    """One instance per conversation. Public methods of a subclass are tools; each hook below is optional.

    A class works without this base as well. Hooks and tools may be `async`."""

    def reset(self, **row: Any) -> str | None:
        """Begin a conversation about a row of the data; parameters get the columns of their names. A text that is
        returned is added to the prompt."""
        return None

    def user(self, reply: str) -> str | None:
        """Answer the model as the user, when it called no tool; None ends the conversation. A second parameter
        `messages` gets the conversation so far."""
        return None

    def turn_reward(self) -> float | None:
        """The reward of the model's last turn, after its tool calls or the user's answer."""
        return None

    def reward(self) -> float | None:
        """The reward of the whole conversation, added to that of the reward functions."""
        return None

    def close(self) -> None:
        """The conversation is over."""


def load_tools(spec: str) -> HostedFactory:
    """The functions at file.py, file.py:name, module or module:name; or the tools a YAML file names."""
    key = "multi_turn.tools"
    if _is_yaml(spec):
        from verl.agents.configured import load_tools_yaml

        return load_tools_yaml(spec, key)
    module, name = _import(spec, key, "function")
    if name is None:
        functions = _functions(module)
        if not functions:
            there = ", ".join(kind.__name__ for kind in _classes(module))
            classes = f"; its classes ({there}) are for multi_turn.environment" if there else ""
            raise ConfigError(
                f"{key}={spec} has no public function{classes}. Write a function with type hints and a docstring."
            )
    else:
        function = attribute(module, name)
        if not callable(function) or inspect.isclass(function):
            what = "a class; set multi_turn.environment to it" if inspect.isclass(function) else "not there"
            there = ", ".join(_functions(module)) or "none"
            raise ConfigError(f"{key}={spec}: {name} is {what}. Functions there: {there}.")
        functions = {name: function}
    tools = [(_described(function, key, spec), function) for function in functions.values()]
    info = HostedInfo(name=spec, schemas=_schemas(tools, key, spec), hooks=(), stateful=False)
    return HostedFactory(info, functools.partial(HostedFunctions, tools))


def load_environment(spec: str) -> list[HostedFactory]:
    """The class at file.py:Name or module:Name; the only class, or every Environment, of file.py; the
    interactions a YAML file names; or an environment of a hub."""
    key = "multi_turn.environment"
    if hub_of(spec):
        return [load_hub(spec)]
    if _is_yaml(spec):
        from verl.agents.configured import load_interactions_yaml

        return load_interactions_yaml(spec, key)
    return [_of_class(kind, key, spec, with_tools=True) for kind in _wanted_classes(spec, key, "Environment")]


def load_user(spec: str) -> HostedFactory:
    """The class at file.py:Name or module:Name, or the only class of file.py; it has `user(reply)`."""
    key = "multi_turn.user.path"
    kinds = _wanted_classes(spec, key, "User")
    if len(kinds) > 1:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{key}={spec} has several classes: {names}. Write {spec}:{kinds[0].__name__}.")
    factory = _of_class(kinds[0], key, spec, with_tools=False)
    if "user" not in factory.info.hooks:
        raise ConfigError(f"{key}={spec}: {factory.info.name} has no method user(self, reply) -> str | None.")
    return factory


# ---- finding


def _is_yaml(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def _import(spec: str, key: str, what: str) -> tuple[ModuleType, str | None]:
    path, colon, name = spec.strip().rpartition(":")
    if not colon:
        path, name = spec.strip(), ""
    if not path or (colon and not name):
        raise ConfigError(f"{key}={spec!r}: expected a file, 'pkg.module', or either with ':{what}'.")
    return import_path(path, name or None, key, ConfigError, what)


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The marked functions of a module; without any, its own public ones."""
    every = {name: value for name, value in vars(module).items() if _is_function(value)}
    marked = {name: value for name, value in every.items() if hasattr(value, _MARK)}
    return marked or {
        name: value
        for name, value in every.items()
        if not name.startswith("_") and value.__module__ == module.__name__
    }


def _is_function(value: Any) -> bool:
    """Also what functools.cache and other decorators make of one."""
    return inspect.isroutine(value) or (callable(value) and hasattr(value, "__wrapped__"))


def _classes(module: ModuleType) -> list[type]:
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and not name.startswith("_") and value.__module__ == module.__name__
    ]


def _wanted_classes(spec: str, key: str, example: str) -> Sequence[type]:
    module, name = _import(spec, key, example)
    there = _classes(module)
    listed = ", ".join(kind.__name__ for kind in there) or "none"
    if name is not None:
        kind = attribute(module, name)
        if not inspect.isclass(kind):
            what = "a function; set multi_turn.tools to it" if callable(kind) else "not a class there"
            raise ConfigError(f"{key}={spec}: {name} is {what}. Classes there: {listed}.")
        return [kind]
    found = [kind for kind in there if issubclass(kind, Environment)] or there
    if not found or (len(found) > 1 and not issubclass(found[0], Environment)):
        problem = "has several classes" if found else "has no public class"
        raise ConfigError(
            f"{key}={spec} {problem}. Write {spec}:Name with the class's name. Classes there: {listed}."
        )
    return found


# ---- describing


def _described(function: Callable[..., Any], key: str, where: str, method: bool = False) -> ToolFunction:
    name, description = getattr(function, _MARK, (None, None))
    try:
        return ToolFunction.of(function, name, description, method)
    except NoSchema as error:
        advice = (
            ""
            if hasattr(function, _MARK)
            else " Begin its name with '_' if it is no tool, or mark tools by @tool."
        )
        raise ConfigError(f"{key}={where}: {error}.{advice}") from None


def _schemas(tools: Sequence[tuple[ToolFunction, Any]], key: str, spec: str) -> list[Schema]:
    names = [described.name for described, _ in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{key}={spec} has two tools named {twice[0]!r}; rename one.")
    return [described.schema for described, _ in tools]


def _of_class(kind: Any, key: str, spec: str, *, with_tools: bool) -> HostedFactory:
    hooks = tuple(
        hook for hook in HOOKS if getattr(kind, hook, None) not in (None, getattr(Environment, hook))
    )
    if required := parameters_of(kind).required:
        raise ConfigError(
            f"{key}={spec}: {kind.__name__} is created without arguments, but its __init__ asks for "
            f"{', '.join(required)}. Give them defaults; what depends on the row goes to reset."
        )
    tools = _methods(kind, key, spec) if with_tools else []
    if with_tools and not tools and "user" not in hooks:
        raise ConfigError(
            f"{key}={spec}: {kind.__name__} has no public method to offer as a tool, and no user(self, reply)."
        )
    info = HostedInfo(
        name=kind.__name__,
        schemas=_schemas(tools, key, spec),
        hooks=hooks,
        stateful=True,
        columns=parameters_of(kind.reset, method=True).required if "reset" in hooks else (),
    )
    return HostedFactory(info, functools.partial(HostedObject, kind, tools, hooks))


def _methods(kind: type, key: str, spec: str) -> list[tuple[ToolFunction, str]]:
    """Each tool of a class, with the name of its method."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    methods = {
        name: found
        for name in names
        if not name.startswith("_")
        and name not in (*HOOKS, "close")
        and _is_function(found := getattr(kind, name))
    }
    if marked := {name: found for name, found in methods.items() if hasattr(found, _MARK)}:
        methods = marked
    elif "get_reward" in methods:
        raise ConfigError(
            f"{key}={spec}: {kind.__name__}.get_reward would be a tool; the hook's name is reward."
        )
    unbound = {
        name for name in methods if isinstance(inspect.getattr_static(kind, name), staticmethod | classmethod)
    }
    return [(_described(found, key, spec, name not in unbound), name) for name, found in methods.items()]
