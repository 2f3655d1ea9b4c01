"""A pytest fixture that trains a tiny model through a user's agent, and says which of its calls can be trained.

Nothing is downloaded: the model has random weights, so that its turns are random words. Where a request offers tools,
about half of its turns call one of them, with arguments that fit the schema.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agents.base import ParsedTurn, Schema, ToolCall
from verl.agents.formats import ToolFormat, register_tool_format
from verl.config.load import load_ppo_config
from verl.data.write import write_rows
from verl.demo.model import build_model_folder
from verl.errors import ConfigError, MissingPackage
from verl.observe.jsonl import read_jsonl
from verl.trainer.main_ppo import run

try:
    import pytest
except ModuleNotFoundError:
    raise MissingPackage("verl.testing needs pytest: pip install pytest") from None

_LONGEST = 2048
"""Tokens of a prompt, and of what follows it."""
_TURN_TOKENS = 12
_FORMAT = "testing"


@dataclass(frozen=True)
class AgentReport:
    """What became of the requests of an agent."""

    folder: Path
    """Of the run."""
    sessions: list[dict[str, Any]]
    """The lines of `rollouts/*.jsonl`, with the step of each."""

    def problems(self, histories: int = 1) -> list[str]:
        """Why the agent is not trained as it should be; empty where it is."""
        count = len(self.sessions)
        failed = [each for each in self.sessions if each["error"] is not None]
        dropped = [each for each in self.sessions if each["requests"]["dropped"]]
        rewritten = [each for each in self.sessions if each["requests"]["histories"] > histories]
        found = {
            f"{len(failed)} of {count} sessions failed and are not trained": failed,
            f"{len(dropped)} of {count} sessions dropped a turn of the model": dropped,
            f"{len(rewritten)} of {count} sessions rewrote history: they have more than {histories}": rewritten,
            "nothing could be trained": not any(map(_trained_tokens, self.sessions)),
        }
        return [problem for problem, there in found.items() if there]

    def check(self, histories: int = 1) -> None:
        """Raise AssertionError, with the report, where a session failed, dropped a turn of the model or has more than
        so many histories."""
        if problems := self.problems(histories):
            raise AssertionError("\n".join([*problems, "", str(self)]))

    def __str__(self) -> str:
        total = {
            name: sum(each["requests"][name] for each in self.sessions)
            for name in ("asked", "failed", "joined", "drawn_tokens")
        }
        scores = [each["score"] for each in self.sessions if each["score"] is not None]
        lines = [
            f"{len(self.sessions)} sessions, {total['asked']} requests, of which {total['failed']} failed and "
            f"{total['joined']} were retries",
            f"trained: {sum(map(_trained_turns, self.sessions))} turns, {sum(map(_trained_tokens, self.sessions))} of "
            f"{total['drawn_tokens']} drawn tokens",
            f"reward: {sum(scores) / len(scores):.3f} on average" if scores else "reward: none",
        ]
        for number, session in enumerate(self.sessions, 1):
            lines += [f"session {number}, step {session['step']}: {_short(session)}", *_findings(session)]
        return "\n".join(lines)


def _trained_turns(session: Mapping[str, Any]) -> int:
    return (
        0 if session["error"] is not None else sum(turn["role"] == "assistant" for turn in session["turns"])
    )


def _trained_tokens(session: Mapping[str, Any]) -> int:
    return 0 if session["error"] is not None else session["requests"]["trained_tokens"]


def _short(session: Mapping[str, Any]) -> str:
    requests, score = session["requests"], session["score"]
    return (
        f"{requests['asked']} requests, {_trained_turns(session)} turns and {_trained_tokens(session)} tokens trained, "
        f"histories: {requests['histories']}, reward: {'none' if score is None else f'{score:g}'}, "
        f"ended by: {session['finish_reason']}"
    )


def _findings(session: Mapping[str, Any]) -> list[str]:
    """What a reader should know of a session, a line each."""
    requests = session["requests"]
    notes = [turn["note"] for turn in session["turns"] if "note" in turn]
    return [
        *([f"  failed: {session['error']}"] if session["error"] is not None else []),
        *(f"  history: {note}" for note in notes),
        *(f"  dropped: {turn['content'][:80]!r}: {turn['reason']}" for turn in requests["dropped"]),
        *(f"  refused: {text}" for text in requests["refused"]),
    ]


@pytest.fixture
def train_agent(tmp_path: Path) -> Callable[..., AgentReport]:
    """Trains a tiny model through an agent, on the CPU, as `verl train` does."""

    def train(
        agent: Callable[..., Any] | None = None,
        *,
        rows: Sequence[Mapping[str, Any]],
        command: str | None = None,
        reward: Callable[..., Any] | None = None,
        steps: int = 1,
        samples: int = 2,
        extra: Sequence[str] = (),
    ) -> AgentReport:
        """Train, and report what became of the requests.

        Args:
            agent: A function at the top of a file, as `rollout.multi_turn.agent` names it.
            rows: The rows of the data; each has a `prompt`, a list of messages.
            command: A program in place of the function.
            reward: A reward function, where the agent returns no reward.
            steps: Training steps; each takes all rows.
            samples: Sessions for each row.
            extra: More keys, as `verl train` takes them, e.g. `rollout.multi_turn.max_turns=20`.
        """
        if (agent is None) == (command is None):
            raise ConfigError("train_agent: give an agent, a function, or a command, not both")
        key, named = ("agent_command", command) if agent is None else ("agent", _place(agent))
        register_tool_format(_FORMAT)(OfferedCalls)
        folder = tmp_path / f"train_agent_{len(list(tmp_path.iterdir()))}"
        build_model_folder(folder / "model", 0, longest=2 * _LONGEST, turn_tokens=_TURN_TOKENS)
        write_rows(rows, folder / "rows.jsonl")
        overrides = [
            f"data.train_files={folder}/rows.jsonl",
            f"data.train_batch_size={len(rows)}",
            f"data.max_prompt_length={_LONGEST}",
            f"data.max_response_length={_LONGEST}",
            f"actor_rollout_ref.model.path={folder}/model",
            f"actor_rollout_ref.rollout.n={samples}",
            "actor_rollout_ref.rollout.max_num_seqs=16",
            f"actor_rollout_ref.rollout.multi_turn.{key}={named}",
            f"actor_rollout_ref.rollout.multi_turn.format={_FORMAT}",
            "algorithm.adv_estimator=grpo",
            "reward.max_failure_ratio=1.0",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}/run",
        ]
        result = run(load_ppo_config([*overrides, *extra]), reward_function=reward, live=False)
        files = sorted((result.folder / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
        lines = [{"step": int(file.stem), **line} for file in files for line in read_jsonl(file)]
        return AgentReport(result.folder, lines)

    return train


def _place(agent: Callable[..., Any]) -> str:
    """Where another process finds a function."""
    if "<" in agent.__qualname__:
        raise ConfigError(
            f"train_agent({agent.__qualname__}): the agent runs in processes of its own, which import it: give a "
            "function at the top of a file"
        )
    package = inspect.getmodule(agent).__package__  # type: ignore[union-attr]
    return f"{agent.__module__ if package else inspect.getfile(agent)}:{agent.__qualname__}"


class OfferedCalls(ToolFormat):
    """What an untrained model calls: one of the tools that the request offers, in about half of its turns."""

    example = "any text"

    def begin(self, name: str | None) -> str | None:
        return f"<call {name or ''}>"

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text)

    def read(self, text: str, tools: Sequence[Schema]) -> ParsedTurn:
        demanded, number = re.match("<call (.*?)>", text), zlib.crc32(text.strip().encode())
        if number % 2 and demanded is None:
            return ParsedTurn(text)
        functions = [tool["function"] for tool in tools]
        named = [
            each for each in functions if demanded is not None and each["name"] == demanded[1]
        ] or functions
        chosen = named[number // 2 % len(named)]
        body = chosen.get("parameters") or {}
        return ParsedTurn(text, (ToolCall(chosen["name"], _value(body, body), "call"),))


def _value(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """What fits a schema; an object has its required properties only."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _value((whole.get("$defs") or whole["definitions"])[name], whole)
    for choices in ("enum", "anyOf", "oneOf", "allOf"):
        if schema.get(choices):
            first = schema[choices][0]
            return first if choices == "enum" else _value(first, whole)
    properties = schema.get("properties") or {}
    values = {
        "integer": schema.get("minimum", 1),
        "number": schema.get("minimum", 1),
        "boolean": True,
        "array": [_value(schema.get("items") or {}, whole)] if schema.get("minItems") else [],
        "object": {name: _value(properties.get(name) or {}, whole) for name in schema.get("required") or ()},
        "null": None,
    }
    kind = schema.get("type", "object" if properties else "string")
    return schema.get("const", values.get(kind if isinstance(kind, str) else kind[0], "text"))
