"""Agent loops written for verl: the same rows and weights as a conversation of ours, audited, in every mode."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.agents.loops import AGENT, LOOP, TWO
from tests.agents.runs import KEY, TOOLS, exact
from tests.agents.talking import letter_rows, write_rows
from verl import cli
from verl.errors import ConfigError, ToolsLost

WORLD = '''
class World:
    def reset(self, start, **row):
        self.sum = start

    def ask(self, text: str) -> str:
        """Count.

        Args:
            text: anything
        """
        self.sum += len(text)
        return "now " + "abcdefgh"[self.sum % 8]

    def reward(self):
        return float(self.sum % 5)
'''
SAVED = ("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]")


@pytest.fixture
def loop(train: Callable[..., Any], write: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """Train with agent loops instead of the environment; `text` replaces parts of `LOOP`."""

    def go(*more: str, folder: str = "loop", name: str = "counting", text: str = LOOP) -> Any:
        target = f"loops_{tmp_path.name}_{folder}.py".replace("-", "_")
        write(text, target)
        kind = text.split(f'@register("{name}")\nclass ')[1].split("(")[0]
        entries = write(json.dumps([{"name": name, "_target_": f"{target}:{kind}"}]), f"{folder}.yaml")
        own = (f"{KEY}.enable=False", f"{KEY}.environment=[]", f"{AGENT}.agent_loop_config_path={entries}")
        return train(*own, f"{AGENT}.default_agent_loop={name}", *TWO, *more, folder=folder)

    return go


def compared(ran: Any) -> list[dict[str, Any]]:
    """The metrics of a run, without those of tools and agents."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("agents/", "tools/", "timing_s/", "reward/"))
        }
        for row in exact(ran.rows)
    ]


def weights(ran: Any) -> dict[str, torch.Tensor]:
    (path,) = ran.folder.glob("global_step_2/actor/huggingface/model.safetensors")
    return load_file(path)


def test_a_loop_of_two_turns_gives_the_rows_and_weights_of_an_environment(train, loop) -> None:
    ours = train(*TWO, *SAVED, world=WORLD, folder="ours")
    theirs = loop(*SAVED)
    for step in (1, 2):
        own, other = ours.batches[step].batch, theirs.batches[step].batch
        for name in (
            "prompts",
            "responses",
            "response_mask",
            "token_versions",
            "token_level_scores",
            "advantages",
        ):
            torch.testing.assert_close(own[name], other[name], rtol=0, atol=0)
        torch.testing.assert_close(own["rollout_log_probs"], other["rollout_log_probs"], rtol=1e-5, atol=1e-5)
        talks = theirs.batches[step].non_tensor_batch["conversation"]
        assert {len(talk.model_turns) for talk in talks} == {1, 2}
        assert (own["response_mask"].sum(-1) < own["attention_mask"].sum(-1)).all()
    assert compared(theirs) == compared(ours)
    mine, saved = weights(ours), weights(theirs)
    assert mine.keys() == saved.keys() and all(torch.equal(mine[name], saved[name]) for name in mine)
    row = theirs.rows[-1]
    assert row["timing_s/agents/generate_sequences"] == 0.5 and row["timing_s/agents/tool_calls"] == 0.25
    assert row["agents/num_turns/mean"] == 2 and row["reward/failed"] == 0


def test_rows_that_were_not_drawn_have_no_score_and_are_not_trained(loop) -> None:
    """The row's number decides what the loop does to what was drawn."""
    spoiled = LOOP.replace(
        "        return AgentLoopOutput(",
        """        if kwargs["start"] % 3 == 1:
            ids[len(prompt_ids)] = ids[len(prompt_ids)] % 8 + 3
            if ids[len(prompt_ids)] == output.token_ids[0]:
                ids[len(prompt_ids)] += 1
        if kwargs["start"] % 3 == 2:
            log_probs[0] -= 0.5
        return AgentLoopOutput(""",
    )
    ran = loop("reward.max_failure_ratio=1", text=spoiled)
    seen = set()
    for step, batch in ran.batches.items():
        talks = batch.non_tensor_batch["conversation"]
        starts = [int(columns["start"]) for columns in batch.non_tensor_batch["columns"]]
        masked = batch.batch["response_mask"].sum(-1) == 0
        for row, (start, talk) in enumerate(zip(starts, talks, strict=True)):
            words = (None, "response_ids[0] is", "response_logprobs[0] is")[start % 3]
            assert bool(masked[row]) == (words is not None) == (talk.error is not None)
            assert words is None or words in talk.error
            seen.add(start % 3)
        assert ran.rows[step - 1]["reward/failed"] == sum(start % 3 > 0 for start in starts)
    assert seen == {0, 1, 2}


