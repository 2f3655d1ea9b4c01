"""The tools, environments and users of a run, and the session of each conversation with them.

Sessions are coroutines in one event loop in a thread of their own, so that tools of many conversations run while the
engine generates. Every call has a deadline (`tool_timeout_s`); what fails becomes a short text for the model.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl.agents.base import Message, Schema, ToolCall, ToolFailed, ToolProvider, ToolRecord
from verl.agents.formats import ToolFormat
from verl.agents.mcp import MCPTools
from verl.agents.schemas import fit_arguments
from verl.agents.tool_host import Target
from verl.agents.tool_processes import Instance, ToolProcesses
from verl.agents.tool_server import TextServer, connect_tool_server
from verl.agents.tools import HostedInfo
from verl.agents.users import EndpointUser
from verl.config.sections.rollout import MultiTurnConfig
from verl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.multi_turn"
SINGLE_TURN = "single_turn_agent"
_AGENTS = (SINGLE_TURN, "tool_agent")
"""Values of the column `agent_name`, besides the names of environments."""
ROUTING_COLUMNS = ("environment", "agent_name", "interaction_kwargs", "extra_info")
"""Columns that decide which environment a row's conversation has."""
ROW_FIELDS = ("prompt", "data_source", "ground_truth", "extra_info")
"""What a row always has, besides the columns of its file."""
_END_S = 10.0
"""For conversations that are given up."""


@dataclass
class Answer:
    """What a turn of the model is answered with."""

    records: list[ToolRecord] = field(default_factory=list)
    user: str | None = None
    done: bool = False
    reward: float | None = None
    """Of the turn."""
    error: str | None = None
    """Why the turn has no reward though the environment gives one."""


class FunctionTools(ToolProvider):
    """Plain functions, in any free process."""

    def __init__(self, processes: ToolProcesses, target: int, info: HostedInfo) -> None:
        self._processes, self._target, self._info = processes, target, info

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._info.schemas

    async def open(self) -> None:
        """`Agents` has opened the processes."""

    async def call(self, session: str, call: ToolCall, timeout_s: float) -> str:
        return await self._processes.call(self._target, call, timeout_s)

    async def close(self) -> None:
        """`Agents` closes the processes."""


