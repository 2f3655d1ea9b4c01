"""What one conversation talks to: its tools, environment and user.

Every call has a deadline (`tool_timeout_s`); what fails becomes a short text for the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl.agents.base import Message, Observation, ParsedTurn, ToolCall, ToolFailed, ToolRecord
from verl.agents.hosted import Called, HostedInfo
from verl.agents.schemas import fit_arguments, schema_problem
from verl.agents.tool_processes import Instance
from verl.agents.toolset import SINGLE_TURN, Agents, EndpointUser
from verl.observe.live import live


@dataclass
class TurnAnswer:
    """What a turn of the model is answered with."""

    records: list[ToolRecord] = field(default_factory=list)
    user: str | None = None
    done: bool = False
    reward: float | None = None
    """Of the turn."""
    error: str | None = None
    """Why the conversation can have no score: its user or the reward of a turn failed."""


class Episode:
    """One run of a conversation. Its coroutines run one after the other. `key` is its name among all that run;
    `seed_key`, where it must be another, seeds the random generators of its processes."""

    def __init__(self, agents: Agents, key: str, row: Mapping[str, Any], seed_key: str | None = None) -> None:
        self.agents = agents
        self.key = key
        self.row = row
        self._timeout_s = agents.cfg.tool_timeout_s
        self.single_turn = agents.agent_of(row) == SINGLE_TURN
        self._instances: list[tuple[HostedInfo, Instance]] = []
        if agents.agent is not None:
            self._instances = [(agents.agent[1], agents.processes.instance(agents.agent[0], key, seed_key))]
        elif not self.single_turn:
            name = agents.environment_of(row)
            hosted = [agents.environments[name]] if name else []
            hosted += agents.stateful_tools
            if isinstance(agents.user, tuple):
                hosted.append(agents.user)
            self._instances = [
                (info, agents.processes.instance(number, key, seed_key)) for number, info in hosted
            ]

    async def open(self) -> str | None:
        """Reset the environment; the text it adds to the prompt."""
        texts = []
        for info, instance in self._instances:
            if "reset" in info.hooks:
                texts.append(await instance.reset(dict(self.row), self._timeout_s))
        return "\n".join(text for text in texts if text) or None

    @property
    def agent(self) -> Instance:
        """The user's agent, which comes through the endpoint."""
        ((_, instance),) = self._instances
        return instance

    async def respond(self, text: str, messages: list[Message]) -> TurnAnswer:
        """The answer to a turn of the model, the last of `messages`."""
        if self.single_turn:
            return TurnAnswer(done=True)
        answer = await self._observe(text) if self.agents.text_server else await self._run_tools(text)
        if not answer.records and not answer.done:
            answer.user = await self._ask_user(text, messages, answer)
            answer.done = answer.user is None
        if answer.error is None:
            answer.reward = await self._turn_reward(answer)
        return answer

    async def close(self) -> float | None:
        """The reward, and the end."""
        try:
            return await self.reward()
        finally:
            await self.end()

    async def reward(self) -> float | None:
        """Of the environment and the tools, where they have one."""
        rewards: list[float] = []
        for info, instance in self._instances:
            if "reward" in info.hooks:
                value = await instance.reward(self._timeout_s)
                rewards += [] if value is None else [value]
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

    async def _run_tools(self, text: str) -> TurnAnswer:
        parsed, limit = await self.parse(text), self.agents.cfg.max_parallel_calls
        running = [
            self._recorded(
                ToolRecord(call.name, call.arguments, call_id=call.id), partial(self.call_tool, call)
            )
            for call in parsed.calls[:limit]
        ]
        records = list(await asyncio.gather(*running))
        for call in parsed.calls[limit:]:
            told = f"Error: not run; at most {limit} call{'s' if limit > 1 else ''} per turn."
            records.append(ToolRecord(call.name, call.arguments, told, "malformed", call_id=call.id))
        records += [ToolRecord("", {}, f"Error: {problem}", "malformed") for problem in parsed.problems]
        return TurnAnswer(records)

    async def _recorded(self, record: ToolRecord, call: Callable[[], Awaitable[Called]]) -> ToolRecord:
        """Make a call: its outcome and its time go to the record."""
        started = time.monotonic()
        live.add("tool_calls_waiting")
        try:
            record.result, record.reward = await call()
        except ToolFailed as error:
            record.result, record.failure = f"Error: {error.text}", error.kind
        finally:
            live.add("tool_calls_waiting", -1)
        live.add("tool_calls_total")
        live.add("tool_calls_failed_total", record.failure is not None)
        record.seconds = time.monotonic() - started
        return record

    async def parse(self, text: str) -> ParsedTurn:
        """The calls of a turn. An agent loop replaces this, and `call_tool`."""
        return self.agents.format.parse(text)

    async def call_tool(self, call: ToolCall) -> Called:
        return await self.call(call)

    async def call(self, call: ToolCall) -> Called:
        schemas = {schema["function"]["name"]: schema for schema in self.agents.schemas(self.row)}
        if call.name not in schemas:
            known = ", ".join(schemas) or "none"
            raise ToolFailed(f"there is no tool {call.name!r}; the tools are: {known}.", "unknown")
        if schema_problem(schemas[call.name]) is None:
            call = replace(call, arguments=fit_arguments(schemas[call.name], call.arguments))
        for info, instance in self._instances:
            if any(schema["function"]["name"] == call.name for schema in info.schemas):
                return await instance.call(call, self._timeout_s)
        provider = next(
            each
            for each in self.agents.providers
            if any(schema["function"]["name"] == call.name for schema in each.schemas)
        )
        return await provider.call(self.key, call, self._timeout_s), None

    async def _observe(self, text: str) -> TurnAnswer:
        """A server that takes the calls out of the text itself."""
        server, fields = self.agents.text_server, self.row.get("extra_info") or {}
        assert server is not None
        record, seen = ToolRecord("tool_server"), Observation("")

        async def observe() -> Called:
            nonlocal seen
            seen = await server.observe(self.key, text, fields, False, self._timeout_s)
            record.failure = None if seen.valid else "malformed"
            return seen.text, None

        await self._recorded(record, observe)
        if seen.done and not seen.text:
            return TurnAnswer(done=True)
        return TurnAnswer([record], done=record.failure is None and seen.done)

    # ---- user and rewards

    async def _ask_user(self, text: str, messages: list[Message], answer: TurnAnswer) -> str | None:
        user = next((instance for info, instance in self._instances if "user" in info.hooks), None)
        if (form := self.agents.format).wraps_content:
            text, messages = form.parse(text).content, form.apart(messages)
        try:
            if user is not None:
                return await user.user(text, messages, self._timeout_s)
            if isinstance(self.agents.user, EndpointUser):
                return await self.agents.user.reply(messages, self.row, self._timeout_s)
        except ToolFailed as error:
            answer.error = f"the user gave no answer: {error.text}"
        return None

    async def _turn_reward(self, answer: TurnAnswer) -> float | None:
        """What the calls of the turn earned, and what its environment gives."""
        rewards = [record.reward for record in answer.records if record.reward is not None]
        for info, instance in self._instances:
            if "turn_reward" in info.hooks:
                try:
                    value = await instance.turn_reward(self._timeout_s)
                except ToolFailed as error:
                    answer.error = f"the environment gave no reward for a turn: {error.text}"
                    return None
                rewards += [] if value is None else [value]
        return sum(rewards) if rewards else None
