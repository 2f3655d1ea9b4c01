"""Conversations as coroutines: a turn is sampled, its episode answers, and the answer becomes part of the next prompt.

Each conversation advances on its own while others generate. The draws are keyed by `uid#sample/turn`, so that they
depend on seed, uid, sample and turn only, not on how long tools take or on what else runs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agents.base import Message, ToolFailed
from verl.agents.conversation import (
    Conversation,
    pack_conversations,
    prompt_messages,
    unpack_conversations,
)
from verl.agents.episode import Episode, TurnAnswer
from verl.agents.formats import detect_format, get_format, parser_names
from verl.agents.loop_audit import Drawn
from verl.agents.loop_runs import AgentLoops, LoopServer
from verl.agents.sessions import AgentDoor, AgentSession
from verl.agents.templates import ChatTurns
from verl.agents.toolset import END_S, KEY, ROUTING_COLUMNS, ROW_FIELDS, Agents
from verl.config.sections.data import PromptsConfig
from verl.config.sections.rollout import TOOL_FORMATS, MultiTurnConfig
from verl.data.chat import ChatFormat
from verl.data.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.rollout.base import GenerationSettings, Request, Response, RolloutEngine
from verl.rollout.sampler import OnFinish, Sampler
from verl.rollout.samples import Finished, Kept

logger = logging.getLogger(__name__)


class ConversationRunner:
    """Runs the conversations of a batch over any rollout engine. One for all batches of a run.

    `stop_ids`: the tokens that end a turn besides the tokenizer's own, as the model's generation config has them."""

    def __init__(
        self,
        cfg: MultiTurnConfig,
        data: PromptsConfig,
        tokenizer: Any,
        stop_ids: Iterable[int] = (),
        loops: AgentLoops | None = None,
        door: AgentDoor | None = None,
    ) -> None:
        """`door`: where agents of users send their requests."""
        self.cfg = cfg
        self.data = data
        self.loops = loops
        self.door = door
        # Of its own: conversations go on in a thread of theirs while others tokenize.
        chat = ChatFormat.of(copy.deepcopy(tokenizer), data)
        if cfg.tool_response_truncate_side != "middle":
            kept = {"left": "beginning", "right": "end"}[cfg.tool_response_truncate_side]
            name = f"{KEY}.tool_response_truncate_side={cfg.tool_response_truncate_side}"
            logger.info(
                "%s keeps the %s of long tool answers; up to 0.2.0 it kept the other half", name, kept
            )
        names, default = (loops.loops, loops.default) if loops is not None else ((), None)
        self.agents = agents = Agents(cfg, get_format(self.format_name(chat)), names, default)
        self.schemas, self.gives_rewards = agents.schemas, agents.gives_rewards
        try:
            self.turns = self._chat_turns(chat, stop_ids)
            if door is not None:
                agents.wait_for(door.open(self))
        except BaseException:
            self.close()
            raise

    def _chat_turns(self, chat: ChatFormat, stop_ids: Iterable[int]) -> ChatTurns:
        cfg, agents = self.cfg, self.agents
        given: dict[str, Any] = {"stop_ids": tuple(stop_ids), "tool_format": agents.format}
        # An agent loop alone renders its prompts itself.
        append = cfg.enable or cfg.own_agent or self.loops is None
        history = cfg.history if append else "split"
        tools, users = agents.has_tools, agents.has_user
        try:
            return ChatTurns(chat, tools=tools, users=users, history=history, **given)
        except ConfigError as error:
            if not cfg.own_agent:
                raise
            turns = ChatTurns(chat, tools=True, users=False, history=history, **given)
            logger.info("what the user says after the model's first turn begins another history: %s", error)
            return turns

    def close(self) -> None:
        """Disconnect and end processes. Safe to call twice."""
        self.agents.close(self.door)

    def format_name(self, chat: ChatFormat) -> str:
        """How calls are written. A template without a place for tools gets them described in hermes' format."""
        name = self.cfg.format
        if name in parser_names():
            return "hermes"  # not used: agent loops read the calls
        if name == "auto":
            name = detect_format(str(chat.tokenizer.chat_template or ""))
            logger.info("%s.format=auto: tool calls are read as %s", KEY, name)
        if name in TOOL_FORMATS and name != "hermes" and chat.ignores_tools:
            raise ConfigError(
                f"{KEY}.format={name}, but the chat template of '{chat.tokenizer.name_or_path}' has no place for "
                f"tools: they are described to the model in the format hermes. Set {KEY}.format=hermes, or "
                "data.chat_template to a template with tools"
            )
        return name

    def check_data(self, dataset: Any) -> None:
        """Refuse rows that name an environment or agent that does not exist, and prompts that the chat template would
        rewrite, before anything is generated."""
        if dataset is None:
            return
        self.agents.check_columns(dataset.rows.column_names, dataset.files_key)
        names = [name for name in ROUTING_COLUMNS if name in dataset.rows.column_names]
        columns = [list(dataset.rows.column(name)) for name in names]
        prompts = list(dataset.rows.column(self.data.prompt_key))
        for number in map(int, dataset.kept):
            row = {name: column[number] for name, column in zip(names, columns, strict=True)}
            where = dataset.rows.origin(number)
            self.agents.check_row(row, where)
            schemas = self.agents.schemas(row)
            messages = self.turns.chat.messages_of(prompts[number], where, schemas)
            if messages is not None:
                self.turns.check_prompt(messages, schemas, where)
            elif self.cfg.splits:
                raise DataError(
                    f"{dataset.files_key}: the prompt of {where} is a string, which {KEY}.history=split cannot use: "
                    "every turn has the whole conversation in the chat template, and a string that is templated "
                    "already would be templated again. Write the prompts as messages, or set "
                    "data.apply_chat_template=always for strings that are not templated"
                )

    def sampler(self, engine: RolloutEngine) -> ConversationSampler:
        """A new owner of conversations over `engine`."""
        return ConversationSampler(self, engine)

    def run(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: Callable[[int, Conversation], None] | None = None,
    ) -> list[Conversation]:
        """`settings.n` conversations for each prompt, in the order of the prompts whatever finished first; `on_finish`
        is called with the row in the batch and its conversation."""
        return self.sampler(engine).collect(prompts, settings, on_finish)


