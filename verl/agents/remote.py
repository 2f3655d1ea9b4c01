"""JSON over HTTP to a server that may be slow, restarted or gone.

A request has a deadline while it is with the server. While the server is away or asks to try again, requests are
repeated with pauses, which do not count against the deadline. The server is lost, and the run has to stop, only when no
request was answered for `LOST_AFTER_S`; what goes wrong with one request alone costs that request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from verl.agents.base import ToolFailed, ToolsLost
from verl.config.sections.rollout import MultiTurnConfig
from verl.errors import RESUME
from verl.json_input import IDENTITY, is_encoded, parse_json

LOST_AFTER_S = 60.0
"""How long a server may leave every request without an answer."""
BUSY_S = 600.0
"""How long one request is repeated while the server answers others."""
MAX_SENDS = 3
"""A call may be what ends a server or exceeds the limit of a proxy, so it is not repeated for ever."""
CONCURRENCY = MultiTurnConfig().max_concurrent_requests
"""Where the key is not given."""
MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_S = 0.2
TOLD_AFTER_S = 2.0
"""How long nothing is said about a server that is away: many are only starting."""
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 10.0
_HEALTH_S = 10.0
_GATEWAY = (502, 504)
"""Answers of a proxy whose server did not answer: it is away, or this call alone took too long."""
_AWAY = (429, 503, *_GATEWAY)
"""Answers of a server, or of a proxy before it, that asks to try again."""
_LIMITS = {
    "HTTP 429": "Lower rollout.multi_turn.max_concurrent_requests, or ask for a higher limit",
    "CAPACITY_REACHED": "Raise max_concurrent_envs of the server",
}
"""What helps where a server has a limit."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)

_log = logging.getLogger(__name__)


class Contact:
    """A server as messages name it, and when it last answered. `key` is where its address is set."""

    def __init__(self, what: str, address: str, key: str) -> None:
        self.what, self.address, self.key = what, address, key
        self.heard: float | None = None
        self._told: float | None = None

    def tell(self, problem: str) -> None:
        """Say once in `LOST_AFTER_S` that requests wait."""
        now = time.monotonic()
        if self._told is None or now - self._told > LOST_AFTER_S:
            self._told = now
            limit = f"for up to {LOST_AFTER_S:g} s without any answer"
            where = f"{self.what} at {self.address}"
            _log.warning("%s: %s. Trying again %s. %s.", where, problem, limit, self._advice(problem))

    def lost(self, problem: str) -> ToolsLost:
        if self.heard is not None:
            return ToolsLost(
                f"{self.what} at {self.address} went away and did not come back within {LOST_AFTER_S:g} s: {problem}. "
                f"{self._advice(problem)}; {RESUME}"
            )
        return ToolsLost(
            f"{self.what} at {self.address} did not answer within {LOST_AFTER_S:g} s: {problem}. Start it first, or "
            f"correct the address ({self.key})"
        )

    def _advice(self, problem: str) -> str:
        for words, advice in _LIMITS.items():
            if problem.startswith(words):
                return advice
        return "Start it again" if self.heard is not None else f"Start it, or correct {self.key}"


class Outage:
    """How long one request has waited for a server that is away."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._began: float | None = None
        self._pause = FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        """Until the server is lost."""
        if self._began is None:
            return LOST_AFTER_S
        return max(self._began, self._contact.heard or 0.0) + LOST_AFTER_S - time.monotonic()

    @property
    def others_are_answered(self) -> bool:
        return self._began is not None and (self._contact.heard or 0.0) > self._began

    async def pause(self, problem: str, at_least_s: float = 0.0) -> None:
        """Wait before the next attempt. ToolsLost: nobody was answered for `LOST_AFTER_S`; ToolFailed: others were, but
        this one was not for `BUSY_S`."""
        _log.debug("%s at %s: %s", self._contact.what, self._contact.address, problem)
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if self.left_s <= 0:
            raise self._contact.lost(problem)
        if now - self._began > BUSY_S:
            raise ToolFailed(f"The server had no time for this call within {BUSY_S:g} s.", "timeout")
        if now - self._began >= TOLD_AFTER_S:
            self._contact.tell(problem)
        await asyncio.sleep(min(max(self._pause, at_least_s), max(self.left_s, 0.0)))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)


@dataclass(frozen=True)
class ServerAnswer:
    """Status and body of an HTTP answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """ValueError where the body is not JSON."""
        return parse_json(self.body.decode("utf-8"))

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.body[:200].decode(errors='replace').strip() or '(empty)'}"


