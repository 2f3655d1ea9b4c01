"""Whole runs whose tools fail, whose server goes away, and whose rows choose their environment; `verl generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.agents.runs import KEY, WORLD, Server, exact, functions, reward
from tests.agents.talking import letter_rows, plan_format, write_rows
from tests.tiny_run import read_metrics
from verl.errors import DataError

# ---- what goes wrong


FAULTS = '''
import os, subprocess, sys, time

def hang(text: str) -> str:
    """Hang.

    Args:
        text: anything
    """
    time.sleep(3600)

def late(text: str) -> str:
    """Answer late.

    Args:
        text: anything
    """
    time.sleep(4)
    return "late"

def boom(text: str) -> str:
    """Raise.

    Args:
        text: anything
    """
    raise ValueError("boom")

def fork(text: str) -> str:
    """Leave a process behind, and die.

    Args:
        text: anything
    """
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(1)

def flood(text: str) -> str:
    """Write a lot.

    Args:
        text: anything
    """
    for _ in range(1000):
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
    return "a " * 1_000_000

def die(text: str) -> str:
    """Die.

    Args:
        text: anything
    """
    os.kill(os.getpid(), 9)

def number(count: int) -> str:
    """Take a number.

    Args:
        count: a number
    """
    return "a"
'''
OUTCOMES = {
    "hang": "timeout",
    "late": "timeout",
    "boom": "failed",
    "fork": "failed",
    "die": "failed",
    "flood": None,
    "nothing": "unknown",
    "number": "malformed",
    "": "malformed",
}
plan_format("faults", [[name] for name in OUTCOMES])


@pytest.mark.slow(seconds=20)
def test_faults_of_tools_cost_only_themselves(
    train, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*functions(write, FAULTS), f"{KEY}.format=faults", f"{KEY}.tool_timeout_s=2", *reward(tmp_path)]
    ran = train(*more, "data.max_response_length=200", f"{KEY}.max_tool_response_length=20")
    found: dict[str, list[Any]] = {name: [] for name in OUTCOMES}
    for step, batch in ran.batches.items():
        talks = batch.non_tensor_batch["conversation"]
        assert len(talks) == 12 and all(talk.error is None for talk in talks), "every sample has its score"
        records = [record for talk in talks for turn in talk.turns for record in turn.records]
        row = ran.rows[step - 1]
        assert row["tools/calls/all"] == len(records) and row["reward/failed"] == 0
        for kind in ("failed", "timeout", "unknown", "malformed"):
            assert row[f"tools/{kind}/all"] == sum(record.failure == kind for record in records)
        for record in records:
            found[record.name].append(record.failure)
            # On a busy machine the others may miss the deadline, too.
            assert record.failure in (OUTCOMES[record.name], "timeout"), record
            if record.name in ("hang", "boom", "die", "flood") and f"tools/calls/{record.name}" in row:
                counted = sum(r.name == record.name and r.failure == "timeout" for r in records)
                assert row[f"tools/timeout/{record.name}"] == counted
        for talk in talks:
            for turn in talk.turns:
                assert turn.role != "tool" or all(len(m["content"].split()) < 200 for m in turn.messages)
    assert all(found.values()), "every fault happened"
    assert ran.rows[-1]["actor/grad_norm"] > 0


FAILING_USER = """
class World:
    def reset(self, start, **row):
        self.start, self.asked = start, 0

    def user(self, reply):
        if self.start % 3 == 0:
            raise ValueError("the dragon ate you")
        self.asked += 1
        return "begin with h" if self.asked < 2 else None

    def reward(self):
        return 1.0
