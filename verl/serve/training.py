"""Where agents of users come to the policy that is trained: the interfaces of `verl serve`, one key for each session.

How tokens are drawn is the run's affair: of a request only its messages, tools, stop strings, number of answers and
most tokens count. The server runs in the event loop of the conversations.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request

from verl.agents.base import Schema
from verl.agents.chains import HistoryPlace, Said
from verl.agents.sessions import (
    MOST_DRAWS,
    AgentSession,
    AskedTurns,
    SessionAgent,
    SessionBusy,
    SessionOver,
)
from verl.agents.toolset import KEY
from verl.errors import RolloutError
from verl.rollout.base import SamplingParams
from verl.serve.app import INTERFACES, Served, address, application, build_server, listen
from verl.serve.draws import Overloaded, SamplePart
from verl.serve.fetching import SamplesToFetch
from verl.serve.served_model import DrawOrder, SampleAnswer, SampleDelta, ServedModel
from verl.serve.wire import ApiError, Door, Fields, as_api_error, given_key

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner

logger = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
"""Of a request."""
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
                turn.text = turn.text if turn.said else order.begun + turn.text
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
        except ClientDisconnect:
            raise
        except Exception as error:
            failed = as_api_error(error)
            session.refuse(f"{failed.status}: {failed.message}")
            raise
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


class SessionServer:
    """Listens for the agents of a run. `told`: the file in which those that run elsewhere find it."""

    base_url = ""

    def __init__(self, told: Path | None = None) -> None:
        self._told = told
        self._samples: SamplesToFetch | None = None

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
        if cfg.format != "auto":
            model.format = runner.agents.format
        self._door = SessionDoor(model, "", MOST_BYTES)
        served, routes = [*INTERFACES, Served("/v1/reward", _take_reward)], []
        host, port = ("127.0.0.1", 0) if self._told is None else (cfg.agent_host, cfg.agent_port)
        self._listening = listen(host, port, f"{KEY}.agent_host={{}} {KEY}.agent_port={{}}")
        if self._told is not None:
            self._samples = samples = SamplesToFetch(cfg, self._told, address(self._listening))
            served.append(
                Served("/v1/sessions/end", lambda model, fields: samples.ended(model.session, fields))
            )
            routes.append(samples.route(MOST_BYTES))
        app = application(served, self._door, lambda path: lambda status: None, *routes)
        # Each session has a limit of its own.
        self._server = build_server(app, most_connections=None)
        self.base_url = f"{address(self._listening)}/v1"
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    def agent_of(self, session: AgentSession) -> SessionAgent:
        return session.talk.episode.agent if self._samples is None else self._samples.offer(session)

    def admit(self, session: AgentSession) -> None:
        self._door.sessions[hashed(session.key)] = session

    def dismiss(self, session: AgentSession) -> None:
        self._door.sessions.pop(hashed(session.key), None)
        if self._samples is not None:
            self._samples.leave(session)

    async def close(self) -> None:
        if not self.base_url:
            return
        if self._samples is not None:
            await self._samples.close()
        with closing(self._listening):
            self._server.should_exit = self._server.force_exit = True
            with suppress(asyncio.CancelledError):
                await self._serving