class Agents:
    """Everything conversations talk to, opened once. `start` and `take` are called from the thread that generates."""

    def __init__(self, cfg: MultiTurnConfig, tool_format: ToolFormat) -> None:
        self.cfg = cfg
        self.format = tool_format
        self.environments: dict[str, tuple[int, HostedInfo]] = {}
        self.stateful_tools: list[tuple[int, HostedInfo]] = []
        self.user: tuple[int, HostedInfo] | EndpointUser | None = None
        self.text_server: TextServer | None = None
        self.providers: list[ToolProvider] = []
        self.processes = ToolProcesses([])
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._pending: set[asyncio.Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
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
        if targets:
            self.processes = ToolProcesses(targets)
            await self.processes.open()
            for number, info in enumerate(self.processes.infos):
                self._add_hosted(number, self.processes.targets[number], info)
        if cfg.tool_server:
            server = await connect_tool_server(cfg.tool_server, cfg.tool_timeout_s)
            if isinstance(server, TextServer):
                self.text_server = server
            else:
                self.providers.append(server)
        for address in cfg.mcp:
            self.providers.append(provider := MCPTools(address))
            await provider.open()
        if cfg.user.base_url:
            self.user = user = EndpointUser(cfg.user)
            await user.open(cfg.tool_timeout_s)
        self._refuse_equal_names()

    def _add_hosted(self, number: int, target: Target, info: HostedInfo) -> None:
        if target.kind == "environment":
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

    def close(self) -> None:
        """Disconnect and end processes. Safe to call twice."""
        if self._loop.is_closed():
            return
        self.wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        closing: list[Any] = [*self.providers, self.processes, self.text_server]
        closing += [self.user] if isinstance(self.user, EndpointUser) else []
        for each in closing:
            if each is not None:
                await each.close()

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # ---- what rows see

    @property
    def has_user(self) -> bool:
        return self.user is not None or any("user" in info.hooks for _, info in self.environments.values())

    @property
    def has_tools(self) -> bool:
        return self.text_server is not None or any(self._schemas(name) for name in (*self.environments, ""))

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
        if agent_name(row) == SINGLE_TURN:
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
        if named not in list(self.environments):  # it may be anything, also what has no hash
            seen = "has no column 'environment'" if named is None else f"names the environment {named!r}"
            raise DataError(f"{where} {seen}; known ({KEY}.environment): {', '.join(self.environments)}")
        return str(named)

    def _environment_named(self, row: Mapping[str, Any]) -> Any:
        kwargs = _column(row, "interaction_kwargs")
        named = _column(row, "environment") or (kwargs.get("name") if isinstance(kwargs, Mapping) else None)
        if named is None and agent_name(row) in self.environments:
            return agent_name(row)
        if named is None and len(self.environments) == 1:
            return next(iter(self.environments))
        return named

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row that names an environment or agent that does not exist."""
        name = agent_name(row)
        if name is not None and name not in (*_AGENTS, *self.environments):
            known = ", ".join((*_AGENTS, *self.environments))
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

    # ---- running sessions

    def start(self, key: Any, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run `coroutine`; `take` returns its result, or its exception, under `key`."""
        self._loop.call_soon_threadsafe(self._start, key, coroutine)

    def _start(self, key: Any, coroutine: Coroutine[Any, Any, Any]) -> None:
        async def deliver() -> None:
            try:
                self._results.put((key, await coroutine))
            except BaseException as error:  # whoever waits for the result must get something
                self._results.put((key, error))
                if not isinstance(error, Exception):
                    raise

        task = self._loop.create_task(deliver())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def take(self, wait: bool) -> list[tuple[Any, Any]]:
        """What has finished; waits for at least one if asked to."""
        found = [self._results.get()] if wait else []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def cancel(self) -> None:
        """Cancel everything that runs, and forget its results."""

        async def cancel() -> None:
            pending = list(self._pending)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

        self.wait_for(cancel())
        self.take(wait=False)

    def end(self, sessions: Iterable[Session]) -> None:
        """End what these sessions hold, after `cancel`. What goes wrong is only logged: the run has failed already."""

        async def end() -> None:
            ending = [asyncio.ensure_future(session.end()) for session in sessions]
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    for problem in await asyncio.gather(*ending, return_exceptions=True):
                        if problem is not None:
                            logger.debug("ending a conversation: %s", problem)

        self.wait_for(end())


class Session:
    """What one conversation talks to. Its coroutines run one after the other."""

    def __init__(self, agents: Agents, key: str, row: Mapping[str, Any]) -> None:
        self.agents = agents
        self.key = key
        self.row = row
        self._timeout_s = agents.cfg.tool_timeout_s
        self.single_turn = agent_name(row) == SINGLE_TURN
        self._instances: list[tuple[HostedInfo, Instance]] = []
        if not self.single_turn:
            name = agents.environment_of(row)
            hosted = [agents.environments[name]] if name else []
            hosted += agents.stateful_tools
            if isinstance(agents.user, tuple):
                hosted.append(agents.user)
            self._instances = [(info, agents.processes.instance(number, key)) for number, info in hosted]

    async def open(self) -> str | None:
        """Reset the environment; the text it adds to the prompt."""
        texts = []
        for info, instance in self._instances:
            if "reset" in info.hooks:
                texts.append(await instance.reset(dict(self.row), self._timeout_s))
        return "\n".join(text for text in texts if text) or None

    async def respond(self, text: str, messages: list[Message]) -> Answer:
        """The answer to a turn of the model, the last of `messages`."""
        if self.single_turn:
            return Answer(done=True)
        answer = await self._observe(text) if self.agents.text_server else await self._run_tools(text)
        if not answer.records and not answer.done:
            answer.user = await self._ask_user(text, messages, answer)
            answer.done = answer.user is None
        answer.reward = await self._turn_reward(answer)
        return answer

    async def close(self) -> float | None:
        """The reward of the environment and the tools, where they have one."""
        rewards: list[float] = []
        try:
            for info, instance in self._instances:
                if "reward" in info.hooks:
                    value = await instance.reward(self._timeout_s)
                    rewards += [] if value is None else [value]
        finally:
            await self.end()
        return sum(rewards) if rewards else None

    async def end(self) -> None:
        """Free what is kept for this conversation."""
        ending = [instance.close() for _, instance in self._instances]
        if not self.single_turn:
            servers = (*self.agents.providers, self.agents.text_server)
            ending += [server.end(self.key) for server in servers if server is not None]
        for problem in await asyncio.gather(*ending, return_exceptions=True):
            if problem is not None:
                raise problem

    # ---- tools

    async def _run_tools(self, text: str) -> Answer:
        parsed, limit = self.agents.format.parse(text), self.agents.cfg.max_parallel_calls
        records = list(await asyncio.gather(*(self._run(call) for call in parsed.calls[:limit])))
        for call in parsed.calls[limit:]:
            told = f"Error: not run; at most {limit} call{'s' if limit > 1 else ''} per turn."
            records.append(ToolRecord(call.name, call.arguments, told, "malformed"))
        records += [ToolRecord("", {}, f"Error: {problem}", "malformed") for problem in parsed.problems]
        return Answer(records)

    async def _run(self, call: ToolCall) -> ToolRecord:
        record, started = ToolRecord(call.name, call.arguments), time.monotonic()
        try:
            schemas = {schema["function"]["name"]: schema for schema in self.agents.schemas(self.row)}
            if call.name not in schemas:
                known = ", ".join(schemas) or "none"
                raise ToolFailed(f"there is no tool {call.name!r}; the tools are: {known}.", "unknown")
            call = replace(call, arguments=fit_arguments(schemas[call.name], call.arguments))
            record.result = await self._call(call)
        except ToolFailed as error:
            record.result, record.failure = f"Error: {error.text}", error.kind
        record.seconds = time.monotonic() - started
        return record

    async def _call(self, call: ToolCall) -> str:
        for info, instance in self._instances:
            if any(schema["function"]["name"] == call.name for schema in info.schemas):
                return await instance.call(call, self._timeout_s)
        provider = next(
            each
            for each in self.agents.providers
            if any(schema["function"]["name"] == call.name for schema in each.schemas)
        )
        return await provider.call(self.key, call, self._timeout_s)

    async def _observe(self, text: str) -> Answer:
        """A server that takes the calls out of the text itself."""
        assert self.agents.text_server is not None
        started = time.monotonic()
        fields = self.row.get("extra_info") or {}
        try:
            seen = await self.agents.text_server.observe(self.key, text, fields, False, self._timeout_s)
        except ToolFailed as error:
            record = ToolRecord("tool_server", {}, f"Error: {error.text}", error.kind)
        else:
            if seen.done and not seen.text:
                return Answer(done=True)
            record = ToolRecord("tool_server", {}, seen.text, None if seen.valid else "malformed")
        record.seconds = time.monotonic() - started
        return Answer([record], done=record.failure is None and seen.done)

    # ---- user and rewards

    async def _ask_user(self, text: str, messages: list[Message], answer: Answer) -> str | None:
        user = next((instance for info, instance in self._instances if "user" in info.hooks), None)
        started = time.monotonic()
        try:
            if user is not None:
                return await user.user(text, messages, self._timeout_s)
            if isinstance(self.agents.user, EndpointUser):
                return await self.agents.user.reply(messages, self.row, self._timeout_s)
        except ToolFailed as error:
            # Nobody answers the model: the conversation ends here, and the failure is counted.
            answer.records.append(ToolRecord("user", {}, error.text, error.kind, time.monotonic() - started))
            answer.done = True
        return None

    async def _turn_reward(self, answer: Answer) -> float | None:
        rewards: list[float] = []
        for info, instance in self._instances:
            if "turn_reward" in info.hooks:
                try:
                    value = await instance.turn_reward(self._timeout_s)
                except ToolFailed as error:
                    answer.error = error.text
                    return None
                rewards += [] if value is None else [value]
        return sum(rewards) if rewards else None


def agent_name(row: Mapping[str, Any]) -> str | None:
    """The column `agent_name`."""
    name = _column(row, "agent_name")
    return None if name is None else str(name)


def _column(row: Mapping[str, Any], name: str) -> Any:
    """A column of the row, or the entry of that name in its extra_info."""
    value = row.get(name)
    if value is None:
        extra = row.get("extra_info")
        value = extra.get(name) if isinstance(extra, Mapping) else None
    return value