def test_turns_that_were_drawn_after_other_tokens_are_not_trained(loop) -> None:
    """Every token with mask 1 was drawn, and the row has another answer of the tool than the policy read."""
    other = """        if 0 in mask:
            ids[len(prompt_ids) + mask.index(0)] += 1
        return AgentLoopOutput("""
    text = LOOP.replace("        return AgentLoopOutput(", other)
    ran = loop("reward.max_failure_ratio=1", "trainer.total_training_steps=1", text=text)
    batch = ran.batches[1]
    errors = [talk.error for talk in batch.non_tensor_batch["conversation"]]
    refused = [error is not None and "was drawn after" in error for error in errors]
    assert refused == (batch.batch["response_mask"].sum(-1) == 0).tolist()
    assert refused == [error is not None for error in errors] and {True, False} <= set(refused)


STUCK = """
import asyncio

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("stuck")
class Stuck(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True)
        drawn = await self.server_manager.generate(request_id="r", prompt_ids=ids, sampling_params=sampling_params)
        if kwargs["start"] % 3 == 1:
            await asyncio.sleep(3600)
        if kwargs["start"] % 3 == 2:
            while True:  # asks although the budget is used up
                ids = ids + [3] * 64
                more = await self.server_manager.generate("r", prompt_ids=ids, sampling_params=sampling_params)
                assert more == [] and more.token_ids == [] and more.stop_reason == "completed"
        assert drawn == drawn.token_ids and len(drawn) == len(drawn.log_probs)
        return AgentLoopOutput(ids, drawn, [1] * len(drawn), reward_score=1.0)
"""


def test_a_loop_that_waits_too_long_costs_its_conversation(loop) -> None:
    ran = loop(
        f"{KEY}.tool_timeout_s=1.5",
        "reward.max_failure_ratio=1",
        "trainer.total_training_steps=1",
        name="stuck",
        text=STUCK,
    )
    batch = ran.batches[1]
    for columns, talk in zip(
        batch.non_tensor_batch["columns"], batch.non_tensor_batch["conversation"], strict=True
    ):
        if int(columns["start"]) % 3:
            assert "neither asked the policy nor returned for 1.5 seconds" in talk.error
        else:
            assert talk.error is None and talk.environment_reward == 1.0


WRAPPED = """
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop


@register("wrapped")
class Wrapped(ToolAgentLoop):
    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        assert tool_call.name == "ask" and agent_data.messages[-1]["role"] == "assistant"
        return response, 0.5, metrics

    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        output.extra_fields["mine"] = 1
        return output
"""


def test_a_subclass_of_the_tool_loop_calls_the_tools_of_the_run(train, loop, write) -> None:
    tools, text = write(TOOLS, "tools.py"), "def compute_score(response): return float(len(response))"
    score = (f"reward.custom_reward_function.path={write(text, 'length.py')}", "reward.in_process=True")
    steps = ("trainer.total_training_steps=1",)
    ours = train(*TWO, *score, *steps, f"{KEY}.environment=[]", f"{KEY}.tools={tools}", folder="ours")
    enabled = (f"{KEY}.enable=True", f"{KEY}.tools={tools}")
    theirs = loop(*enabled, *score, *steps, name="wrapped", text=WRAPPED)
    own, other = ours.batches[1].batch, theirs.batches[1].batch
    for name in ("prompts", "responses", "response_mask"):
        assert torch.equal(own[name], other[name])
    talks = theirs.batches[1].non_tensor_batch["conversation"]
    called = torch.tensor([sum(len(turn.records) for turn in talk.turns) for talk in talks])
    assert called.sum() > 0 and theirs.rows[0]["tools/calls/ask"] == called.sum()
    more = other["token_level_scores"].sum(-1) - own["token_level_scores"].sum(-1)
    torch.testing.assert_close(more, 0.5 * called.float())