"""


def test_a_conversation_whose_environment_cannot_answer_is_not_trained_on(train) -> None:
    """Its environment would give a reward; no tool was called."""
    more = ["reward.max_failure_ratio=1", "trainer.total_training_steps=1", "data.shuffle=False"]
    ran = train(*more, f"{KEY}.format=hermes", world=FAILING_USER)
    batch, rows = ran.batches[1], ran.rollouts(1)
    failed = [talk.error is not None for talk in batch.non_tensor_batch["conversation"]]
    assert failed == [True] * 4 + [False] * 8
    assert (batch.batch["response_mask"].sum(-1) == 0).tolist() == failed
    assert [row["score"] is None for row in rows] == failed
    assert rows[0]["error"] == "the user gave no answer: user failed: ValueError: the dragon ate you"
    own = [[turn["content"] for turn in row["turns"] if turn["role"] == "assistant"] for row in rows]
    assert max(map(len, own)) == 2 and any(turn["role"] == "user" for turn in rows[-1]["turns"])
    assert [row["response"] for row in rows] == ["\n".join(texts) for texts in own]
    (metrics,) = ran.rows
    assert metrics["reward/failed"] == 4 and metrics["tools/calls/all"] == metrics["tools/failed/all"] == 0
    (finding,) = [each for each in metrics["findings"] if each["rule"] == "rewards_failed"]
    assert finding["try"].startswith(
        "to fix the reward function, environment, agent loop or simulated user (rollouts/"
    )


@pytest.mark.slow(seconds=1)
def test_a_model_that_calls_wrongly_is_told_what_exists(
    train, write: Callable[..., str], tmp_path: Path
) -> None:
    more = [*functions(write), *reward(tmp_path), "trainer.total_training_steps=1"]
    ran = train(*more)
    talks = ran.batches[1].non_tensor_batch["conversation"]
    records = [record for talk in talks for turn in talk.turns for record in turn.records]
    told = {record.failure: record.result for record in records}
    assert told["unknown"] == "Error: there is no tool 'nothing'; the tools are: ask."
    assert "it is empty" in told["malformed"] and told[None].startswith("heard ")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("while_", ["training", "validating"])
def test_a_lost_tool_server_stops_the_run_which_then_resumes(
    keys, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, while_: str
) -> None:
    from verl.agents import remote
    from verl.trainer import loop
    from verl.trainer.main_ppo import main

    monkeypatch.setattr(remote, "LOST_AFTER_S", 0.3)
    val = write_rows(tmp_path / "val.jsonl", letter_rows(2))
    more = [
        f"{KEY}.environment=[]",
        f"{KEY}.tool_server={server.address}",
        *reward(tmp_path),
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        f"data.val_files={val}",
    ]
    assert main(keys(*more, folder="whole")) == 0
    name = "step" if while_ == "training" else "validate"
    method = getattr(loop.RLLoop, name)

    def watched(self: Any, *given: Any) -> Any:
        if self.step_number == (3 if while_ == "training" else 2):
            server.stop()
        return method(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(loop.RLLoop, name, watched)
        assert main(keys(*more, folder="parts")) == 3
    said = capfd.readouterr().err
    assert f"{server.address} went away" in said and "resume" in said
    assert (tmp_path / "parts" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    server.start()
    assert main(keys(*more, folder="parts")) == 0
    whole, parts = (exact(read_metrics(tmp_path / folder)) for folder in ("whole", "parts"))
    assert [row["step"] for row in parts] == [row["step"] for row in whole]
    assert parts[-2:] == whole[-2:]


# ---- generating a file


@pytest.mark.slow(seconds=4)
def test_generation_writes_the_turns_and_resumes(
    model: Path, write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer.generation import Journal
    from verl.trainer.main_generation import main

    data = write_rows(tmp_path / "rows.jsonl", letter_rows(7, start=lambda number: number))

    def keys(output: str, *more: str) -> list[str]:
        return [
            f"model.path={model}",
            f"data.path={data}",
            f"data.output_path={tmp_path / output}",
            "data.max_prompt_length=32",
            "data.max_response_length=64",
            "data.save_token_ids=True",
            "rollout.n=2",
            "rollout.multi_turn.enable=True",
            f"rollout.multi_turn.environment={write(WORLD, 'world.py')}",
            "rollout.multi_turn.format=ask",
            "rollout.multi_turn.max_turns=3",
            "trainer.device=cpu",
            *more,
        ]

    assert main(keys("whole.parquet")) == 0
    whole = pq.read_table(tmp_path / "whole.parquet").to_pylist()
    for row in whole:
        for turns, response, ids in zip(
            row["responses_turns"], row["responses"], row["responses_token_ids"], strict=True
        ):
            lines = json.loads(turns)
            own = " ".join(line["content"] for line in lines if line["role"] == "assistant")
            assert own.split() == response.split() and len(ids) >= len(response.split())
            assert {line["role"] for line in lines} <= {"assistant", "tool", "user"}
    assert any(len(json.loads(turns)) > 1 for row in whole for turns in row["responses_turns"])

    add, written = Journal.add, []

    def stopping(self: Any, row: int, record: Any) -> None:
        add(self, row, record)
        written.append(row)
        if len(written) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stopping)
        assert main(keys("parts.parquet", "data.batch_size=4")) == 130
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", lambda self, row, record: (written.append(row), add(self, row, record)))
        assert main(keys("parts.parquet", "data.batch_size=2")) == 0
    assert sorted(written) == list(range(7)), "each row once"
    assert pq.read_table(tmp_path / "parts.parquet").to_pylist() == whole


# ---- columns of the data


TWO = WORLD + WORLD.replace("class World", "class Other").replace('"now "', '"heard "')


@pytest.mark.slow(seconds=2)
def test_rows_name_their_environment(train, keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["World", "Other"]
    rows = letter_rows(12, start=1, environment=lambda number: names[number % 2])
    rows[4] |= {"environment": None, "extra_info": {"interaction_kwargs": {"name": "Other"}}}
    rows[5] |= {"agent_name": "single_turn_agent", "environment": None}
    data = write_rows(tmp_path / "two.jsonl", rows)
    both = f"{KEY}.environment=[{tmp_path}/world.py:World,{tmp_path}/world.py:Other]"
    more = [f"data.train_files={data}", "data.train_batch_size=12", "data.shuffle=False", both]
    ran = train(*more, "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1", world=TWO)
    batch = ran.batches[1]
    for number, talk in enumerate(batch.non_tensor_batch["conversation"]):
        row = number // 2
        answers = [record.result.split()[0] for turn in talk.turns for record in turn.records]
        word = "heard" if row % 2 or row == 4 else "now"
        assert set(answers) <= {word, "Error:"}
        if row == 5:
            assert len(talk.turns) == 1 and talk.environment_reward is None
        else:
            assert talk.environment_reward is not None

    from verl.workers import placement

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(placement, "build_group", never)
    rows[7]["environment"] = "Word"
    write_rows(data, rows)
    with pytest.raises(DataError, match=r"row 7 of .*two\.jsonl names .*'Word'.*World, Other"):
        train(*more, world=TWO, folder="refused")


SCORE = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class Score(BaseTool):
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth, self.calls = ground_truth, 0
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls += 1
        return ToolResponse(text=f"heard {self.truth}"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 10.0 * self.calls
"""
SCORE_YAML = """
tools:
  - class_name: score_tool.py:Score
    config: {}
    tool_schema:
      type: function
      function:
        name: ask
        description: Score.
        parameters: {type: object, properties: {text: {type: string, description: any}}, required: [text]}
"""
INTERACTION = """
from verl.interactions.base import BaseInteraction

class Hint(BaseInteraction):
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, f"begin with {self.truth}", 0.125, {}
"""


