"""Drives conversations: a finished turn goes to its session, the session's answer becomes the next request.

Each conversation advances on its own while others generate. The draws are keyed by `uid#sample/turn`, so that they
depend on seed, uid, sample and turn only, not on how long tools take or on what else runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from verl.agents.base import Message, Schema, ToolFailed
from verl.agents.conversation import Conversation, prompt_messages
from verl.agents.conversation_state import pack_conversations, unpack_conversations
from verl.agents.formats import detect_format, get_format
from verl.agents.sessions import Answer, Session
from verl.agents.templates import ChatTurns
from verl.agents.toolset import KEY, ROUTING_COLUMNS, ROW_FIELDS, Agents, Results
from verl.config.known import TOOL_FORMATS
from verl.config.sections.data import PromptsConfig
from verl.config.sections.rollout import MultiTurnConfig
from verl.data.chat import ChatFormat
from verl.data.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.rollout.base import GenerationSettings, Request, Response, RolloutEngine
from verl.rollout.requests import SuspendableRequests
from verl.rollout.samples import Finished, SampleStream, collect_samples, group_names

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
        chat = ChatFormat.of(tokenizer, data)
        if cfg.tool_response_truncate_side != "middle":
            kept = {"left": "beginning", "right": "end"}[cfg.tool_response_truncate_side]
            name = f"{KEY}.tool_response_truncate_side={cfg.tool_response_truncate_side}"
            logger.info(
                "%s keeps the %s of long tool answers; up to 0.2.0 it kept the other half", name, kept
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
            schemas = self.agents.schemas(row)
            messages = self.turns.chat.messages_of(prompts[number], where, schemas)
            if messages is not None:
                self.turns.check_prompt(messages, schemas, where)
            elif self.cfg.history == "split":
                raise DataError(
                    f"{dataset.files_key}: the prompt of {where} is a string, which {KEY}.history=split cannot use: "
                    "every turn has the whole conversation in the chat template, and a string that is templated "
                    "already would be templated again. Write the prompts as messages, or set "
                    "data.apply_chat_template=always for strings that are not templated"
                )

    def run(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        settings: GenerationSettings,
        on_finish: OnFinish | None = None,
    ) -> list[Conversation]:
        """`settings.n` conversations for each prompt, in the order of the prompts whatever finished first."""
        return collect_samples(ConversationStream(self, engine), prompts, settings, on_finish)


@dataclass(eq=False)
class _Talk:
    """A conversation that has not ended."""

    group: str
    conversation: Conversation
    session: Session
    row: dict[str, Any]
    settings: GenerationSettings
    draw_key: str | None
    """Keys the draws of its turns, where its request ids must be others."""
    prompt: list[int] = field(default_factory=list)
    """What the turn that is being generated was asked with."""

    @property
    def name(self) -> tuple[str, int]:
        return self.group, self.conversation.sample


class ConversationStream(SampleStream):
    """One conversation per sample. While it is suspended tools go on, and their answers are read after `resume`."""

    def __init__(self, runner: ConversationRunner, engine: RolloutEngine) -> None:
        self.runner, self.agents, self.turns = runner, runner.agents, runner.turns
        self.engine = engine
        self.split = runner.cfg.history == "split"
        self.talks: dict[tuple[str, int], _Talk] = {}
        self.requests = SuspendableRequests(engine)
        self.asked: dict[str, _Talk] = {}
        """Whose turn a request is."""
        self.results: Results = SimpleQueue()
        """Of sessions; each has its step and its conversation as the key."""
        self.answers = 0
        """Sessions at work."""
        self.ended: list[Finished] = []
        self.restored: dict[str, dict[int, Conversation]] = {}

    def add(self, prompts: DataProto, settings: GenerationSettings, prefix: str = "") -> None:
        stops = dict.fromkeys((*settings.sampling.stop_token_ids, *self.turns.end_token_ids))
        settings = replace(settings, sampling=replace(settings.sampling, stop_token_ids=tuple(stops)))
        outstanding = {group for group, _ in self.talks} | {finished.group for finished in self.ended}
        columns = prompts.non_tensor_batch
        added: list[_Talk] = []
        for number, group in enumerate(group_names(prompts, prefix, outstanding)):
            uid = str(columns["uid"][number])
            known = self.restored.pop(group, {})
            for sample in range(settings.n):
                if sample in known:
                    self.ended.append(Finished(group, sample, known[sample]))
                    continue
                messages = prompt_messages(columns["raw_prompt"][number])
                conversation = Conversation(uid, sample, columns["prompt_ids"][number], messages)
                key, row = f"{uid}#{sample}", row_of(prompts, number)
                session = Session(self.agents, f"{prefix}{key}", row, seed_key=key)
                added.append(_Talk(group, conversation, session, row, settings, key if prefix else None))
        for talk in added:
            self.talks[talk.name] = talk
            self.start_session("open", talk, talk.session.open())

    def poll(self, timeout_s: float | None = None) -> list[Finished]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.ended and self.talks and not self.requests.suspended:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.take_results(left)
            if self.requests.running:
                self.take_responses(left)
            if left == 0.0:
                break
        ended, self.ended = self.ended, []
        return ended

    def take_results(self, timeout_s: float | None) -> None:
        """Go on with conversations whose session has answered; wait for one where there is nothing to generate."""
        wait = not self.requests.running
        while True:
            try:
                (step, talk), result = self.results.get(wait, timeout_s)
            except Empty:
                return
            wait = False
            self.answers -= 1
            self.take_result(step, talk, result)

    def take_responses(self, timeout_s: float | None) -> None:
        """Generate. Answers of sessions are looked for every `POLL_S` seconds."""
        waits = [wait for wait in (timeout_s, POLL_S if self.answers else None) if wait is not None]
        for response in self.requests.poll(0.0 if self.ended else min(waits, default=None)):
            self.take_response(self.asked.pop(response.request_id), response)

    def suspend(self) -> None:
        self.requests.suspend()

    def resume(self) -> None:
        self.requests.resume()

    def abort(self) -> None:
        talks = list(self.talks.values())
        self.talks, self.asked, self.ended, self.restored = {}, {}, [], {}
        if talks:
            self.agents.cancel(self.results)
            self.agents.end(talk.session.end() for talk in talks)
        self.results, self.answers = SimpleQueue(), 0
        self.requests.abort()
        try:
            self.engine.release([talk.session.key for talk in talks])
        except Exception as error:  # of an engine that failed; the first error says why
            logger.debug("releasing conversations: %s", error)

    @property
    def outstanding(self) -> int:
        return len(self.talks) + len(self.ended)

    def pack(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Finished conversations only: the state of an environment cannot be saved, so that others begin again."""
        whole = [(each.group, each.result) for each in (*finished, *self.ended)]
        whole += [(group, each) for group, known in self.restored.items() for each in known.values()]
        return {"groups": [group for group, _ in whole], **pack_conversations([each for _, each in whole])}

    def unpack(self, packed: dict[str, Any], groups: Iterable[str]) -> None:
        wanted = set(groups)
        for group, conversation in zip(packed["groups"], unpack_conversations(packed), strict=True):
            if group in wanted:
                self.restored.setdefault(group, {})[conversation.sample] = conversation

    def start_session(self, step: str, talk: _Talk, coroutine: Any) -> None:
        self.answers += 1
        self.agents.start((step, talk), coroutine, self.results)

    # ---- the steps of a conversation

    def take_result(self, step: str, talk: _Talk, result: Any) -> None:
        if isinstance(result, BaseException) and not isinstance(result, ToolFailed):
            raise result
        if step == "open":
            self.opened(talk, result)
        elif step == "respond":
            assert isinstance(result, Answer)
            self.answered(talk, result)
        else:
            self.closed(talk, result)

    def opened(self, talk: _Talk, result: str | ToolFailed | None) -> None:
        conversation = talk.conversation
        if isinstance(result, ToolFailed):
            conversation.error = f"the environment could not be reset: {result.text}"
            self.finish(talk, "abort")
            return
        if result is not None:
            prompt, limit = self.extended_prompt(talk, result), self.runner.data.max_prompt_length
            if len(prompt) > limit:
                conversation.error = (
                    f"with the text that reset() returned, the prompt has {len(prompt)} tokens; "
                    f"data.max_prompt_length={limit}"
                )
                self.finish(talk, "abort")
                return
            conversation.prompt_ids = prompt
        self.submit(talk)

    def extended_prompt(self, talk: _Talk, text: str) -> list[int]:
        """Add what the environment says at its start to the last message of the prompt."""
        conversation = talk.conversation
        last = conversation.messages[-1] if conversation.messages else {"role": ""}
        if isinstance(talk.row["prompt"], str):
            last = {"role": ""}
        if last["role"] != "user" or not isinstance(last.get("content"), str):
            raise DataError(
                f"the environment of prompt {conversation.uid} adds text to the prompt, which must then be messages "
                f"that end with the user's; it ends with {last['role'] or 'a string'!r} (data.prompt_key)"
            )
        joined = f"{last['content']}\n{text}" if last["content"] else text
        conversation.messages[-1] = {**last, "content": joined}
        return self.turns.prompt(conversation.messages, self.agents.schemas(talk.row))

    def submit(self, talk: _Talk) -> None:
        """Request the next turn."""
        conversation, session = talk.conversation, talk.session
        talk.prompt = prompt = self.prompt_ids(talk)
        if self.split:
            most = self.runner.data.max_prompt_length + self.runner.data.max_response_length - len(prompt)
            left = min(most, talk.settings.sampling.max_tokens)
        else:
            left = talk.settings.sampling.max_tokens - len(conversation.token_ids)
        if left < 1:
            self.finish(talk, "length")
            return
        turn = len(conversation.model_turns)
        request = Request(
            f"{session.key}/{turn}",
            prompt,
            replace(talk.settings.sampling, max_tokens=left),
            seed=talk.settings.seed,
            prefix_id=session.key,
            key=None if talk.draw_key is None else f"{talk.draw_key}/{turn}",
        )
        self.requests.submit([request])
        self.asked[request.request_id] = talk

    def prompt_ids(self, talk: _Talk) -> list[int]:
        """What the next turn is generated from."""
        conversation = talk.conversation
        if self.split and conversation.turns:
            return self.turns.prompt(conversation.messages, self.agents.schemas(talk.row))
        return [*conversation.prompt_ids, *conversation.token_ids]

    def take_response(self, talk: _Talk, response: Response) -> None:
        conversation, session = talk.conversation, talk.session
        text = self.turns.text(response.token_ids)
        conversation.add_model_turn(response, text, prompt_ids=talk.prompt if self.split else None)
        if response.finish_reason != "stop":
            self.finish(talk, response.finish_reason)
            return
        self.start_session("respond", talk, session.respond(text, list(conversation.messages)))

    def answered(self, talk: _Talk, answer: Answer) -> None:
        cfg, conversation = self.runner.cfg, talk.conversation
        conversation.turns[-1].records = answer.records
        if answer.reward is not None:
            conversation.add_reward(answer.reward)
        if answer.error is not None:
            conversation.error = answer.error
            self.finish(talk, "abort")
            return
        messages = self.messages(answer)
        if answer.done or not messages:
            self.finish(talk, "stop")
            return
        user_turns = sum(turn.role == "user" for turn in conversation.turns) + (answer.user is not None)
        limit = cfg.max_user_turns
        if len(conversation.model_turns) >= cfg.max_turns or (limit is not None and user_turns > limit):
            self.finish(talk, "turns")
            return
        if self.split:
            ids: list[int] = []
        else:
            ids = self.turns.after(conversation.token_ids[conversation.turns[-1].start :], messages)
            if len(conversation.token_ids) + len(ids) >= talk.settings.sampling.max_tokens:
                self.finish(talk, "length")
                return
        conversation.add_messages(ids, messages)
        self.submit(talk)

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

    def finish(self, talk: _Talk, reason: str) -> None:
        talk.conversation.finish_reason = reason
        self.engine.release([talk.session.key])
        self.start_session("close", talk, talk.session.close())

    def closed(self, talk: _Talk, result: float | ToolFailed | None) -> None:
        conversation = talk.conversation
        if isinstance(result, ToolFailed):
            conversation.error = conversation.error or f"the environment gave no reward: {result.text}"
        else:
            conversation.environment_reward = result
        del self.talks[talk.name]
        self.ended.append(Finished(talk.group, conversation.sample, conversation))


def row_of(prompts: DataProto, row: int) -> dict[str, Any]:
    """The columns of the data file, as environments get them."""
    column = {name: values[row] for name, values in prompts.non_tensor_batch.items()}
    own = {"prompt": column["raw_prompt"], **(column.get("columns") or {})}
    return own | {name: column.get(name) for name in ROW_FIELDS if name != "prompt"}
