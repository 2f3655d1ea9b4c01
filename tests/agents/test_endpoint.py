"""Agents of users that come through the endpoint: the rows are those of the run's own conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.agents.clients import CLIENT
from tests.agents.runs import KEY
from verl.errors import ConfigError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

WORLD = """
class World:
    def reset(self, **row):
        self.turns = 0

    def user(self, reply):
        self.turns += 1
        return "begin with h" if self.turns < 3 else None

    def reward(self):
        return 0.5 * self.turns
"""
AGENT = (
    CLIENT
    + """

def agent(row, base_url, api_key):
    client, messages, turns = Client(base_url, api_key), list(row["prompt"]), 0
    for number in range(3):
        messages.append(client.say(messages, stream=row["start"] % 2 == 1))
        turns += 1
        messages.append({"role": "user", "content": "begin with h"})
    return 0.5 * turns
"""
)
PLAIN = f"{KEY}.format=hermes"
EQUAL = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "response_mask",
    "token_versions",
    "advantages",
)


@pytest.fixture
def endpoint(train: Callable[..., Any], write: Callable[..., str]) -> Callable[..., Any]:
    """Train with an agent of one's own."""

    def go(text: str, *more: str, folder: str = "endpoint") -> Any:
        path = write(text, f"{folder}_agent.py")
        own = (f"{KEY}.enable=False", f"{KEY}.environment=[]", f"{KEY}.agent={path}:agent", PLAIN)
        return train(*own, *more, folder=folder)

    return go


def same_rows(ours: Any, theirs: Any) -> None:
    for step in (1, 2):
        own, other = ours.batches[step].batch, theirs.batches[step].batch
        for name in EQUAL:
            torch.testing.assert_close(own[name], other[name], rtol=0, atol=0, msg=name)
        for name in ("rollout_log_probs", "old_log_probs"):
            if name in own:
                torch.testing.assert_close(own[name], other[name], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        assert mine["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-5)


def test_an_agent_gives_the_rows_and_gradients_of_a_conversation_of_ours(train, endpoint) -> None:
    ours = train(PLAIN, world=WORLD, folder="ours")
    theirs = endpoint(AGENT)
    same_rows(ours, theirs)
    talks = theirs.batches[2].non_tensor_batch["conversation"]
    assert {len(talk.model_turns) for talk in talks} == {3}
    assert theirs.rows[-1]["agents/chains/mean"] == 1 and theirs.rows[-1]["reward/failed"] == 0
