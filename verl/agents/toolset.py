"""The tools, environments and users of a run, opened once, and the event loop in which conversations run.

The loop has a thread of its own, so that the tools of many conversations run while the engine generates.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from verl.agents.base import (
    Message,
    Schema,
    ToolCall,
    ToolFailed,
    ToolProvider,
    row_column,
    without_thoughts,
)
from verl.agents.chat_endpoint import ChatEndpoint, EndpointKeys
from verl.agents.formats import ToolFormat
from verl.agents.hosted import HostedInfo
from verl.agents.mcp import MCPTools
from verl.agents.remote import CONCURRENCY, plain_text
from verl.agents.tool_processes import Target, ToolProcesses
from verl.agents.tool_server import TextServer, connect_tool_server
from verl.config.sections.rollout import OWN_AGENTS, MultiTurnConfig, MultiTurnUserConfig
from verl.errors import RESUME, ConfigError, DataError, ToolsLost

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
KEY = "actor_rollout_ref.rollout.multi_turn"
SINGLE_TURN = OWN_AGENTS[0]
ROUTING_COLUMNS = ("environment", "agent_name", "interaction_kwargs", "extra_info")
"""Columns that decide which environment a row's conversation has."""
ROW_FIELDS = ("uid", "prompt", "data_source", "ground_truth", "extra_info")
"""What a row always has, besides the columns of its file."""
END_S = 10.0
"""For conversations that are given up."""
_USER = "rollout.multi_turn.user"
STOP_MARK = "[[END]]"
"""A reply with this mark ends the conversation."""
DEFAULT_PROMPT = (
    "You play a person who asks an assistant for help. The messages you receive are the assistant's. Stay in this "
    "role: write only what the person says next, in one short message, and never do the assistant's work."
)
_END_RULE = (
    f"When the person has what they wanted, or has nothing left to say, write {STOP_MARK} and nothing else."
)
_OPENING = "Hello, how can I help?"
_NOT_THEIRS = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)), "<")
"""Where files of Python and of this package are."""


class FunctionTools(ToolProvider):
    """Plain functions, in any free process."""

    def __init__(self, processes: ToolProcesses, target: int, info: HostedInfo) -> None:
        self._processes, self._target, self._info = processes, target, info

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._info.schemas

    async def call(self, key: str, call: ToolCall, timeout_s: float) -> str:
        return await self._processes.call(self._target, call, timeout_s)

    async def close(self) -> None:
        """`Agents` closes the processes."""