@dataclass(eq=False)
class Talk:
    """A conversation that has not ended."""

    conversation: Conversation
    episode: Episode
    settings: GenerationSettings
    draw_key: str | None
    """Keys the draws of its turns, where its request ids must be others."""
    draws: list[Drawn] | None = None
    """Of an agent loop, for its audit."""
    ended_early: bool = False


class ConversationSampler(Sampler):
    """One conversation per sample, each a coroutine in the event loop of the tools. While the engine is suspended tools
    go on, and what they answer is sampled from after `resume`."""

    poll_s = 0.02

    def __init__(self, runner: ConversationRunner, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.runner, self.agents, self.turns = runner, runner.agents, runner.turns
        self.split = runner.cfg.splits
        self.running: dict[asyncio.Task[Conversation], Talk] = {}
        """Used in the event loop's thread only."""

    def _start(
        self,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish,
        prefix: str,
        missing: Mapping[str, Iterable[int]],
    ) -> None:
        stops = dict.fromkeys((*settings.sampling.stop_token_ids, *self.turns.end_token_ids))
        settings = replace(settings, sampling=replace(settings.sampling, stop_token_ids=tuple(stops)))
        columns = prompts.non_tensor_batch
        talks: list[tuple[str, Talk]] = []
        for number, (group, samples) in enumerate(missing.items()):
            uid, ids = str(columns["uid"][number]), columns["prompt_ids"][number]
            for sample in samples:
                conversation = Conversation(uid, sample, ids, prompt_messages(columns["raw_prompt"][number]))
                key, row = f"{uid}#{sample}", row_of(prompts, number)
                episode = Episode(self.agents, f"{prefix}{key}", row, seed_key=key)
                talks.append((group, Talk(conversation, episode, settings, key if prefix else None)))
        for group, talk in talks:
            self.agents.loop.call_soon_threadsafe(self._begin, group, talk, on_finish)

    def _begin(self, group: str, talk: Talk, on_finish: OnFinish) -> None:
        def ended(task: asyncio.Task[Conversation]) -> None:
            del self.running[task]
            if not task.cancelled():
                task.exception()  # read here: where another conversation has failed before, nobody else does
                self.post(lambda: finish(task.result()))
            elif talk.ended_early:
                self.post(abort)

        def abort() -> None:
            self.engine.release([talk.episode.key])  # again: its turn has only now left the engine
            talk.conversation.finish_reason = "abort"
            finish(talk.conversation)

        def finish(conversation: Conversation) -> None:
            self._end(Finished(group, conversation.sample, conversation), on_finish)

        task = self.agents.start(self.run_conversation(talk))
        self.running[task] = talk
        task.add_done_callback(ended)

    def end_early(self) -> None:
        """Conversations end where they are, those that wait for a tool or a user, too."""

        def mark() -> None:
            for talk in self.running.values():
                talk.ended_early = True

        self.agents.loop.call_soon_threadsafe(mark)
        self.agents.cancel(self.running)

    def _do_posted(self) -> None:
        self.agents.require_answering()
        super()._do_posted()

    def abort(self, error: BaseException | None = None) -> None:
        self.agents.cancel(self.running)
        super().abort(error)

    def pack(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Finished conversations only: the state of an environment cannot be saved, so that others begin again."""
        conversations = pack_conversations([each.result for each in finished])
        return {"groups": [each.group for each in finished], **conversations}

    def unpack(self, packed: dict[str, Any], groups: Iterable[str]) -> Kept:
        wanted, kept = set(groups), Kept()
        for group, conversation in zip(packed["groups"], unpack_conversations(packed), strict=True):
            if group in wanted:
                kept[group, conversation.sample] = conversation, True
        return kept

    # ---- one conversation

    async def run_conversation(self, talk: Talk) -> Conversation:
        """From the reset of the environment to its reward."""
        conversation, episode, started = talk.conversation, talk.episode, time.monotonic()
        try:
            loops, name = self.runner.loops, self.agents.agent_of(episode.row)
            if self.runner.door is not None:
                await AgentSession(self, talk).run(self.runner.door)
                self.engine.release([episode.key])
                await episode.end()
            elif loops is not None and name is not None and name in loops.loops:
                await LoopServer(loops, self, talk).run(name)
                self.engine.release([episode.key])
                await episode.end()
            else:
                conversation.finish_reason = await self.converse(talk)
                self.engine.release([episode.key])
                try:
                    conversation.environment_reward = await episode.close()
                except ToolFailed as failure:
                    conversation.error = (
                        conversation.error or f"the environment gave no reward: {failure.text}"
                    )
        except BaseException:
            await self._give_up(episode)
            raise
        conversation.seconds = time.monotonic() - started
        return conversation

    async def _give_up(self, episode: Episode) -> None:
        """What goes wrong is only logged: the run has failed already."""
        try:
            self.engine.release([episode.key])
            async with asyncio.timeout(END_S):
                await episode.end()
        except Exception as problem:
            logger.debug("ending a conversation: %s", problem)

    async def converse(self, talk: Talk) -> str:
        """Let model and environment speak in turn; why it ended."""
        conversation, episode = talk.conversation, talk.episode
        try:
            opening = await episode.open()
        except ToolFailed as failure:
            conversation.error = f"the environment could not be reset: {failure.text}"
            return "abort"
        if opening is not None and not self.extend_prompt(talk, opening):
            return "abort"
        while True:
            prompt = self.prompt_ids(talk)
            left = self.tokens_left(talk, len(prompt))
            if left < 1:
                return "length"
            response = await self.recorded(talk, prompt, left)
            text = self.turns.text(response.token_ids)
            conversation.add_model_turn(response, text, prompt_ids=prompt if self.split else None)
            if response.finish_reason != "stop":
                return response.finish_reason
            ended = self.take_answer(talk, await episode.respond(text, list(conversation.messages)))
            if ended is not None:
                return ended

    async def recorded(self, talk: Talk, prompt: list[int], most: int) -> Response:
        """What `draw` gives, kept for the audit of an agent loop."""
        drawn = Drawn(prompt)
        if talk.draws is not None:
            talk.draws.append(drawn)
        drawn.response = await self.draw(talk, prompt, most)
        return drawn.response

    async def draw(self, talk: Talk, prompt: list[int], most: int, name: str | None = None) -> Response:
        """The next turn of the model, of at most so many tokens. `name`: instead of its number."""
        key, turns = talk.episode.key, talk.conversation.model_turns
        turn = name or (len(turns) if talk.draws is None else len(talk.draws) - 1)
        return await self.sample(
            Request(
                f"{key}/{turn}",
                prompt,
                replace(talk.settings.sampling, max_tokens=most),
                seed=talk.settings.seed,
                prefix_id=key,
                key=None if talk.draw_key is None else f"{talk.draw_key}/{turn}",
            )
        )

    def extend_prompt(self, talk: Talk, opening: str) -> bool:
        """Add what the environment says at its start to the last message of the prompt; whether it fits."""
        conversation, limit = talk.conversation, self.runner.data.max_prompt_length
        last = conversation.messages[-1] if conversation.messages else {"role": ""}
        if isinstance(talk.episode.row["prompt"], str):
            last = {"role": ""}
        if last["role"] != "user" or not isinstance(last.get("content"), str):
            raise DataError(
                f"the environment of prompt {conversation.uid} adds text to the prompt, which must then be messages "
                f"that end with the user's; it ends with {last['role'] or 'a string'!r} (data.prompt_key)"
            )
        joined = f"{last['content']}\n{opening}" if last["content"] else opening
        conversation.messages[-1] = {**last, "content": joined}
        prompt = self.turns.prompt(conversation.messages, self.agents.schemas(talk.episode.row))
        if len(prompt) > limit:
            conversation.error = (
                f"with the text that reset() returned, the prompt has {len(prompt)} tokens; "
                f"data.max_prompt_length={limit}"
            )
            return False
        conversation.prompt_ids = prompt
        return True

    def prompt_ids(self, talk: Talk) -> list[int]:
        """What the next turn is generated from."""
        conversation = talk.conversation
        if self.split and conversation.turns:
            return self.turns.prompt(conversation.messages, self.agents.schemas(talk.episode.row))
        return [*conversation.prompt_ids, *conversation.token_ids]

    def tokens_left(self, talk: Talk, prompt: int) -> int:
        """How long the next turn may be after so many tokens."""
        most = talk.settings.sampling.max_tokens
        if self.split:
            data = self.runner.data
            return min(data.max_prompt_length + data.max_response_length - prompt, most)
        return most - len(talk.conversation.token_ids)

    def take_answer(self, talk: Talk, answer: TurnAnswer) -> str | None:
        """Add what the model's turn was answered with; why the conversation ends, where it does."""
        cfg, conversation = self.runner.cfg, talk.conversation
        conversation.turns[-1].records = answer.records
        if answer.reward is not None:
            conversation.add_reward(answer.reward)
        if answer.error is not None:
            conversation.error = answer.error
            return "abort"
        messages = self.messages(answer)
        if answer.done or not messages:
            return "stop"
        user_turns = sum(turn.role == "user" for turn in conversation.turns) + (answer.user is not None)
        limit = cfg.max_user_turns
        if len(conversation.model_turns) >= cfg.max_turns or (limit is not None and user_turns > limit):
            return "turns"
        ids: list[int] = []
        if not self.split:
            ids = self.turns.after(conversation.token_ids[conversation.turns[-1].start :], messages)
            if len(conversation.token_ids) + len(ids) >= talk.settings.sampling.max_tokens:
                return "length"
        conversation.add_messages(ids, messages)
        return None

    def messages(self, answer: TurnAnswer) -> list[Message]:
        """What the model reads next."""
        cfg = self.runner.cfg
        if answer.done:
            return []
        if answer.user is not None:
            return [{"role": "user", "content": answer.user}]
        texts = [
            self.turns.truncate(record.result, cfg.max_tool_response_length, cfg.tool_response_truncate_side)
            for record in answer.records
        ]
        return [
            self.turns.tool_message(record.name, text, record.call_id or f"call_{number}")
            for number, (record, text) in enumerate(zip(answer.records, texts, strict=True))
        ]


def row_of(prompts: DataProto, row: int) -> dict[str, Any]:
    """The columns of the data file, as environments get them."""
    column = {name: values[row] for name, values in prompts.non_tensor_batch.items()}
    own = {"uid": column["uid"], "prompt": column["raw_prompt"], **(column.get("columns") or {})}
    return own | {name: column.get(name) for name in ROW_FIELDS if name not in ("uid", "prompt")}
