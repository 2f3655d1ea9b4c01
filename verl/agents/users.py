"""An OpenAI-compatible endpoint that plays the user: it answers the model where the model calls no tool."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.base import Message, ToolFailed, ToolsLost, row_column
from verl.agents.remote import CONCURRENCY, Answer, RemoteServer, plain_text
from verl.config.sections.rollout import MultiTurnUserConfig
from verl.errors import RESUME, ConfigError

KEY = "rollout.multi_turn.user"
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
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


class EndpointUser:
    """Asks the endpoint for the user's next message."""

    def __init__(self, config: MultiTurnUserConfig, concurrency: int = CONCURRENCY) -> None:
        self._config = config
        base = str(config.base_url).rstrip("/").removesuffix("/chat/completions")
        if not re.match("https?://[^/]", base):
            raise ConfigError(
                f"{KEY}.base_url={config.base_url!r} is no HTTP address such as http://127.0.0.1:8000/v1"
            )
        secret = os.environ.get(config.api_key_env, "")
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._server = RemoteServer(
            base,
            "The simulated user",
            key=f"{KEY}.base_url",
            concurrency=concurrency,
            health="/models",
            headers=headers,
        )

    async def open(self, timeout_s: float = 30.0) -> None:
        """Check that the endpoint is there, takes the key and, where it lists its models, has this one."""
        try:
            answer = await self._server.request("GET", "/models", timeout_s=timeout_s)
        except (ToolsLost, ToolFailed) as error:
            raise ConfigError(f"{KEY}.base_url={self._config.base_url}: {error}") from error
        if answer.status in (401, 403):
            raise ConfigError(self._refused(answer))
        try:
            listed = [model["id"] for model in answer.json()["data"]] if answer.status == 200 else []
        except (ValueError, KeyError, TypeError):
            listed = []  # not every endpoint has a list
        if listed and self._config.model not in listed:
            raise ConfigError(
                f"{KEY}.model={self._config.model!r} is not at {self._config.base_url}; it has: "
                f"{', '.join(map(str, listed[:20]))}"
            )

    async def reply(
        self, messages: Sequence[Message], row: Mapping[str, Any], timeout_s: float
    ) -> str | None:
        """The user's next message; None: the user ends the conversation. ToolFailed: no usable answer (in time);
        ToolsLost: the run must stop."""
        request = {"model": self._config.model, "messages": [self._system(row), *swap_roles(messages)]}
        answer = await self._server.request("POST", "/chat/completions", request, timeout_s=timeout_s)
        if answer.status in (401, 403, 404):  # no repetition helps
            raise ToolsLost(f"{self._refused(answer)}. {RESUME[0].upper()}{RESUME[1:]}")
        if answer.status != 200:
            raise ToolFailed(f"The simulated user failed: {answer}")
        try:
            text = answer.json()["choices"][0]["message"]["content"] or ""
            said = _THOUGHT.sub("", plain_text(text)).strip()
        except (ValueError, KeyError, IndexError, TypeError):
            raise ToolFailed(
                f"The simulated user's answer has no choices[0].message.content: {answer}"
            ) from None
        return None if STOP_MARK in said or not said else said

    async def close(self) -> None:
        await self._server.close()

    def _system(self, row: Mapping[str, Any]) -> Message:
        prompt = str(row_column(row, "user_prompt") or self._config.prompt or DEFAULT_PROMPT)
        return {"role": "system", "content": prompt if STOP_MARK in prompt else f"{prompt}\n\n{_END_RULE}"}

    def _refused(self, answer: Answer) -> str:
        return (
            f"The endpoint {KEY}.base_url={self._config.base_url} refused model {self._config.model!r} with {answer}. "
            f"Check {KEY}.model, and the key in the variable {self._config.api_key_env} ({KEY}.api_key_env)"
        )


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
            text = _THOUGHT.sub("", text).strip()
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
