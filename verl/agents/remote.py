"""JSON over HTTP to a server that may be slow, restarted or gone.

A request has a deadline while it is with the server. While the server is away, requests are repeated with pauses for
`LOST_AFTER_S`, which does not count against the deadline; then the run has to stop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from verl.agents.base import ToolFailed, ToolsLost
from verl.errors import RESUME
from verl.json_input import parse_json

LOST_AFTER_S = 60.0
"""How long a server may be away."""
MAX_SENDS = 3
"""A call may be what ends a server, so one that broke off is not repeated for ever."""
MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 10.0
_HEALTH_S = 10.0
_MAX_CONCURRENT = 256
_AWAY = (429, 502, 503, 504)
"""Answers of a server, or of a proxy before it, that asks to try again."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)

_log = logging.getLogger(__name__)


class Outage:
    """How long one call has waited for a server that is away."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._pause = FIRST_PAUSE_S

    async def pause(self, at_least: float = 0.0) -> bool:
        """Wait before the next attempt; False: it has been away for `LOST_AFTER_S`."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        left = self._began + LOST_AFTER_S - now
        if left <= 0:
            return False
        await asyncio.sleep(min(max(self._pause, at_least), left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return True


def lost(what: str, address: str, problem: str) -> ToolsLost:
    return ToolsLost(
        f"{what} at {address} went away and did not come back within {LOST_AFTER_S:g} s: {problem}. Start it again; "
        f"{RESUME}"
    )


@dataclass(frozen=True)
class Answer:
    """Status and body of an HTTP answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """ValueError where the body is not JSON."""
        return parse_json(self.body.decode("utf-8"))

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.body[:200].decode(errors='replace').strip() or '(empty)'}"


class RemoteServer:
    """One HTTP server. `what` and `address` are for messages; `health` is a path that any living server answers."""

    def __init__(
        self, address: str, what: str, *, health: str = "/health", headers: Mapping[str, str] | None = None
    ) -> None:
        self.address, self.what = address, what
        self._health = health
        self._heard: float | None = None
        self._places = asyncio.Semaphore(_MAX_CONCURRENT)
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=headers,
            verify=address.startswith("https:"),  # loading certificates takes a moment
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_CONCURRENT),
            timeout=None,
        )

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Answer:
        """The answer to one request, whatever its status. ToolFailed after `timeout_s`, or when the connection broke
        `MAX_SENDS` times; ToolsLost when the server stayed away."""
        content = None if body is None else _encode(body)
        outage, sends, problem, retry_after = Outage(), 0, "", 0.0
        async with self._places:
            while True:
                try:
                    answer, headers = await self._send(method, path, content, timeout_s)
                    if answer.status not in _AWAY:
                        return answer
                    problem, retry_after = str(answer), _seconds(headers.get("Retry-After"))
                except _NOT_SENT as error:
                    problem = describe(error)
                except httpx.HTTPError as error:
                    problem, sends = describe(error), sends + 1
                    if sends == MAX_SENDS:
                        raise ToolFailed(f"The connection broke {sends} times during this call.") from error
                except TimeoutError:
                    quiet_s = time.monotonic() - (self._heard or math.inf)
                    if quiet_s > LOST_AFTER_S and not await self._is_alive():
                        problem = f"it answered nothing for {quiet_s:.0f} s, not even GET {self._health}"
                        raise self._lost(problem) from None
                    raise ToolFailed(f"There was no answer within {timeout_s:g} s.", "timeout") from None
                _log.debug("%s at %s: %s", self.what, self.address, problem)
                if not await outage.pause(retry_after):
                    raise self._lost(problem)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self, method: str, path: str, content: bytes | None, timeout_s: float
    ) -> tuple[Answer, httpx.Headers]:
        headers = {} if content is None else {"Content-Type": "application/json"}
        connect = httpx.Timeout(None, connect=min(_CONNECT_S, timeout_s / 2))
        received = bytearray()
        async with asyncio.timeout(timeout_s):
            async with self._http.stream(
                method, path, content=content, headers=headers, timeout=connect
            ) as response:
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_ANSWER_BYTES:
                        raise ToolFailed(f"The answer is larger than {MAX_ANSWER_BYTES:,} bytes.")
        self._heard = time.monotonic()
        return Answer(response.status_code, bytes(received)), response.headers

    def _lost(self, problem: str) -> ToolsLost:
        if self._heard is not None:
            return lost(self.what, self.address, problem)
        return ToolsLost(
            f"{self.what} at {self.address} did not answer within {LOST_AFTER_S:g} s: {problem}. Start it first, or "
            "correct the address"
        )

    async def _is_alive(self) -> bool:
        try:
            await self._send("GET", self._health, None, _HEALTH_S)
        except (httpx.HTTPError, TimeoutError):
            return False
        return True


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