class RemoteServer:
    """One HTTP server. `what` and `key`, where its address is set, are for messages; `health` is a path that any living
    server answers; `concurrency` bounds the requests it gets at a time."""

    def __init__(
        self,
        address: str,
        what: str,
        *,
        key: str,
        concurrency: int = CONCURRENCY,
        health: str = "/health",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.contact = Contact(what, address, key)
        self._health = health
        self._places = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(
            base_url=address,
            headers={**IDENTITY, **(headers or {})},
            verify=address.startswith("https:"),  # loading certificates takes a moment
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
            timeout=None,
        )

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> ServerAnswer:
        """The answer to one request, whatever its status. ToolFailed after `timeout_s`, or when the request broke the
        connection, or met a proxy's 502 or 504 while the server answers others, `MAX_SENDS` times; ToolsLost when the
        server stayed away."""
        content = None if body is None else _encode(body)
        outage, sends = Outage(self.contact), 0
        async with self._places:
            while True:
                retry_after_s = 0.0
                try:
                    answer, headers = await self._send(method, path, content, timeout_s)
                    if answer.status not in _AWAY:
                        self.contact.heard = time.monotonic()
                        return answer
                    problem, retry_after_s = str(answer), _seconds(headers.get("Retry-After"))
                    if answer.status in _GATEWAY:
                        sends += 1
                        last = sends >= MAX_SENDS or outage.left_s <= 0
                        if last and (outage.others_are_answered or await self._is_alive()):
                            raise ToolFailed(
                                f"This call was sent {sends} times and met HTTP {answer.status}."
                            )
                except _NOT_SENT as error:
                    problem = describe(error)
                except TimeoutError:
                    await self._check_alive()
                    raise ToolFailed(f"There was no answer within {timeout_s:g} s.", "timeout") from None
                except (httpx.HTTPError, OSError) as error:
                    problem, sends = describe(error), sends + 1
                    if sends >= MAX_SENDS:
                        raise ToolFailed(f"The connection broke {sends} times during this call.") from error
                await outage.pause(problem, retry_after_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, content: bytes | None, timeout_s: float
    ) -> tuple[ServerAnswer, httpx.Headers]:
        headers = {} if content is None else {"Content-Type": "application/json"}
        connect = httpx.Timeout(None, connect=min(_CONNECT_S, timeout_s / 2))
        received = bytearray()
        async with asyncio.timeout(timeout_s):
            async with self._http.stream(
                method, path, content=content, headers=headers, timeout=connect
            ) as response:
                if is_encoded(response.headers):
                    raise ToolFailed("The answer is compressed, which was not asked for.")
                async for chunk in response.aiter_raw():
                    received += chunk
                    if len(received) > MAX_ANSWER_BYTES:
                        raise ToolFailed(f"The answer is larger than {MAX_ANSWER_BYTES:,} bytes.")
        return ServerAnswer(response.status_code, bytes(received)), response.headers

    async def _check_alive(self) -> None:
        """ToolsLost for a server that answers nothing any more."""
        if self.contact.heard is None:
            return
        quiet_s = time.monotonic() - self.contact.heard
        if quiet_s > LOST_AFTER_S and not await self._is_alive():
            raise self.contact.lost(f"it answered nothing for {quiet_s:.0f} s, not even GET {self._health}")

    async def _is_alive(self) -> bool:
        try:
            answer, _ = await self._send("GET", self._health, None, _HEALTH_S)
        except ToolFailed:
            return True
        except (httpx.HTTPError, OSError):
            return False
        return answer.status not in (503, *_GATEWAY)


def describe(error: BaseException) -> str:
    """An error in one line; of a group, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def plain_text(value: Any) -> str:
    """A result as text that can be encoded: JSON may hold halves of surrogate pairs."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def _encode(body: Any) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(f"The call cannot be written as JSON: {error}.", "malformed") from None


def _seconds(value: str | None) -> float:
    try:
        return float(value or 0.0)
    except ValueError:
        return 0.0
