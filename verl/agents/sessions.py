"""Agents of users that ask the policy over HTTP: one session for each sample, named by its key.

A session draws what is asked for by the run's sampler, keeps every answer until it is read, and makes the turns of its
agent the conversation of the sample. Nothing an agent does reaches another session.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from verl.agents.base import Message, Schema, ToolFailed
from verl.agents.chains import Chains, DrawnTurn, HistoryPlace
from verl.agents.hosted import as_reward
from verl.agents.own_time import OwnTime
from verl.data.messages import Messages
from verl.rollout.base import Response

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner, ConversationSampler, Talk

logger = logging.getLogger(__name__)

MOST_DRAWS = 64
"""Of one session, under way at a time."""
_TOO_LONG = "context_length_exceeded"
_LEAST = 1 << 16
"""Characters of messages that are looked at in any case."""
_REFUSED = 4
"""Failed requests of a session whose reason is recorded."""
_NOTICE_S = 0.05
"""Until a client that has left is known to have."""
_KEY = "rollout.multi_turn"


class SessionAgent(Protocol):
    """Who has the conversation of a session."""

    async def reset(self, row: dict[str, Any], timeout_s: float) -> Any:
        """Wait until it is there."""

    async def run(self, row: dict[str, Any], base_url: str, api_key: str) -> Any:
        """To its end: what it returns."""


class AgentDoor(Protocol):
    """The server that agents send their requests to. All of it belongs to the event loop of the conversations."""

    base_url: str

    async def open(self, runner: ConversationRunner) -> None: ...
    def agent_of(self, session: AgentSession) -> SessionAgent: ...
    def admit(self, session: AgentSession) -> None: ...
    def dismiss(self, session: AgentSession) -> None: ...
    async def close(self) -> None: ...


class SessionBusy(Exception):
    """As many draws of the session as may be are under way."""


class SessionOver(Exception):
    """The session draws nothing more."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class AskedTurns:
    """The draws of one request."""

    same: tuple[Any, ...]
    """What an equal request has, too."""
    turns: list[DrawnTurn]
    draws: list[asyncio.Task[Response]]
    left: bool = False
    """A client left before it had the answer."""
    read: bool = False
    """A client had the whole answer."""

    @property
    def unread(self) -> bool:
        return self.left and not self.read

    @property
    def failed(self) -> bool:
        return any(draw.done() and (draw.cancelled() or draw.exception()) for draw in self.draws)

    async def answers(self) -> AsyncIterator[Response]:
        """In the order of the samples. The draws go on when the client leaves."""
        try:
            for sample, draw in enumerate(self.draws):
                yield replace(await asyncio.shield(draw), sample=sample)
            self.read = True
        except (asyncio.CancelledError, GeneratorExit):
            if any(draw.cancelled() for draw in self.draws):
                raise SessionOver("the session has ended", "session_ended") from None
            self.left = True
            raise


