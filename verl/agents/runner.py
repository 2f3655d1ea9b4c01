"""Drives conversations: a finished turn goes to its session, the session's answer becomes the next request.

Each conversation advances on its own while others generate. Request ids are `uid#sample/turn`, so the draws depend on
seed, uid, sample and turn only, not on how long tools take or on what else runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl.agents.base import Message, Schema, ToolFailed
from verl.agents.conversation import Conversation, prompt_messages
from verl.agents.formats import detect_format, get_format
from verl.agents.sessions import Answer, Session
from verl.agents.templates import ChatTurns
from verl.agents.toolset import KEY, ROUTING_COLUMNS, ROW_FIELDS, Agents
from verl.config.known import TOOL_FORMATS
from verl.config.sections.data import PromptsConfig
from verl.config.sections.rollout import MultiTurnConfig
from verl.data.chat import ChatFormat, as_messages
from verl.data.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.rollout.base import GenerationSettings, Request, Response, RolloutEngine

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""How often answers of tools are looked for while the engine generates."""

OnFinish = Callable[[int, Conversation], None]
"""Called with the row in the batch and its conversation, as each finishes."""


class ConversationRunner:
    """Runs the conversations of a batch over any rollout engine. One for all batches of a run.

    `stop_ids`: the tokens that end a turn besides the tokenizer's own, as the model's generation config has them."""

    def __init__(
        self, cfg: MultiTurnConfig, data: PromptsConfig, tokenizer: Any, stop_ids: Iterable[int] = ()
    ) -> None:
        self.cfg = cfg
        self.data = data
        chat = ChatFormat(
            tokenizer, data.apply_chat_template_kwargs, data.system_prompt, raw_prompts=data.raw_prompts
        )
        self.agents = Agents(cfg, get_format(self.format_name(chat)))
        try:
            self.turns = ChatTurns(
                chat,
                tools=self.agents.has_tools,
                users=self.agents.has_user,
                history=cfg.history,
                stop_ids=stop_ids,
            )
        except BaseException:
            self.agents.close()
            raise

    def format_name(self, chat: ChatFormat) -> str:
        """How calls are written. A template without a place for tools gets them described in hermes' format."""
        name = self.cfg.format
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

    def close(self) -> None:
        self.agents.close()

    def schemas(self, row: Mapping[str, Any]) -> list[Schema]:
        """Of the tools that the conversation of a row has."""
        return self.agents.schemas(row)

    @property
    def gives_rewards(self) -> bool:
        """Whether no reward function is needed."""
        return self.agents.gives_rewards

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
            messages = as_messages(prompts[number])
            if messages is not None:
                self.turns.check_prompt(messages, self.agents.schemas(row), where)

    def run(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish | None = None,
    ) -> list[Conversation]:
        """`settings.n` conversations for each prompt, in the order of the prompts whatever finished first."""
        batch = ConversationBatch(self, engine, prompts, settings, on_finish)
        try:
            return batch.run()
        except BaseException:
            self.agents.cancel()
            self.agents.end(session.end() for session in batch.sessions)
            try:
                batch.abort()
            except Exception as error:  # of an engine that failed; the first error says why
                logger.debug("ending the requests of a batch: %s", error)
            raise


