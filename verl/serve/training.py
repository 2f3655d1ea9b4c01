"""Where agents of users come to the policy that is trained: the interfaces of `verl serve`, one key for each session.

Agents that run elsewhere fetch their samples here, with a key of the run, and say how they ended. How tokens are drawn
is the run's affair: of a request only its messages, tools, stop strings, number of answers and most tokens count. The
server runs in the event loop of the conversations.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route

from verl.agents.base import Schema, ToolFailed
from verl.agents.chains import HistoryPlace, Said
from verl.agents.hosted import as_text
from verl.agents.sessions import (
    MOST_DRAWS,
    AgentSession,
    AskedTurns,
    SessionAgent,
    SessionBusy,
    SessionOver,
)
from verl.errors import RolloutError
from verl.rollout.base import SamplingParams
from verl.serve.app import INTERFACES, Served, address, application, build_server, listen
from verl.serve.draws import Overloaded, SamplePart
from verl.serve.served_model import DrawOrder, SampleAnswer, SampleDelta, ServedModel
from verl.serve.wire import ApiError, Door, Fields, given_key, openai_error

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner

logger = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
"""Of a request."""
AGENT_ENDPOINT = "agent_endpoint.json"
"""In the folder of a run: where agents that run elsewhere come, and with which key."""
MOST_WAIT_S = 60.0
"""That an agent from elsewhere may wait for a sample."""
KEY_VARIABLE = "VERL_AGENT_KEY"
"""Of the environment: the key such agents need; default: a random one."""
_NO_LIMIT = 1 << 40


class SessionModel(ServedModel):
    """The policy as one request of a session sees it."""

    session: AgentSession
    retry = False
    """The client says that it asks again."""
    place: HistoryPlace | None = None

    def of(self, session: AgentSession, request: Request) -> SessionModel:
        model = copy.copy(self)
        model.session = session
        model.retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        return model

    def is_called(self, name: str) -> bool:
        return True  # agents name the model that they were written for

    @property
    def scores(self) -> bool:
        return False

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[int]:
        try:
            self.place = self.session.place(self.given(messages, tools), tools)
        except SessionOver as over:
            raise _over(over) from None
        return self.place.prompt_ids

    def text_prompt(self, text: str, special: bool = True) -> list[int]:
        drawn, rest = self.session.ids_of_drawn(text)
        return [*drawn, *super().text_prompt(rest, special and not drawn)]

    async def answers(
        self, order: DrawOrder, *, streamed: bool = False
    ) -> AsyncIterator[SampleDelta | SampleAnswer]:
        session, asked = self.session, order.sampling
        if order.likeliest:
            raise ApiError(
                400, "'top_logprobs' is not supported where the policy is trained", param="top_logprobs"
            )
        try:
            place = self.place or session.place_ids(order.prompt_ids)
            turns = await session.ask(
                place, order.prompt_ids, asked.stop, asked.max_tokens, order.n, self.retry
            )
        except SessionBusy:
            raise Overloaded(f" in this session, of at most {MOST_DRAWS}") from None
        except SessionOver as over:
            raise _over(over) from None
        own = session.talk.settings.sampling
        stops = (*own.stop, *asked.stop)
        self.engine = _Draws(turns)  # type: ignore[assignment]
        order = replace(order, sampling=replace(own, stop=stops))
        async for answer in super().answers(order):
            if isinstance(answer, SampleAnswer):
                turn = turns.turns[answer.sample]
                turn.said = Said.drawn(answer.content, answer.calls, order.begun + answer.text)
                turn.call_ids |= {call.id: number for number, call in enumerate(answer.calls)}
            yield answer


class _Draws:
    """The draws of a request in the place of an engine's."""

    def __init__(self, asked: AskedTurns) -> None:
        self._asked = asked

    async def draw(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, n: int, seed: int, *, streamed: bool
    ) -> AsyncIterator[SamplePart]:
        try:
            async for response in self._asked.answers():
                yield SamplePart(response, True)
        except SessionOver as over:
            raise _over(over) from None
        except Exception as error:
            raise RolloutError(f"the policy is lost: {error}") from error