@pytest.mark.slow(seconds=2)
def test_tools_and_interactions_of_yaml_files(train, write: Callable[..., str], tmp_path: Path) -> None:
    write(SCORE, "score_tool.py")
    write(INTERACTION, "hint.py")
    tools = write(SCORE_YAML, "tools.yaml")
    hint = write("interaction:\n  - name: hint\n    class_name: hint.py:Hint\n    config: {}\n", "hint.yaml")
    rows = letter_rows(
        6,
        tools_kwargs=lambda number: {"ask": {"create_kwargs": {"ground_truth": "abcdefgh"[number]}}},
        interaction_kwargs=lambda number: {"name": "hint", "ground_truth": "abcdefgh"[number]},
        agent_name="tool_agent",
        data_source="qa_em",
    )
    data = write_rows(tmp_path / "kwargs.jsonl", rows)
    ran = train(
        f"data.train_files={data}",
        "data.shuffle=False",
        f"{KEY}.environment=[]",
        f"{KEY}.tool_config_path={tools}",
        f"{KEY}.interaction_config_path={hint}",
        "trainer.total_training_steps=1",
    )
    talks = ran.batches[1].non_tensor_batch["conversation"]
    for number, talk in enumerate(talks):
        letter = "abcdefgh"[number // 4]
        ran_calls = [r for turn in talk.turns for r in turn.records if r.name == "ask" and r.failure is None]
        assert all(record.result == f"heard {letter}" for record in ran_calls)
        said = {m["content"] for turn in talk.turns if turn.role == "user" for m in turn.messages}
        assert said <= {f"begin with {letter}"}
        assert talk.environment_reward == 10.0 * len(ran_calls)
    assert any(turn.role == "user" for talk in talks for turn in talk.turns)
    assert any(turn.reward for talk in talks for turn in talk.turns)
    assert ran.rows[-1]["reward/calls"] == len(talks), "they only add to the scorer of the data source"
