"""Agents of users that come through the endpoint: the rows are those of the run's own conversations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.agents.clients import AGENT
from tests.agents.runs import KEY, reward
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


@pytest.mark.slow(seconds=8)
def test_an_agent_gives_the_rows_and_gradients_of_a_conversation_of_ours(train, endpoint) -> None:
    ours = train(PLAIN, world=WORLD, folder="ours")
    theirs = endpoint(AGENT)
    same_rows(ours, theirs)
    talks = theirs.batches[2].non_tensor_batch["conversation"]
    assert {len(talk.model_turns) for talk in talks} == {3}
    assert theirs.rows[-1]["agents/chains/mean"] == 1 and theirs.rows[-1]["reward/failed"] == 0


@pytest.mark.slow(seconds=6)
def test_each_history_is_a_row_and_the_advantage_is_of_the_session(train, endpoint) -> None:
    """Odd rows ask a second question of its own; with chains=longest it is left out."""
    text = AGENT.replace(
        "    return 0.5 * turns",
        """    if row["start"] % 2:
        client.say([{"role": "user", "content": "begin with a"}])
    return float(row["start"] % 3)""",
    )
    every = endpoint(text, f"{KEY}.max_turns=4", folder="every")
    longest = endpoint(text, f"{KEY}.max_turns=4", f"{KEY}.chains=longest", folder="longest")
    for step in (1, 2):
        batch, alone = every.batches[step], longest.batches[step]
        talks = batch.non_tensor_batch["conversation"]
        starts = [int(columns["start"]) for columns in batch.non_tensor_batch["columns"]]
        sessions = list(batch.non_tensor_batch["session"])
        assert len(alone) == len(set(sessions)) == 12 and len(batch) == 12 + sum(
            start % 2 for start in (int(c["start"]) for c in alone.non_tensor_batch["columns"])
        )
        for name in set(sessions):
            rows = [row for row, session in enumerate(sessions) if session == name]
            assert len(rows) == 1 + starts[rows[0]] % 2
            mask = batch.batch["response_mask"][rows].bool()
            assert len(set(batch.batch["advantages"][rows][mask].tolist())) == 1
            assert int(mask.sum()) == sum(talks[rows[0]].response_mask)
        assert every.rows[step - 1]["agents/chains/mean"] == pytest.approx(len(batch) / 12)
        assert every.rows[step - 1]["agents/dropped_turns/mean"] == 0
    assert longest.rows[0]["agents/dropped_turns/mean"] > 0


PROGRAM = """
import json
import os
import sys
import urllib.request

row, url = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"]
request = urllib.request.Request(
    f"{url}/chat/completions",
    json.dumps({"messages": row["prompt"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
json.load(urllib.request.urlopen(request))
print("working on it")
if row["start"] % 3 == 1:
    sys.exit(3)
print(json.dumps({"reward": 0.5}) if row["start"] % 3 == 0 else "done")
"""


@pytest.mark.slow(seconds=4)
def test_a_program_gets_the_row_and_may_print_its_reward(train, write, tmp_path) -> None:
    """What it does not score, and with agent_failure=score what failed, is scored by the reward function."""
    path = write(PROGRAM, "program.py")
    write(
        "def compute_score(response, extra_info):\n    return 2.0 if 'agent_error' in extra_info else 1.0\n",
        "score.py",
    )
    own = (f"{KEY}.enable=False", f"{KEY}.environment=[]", f"{KEY}.agent_command={sys.executable} {path}")
    for failure, expected in (("mask", {0.5, 1.0}), ("score", {0.5, 1.0, 2.0})):
        ran = train(
            *own,
            *reward(tmp_path),
            f"{KEY}.agent_failure={failure}",
            "reward.max_failure_ratio=1",
            folder=failure,
        )
        for batch in ran.batches.values():
            starts = [int(columns["start"]) for columns in batch.non_tensor_batch["columns"]]
            scores = batch.batch["token_level_scores"].sum(-1).tolist()
            errors = batch.non_tensor_batch["reward_error"]
            for start, score, error in zip(starts, scores, errors, strict=True):
                failed = start % 3 == 1
                assert (error is not None and "status 3" in error) == (failed and failure == "mask")
                assert error or score == (0.5, 2.0, 1.0)[start % 3]
                assert error or score in expected


def test_keys_that_contradict_are_named(endpoint, write) -> None:
    for key in (f"{KEY}.agent_command=prog", f"{KEY}.tools={write('x = 1', 't.py')}"):
        with pytest.raises(ConfigError, match=r"multi_turn\.agent' runs whole conversations"):
            endpoint(AGENT, key)
    with pytest.raises(ConfigError, match="there is no function agent"):
        endpoint("def other(row):\n    pass\n")
