"""An OpenAI-compatible endpoint that writes a message: the simulated user's, or the model's while an environment is
tried."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.agents.base import ToolFailed, ToolsLost
from verl.agents.remote import CONCURRENCY, RemoteServer, ServerAnswer
from verl.errors import ConfigError


@dataclass(frozen=True)
class EndpointKeys:
    """Where address, model and key are set, for messages."""

    url: str
    model: str
    api_key_env: str


class ChatEndpoint:
    """One model behind an address; `what` begins the messages about it. Without a model the first one that the
    endpoint lists is taken."""

    def __init__(
        self,
        what: str,
        url: str,
        model: str | None,
        api_key_env: str,
        *,
        keys: EndpointKeys,
        concurrency: int = CONCURRENCY,
        if_refused: str = "",
    ) -> None:
        """`if_refused`: the end of the message about a key or model that the endpoint does not take."""
        self.what, self.url, self.model = what, url, model
        self._api_key_env, self._keys, self._if_refused = api_key_env, keys, if_refused
        base = url.rstrip("/").removesuffix("/chat/completions")
        if not re.match("https?://[^/]", base):
            raise ConfigError(f"{keys.url}={url!r} is no HTTP address such as http://127.0.0.1:8000/v1")
        secret = os.environ.get(api_key_env, "")
        self._server = RemoteServer(
            base,
            what,
            key=keys.url,
            concurrency=concurrency,
            health="/models",
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
        )

    async def open(self, timeout_s: float = 30.0) -> None:
        """Check that the endpoint is there, takes the key and, where it lists its models, has this one."""
        try:
            answer = await self._server.request("GET", "/models", timeout_s=timeout_s)
        except (ToolsLost, ToolFailed) as error:
            raise ConfigError(f"{self._keys.url}={self.url}: {error}") from error
        if answer.status in (401, 403):
            raise ConfigError(self._refused(answer))
        try:
            listed = [model["id"] for model in answer.json()["data"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError):
            listed = []  # not every endpoint has a list
        if self.model is None and not listed:
            raise ConfigError(f"{self._keys.url}={self.url} lists no models; name one ({self._keys.model})")
        self.model = self.model or str(listed[0])
        if listed and self.model not in listed:
            raise ConfigError(
                f"{self._keys.model}={self.model!r} is not at {self.url}; it has: {', '.join(map(str, listed[:20]))}"
            )

    async def complete(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The first choice for a request without its model. ToolFailed: no usable answer (in time); ToolsLost: the run
        must stop."""
        body = {"model": self.model, **request}
        answer = await self._server.request("POST", "/chat/completions", body, timeout_s=timeout_s)
        if answer.status in (401, 403, 404):  # no repetition helps
            raise ToolsLost(f"{self._refused(answer)}{self._if_refused}")
        if answer.status != 200:
            raise ToolFailed(f"{self.what} failed: {answer}")
        try:
            choice = answer.json()["choices"][0]
            return {**choice, "message": dict(choice["message"])}
        except (ValueError, KeyError, IndexError, TypeError):
            raise ToolFailed(f"{self.what}'s answer has no choices[0].message: {answer}") from None

    async def close(self) -> None:
        await self._server.close()

    def _refused(self, answer: ServerAnswer) -> str:
        what = "the list of its models" if self.model is None else f"model {self.model!r}"
        return (
            f"The endpoint {self._keys.url}={self.url} refused {what} with {answer}. Check "
            f"{self._keys.model}, and the key in the variable {self._api_key_env} ({self._keys.api_key_env})"
        )
