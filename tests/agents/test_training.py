"""Whole runs with conversations of several turns, through the code of the commands, on a tiny untrained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents.runs import KEY, WORLD, exact, reward
from tests.agents.talking import REWRITING, letter_rows, word_tokenizer, write_rows
from verl.errors import ConfigError

# ---- rewards


@pytest.mark.parametrize("with_function", [True, pytest.param(False, marks=pytest.mark.slow(seconds=1))])
def test_rewards_are_where_they_were_earned(train, tmp_path: Path, with_function: bool) -> None:
    ran = train("trainer.total_training_steps=1", *(reward(tmp_path) if with_function else []))
    batch = ran.batches[1]
    talks = batch.non_tensor_batch["conversation"]
    assert len(talks) == 12 and {turn.role for t in talks for turn in t.turns} == {
        "assistant",
        "tool",
        "user",
    }
    for row, talk in enumerate(talks):
        expected = torch.zeros(batch.batch["responses"].shape[1])
        for number, turn in enumerate(talk.model_turns, start=1):
            # A turn that was cut off is nothing the environment saw.
            cut = talk.finish_reason == "length" and turn is talk.model_turns[-1]
            assert turn.reward == (None if cut else 0.25 * number)
            expected[turn.end - 1] += turn.reward or 0.0
        calls = sum(len(turn.records) for turn in talk.turns)
        score = 10.0 * len(talk.transcript()) + calls if with_function else 0.0
        words = len(batch_text(talk).split())
        expected[max(turn.end for turn in talk.model_turns) - 1] += (
            talk.environment_reward + score + (0.001 * words if with_function else 0.0)
        )
        torch.testing.assert_close(batch.batch["token_level_scores"][row], expected)
        assert talk.turns[-1].role == "assistant", "nothing follows the last turn of the model"
    assert ran.rows[0]["critic/score/mean"] == pytest.approx(
        float(batch.batch["token_level_scores"].sum(-1).mean()), rel=1e-5
    )


def batch_text(talk: Any) -> str:
    return " ".join(m["content"] for turn in talk.model_turns for m in turn.messages)


@pytest.mark.slow(seconds=2)
def test_a_sample_without_its_environment_is_masked_and_its_group_whole(train) -> None:
    """`random` of an environment is seeded by its conversation, so the same ones fail in every run."""
    world = WORLD.replace(
        "self.sum, self.turns = start, 0",
        "self.sum, self.turns, self.fate = start, 0, random.random()\n        assert self.fate > 0.15, 'no luck'",
    ).replace("        return float", "        assert self.fate > 0.3, 'too late'\n        return float")
    ran = train("reward.max_failure_ratio=1", world=world)
    seen = set()
    for step, batch in ran.batches.items():
        talks = batch.non_tensor_batch["conversation"]
        assert len(batch) == 12 and [t.sample for t in talks] == [0, 1, 2, 3] * 3
        failed = [talk.error is not None for talk in talks]
        seen |= {str(talk.error).split(":")[0] for talk in talks}
        masked = batch.batch["response_mask"].sum(-1) == 0
        assert masked.tolist() == failed
        row = ran.rows[step - 1]
        assert row["reward/failed"] == sum(failed) and row["training/masked_responses"] == sum(failed)
        scores = batch.batch["token_level_scores"].sum(-1).double()
        for start in range(0, 12, 4):
            own = [i for i in range(start, start + 4) if not failed[i]]
            centred = scores[own] - scores[own].mean()
            expected = centred / (scores[own].std() + 1e-6) if len(own) > 1 else centred * 0
            for place, i in enumerate(own if len(own) > 1 else []):
                got = batch.batch["advantages"][i][batch.batch["response_mask"][i].bool()]
                torch.testing.assert_close(got.double(), expected[place].expand_as(got), atol=1e-3, rtol=1e-3)
    assert seen == {"None", "the environment could not be reset", "the environment gave no reward"}


# ---- templates that rewrite history


@pytest.mark.slow(seconds=3)
def test_split_rows_share_the_advantage_of_their_conversation(train, rewriting_model: Path) -> None:
    changed = f"actor_rollout_ref.model.path={rewriting_model}"
    with pytest.raises(ConfigError, match="rewrites.*history=split"):
        train(changed)
    ran = train(changed, f"{KEY}.history=split")
    tokenizer, seen_again = word_tokenizer(REWRITING), 0

    def rendered(messages: list[dict[str, Any]]) -> list[int]:
        tools = [{"type": "function", "function": {"name": "ask"}}]
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for step, batch in ran.batches.items():
        talks, sessions = batch.non_tensor_batch["conversation"], batch.non_tensor_batch["session"]
        assert len(set(sessions)) == 12 and len(batch) == sum(
            len(talk.model_turns) for talk in {id(talk): talk for talk in talks}.values()
        )
        row, totals = 0, {}
        for talk in {id(talk): talk for talk in talks}.values():
            messages, prompt = talk.messages, talk.messages[: -sum(len(turn.messages) for turn in talk.turns)]
            for number, turn in enumerate(talk.model_turns):
                ids, length = batch.batch["input_ids"][row], turn.end - turn.start
                seen = batch.batch["attention_mask"][row].bool()
                assert ids[seen].tolist() == [*turn.prompt_ids, *talk.token_ids[turn.start : turn.end]]
                own = batch.batch["response_mask"][row].bool()
                assert own.sum() == length
                if number:
                    single = all(len(each.messages) == 1 for each in talk.turns)
                    answered = messages[: len(prompt) + 2 * number] if single else None
                    assert answered is None or turn.prompt_ids == rendered(answered), (
                        "history as the template has it"
                    )
                    seen_again += single
                totals.setdefault(sessions[row], set()).update(batch.batch["advantages"][row][own].tolist())
                row += 1
        assert all(len(values) == 1 for values in totals.values()), "one advantage for each conversation"
        assert len({value for values in totals.values() for value in values}) > 3
        assert any(len(talk.model_turns) > 1 for talk in talks)
        metrics = ran.rows[step - 1]
        assert metrics["training/rollout_probs_diff_max"] < 1e-5, "the prompts are what the model saw"
        lines = ran.rollouts(step)
        assert len(lines) == 12 and sum(len(line["turns"]) for line in lines) > 20
        own = [[turn["content"] for turn in line["turns"] if turn["role"] == "assistant"] for line in lines]
        assert [line["response"] for line in lines] == ["\n".join(texts) for texts in own]
    assert seen_again > 2


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("history", ["append", "split"])
def test_a_resumed_run_equals_an_uninterrupted_one(train, rewriting_model: Path, history: str) -> None:
    more = [f"{KEY}.history={history}", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    if history == "split":
        more.append(f"actor_rollout_ref.model.path={rewriting_model}")
    whole = train(*more, "trainer.total_training_steps=3", folder="whole")
    train(*more, "trainer.total_training_steps=1", folder="parts")
    parts = train(*more, "trainer.total_training_steps=3", folder="parts")
    assert exact(parts.rows) == exact(whole.rows)
    assert [line["turns"] for line in parts.rollouts(3)] == [line["turns"] for line in whole.rollouts(3)]


# ---- every algorithm and engine


@pytest.mark.parametrize(
    "more",
    [
        ["actor_rollout_ref.rollout.name=hf"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=turn_rloo"],
        ["algorithm.adv_estimator=turn_rloo", f"{KEY}.history=split"],
        ["algorithm.adv_estimator=gae"],
        ["algorithm.adv_estimator=gae", f"{KEY}.history=split"],
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"],
        [
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=score",
            f"{KEY}.history=split",
        ],
        ["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"],
    ],
    ids=lambda more: "+".join(text.rpartition("=")[2] for text in more),
)
@pytest.mark.slow(seconds=2)
def test_every_algorithm_and_engine_takes_conversations(train, more: list[str]) -> None:
    ran = train(*more)
    assert [row["step"] for row in ran.rows] == [1, 2]
    for row in ran.rows:
        assert row["agents/turns/mean"] > 1 and row["tools/calls/all"] > 0
        if "training/rollout_probs_diff_max" in row:
            assert row["training/rollout_probs_diff_max"] < 1e-5
    first, second = (ran.rows[i]["actor/grad_norm"] for i in (0, 1))
    assert first > 0 and second > 0
    if "algorithm.filter_groups.enable=True" in more:
        assert all(row["training/num_gen_batches"] >= 1 for row in ran.rows)


@pytest.mark.slow(seconds=2)
def test_validation_and_the_run_folder_show_the_turns(train, tmp_path: Path) -> None:
    val = write_rows(tmp_path / "val.jsonl", letter_rows(5, start=3))
    ran = train(f"data.val_files={val}", "trainer.test_freq=1", "trainer.total_training_steps=1")
    row = ran.rows[-1]
    assert 1 <= row["val-aux/letters/num_turns/mean@1"] <= 3
    assert any(name.startswith("val-core/letters/reward") for name in row)
    (path,) = (ran.folder / "validation").glob("*1.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 5
    for line in [*lines, *ran.rollouts(1)]:
        assert line["turns"][0]["role"] == "assistant" and line["finish_reason"] in (
            "stop",
            "turns",
            "length",
        )
        called = [turn for turn in line["turns"] if "tool_calls" in turn]
        for turn in called:
            assert all({"name", "arguments"} <= set(call) for call in turn["tool_calls"])
    failures = [
        call.get("failure")
        for line in ran.rollouts(1)
        for turn in line["turns"]
        for call in turn.get("tool_calls", [])
    ]
    assert row["tools/calls/all"] == len(failures)
    for kind in ("unknown", "malformed", "failed", "timeout"):
        assert row[f"tools/{kind}/all"] == failures.count(kind)
    assert row["tools/unknown/all"] > 0 and row["tools/malformed/all"] > 0
    assert row["tools/calls/ask"] > 0