class AgentSession:
    """The requests of one agent, and the conversation they make."""

    def __init__(self, sampler: ConversationSampler, talk: Talk) -> None:
        self.sampler, self.talk = sampler, talk
        self.turns, self.data, self.cfg = sampler.turns, sampler.runner.data, sampler.runner.cfg
        self.key = secrets.token_urlsafe(24)
        self.chains = Chains()
        self.reward: float | None = None
        """That was posted."""
        self.requests = 0
        """Under way, whatever they ask for."""
        self.joined = 0
        """Requests that were answered with the draws of an earlier one."""
        self.failed = 0
        """Requests that got no answer of the policy."""
        self.refused: list[str] = []
        """What the first of these were told."""
        self._asked: list[AskedTurns] = []
        self._names: dict[str, int] = {}
        self._limit = ""
        """Of the conversation, which the agent has met: turns or length."""
        self._own_time = OwnTime(self.cfg.agent_timeout_s)
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._row_prompt = list(talk.conversation.messages)
        self._split = self.cfg.history == "split"

    # ---- prompts

    def place(self, messages: Messages, tools: Sequence[Schema]) -> HistoryPlace:
        """Where a request of messages, with calls as they are given, belongs, and the ids of its prompt. SessionOver:
        they are too long."""
        offered = json.dumps(list(tools), sort_keys=True)
        longest = (self.data.max_prompt_length + self.data.max_response_length) * self.turns.longest_token
        if (size := len(offered) + sum(len(str(message)) for message in messages)) > _LEAST + longest:
            # Encoding it would keep all others waiting.
            self._limit = "length"
            raise SessionOver(
                f"the messages have {size} characters, and {longest} are more than any prompt of this run",
                _TOO_LONG,
            )
        place = self.chains.place(messages, offered)
        parent, chat = place.parent, self.turns.chat
        if parent is None:
            taken = chat.taken(messages, tools)
            place.messages = taken
            row = not tools and messages == self._row_prompt
            place.prompt_ids = (
                list(self.talk.conversation.prompt_ids) if row else self.turns.prompt(taken, tools)
            )
            return place
        added = len(place.messages)
        place.messages = self._following(parent, place.messages, tools)
        whole = [*parent.all_messages, *place.messages]
        if self._split:
            place.prompt_ids = self.turns.prompt(whole, tools)
        elif self.turns.users or all(message["role"] == "tool" for message in messages[-added:]):
            assert parent.response is not None
            place.prompt_ids = [*parent.ids, *self.turns.after(parent.response.token_ids, place.messages)]
        else:
            place.parent, place.messages = None, whole
            place.prompt_ids = self.turns.prompt(whole, tools)
            place.note = "another history: the chat template rewrites turns when the user answers"
        return place

    def _following(self, parent: DrawnTurn, messages: Messages, tools: Sequence[Schema]) -> list[Message]:
        """What follows a turn, as the run itself writes it after a turn of its own."""
        found: list[Message] = []
        for message in messages:
            if message["role"] == "tool" and message.get("tool_call_id") in parent.call_ids:
                number = parent.call_ids[message["tool_call_id"]]
                assert parent.said is not None
                name, text = parent.said.calls[number][0], str(message.get("content") or "")
                drawn = self.sampler.agents.format.read(parent.said.raw, tools).calls[number]
                found.append(self.turns.tool_message(name, text, drawn.id or f"call_{number}"))
            elif message["role"] == "tool":
                name, text = str(message.get("name") or ""), str(message.get("content") or "")
                found.append(self.turns.tool_message(name, text, str(message.get("tool_call_id") or "")))
            else:
                found += self.turns.chat.taken([message], tools)
        return found

    def place_ids(self, ids: Sequence[int]) -> HistoryPlace:
        """Of a request that has a prompt of token ids."""
        place = self.chains.place_ids(ids)
        new = ids if place.parent is None else ids[len(place.parent.ids) :]
        text = self.turns.chat.tokenizer.decode(list(new), skip_special_tokens=False)
        place.messages = [{"role": "user", "content": str(text)}]
        return place

    def ids_of_drawn(self, text: str) -> tuple[list[int], str]:
        """The ids of the longest beginning of a text that is a prompt and its answer, and the rest of the text."""
        found: list[int] = []
        length, decode = 0, self.turns.chat.tokenizer.decode
        for turn in self.chains.turns:
            if turn.response is not None and not turn.history:
                ended = turn.response.token_ids[-1:] and turn.ids[-1] in self.turns.stop_ids
                ids = turn.ids[:-1] if ended else turn.ids  # the text is without the token that ended it
                whole = str(decode(ids, skip_special_tokens=False))
                if length < len(whole) < len(text) and text.startswith(whole):
                    found, length = ids, len(whole)
        return found, text[length:]

    # ---- draws

    async def ask(
        self,
        place: HistoryPlace,
        prompt: Sequence[int],
        stop: tuple[str, ...],
        most: int,
        n: int,
        retry: bool,
    ) -> AskedTurns:
        """Begin to draw, or join what an earlier request with the same content has begun: where the client says that
        it asks again (`retry`), or did not wait for the answer."""
        same = (tuple(prompt), place.tools, stop, most, n)
        equal = [asked for asked in reversed(self._asked) if asked.same == same and not asked.failed]
        if equal and not retry and not all(draw.done() for draw in equal[0].draws):
            await asyncio.sleep(_NOTICE_S)  # the client may have left, and this is not known yet
        for earlier in equal:
            if retry or earlier.unread:
                earlier.left = False
                self.joined += 1
                return earlier
        if self._fault.done() or not self._own_time.running:
            raise SessionOver("the session has ended", "session_ended")
        most = min(most, self._tokens_left(place, prompt))
        if len(self.chains.turns) + n > self.cfg.max_turns:
            self._limit = self._limit or "turns"
            raise SessionOver(
                f"the policy has taken the {self.cfg.max_turns} turns of this session ({_KEY}.max_turns)",
                "max_turns",
            )
        if sum(not draw.done() for asked in self._asked for draw in asked.draws) + n > MOST_DRAWS:
            raise SessionBusy
        self._limit = ""  # the agent has found a way on
        for turn in place.replaced:
            turn.dropped = place.note or ""
        if place.parent is not None:
            place.parent.dropped = ""
        main = place.parent.main if place.parent else self._is_row(place, prompt)
        turns = [
            DrawnTurn(
                list(prompt),
                place.parent,
                place.history,
                place.messages,
                place.tools,
                main=main,
                note=place.note,
            )
            for _ in range(n)
        ]
        self.chains.turns += turns
        loop = asyncio.get_running_loop()
        draws = [loop.create_task(self._draw(turn, self._name(turn), stop, most)) for turn in turns]
        self._asked.append(AskedTurns(same, turns, draws))
        return self._asked[-1]

    def _is_row(self, place: HistoryPlace, prompt: Sequence[int]) -> bool:
        """Whether a request asks for the first turn of the row's own conversation, whatever its tools."""
        ours, given = (
            [(message["role"], message.get("content")) for message in messages]
            for messages in (self._row_prompt, place.messages)
        )
        return ours == given or list(prompt) == self.talk.conversation.prompt_ids

    def _name(self, turn: DrawnTurn) -> str:
        """What keys the draws: the number of the turn in its history, as in a conversation of ours, not the order in
        which requests arrive."""
        name = str(len(turn.path) - 1)
        if not turn.main or name in self._names:
            name = f"{name}:{hashlib.sha256(json.dumps(turn.prompt_ids).encode()).hexdigest()[:16]}"
        before = self._names.get(name, 0)
        self._names[name] = before + 1
        return f"{name}+{before}" if before else name

    def _tokens_left(self, place: HistoryPlace, prompt: Sequence[int]) -> int:
        """Tokens that the answer may have. SessionOver: none."""
        root = place.parent.path[0].prompt_ids if place.parent is not None else prompt
        first, most = self.data.max_prompt_length, self.talk.settings.sampling.max_tokens
        if self._split:
            left = first + self.data.max_response_length - len(prompt)
        else:
            left = most - (len(prompt) - len(root)) if len(root) <= first else 0
        if left > 0:
            return min(left, most)
        self._limit = "length"
        what = "the prompt" if place.parent is None else "the conversation"
        raise SessionOver(
            f"{what} has {len(prompt)} tokens, and no tokens are left for an answer (data.max_prompt_length={first}, "
            f"data.max_response_length={self.data.max_response_length})",
            _TOO_LONG,
        )

    async def _draw(self, turn: DrawnTurn, name: str, stop: tuple[str, ...], most: int) -> Response:
        settings = self.talk.settings
        sampling = replace(settings.sampling, stop=(*settings.sampling.stop, *stop))
        talk = replace(self.talk, settings=replace(settings, sampling=sampling))
        try:
            with self._own_time.paused():
                turn.response = await self.sampler.draw(talk, turn.prompt_ids, most, name)
        except Exception as error:  # the run ends with it
            if not self._fault.done():
                self._fault.set_exception(error)
            raise
        turn.text = self.turns.text(turn.response.token_ids)
        return turn.response

    def refuse(self, text: str) -> None:
        """Record what a request that failed is told."""
        self.failed += 1
        self.refused = [*self.refused, text][:_REFUSED]

    # ---- from the start of the agent to the conversation

    async def run(self, door: AgentDoor) -> None:
        """Run the agent; its turns are then the conversation."""
        value: Any = None
        failure: str | None = None
        tasks: list[asyncio.Future[Any]] = []
        agent = door.agent_of(self)
        try:
            await agent.reset({}, math.inf)  # waits for its place and its process, or to be fetched
            door.admit(self)
            task = asyncio.ensure_future(agent.run(dict(self.talk.episode.row), door.base_url, self.key))
            tasks.append(task)
            async with self._own_time.limit():
                await asyncio.wait((task, self._fault), return_when=asyncio.FIRST_COMPLETED)
            if self._fault.done():
                self._fault.result()
            value = task.result()
        except ToolFailed as error:
            failure = error.text
        except TimeoutError:
            failure = (
                f"the agent neither asked the policy nor returned for {self.cfg.agent_timeout_s:g} seconds "
                f"({_KEY}.agent_timeout_s)"
            )
        finally:
            self._own_time.end()
            door.dismiss(self)
            tasks += [draw for asked in self._asked for draw in asked.draws]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._fault.done():
                self._fault.exception()  # read
        self._record(failure)
        self._score(value)

    def _record(self, failure: str | None) -> None:
        conversation, cfg, chains = self.talk.conversation, self.cfg, self.chains
        for asked in self._asked:
            for turn in asked.turns:
                if asked.unread and turn not in {t.parent for t in chains.turns}:
                    turn.dropped = turn.dropped or "the client left and never read the answer"
        chains.write(conversation, longest=cfg.chains == "longest", each_turn=self._split)
        trained = len(conversation.model_turns)
        conversation.metrics = {
            "num_turns": float(len(conversation.turns) + 1),
            "agents/chains": float(len(chains.leaves(False))),
            "agents/dropped_turns": float(len(chains.turns) - trained),
            "agents/rewritten_histories": float(sum(turn.note is not None for turn in chains.turns)),
            "agents/joined_requests": float(self.joined),
        }
        kept = {turn for leaf in chains.leaves(cfg.chains == "longest") for turn in leaf.path}
        conversation.requests = {
            "asked": len(self._asked) + self.joined + self.failed,
            "joined": self.joined,
            "failed": self.failed,
            "refused": self.refused,
            "histories": len(chains.leaves(False)),
            "drawn_tokens": sum(len(turn.response.token_ids) for turn in chains.turns if turn.response),
            "trained_tokens": sum(conversation.response_mask),
            "dropped": [
                {"content": turn.text, "reason": turn.dropped or _not_kept(turn)}
                for turn in chains.turns
                if turn not in kept
            ],
        }
        if self._limit:
            conversation.finish_reason, failure = self._limit, None
        if failure is None and not trained:
            failure = "the agent asked the policy for nothing"
        if failure is None:
            return
        if cfg.agent_failure == "mask" or not trained:
            conversation.error, conversation.finish_reason = failure, "abort"
        else:
            conversation.extra = {"agent_error": failure}
        logger.debug("%s", failure)

    def _score(self, value: float | Mapping[str, Any] | None) -> None:
        conversation, reward = self.talk.conversation, self.reward
        if isinstance(value, Mapping):
            rest = {str(name): each for name, each in value.items() if name != "reward"}
            conversation.reward_extra = rest
            conversation.extra = {**conversation.extra, **rest}
            value = value.get("reward")
        if value is not None:
            reward = as_reward(value, "the agent")
        if reward is not None and conversation.error is None:
            conversation.environment_reward, conversation.scored = reward, True


def _not_kept(turn: DrawnTurn) -> str:
    """Why a turn that its client did not drop is in no row."""
    if turn.said is None:
        return "the agent ended before the answer was complete"
    return f"it is not in the longest history ({_KEY}.chains=longest)"