def _write_private(file: Path, text: str) -> None:
    """Nobody else may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(text)


def _over(over: SessionOver) -> ApiError:
    return ApiError(409 if over.code == "session_ended" else 400, str(over), code=over.code)


@dataclass
class SessionDoor(Door[SessionModel]):
    """Knows sessions by their keys."""

    sessions: dict[bytes, AgentSession] = field(default_factory=dict)
    """By a hash of the key: how long it takes to look for one says nothing about the others."""

    @contextmanager
    def admitted(self, request: Request) -> Iterator[SessionModel]:
        session = self.sessions.get(hashed(given_key(request)))
        if session is None:
            raise ApiError(
                401,
                "there is no session with this key: it has ended, or the key is not the `api_key` that the agent got",
                code="invalid_api_key",
            )
        if session.requests >= MOST_DRAWS:
            raise Overloaded(f" in this session, of at most {MOST_DRAWS}")
        session.requests += 1
        try:
            yield self.model.of(session, request)
        finally:
            session.requests -= 1


def hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


async def _take_reward(model: SessionModel, fields: Fields) -> dict[str, Any]:
    reward = fields.number("reward", nan, -inf, inf)
    fields.done()
    if not isfinite(reward):
        raise ApiError(400, "'reward' must be a finite number", param="reward")
    model.session.reward = reward
    return {"reward": reward}


class SamplesToFetch:
    """The samples of a run that wait for an agent from elsewhere."""

    def __init__(self, most: int, patience_s: float, admit: Callable[[AgentSession], None]) -> None:
        self.most, self.patience_s, self.admit = most, patience_s, admit
        self.waiting: dict[AgentElsewhere, None] = {}
        """The oldest first."""
        self.running = 0
        self.fetched_at = 0.0
        """When an agent has asked last."""
        self.changed = asyncio.Event()
        self.over = False

    def end(self) -> None:
        self.over = True
        self.changed.set()

    def offer(self, agent: AgentElsewhere) -> None:
        self.waiting[agent] = None
        self.changed.set()

    async def take(self, wait_s: float) -> AgentElsewhere | None:
        """The next one, once there is one and fewer than `most` run; None after so many seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            self.fetched_at = loop.time()
            if self.over:
                raise ApiError(410, "the run has ended", code="run_ended")
            if self.waiting and self.running < self.most:
                agent = next(iter(self.waiting))
                del self.waiting[agent]
                return agent
            self.changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self.changed.wait()
            except TimeoutError:
                return None


@dataclass(eq=False)
class AgentElsewhere:
    """An agent that fetches its sample, and says how it ended."""

    session: AgentSession
    samples: SamplesToFetch

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._fetched: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Any] = loop.create_future()

    async def reset(self, row: dict[str, Any], timeout_s: float) -> None:
        """Wait to be fetched. ToolFailed where no agent has asked for anything for too long and none runs."""
        samples, loop = self.samples, asyncio.get_running_loop()
        offered = loop.time()
        samples.offer(self)
        try:
            while not self._fetched.done():
                await asyncio.wait((self._fetched,), timeout=min(samples.patience_s / 4, 1.0))
                silent = loop.time() - max(offered, samples.fetched_at)
                if not self._fetched.done() and not samples.running and silent > samples.patience_s:
                    raise ToolFailed(
                        f"no agent has asked for a sample for {samples.patience_s:g} seconds "
                        "(rollout.multi_turn.agent=endpoint, agent_timeout_s)"
                    )
        finally:
            samples.waiting.pop(self, None)

    def fetch(self) -> None:
        self.samples.running += 1
        self.samples.admit(self.session)
        self.session.agent = self
        self._fetched.set_result(None)

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        try:
            return await self.ended
        finally:
            self.samples.running -= 1
            self.samples.changed.set()