def test_a_loop_that_nobody_made_known_is_refused(train, write) -> None:
    with pytest.raises(ConfigError, match="default_agent_loop='nobody' is not known; known: .*tool_agent"):
        train(f"{AGENT}.default_agent_loop=nobody")
    with pytest.raises(ConfigError, match="must be a list of entries with name and _target_"):
        train(f"{AGENT}.agent_loop_config_path={write('name: mine', 'wrong.yaml')}")


BLOCKING = """
import time

from verl.agents.agent_loop import AgentLoopBase, register

STOPPED = []


@register("blocking")
class Blocking(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        while not STOPPED:
            time.sleep(0.01)  # nothing is awaited
"""


def test_a_loop_that_blocks_the_event_loop_stops_the_run_with_its_line(loop, monkeypatch) -> None:
    monkeypatch.setattr("verl.agents.toolset.END_S", 1.0)
    try:
        with pytest.raises(
            ToolsLost, match=r"kept all conversations waiting.*_loop\.py, line 1[23]\).*awaited"
        ):
            loop(f"{KEY}.tool_timeout_s=1", name="blocking", text=BLOCKING)
    finally:
        for name, module in list(sys.modules.items()):
            if name.startswith("verl_user_loops"):
                getattr(module, "STOPPED", []).append(True)


@pytest.mark.slow(seconds=6)
def test_a_resumed_run_of_a_loop_equals_an_uninterrupted_one(loop) -> None:
    whole = loop(folder="whole")
    loop("trainer.total_training_steps=1", folder="parts")
    parts = loop(folder="parts")
    assert exact(parts.rows) == exact(whole.rows)
    assert [line["turns"] for line in parts.rollouts(2)] == [line["turns"] for line in whole.rollouts(2)]


@pytest.mark.slow(seconds=5)
def test_a_loop_is_replayed_and_a_loop_that_changed_is_found(loop, tmp_path, capsys) -> None:
    ran = loop("trainer.total_training_steps=1")
    capsys.readouterr()
    assert cli.main(["replay", str(ran.folder), "--step", "1"]) == 0
    (file,) = tmp_path.glob("loops_*.py")
    file.write_text(file.read_text().replace('"now "', '"heard "'))
    for name in [name for name in sys.modules if name.startswith("verl_user_loops")]:
        del sys.modules[name]  # as in another process
    assert cli.main(["replay", str(ran.folder), "--step", "1"]) == 1
    assert "content of turn 2 (tool)" in capsys.readouterr().out


@pytest.mark.slow(seconds=3)
def test_a_column_chooses_the_loop_beside_environments(train, write, tmp_path) -> None:
    """Rows without a name, or with one of ours, are conversations of `multi_turn`."""
    write(LOOP, "beside.py")
    entries = write('[{"name": "counting", "_target_": "beside.py:Counting"}]', "beside.yaml")
    names = ["counting", "tool_agent", None, "single_turn_agent"]
    rows = letter_rows(12, start=lambda number: number)
    for number, row in enumerate(rows):
        row |= {"agent_name": names[number % 4], "environment": None if number % 4 in (0, 3) else "World"}
    keys = [
        f"data.train_files={write_rows(tmp_path / 'mixed.jsonl', rows)}",
        "data.train_batch_size=12",
        "data.shuffle=False",
        "actor_rollout_ref.rollout.n=2",
        f"{AGENT}.agent_loop_config_path={entries}",
        "trainer.total_training_steps=1",
    ]
    batch = train(*TWO, *keys, world=WORLD).batches[1]
    for number, talk in enumerate(batch.non_tensor_batch["conversation"]):
        kind = number // 2 % 4
        assert talk.error is None and talk.metrics.get("generate_sequences", 0) == (0.5 if kind == 0 else 0)
        assert (talk.environment_reward is None) == (kind == 3)
        if kind == 3:
            assert len(talk.turns) == 1
    kinds = {
        number // 2 % 4
        for number, talk in enumerate(batch.non_tensor_batch["conversation"])
        if len(talk.turns) > 1
    }
    assert kinds == {0, 1, 2}


@pytest.mark.slow(seconds=4)
def test_the_rows_of_a_loop_do_not_depend_on_the_engine(loop) -> None:
    steps = ("trainer.total_training_steps=1",)
    native, hf = (
        loop(*steps, f"actor_rollout_ref.rollout.name={name}", folder=name).batches[1].batch
        for name in ("native", "hf")
    )
    for name in ("prompts", "responses", "response_mask", "token_level_scores"):
        assert torch.equal(native[name], hf[name])