class Agents:
    """Everything conversations talk to, opened once, and the event loop they run in."""

    def __init__(
        self,
        cfg: MultiTurnConfig,
        tool_format: ToolFormat,
        loops: Collection[str] = (),
        default_agent: str | None = None,
    ) -> None:
        """`loops`: the names of agent loops of users; `default_agent`: of rows that name none."""
        self.cfg = cfg
        self.format = tool_format
        self.loops, self.default_agent = loops, default_agent
        self.environments: dict[str, tuple[int, HostedInfo]] = {}
        self.stateful_tools: list[tuple[int, HostedInfo]] = []
        self.user: tuple[int, HostedInfo] | EndpointUser | None = None
        self.agent: tuple[int, HostedInfo] | None = None
        """The user's, which comes through the endpoint."""
        self.text_server: TextServer | None = None
        self.providers: list[ToolProvider] = []
        self.processes = ToolProcesses([])
        self._conversations: set[asyncio.Task[Any]] = set()
        self._asked_at, self._answered, self._blocked = 0.0, threading.Event(), False
        self._answered.set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        try:
            self.wait_for(self._open())
        except BaseException:
            self.close()
            raise

    # ---- opening and closing

    async def _open(self) -> None:
        cfg = self.cfg
        targets = [Target("tools", spec) for spec in cfg.tools]
        targets += [Target("environment", spec) for spec in cfg.environment]
        targets += [Target("user", cfg.user.path)] if cfg.user.path else []
        targets += [Target("agent", cfg.agent)] if cfg.agent and not cfg.agents_elsewhere else []
        targets += [Target("command", cfg.agent_command)] if cfg.agent_command else []
        if targets:
            self.processes = ToolProcesses(targets)
            await self.processes.open()
            for number, info in enumerate(self.processes.infos):
                self._add_hosted(number, self.processes.targets[number], info)
        if cfg.tool_server:
            server = await connect_tool_server(
                cfg.tool_server, cfg.tool_timeout_s, cfg.max_concurrent_requests
            )
            if isinstance(server, TextServer):
                self.text_server = server
            else:
                self.providers.append(server)
        for address in cfg.mcp:
            self.providers.append(provider := MCPTools(address, concurrency=cfg.max_concurrent_requests))
            await provider.open()
        if cfg.user.base_url:
            self.user = user = EndpointUser(cfg.user, cfg.max_concurrent_requests)
            await user.open(cfg.tool_timeout_s)
        self._refuse_equal_names()

    def _add_hosted(self, number: int, target: Target, info: HostedInfo) -> None:
        if target.kind in ("agent", "command") or "run" in info.hooks:
            self.agent = (number, info)
        elif target.kind == "environment":
            if info.name in self.environments:
                raise ConfigError(f"{KEY}.environment: two environments are called {info.name!r}; rename one")
            self.environments[info.name] = (number, info)
        elif target.kind == "user":
            self.user = (number, info)
        elif info.stateful:
            self.stateful_tools.append((number, info))
        else:
            self.providers.append(FunctionTools(self.processes, number, info))

    def _refuse_equal_names(self) -> None:
        for environment in self.environments or [""]:
            names = [str(schema["function"]["name"]) for schema in self._schemas(environment)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                where = f" with the environment {environment}" if environment else ""
                raise ConfigError(
                    f"two tools are called {twice[0]!r}{where}; rename one ({KEY}.tools, environment, tool_server, mcp)"
                )
        if self.text_server is not None and (
            self.environments or self.stateful_tools or any(provider.schemas for provider in self.providers)
        ):
            raise ConfigError(
                f"{KEY}.tool_server={self.cfg.tool_server} reads whole turns (/get_observation) and cannot be combined "
                f"with {KEY}.tools, environment or mcp; use one of them"
            )

    def close(self, door: Any = None) -> None:
        """Disconnect and end processes, and `door` after the conversations. Safe to call twice."""
        if self.loop.is_closed() or self._blocked:
            return
        self.wait_for(self._close(door))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _close(self, door: Any) -> None:
        await _cancel(self._conversations)
        closing: list[Any] = [*self.providers, self.processes, self.text_server, door]
        closing += [self.user] if isinstance(self.user, EndpointUser) else []
        for each in closing:
            if each is not None:
                await each.close()
        # What an interruption left, of which nobody waits for the end.
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, which came while it runs
            future.cancel()
            raise

    # ---- what rows see

    @property
    def has_user(self) -> bool:
        return bool(self.user or self.cfg.own_agent) or any(
            "user" in info.hooks for _, info in self.environments.values()
        )

    @property
    def has_tools(self) -> bool:
        return bool(self.text_server or self.cfg.own_agent) or any(
            self._schemas(name) for name in (*self.environments, "")
        )

    @property
    def gives_rewards(self) -> bool:
        """Whether every conversation is rewarded by its environment, so that no reward function is needed.

        Tools and interactions of YAML files only add to the scorer of the data source, as in verl."""
        return bool(self.environments) and all(
            {"reward", "turn_reward"} & set(info.hooks)
            and not self.processes.targets[number].spec.endswith((".yaml", ".yml"))
            for number, info in self.environments.values()
        )

    def schemas(self, row: Mapping[str, Any]) -> list[Schema]:
        """Of the tools a row's conversation has. A row that names no environment there is has those without one:
        `check_row` refuses it, with its place."""
        if self.agent_of(row) == SINGLE_TURN:
            return []
        named = self._environment_named(row)
        return self._schemas(named if named in list(self.environments) else "")

    def _schemas(self, environment: str) -> list[Schema]:
        found = [schema for provider in self.providers for schema in provider.schemas]
        found += [schema for _, info in self.stateful_tools for schema in info.schemas]
        if environment:
            found += self.environments[environment][1].schemas
        return found

    def environment_of(self, row: Mapping[str, Any], where: str = "a row") -> str | None:
        """The name of a row's environment: in its column, or the only one there is."""
        if not self.environments:
            return None
        named = self._environment_named(row)
        if named is None and self.agent_of(row) in self.loops:
            return None
        if named not in list(self.environments):  # it may be anything, also what has no hash
            seen = "has no column 'environment'" if named is None else f"names the environment {named!r}"
            raise DataError(f"{where} {seen}; known ({KEY}.environment): {', '.join(self.environments)}")
        return str(named)

    def _environment_named(self, row: Mapping[str, Any]) -> Any:
        kwargs = row_column(row, "interaction_kwargs")
        named = row_column(row, "environment") or (
            kwargs.get("name") if isinstance(kwargs, Mapping) else None
        )
        if named is None and self.agent_of(row) in self.environments:
            return self.agent_of(row)
        if named is None and len(self.environments) == 1:
            return next(iter(self.environments))
        return named

    def agent_of(self, row: Mapping[str, Any]) -> str | None:
        """The column `agent_name`, or who runs rows that name none."""
        name = row_column(row, "agent_name")
        return self.default_agent if name is None else str(name)

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row that names an environment or agent that does not exist."""
        name = self.agent_of(row)
        if name is not None and name not in (*OWN_AGENTS, *self.environments, *self.loops):
            known = ", ".join((*OWN_AGENTS, *self.environments, *self.loops))
            raise DataError(f"{where} has agent_name {name!r}; known: {known}")
        if name != SINGLE_TURN:
            self.environment_of(row, where)

    def check_columns(self, columns: Collection[str], where: str) -> None:
        """Refuse data without a column that the `reset` of an environment or user asks for."""
        for info in self.processes.infos:
            missing = [name for name in info.columns if name not in (*columns, *ROW_FIELDS)]
            if missing and len(self.environments) < 2:
                raise DataError(
                    f"{where} has no column {missing[0]!r}, which reset() of {info.name} asks for; its columns are "
                    f"{', '.join(columns)}. Rename the parameter, or give it a default"
                )

    def start(self, conversation: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """In the event loop's thread."""
        task = self.loop.create_task(conversation)
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        return task

    def cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel these of the event loop, and wait until they have ended."""

        async def cancel() -> None:
            await _cancel(tasks)

        if not self.loop.is_closed() and not self._blocked:
            self.wait_for(cancel())

    def require_answering(self) -> None:
        """ToolsLost where the code of an agent loop has kept the event loop from all conversations for too long."""
        if not self.loops:
            return
        now, limit = time.monotonic(), self.cfg.tool_timeout_s + END_S
        if self._answered.is_set():
            if now - self._asked_at > 1.0:
                self._asked_at = now
                self._answered.clear()
                self.loop.call_soon_threadsafe(self._answered.set)
        elif now - self._asked_at > limit:
            self._blocked = True
            raise ToolsLost(
                f"an agent loop has kept all conversations waiting for {limit:.0f} seconds{self._where()}: what takes "
                "long must be awaited, or run in a thread (loop.run_in_executor, asyncio.to_thread)"
            )

    def _where(self) -> str:
        """The line of the user's code that the event loop's thread executes."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        theirs = [
            each for each in traceback.extract_stack(frame) if not each.filename.startswith(_NOT_THEIRS)
        ]
        return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---- a user behind an endpoint