async def _fetch(samples: SamplesToFetch, fields: Fields) -> dict[str, Any]:
    wait_s = fields.number("wait", 0.0, 0.0, MOST_WAIT_S)
    fields.done()
    agent = await samples.take(wait_s)
    if agent is None:
        return {"session": None}
    agent.fetch()
    session = agent.session
    conversation = session.talk.conversation
    row = json.loads(as_text(dict(session.talk.episode.row)))
    name = f"{conversation.uid}#{conversation.sample}"
    return {"session": name, "api_key": session.key, "row": row}


async def _end(model: SessionModel, fields: Fields) -> dict[str, Any]:
    reward, error = fields.number("reward", nan, -inf, inf), fields.text("error")
    extra = fields.mapping("extra") or {}
    fields.done()
    agent = model.session.agent
    if agent is None or agent.ended.done():
        raise ApiError(409, "the session has ended", code="session_ended")
    if isfinite(reward):
        extra = {**extra, "reward": reward}
    elif not isnan(reward):
        raise ApiError(400, "'reward' must be a finite number", param="reward")
    if error is not None:
        agent.ended.set_exception(ToolFailed(error))
    else:
        agent.ended.set_result(extra)
    return {"ended": True}


class SessionServer:
    """Listens for the agents of a run. `waits_for`: those that run elsewhere, which find its address and key in this
    file."""

    base_url = ""

    def __init__(self, waits_for: Path | None = None) -> None:
        self._file = waits_for
        self._elsewhere: SamplesToFetch | None = None

    async def open(self, runner: ConversationRunner) -> None:
        turns, cfg = runner.turns, runner.cfg
        model = SessionModel(
            name="policy",
            chat=turns.chat,
            engine=None,  # type: ignore[arg-type]
            end_ids=frozenset(turns.stop_ids),
            context=_NO_LIMIT,
            default_tokens=_NO_LIMIT,
        )
        if runner.cfg.format != "auto":
            model.format = runner.agents.format
        self._door = SessionDoor(model, "", MOST_BYTES)
        served = [*INTERFACES, Served("/v1/reward", _take_reward)]
        host, port, more = "127.0.0.1", 0, []
        key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)
        if self._file is not None:
            host, port = cfg.agent_host, cfg.agent_port
            served.append(Served("/v1/sessions/end", _end))
            self._elsewhere = SamplesToFetch(cfg.max_concurrent_requests, cfg.agent_timeout_s, self.admit)
            fetching = Door(self._elsewhere, key, MOST_BYTES).endpoint(
                _fetch, openai_error, lambda status: None
            )
            more.append(Route("/v1/sessions", fetching, methods=["POST"]))
        app = application(served, self._door, lambda path: lambda status: None, *more)
        # Each session has a limit of its own.
        self._server = build_server(app, most_connections=None)
        self._listening = listen(host, port, "rollout.multi_turn.agent_host={} agent_port={}")
        if self._file is not None:
            found = {"url": address(self._listening), "key": key}
            _write_private(self._file, json.dumps(found))
            logger.info(
                "agents fetch their samples at %s/v1/sessions; %s has the key", found["url"], self._file
            )
        self.base_url = f"{address(self._listening)}/v1"
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    def agent_of(self, session: AgentSession) -> SessionAgent:
        if self._elsewhere is None:
            return session.talk.episode.agent
        return AgentElsewhere(session, self._elsewhere)

    def admit(self, session: AgentSession) -> None:
        self._door.sessions[hashed(session.key)] = session

    def dismiss(self, session: AgentSession) -> None:
        self._door.sessions.pop(hashed(session.key), None)

    async def close(self) -> None:
        if not self.base_url:
            return
        if self._file is not None and self._elsewhere is not None:
            self._file.unlink(missing_ok=True)
            self._elsewhere.end()
            await asyncio.sleep(0.05)  # who waits for a sample hears of it
        with closing(self._listening):
            self._server.should_exit = self._server.force_exit = True
            with suppress(asyncio.CancelledError):
                await self._serving
