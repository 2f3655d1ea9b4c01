"""Runs of several turns with a random model: a tokenizer of numbers, a format that takes every turn for a tool call,
and a record of what was asked of the engine and what became of it."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import tiny_run
from verl.agents.base import ParsedTurn, ToolCall
from verl.agents.conversation import Conversation
from verl.agents.formats import ToolFormat, register_tool_format
from verl.rollout.base import Request, Response, RolloutEngine
from verl.rollout.sampler import Sampler
from verl.trainer.loop import RLLoop

SPECIAL = ["<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>"]
NUMBERS = 96
ENDS = list(range(len(SPECIAL), len(SPECIAL) + 24))
"""Numbers that end a turn, so that turns have a few tokens."""
TEMPLATE = (
    "{% if tools %}<|tool|> {{ tools | length }}<eos>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TOOLS = '''
import random
import time

DELAYS = random.SystemRandom()


def lookup(key: int) -> str:
    """Look something up, sooner or later.

    Args:
        key: what to look up
    """
    time.sleep(DELAYS.random() * {longest})
    return "%d %d" % (key % 96, key // 96 % 96)
'''


def number_of(text: str) -> int:
    return zlib.crc32(text.encode()) % 10_000


def lookup(text: str) -> ToolCall:
    return ToolCall("lookup", {"key": number_of(text)})


def looked_up(text: str) -> str:
    """What the tool answers."""
    key = number_of(text)
    return f"{key % 96} {key // 96 % 96}"


@register_tool_format("turns_are_calls")
class EveryTurn(ToolFormat):
    """Takes every turn for the call that `call` makes of its text."""

    example = ""
    call: Callable[[str], ToolCall] = staticmethod(lookup)

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn("", (type(self).call(text),))


def chat_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *map(str, range(NUMBERS))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chat_model(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def save_task(folder: Path, longest_delay_s: float = 0.05) -> Path:
    """Prompts of some numbers; the reward differs from sample to sample. `tools.py` has the tool `lookup`."""
    draws = random.Random(0)
    rows = [
        {
            "prompt": [
                {"role": "user", "content": " ".join(str(draws.randrange(NUMBERS)) for _ in range(6))}
            ],
            "reward_model": {"ground_truth": ""},
            "data_source": "numbers",
        }
        for _ in range(16)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "digits_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return solution_str.count('1') / (1 + len(solution_str))\n"
    )
    (folder / "tools.py").write_text(TOOLS.format(longest=longest_delay_s))
    return folder


def agent_run(model: Path, task: Path, folder: Path, *extra: str, turns: int = 3) -> list[str]:
    """The command line of a run of one step with the tool `lookup`, to which `extra` may add others."""
    return tiny_run(
        model,
        task,
        "data.train_batch_size=4",
        "data.max_response_length=48",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        f"actor_rollout_ref.rollout.stop_token_ids={ENDS}",
        f"{MULTI_TURN}.enable=True",
        f"{MULTI_TURN}.format=turns_are_calls",
        f"{MULTI_TURN}.max_turns={turns}",
        f"{MULTI_TURN}.tool_timeout_s=600",
        "trainer.plugins=[tests.agent_run]",
        "trainer.total_training_steps=1",
        *extra,
        folder=folder,
    )


class RecordingEngine:
    """Passes everything on to an engine and keeps requests and responses. Nothing is generated before each conversation
    has asked, so that engines of several ranks are all used."""

    def __init__(self, engine: RolloutEngine, conversations: int) -> None:
        self._engine, self._conversations = engine, conversations
        self.requests: dict[str, Request] = {}
        self.responses: dict[str, Response] = {}

    def submit(self, requests: list[Request]) -> None:
        self.requests |= {request.request_id: request for request in requests}
        self._engine.submit(requests)

    def poll(self, timeout_s: float | None = None) -> list[Response]:
        if len(self.requests) < self._conversations:
            time.sleep(0.001)
            return []
        responses = self._engine.poll(timeout_s)
        self.responses |= {response.request_id: response for response in responses}
        return responses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass
class Batch:
    """One batch of conversations."""

    engine: RecordingEngine
    conversations: list[Conversation]
    prefilled: int
    """Prompt tokens that the engine has computed since it was built."""

    @property
    def rows(self) -> list[tuple[list[int], list[int], list[int]]]:
        return [(talk.prompt_ids, talk.token_ids, talk.response_mask) for talk in self.conversations]

    @property
    def new_tokens(self) -> int:
        """Prompt tokens to compute where all that a conversation has computed before is kept."""
        count = 0
        for talk in self.conversations:
            seen = 0
            for number, turn in enumerate(talk.model_turns):
                prompt = self.engine.requests[f"{talk.uid}#{talk.sample}/{number}"].prompt_ids
                count += len(prompt) - seen
                seen = len(talk.prompt_ids) + turn.end - 1  # the last token drawn was never fed
        return count

    def check(self, answer: Callable[[str], str], tokenizer: Any, *, most_turns: int) -> None:
        """Every conversation is what the engine was asked and answered, and `answer` of each turn's text."""
        assert {talk.finish_reason for talk in self.conversations} <= {"turns", "length"}
        assert any(len(talk.model_turns) == most_turns for talk in self.conversations)
        for talk in self.conversations:
            roles = [turn.role for turn in talk.turns]
            assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"]
            text = ""
            for number, turn in enumerate(talk.turns):
                ids, mask = talk.token_ids[turn.start : turn.end], talk.response_mask[turn.start : turn.end]
                if turn.role == "assistant":
                    name = f"{talk.uid}#{talk.sample}/{number // 2}"
                    seen = [*talk.prompt_ids, *talk.token_ids[: turn.start]]
                    response = self.engine.responses[name]
                    assert self.engine.requests[name].prompt_ids == seen
                    assert ids == response.token_ids and set(mask) == {1}
                    assert talk.log_probs[turn.start : turn.end] == response.log_probs
                    text = turn.messages[0]["content"]
                    called = [(record.result, record.failure) for record in turn.records]
                    assert called == ([(answer(text), None)] if response.finish_reason == "stop" else [])
                else:
                    # After the end of the turn, where the model ended it with another token.
                    written = tokenizer.encode(f"<|tool|> {answer(text)}<eos><|assistant|>")
                    assert set(mask) == {0} and ids[-len(written) :] == written, tokenizer.decode(ids)
                    assert ids[: -len(written)] in ([], [tokenizer.eos_token_id])


@dataclass
class Record:
    """What happened in the runs of this process."""

    batches: list[Batch] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    """The batch that each step trained on."""


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    record = Record()
    step, collect = RLLoop.step, Sampler.collect

    def collect_and_keep(sampler: Any, prompts: Any, settings: Any, *args: Any) -> Any:
        engine = sampler.engine
        sampler.engine = recording = RecordingEngine(engine, len(prompts) * settings.n)
        conversations = collect(sampler, prompts, settings, *args)
        record.batches.append(Batch(recording, conversations, engine.stats().prefilled_tokens))
        return conversations

    def step_and_keep(self: Any, *args: Any) -> Any:
        metrics = step(self, *args)
        record.steps.append(self.batch)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "collect", collect_and_keep)
        patch.setattr(RLLoop, "step", step_and_keep)
        yield record