class EndpointUser:
    """Asks the endpoint for the user's next message."""

    def __init__(self, config: MultiTurnUserConfig, concurrency: int = CONCURRENCY) -> None:
        self._config = config
        self._endpoint = ChatEndpoint(
            "The simulated user",
            str(config.base_url),
            config.model,
            config.api_key_env,
            keys=EndpointKeys(f"{_USER}.base_url", f"{_USER}.model", f"{_USER}.api_key_env"),
            concurrency=concurrency,
            if_refused=f". {RESUME[0].upper()}{RESUME[1:]}",
        )
        self.open, self.close = self._endpoint.open, self._endpoint.close

    async def reply(
        self, messages: Sequence[Message], row: Mapping[str, Any], timeout_s: float
    ) -> str | None:
        """The user's next message; None: the user ends the conversation. ToolFailed: no usable answer (in time);
        ToolsLost: the run must stop."""
        request = {"messages": [self._system(row), *swap_roles(messages)]}
        choice = await self._endpoint.complete(request, timeout_s)
        try:
            text = choice["message"]["content"] or ""
            said = without_thoughts(plain_text(text))
        except (KeyError, TypeError, ValueError):
            raise ToolFailed(
                f"The simulated user's answer has no choices[0].message.content: {str(choice)[:200]}"
            ) from None
        return None if STOP_MARK in said or not said else said

    def _system(self, row: Mapping[str, Any]) -> Message:
        prompt = str(row_column(row, "user_prompt") or self._config.prompt or DEFAULT_PROMPT)
        return {"role": "system", "content": prompt if STOP_MARK in prompt else f"{prompt}\n\n{_END_RULE}"}


def swap_roles(messages: Sequence[Message]) -> list[Message]:
    """The conversation as the user sees it: what the model said comes from "user", what the user said from "assistant".

    System messages, tool calls with their results, and thoughts are left out. Roles alternate, beginning with "user",
    as many chat templates demand."""
    swapped: list[Message] = [{"role": "user", "content": _OPENING}]
    for message, following in itertools.zip_longest(messages, messages[1:]):
        role, text = message["role"], _plain(message)
        if role not in ("assistant", "user") or _is_tool_result(message):
            continue
        if role == "assistant":
            if following is not None and _is_tool_result(following):
                continue
            text = without_thoughts(text)
        new = "user" if role == "assistant" else "assistant"
        if swapped[-1]["role"] == new:
            earlier = swapped.pop()["content"]
            text = text if earlier is _OPENING else f"{earlier}\n\n{text}"
        swapped.append({"role": new, "content": text})
    return swapped


def _is_tool_result(message: Message) -> bool:
    """Templates without a role for tools put results into a user message."""
    return message["role"] == "tool" or _plain(message).lstrip().startswith("<tool_response>")


def _plain(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts, as in requests with images
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
