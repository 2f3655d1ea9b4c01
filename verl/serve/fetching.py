"""Agents that run elsewhere: they fetch samples of a run with its key, and say how they ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from verl.agents.base import ToolFailed
from verl.agents.hosted import as_text
from verl.serve.wire import ApiError, Door, Fields, openai_error

if TYPE_CHECKING:
    from verl.agents.sessions import AgentSession
    from verl.config.sections.rollout import MultiTurnConfig

logger = logging.getLogger(__name__)

AGENT_ENDPOINT = "agent_endpoint.json"
"""In the folder of a run: where agents that run elsewhere come, and with which key."""
KEY_VARIABLE = "VERL_AGENT_KEY"
"""Of the environment: the key such agents need; default: a random one."""
MOST_WAIT_S = 60.0
"""That such an agent may wait for a sample."""
_HEARD_S = 0.05
"""For those that wait at the end to hear of it."""


class SamplesToFetch:
    """The samples of a run that wait for an agent from elsewhere, and those that have one."""

    def __init__(self, cfg: MultiTurnConfig, file: Path, address: str) -> None:
        self._most, self._patience_s = cfg.max_concurrent_requests, cfg.agent_timeout_s
        self._file, self._address = file, address
        self._key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)
        self._told = self._over = False
        self._waiting: dict[AgentSession, AgentElsewhere] = {}
        """The oldest first."""
        self._running: dict[AgentSession, AgentElsewhere] = {}
        self._asked_at = 0.0
        """When an agent has asked last."""
        self._changed = asyncio.Event()

    def offer(self, session: AgentSession) -> AgentElsewhere:
        """A sample that waits from now on."""
        # Not before: a run that is refused must not change the file of the one in its folder.
        if not self._told:
            self._told = True
            self._tell()
        self._waiting[session] = agent = AgentElsewhere(self)
        self._changed.set()
        return agent

    def leave(self, session: AgentSession) -> None:
        """Its conversation has ended, whether an agent came or not."""
        self._waiting.pop(session, None)
        if self._running.pop(session, None) is not None:
            self._changed.set()

    def deserted_since(self, moment: float) -> bool:
        """Whether no agent runs, and none has asked for a sample for too long since that moment."""
        silent = asyncio.get_running_loop().time() - max(moment, self._asked_at)
        return not self._running and silent > self._patience_s

    def failure(self) -> ToolFailed:
        return ToolFailed(
            f"no agent has asked for a sample for {self._patience_s:g} seconds (rollout.multi_turn.agent=endpoint, "
            f"agent_timeout_s); they come to {self._address}/v1/sessions"
        )

    async def close(self) -> None:
        self._over = True
        self._changed.set()
        if self._told:
            self._file.unlink(missing_ok=True)
        await asyncio.sleep(_HEARD_S)

    def _tell(self) -> None:
        """Write address and key to the file, which nobody else may read."""
        file = self._file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            json.dump({"url": self._address, "key": self._key}, written)
        logger.info("agents fetch their samples at %s/v1/sessions; %s has the key", self._address, file)

    # ---- requests

    def route(self, most_bytes: int) -> Route:
        door = Door(self, self._key, most_bytes)
        answer = door.endpoint(
            lambda samples, fields: samples.fetched(fields), openai_error, lambda status: None
        )
        return Route("/v1/sessions", answer, methods=["POST"])

    async def fetched(self, fields: Fields) -> dict[str, Any]:
        """The next sample, once there is one and fewer than `max_concurrent_requests` run."""
        wait_s = fields.number("wait", 0.0, 0.0, MOST_WAIT_S)
        fields.done()
        session = await self._next(wait_s)
        if session is None:
            return {"session": None}
        self._running[session] = agent = self._waiting.pop(session)
        agent.begin()
        talk = session.talk
        row = json.loads(as_text(dict(talk.episode.row)))
        name = f"{talk.conversation.uid}#{talk.conversation.sample}"
        return {"session": name, "api_key": session.key, "row": row}

    async def _next(self, wait_s: float) -> AgentSession | None:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            self._asked_at = loop.time()
            if self._over:
                raise ApiError(410, "the run has ended", code="run_ended")
            if self._waiting and len(self._running) < self._most:
                return next(iter(self._waiting))
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return None

    async def ended(self, session: AgentSession, fields: Fields) -> dict[str, Any]:
        """The agent of a session has ended, with a reward, an error or neither."""
        reward, error = fields.number("reward", nan, -inf, inf), fields.text("error")
        extra = fields.mapping("extra") or {}
        fields.done()
        if isfinite(reward):
            extra = {**extra, "reward": reward}
        elif not isnan(reward):
            raise ApiError(400, "'reward' must be a finite number", param="reward")
        if not self._running[session].end(extra, error):
            raise ApiError(409, "the session has ended", code="session_ended")
        return {"ended": True}


class AgentElsewhere:
    """An agent that comes for its sample."""

    def __init__(self, samples: SamplesToFetch) -> None:
        loop = asyncio.get_running_loop()
        self._samples, self._offered = samples, loop.time()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[dict[str, Any]] = loop.create_future()

    def begin(self) -> None:
        self._begun.set_result(None)

    def end(self, value: dict[str, Any], error: str | None) -> bool:
        """False where it has ended already."""
        if self._ended.done():
            return False
        if error is None:
            self._ended.set_result(value)
        else:
            self._ended.set_exception(ToolFailed(error))
        return True

    async def reset(self, row: dict[str, Any], timeout_s: float) -> None:
        """Wait until it is fetched. ToolFailed where nobody comes."""
        while not self._begun.done():
            await asyncio.wait((self._begun,), timeout=0.5)
            if not self._begun.done() and self._samples.deserted_since(self._offered):
                raise self._samples.failure()

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        return await self._ended
