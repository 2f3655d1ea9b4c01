"""The record of one conversation. It only grows: what the model drew is kept as token ids and never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from verl.agents.base import FailureKind, Message, ToolRecord
from verl.rollout.samples import pack_rows, unpack_rows

if TYPE_CHECKING:
    from verl.rollout.base import Response


@dataclass
class Turn:
    """Consecutive tokens of one author: `token_ids[start:end]` of the conversation."""

    role: Literal["assistant", "tool", "user"]
    start: int
    end: int
    messages: list[Message] = field(default_factory=list)
    """The turn's own; several for the answers to parallel calls."""
    records: list[ToolRecord] = field(default_factory=list)
    """Of the calls the model made in this turn."""
    reward: float | None = None
    prompt_ids: list[int] | None = None
    """Where a row of its own begins with this turn: what the model saw before it."""
    note: str | None = None
    """Of an agent that came through the endpoint: why this turn begins or leaves a history."""


class Conversation:
    """One sample of one prompt: token ids, mask, log-probs and policy version of every token after the prompt."""

    def __init__(self, uid: str, sample: int, prompt_ids: Sequence[int], messages: Sequence[Message]) -> None:
        self.uid = uid
        self.sample = sample
        self.prompt_ids = list(prompt_ids)
        self.messages = list(messages)
        """The prompt's, then those of every turn."""
        self.token_ids: list[int] = []
        self.response_mask: list[int] = []
        """1: drawn by the model."""
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        """A token the model did not draw has the version of the last one it drew."""
        self.turns: list[Turn] = []
        self.finish_reason = ""
        """stop, length, turns or abort: of the last model turn, unless the conversation ended for another reason."""
        self.environment_reward: float | None = None
        self.error: str | None = None
        """Why there can be no score: the environment could not begin, failed or is gone, or the user gave no answer."""
        self.scored = False
        """Whether its agent gave `environment_reward`, so that nothing else scores it."""
        self.metrics: dict[str, float] = {}
        """Of its agent loop."""
        self.requests: dict[str, Any] = {}
        """Of an agent that came through the endpoint: how many, what those that failed were answered, dropped turns."""
        self.reward_extra: dict[str, Any] = {}
        """What its agent returned with the reward."""
        self.extra: dict[str, Any] = {}
        """What its agent loop adds to `extra_info` for the reward function."""
        self.seconds = 0.0
        """From its start to its reward."""

    @property
    def policy_version(self) -> int:
        """The oldest version that drew a token."""
        drawn = [version for version, own in zip(self.versions, self.response_mask, strict=True) if own]
        return min(drawn, default=0)

    @property
    def model_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.role == "assistant"]

    @property
    def rows(self) -> list[tuple[int, int, list[int]]]:
        """The rows of a conversation whose turns have prompts: start and end of each in `token_ids`, and its prompt. A
        row ends with what the model drew last."""
        found: list[tuple[int, int, list[int]]] = []
        for turn in self.model_turns:
            if turn.prompt_ids is not None:
                found.append((turn.start, turn.end, turn.prompt_ids))
            elif found:
                start, _, prompt = found[-1]
                found[-1] = (start, turn.end, prompt)
        return found

    @property
    def drawn_ids(self) -> list[list[int]]:
        """What the model wrote, by turn. As one text, which is what rewards and readers get as the response, each turn
        begins on a new line."""
        return [self.token_ids[turn.start : turn.end] for turn in self.model_turns]

    def add_model_turn(
        self, response: Response, text: str, *, prompt_ids: Sequence[int] | None = None
    ) -> None:
        """What the model drew; `text` is its message. `prompt_ids`: what it saw, where its row begins."""
        if len(response.log_probs) != len(response.token_ids):
            raise ValueError(
                f"{response.request_id}: {len(response.token_ids)} tokens, {len(response.log_probs)} log-probs"
            )
        message: Message = {"role": "assistant", "content": text}
        if not self.turns and self.messages and self.messages[-1]["role"] == "assistant":
            # The prompt ends inside the model's first message; the template knows them only as one.
            begun = self.messages.pop()
            message = {**begun, "content": begun["content"] + text}
        turn = self._add("assistant", response.token_ids, [message])
        turn.prompt_ids = None if prompt_ids is None else list(prompt_ids)
        self.response_mask += [1] * len(response.token_ids)
        self.log_probs += response.log_probs
        self.versions += response.versions
        self.finish_reason = response.finish_reason

    def add_messages(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """The answer to the last model turn, of tools or of the user, as `ChatTurns.after` has it."""
        from_tools = any(message["role"] == "tool" or "tool_call_id" in message for message in messages)
        self._add("tool" if from_tools else "user", ids, messages)
        self.response_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [self.versions[-1] if self.versions else 0] * len(ids)

    def _add(
        self, role: Literal["assistant", "tool", "user"], ids: Sequence[int], messages: Sequence[Message]
    ) -> Turn:
        start = len(self.token_ids)
        self.token_ids += ids
        self.messages += messages
        self.turns.append(Turn(role, start, len(self.token_ids), list(messages)))
        return self.turns[-1]

    def add_reward(self, value: float) -> None:
        """Add to the reward of the last model turn."""
        turns = self.model_turns
        if not turns:
            raise ValueError(f"{self.uid}#{self.sample}: a reward of {value} before the model's first turn")
        turns[-1].reward = (turns[-1].reward or 0.0) + value

    def transcript(self) -> list[dict[str, Any]]:
        """The turns after the prompt as plain data."""
        lines: list[dict[str, Any]] = []
        for turn in self.turns:
            for message in turn.messages:
                line = {"role": turn.role, "content": message["content"]}
                if turn.records:
                    line["tool_calls"] = [_plain(record) for record in turn.records]
                if turn.reward is not None:
                    line["reward"] = turn.reward
                if turn.note is not None:
                    line["note"] = turn.note
                lines.append(line)
        return lines


def conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """`agents/...` and `tools/...` of a batch."""
    metrics: dict[str, float] = {}
    turns = [len(conversation.model_turns) for conversation in conversations]
    metrics["agents/turns/mean"] = sum(turns) / len(turns)
    metrics["agents/turns/max"] = float(max(turns))
    for reason in ("turns", "length", "abort"):
        share = sum(conversation.finish_reason == reason for conversation in conversations)
        metrics[f"agents/finish/{reason}"] = share / len(conversations)
    for name in sorted({name for each in conversations for name in each.metrics}):
        values = [each.metrics[name] for each in conversations if name in each.metrics]
        if name.startswith("agents/"):
            metrics[f"{name}/mean"] = sum(values) / len(values)
        elif name == "num_turns":
            metrics |= {
                "agents/num_turns/mean": sum(values) / len(values),
                "agents/num_turns/max": max(values),
            }
        else:
            metrics[f"timing_s/agents/{name}"] = sum(values) / len(values)
    records = [record for each in conversations for turn in each.turns for record in turn.records]
    metrics["tools/calls/all"] = float(len(records))
    for kind in get_args(FailureKind):
        metrics[f"tools/{kind}/all"] = float(sum(record.failure == kind for record in records))
    # Names the model made up, and calls without one, are only in the sums.
    for tool in sorted({record.name for record in records if record.failure in (None, "failed", "timeout")}):
        own = [record for record in records if record.name == tool]
        metrics[f"tools/calls/{tool}"] = float(len(own))
        metrics[f"tools/failed/{tool}"] = float(sum(record.failure == "failed" for record in own))
        metrics[f"tools/timeout/{tool}"] = float(sum(record.failure == "timeout" for record in own))
        metrics[f"timing_s/tools/{tool}"] = sum(record.seconds for record in own) / len(own)
    return metrics


def _plain(record: ToolRecord) -> dict[str, Any]:
    """Name, arguments and failure of a call; its result is the message that follows, and its time differs by run."""
    call: dict[str, Any] = {"name": record.name, "arguments": record.arguments}
    return call if record.failure is None else {**call, "failure": record.failure}


def prompt_messages(raw: Any) -> list[Message]:
    """The messages of a prompt; a string, which is templated already, counts as one of the user."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    return [dict(message) for message in raw]


# ---- finished conversations as plain data for a checkpoint; token lists are joined into few arrays

_TOKENS = {
    "prompt_ids": np.int64,
    "token_ids": np.int64,
    "response_mask": np.int64,
    "log_probs": np.float64,
    "versions": np.int64,
}
_FIELDS = ("uid", "sample", "messages", "finish_reason", "environment_reward", "error", "seconds")
_LOOP_FIELDS = ("scored", "metrics", "requests", "extra", "reward_extra")


def pack_conversations(conversations: Sequence[Conversation]) -> dict[str, Any]:
    prompts = [turn.prompt_ids for each in conversations for turn in each.turns]
    return {
        "conversations": [
            {name: getattr(each, name) for name in (*_FIELDS, *_LOOP_FIELDS)}
            | {
                # Their prompts are in an array; here is only whether there is one.
                "turns": [{**asdict(turn), "prompt_ids": turn.prompt_ids is not None} for turn in each.turns]
            }
            for each in conversations
        ],
        "turn_prompts": pack_rows([ids for ids in prompts if ids is not None], np.int64),
        **{
            name: pack_rows([getattr(each, name) for each in conversations], dtype)
            for name, dtype in _TOKENS.items()
        },
    }


def unpack_conversations(packed: dict[str, Any]) -> list[Conversation]:
    found = []
    columns = {name: unpack_rows(packed[name]) for name in _TOKENS}
    prompts = iter(unpack_rows(packed["turn_prompts"]))
    for number, plain in enumerate(packed["conversations"]):
        conversation = Conversation(plain["uid"], plain["sample"], (), ())
        for name in (*_FIELDS, *_LOOP_FIELDS):
            setattr(conversation, name, plain.get(name, getattr(conversation, name)))
        for name, rows in columns.items():
            setattr(conversation, name, rows[number])
        for turn in plain["turns"]:
            records = [ToolRecord(**record) for record in turn["records"]]
            prompt = next(prompts) if turn["prompt_ids"] else None
            conversation.turns.append(Turn(**{**turn, "records": records, "prompt_ids": prompt}))
        found.append(conversation)
    return found
