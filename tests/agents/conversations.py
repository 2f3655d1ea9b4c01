"""Conversations over a real engine with real tool processes, for tests of the runner and of streams."""

from __future__ import annotations

from typing import Any

from tests.agents.chat_tokenizers import chat_tokenizer
from tests.agents.talking import plan_format, talking_model
from verl.agents.conversation import Conversation
from verl.agents.runner import ConversationRunner, ConversationSampler
from verl.config.schema import DataConfig
from verl.config.sections.rollout import MultiTurnConfig
from verl.data.proto import DataProto, object_column
from verl.rollout.base import GenerationSettings, Request, Response, SamplingParams
from verl.rollout.native import Limits, NativeRollout

plan_format("runner", [[], ["ask"], ["ask", "ask"], [""], [], ["ask", "nothing"]])

TOOLS = '''
import asyncio
from random import SystemRandom

async def ask(text: str) -> str:
    """Answer.

    Args:
        text: anything
    """
    await asyncio.sleep(SystemRandom().random() * 0.03)
    return f"heard {text[::-1]}"
'''
WORLD = '''
import time
from random import SystemRandom

class World:
    def reset(self, start, **row):
        self.sum, self.turns, self.replies = start, 0, 0
        return f"Start at {start}."

    def ask(self, text: str) -> str:
        """Add.

        Args:
            text: anything
        """
        time.sleep(SystemRandom().random() * 0.03)
        self.sum += len(text)
        return f"now {self.sum}"

    def user(self, reply):
        self.replies += 1
        return None if self.replies > 1 else f"{self.sum} it is. Go on."

    def turn_reward(self):
        self.turns += 1
        return 0.25 * self.turns

    def reward(self):
        return float(self.sum)
'''


class Talk:
    """A runner with a model and an engine; remembers what the engine was asked and answered."""

    def __init__(self, family: str, cfg: MultiTurnConfig, **limits: Any) -> None:
        self.tokenizer = chat_tokenizer(family)
        self.cfg = cfg
        door = None
        if cfg.own_agent:
            from verl.serve.training import SessionServer

            door = SessionServer()
        data = DataConfig(max_prompt_length=1900)
        self.runner = ConversationRunner(cfg, data, self.tokenizer, door=door)
        try:
            ends = self.runner.turns.end_token_ids
            letters = self.tokenizer.convert_tokens_to_ids(["a", "b", "ab", "c"])
            self.model = talking_model(len(self.tokenizer), letters, ends or [self.tokenizer.eos_token_id])
            self.engine = self.new_engine(**limits)
        except BaseException:
            self.runner.close()
            raise
        self.requests: dict[str, Request] = {}
        self.responses: dict[str, Response] = {}
        self.interrupted: set[str] = set()

    def new_engine(self, **limits: Any) -> NativeRollout:
        engine = NativeRollout(self.model, self.tokenizer, Limits(**{"max_num_seqs": 64, **limits}))
        submit, poll = engine.submit, engine.poll

        def watched_submit(requests: Any) -> None:
            requests = list(requests)
            for request in requests:
                resumed = request.request_id in self.interrupted
                assert request.request_id not in self.requests or resumed, "asked twice"
                self.requests[request.request_id] = request
            submit(requests)

        def watched_poll(timeout_s: float | None = None) -> list[Response]:
            found = poll(timeout_s)
            self.responses |= {response.request_id: response for response in found}
            self.interrupted |= {r.request_id for r in found if r.finish_reason == "abort"}
            return found

        engine.submit, engine.poll = watched_submit, watched_poll  # type: ignore[method-assign]
        return engine

    def sampler(self) -> ConversationSampler:
        return self.runner.sampler(self.engine)

    def prompts(self, numbers: Any) -> DataProto:
        rows = [
            {
                "uid": f"p{number}",
                "raw_prompt": [{"role": "user", "content": f"Question {number}?"}],
                "columns": {"start": number},
                "data_source": "test",
                "ground_truth": None,
                "extra_info": {},
            }
            for number in numbers
        ]
        for row in rows:
            schemas = self.runner.agents.schemas(row["columns"])
            row["prompt_ids"] = self.runner.turns.prompt(row["raw_prompt"], schemas)
        return DataProto.from_dict(
            non_tensors={name: object_column([row[name] for row in rows]) for name in rows[0]}
        )

    def run(
        self, numbers: Any, n: int = 2, *, max_tokens: int = 900, seed: int = 3, **changes: Any
    ) -> list[Conversation]:
        self.requests.clear()
        self.responses.clear()
        settings = GenerationSettings(SamplingParams(max_tokens=max_tokens, **changes), n=n, seed=seed)
        return self.runner.run(self.engine, self.prompts(numbers), settings)


def settings_of(**changes: Any) -> MultiTurnConfig:
    return MultiTurnConfig(
        **{"enable": True, "format": "runner", "max_turns": 4, "max_parallel_calls": 2, **changes}
    )


def content(conversation: Conversation) -> tuple[Any, ...]:
    """What must not depend on times."""
    turns = [(turn.role, turn.start, turn.end, turn.reward, turn.messages) for turn in conversation.turns]
    return (
        conversation.uid,
        conversation.sample,
        conversation.prompt_ids,
        conversation.token_ids,
        conversation.response_mask,
        turns,
        conversation.transcript(),
        conversation.finish_reason,
        conversation.environment_reward,
        conversation.error,
    )


def by_name(conversations: list[Conversation]) -> dict[str, Any]:
    return {f"{c.uid}#{c.sample}": content(c) for c in conversations}