class ConversationBatch:
    """The conversations of one call of `run`."""

    def __init__(
        self,
        runner: ConversationRunner,
        engine: RolloutEngine,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish | None,
    ) -> None:
        self.runner, self.agents, self.turns = runner, runner.agents, runner.turns
        self.engine, self.settings, self.on_finish = engine, settings, on_finish
        self.split = runner.cfg.history == "split"
        stops = dict.fromkeys((*settings.sampling.stop_token_ids, *self.turns.end_token_ids))
        self.sampling = replace(settings.sampling, stop_token_ids=tuple(stops))
        self.rows = [row_of(prompts, i) for i in range(len(prompts)) for _ in range(settings.n)]
        self.conversations: list[Conversation] = []
        self.sessions: list[Session] = []
        columns = prompts.non_tensor_batch
        for number, row in enumerate(self.rows):
            prompt, sample = divmod(number, settings.n)
            uid = str(columns["uid"][prompt])
            messages = prompt_messages(columns["raw_prompt"][prompt])
            self.conversations.append(Conversation(uid, sample, columns["prompt_ids"][prompt], messages))
            self.sessions.append(Session(self.agents, f"{uid}#{sample}", row))
        self.prompts: dict[int, list[int]] = {}
        """What the turn that is being generated was asked with, by row."""
        self.requests: dict[str, int] = {}
        """Outstanding requests: the row of each."""
        self.answers = 0
        """Sessions at work."""
        self.finished = 0

    def run(self) -> list[Conversation]:
        for row, session in enumerate(self.sessions):
            self.start_session(("open", row), session.open())
        while self.finished < len(self.conversations):
            for (step, row), result in self.agents.take(wait=not self.requests):
                self.answers -= 1
                self.take_result(step, row, result)
            if self.requests:
                for response in self.engine.poll(POLL_S if self.answers else None):
                    self.take_response(response)
        return self.conversations

    def abort(self) -> None:
        """End what the engine still generates for this batch."""
        if self.requests:
            with suppress(NotImplementedError):
                self.engine.abort(list(self.requests))
            while self.engine.poll():
                pass
        self.engine.release([session.key for session in self.sessions])

    def start_session(self, key: tuple[str, int], coroutine: Any) -> None:
        self.answers += 1
        self.agents.start(key, coroutine)

    # ---- the steps of a conversation

    def take_result(self, step: str, row: int, result: Any) -> None:
        if isinstance(result, BaseException) and not isinstance(result, ToolFailed):
            raise result
        if step == "open":
            self.opened(row, result)
        elif step == "respond":
            assert isinstance(result, Answer)
            self.answered(row, result)
        else:
            self.closed(row, result)

    def opened(self, row: int, result: str | ToolFailed | None) -> None:
        conversation = self.conversations[row]
        if isinstance(result, ToolFailed):
            conversation.error = f"the environment could not be reset: {result.text}"
            self.finish(row, "abort")
            return
        if result is not None:
            prompt, limit = self.extended_prompt(row, result), self.runner.data.max_prompt_length
            if len(prompt) > limit:
                conversation.error = (
                    f"with the text that reset() returned, the prompt has {len(prompt)} tokens; "
                    f"data.max_prompt_length={limit}"
                )
                self.finish(row, "abort")
                return
            conversation.prompt_ids = prompt
        self.submit(row)

    def extended_prompt(self, row: int, text: str) -> list[int]:
        """Add what the environment says at its start to the last message of the prompt."""
        conversation = self.conversations[row]
        last = conversation.messages[-1] if conversation.messages else {"role": ""}
        if last["role"] != "user" or not isinstance(last.get("content"), str):
            raise DataError(
                f"the environment of prompt {conversation.uid} adds text to the prompt, which must then be messages "
                f"that end with the user's; it ends with {last['role'] or 'a string'!r} (data.prompt_key)"
            )
        joined = f"{last['content']}\n{text}" if last["content"] else text
        conversation.messages[-1] = {**last, "content": joined}
        return self.turns.prompt(conversation.messages, self.agents.schemas(self.rows[row]))

    def submit(self, row: int) -> None:
        """Request the next turn."""
        conversation, session = self.conversations[row], self.sessions[row]
        self.prompts[row] = prompt = self.prompt_ids(row)
        if self.split:
            most = self.runner.data.max_prompt_length + self.runner.data.max_response_length - len(prompt)
            left = min(most, self.sampling.max_tokens)
        else:
            left = self.sampling.max_tokens - len(conversation.token_ids)
        if left < 1:
            self.finish(row, "length")
            return
        turn = len(conversation.model_turns)
        request = Request(
            f"{session.key}/{turn}",
            prompt,
            replace(self.sampling, max_tokens=left),
            seed=self.settings.seed,
            prefix_id=session.key,
        )
        self.requests[request.request_id] = row
        self.engine.submit([request])

    def prompt_ids(self, row: int) -> list[int]:
        """What the next turn is generated from."""
        conversation = self.conversations[row]
        if self.split and conversation.turns:
            return self.turns.prompt(conversation.messages, self.agents.schemas(self.rows[row]))
        return [*conversation.prompt_ids, *conversation.token_ids]

    def take_response(self, response: Response) -> None:
        row = self.requests.pop(response.request_id)
        conversation, session = self.conversations[row], self.sessions[row]
        text = self.turns.text(response.token_ids)
        conversation.add_model_turn(response, text, prompt_ids=self.prompts[row] if self.split else None)
        if response.finish_reason != "stop":
            self.finish(row, response.finish_reason)
            return
        self.start_session(("respond", row), session.respond(text, list(conversation.messages)))

    def answered(self, row: int, answer: Answer) -> None:
        cfg, conversation = self.runner.cfg, self.conversations[row]
        conversation.turns[-1].records = answer.records
        if answer.reward is not None:
            conversation.add_reward(answer.reward)
        if answer.error is not None:
            conversation.error = f"the environment gave no reward for a turn: {answer.error}"
            self.finish(row, "abort")
            return
        messages = self.messages(answer)
        if answer.done or not messages:
            self.finish(row, "stop")
            return
        user_turns = sum(turn.role == "user" for turn in conversation.turns) + (answer.user is not None)
        limit = cfg.max_user_turns
        if len(conversation.model_turns) >= cfg.max_turns or (limit is not None and user_turns > limit):
            self.finish(row, "turns")
            return
        if self.split:
            ids: list[int] = []
        else:
            ids = self.turns.after(conversation.token_ids[conversation.turns[-1].start :], messages)
            if len(conversation.token_ids) + len(ids) >= self.sampling.max_tokens:
                self.finish(row, "length")
                return
        conversation.add_messages(ids, messages)
        self.submit(row)

    def messages(self, answer: Answer) -> list[Message]:
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
            self.turns.tool_message(record.name, text, f"call_{number}")
            for number, (record, text) in enumerate(zip(answer.records, texts, strict=True))
        ]

    def finish(self, row: int, reason: str) -> None:
        self.conversations[row].finish_reason = reason
        self.engine.release([self.sessions[row].key])
        self.start_session(("close", row), self.sessions[row].close())

    def closed(self, row: int, result: float | ToolFailed | None) -> None:
        conversation = self.conversations[row]
        if isinstance(result, ToolFailed):
            conversation.error = conversation.error or f"the environment gave no reward: {result.text}"
        else:
            conversation.environment_reward = result
        self.finished += 1
        if self.on_finish is not None:
            self.on_finish(row, conversation)


def row_of(prompts: DataProto, row: int) -> dict[str, Any]:
    """The columns of the data file, as environments get them."""
    column = {name: values[row] for name, values in prompts.non_tensor_batch.items()}
    own = {"prompt": column["raw_prompt"], **(column.get("columns") or {})}
    return own | {name: column.get(name) for name in ROW_FIELDS if name != "prompt"}
