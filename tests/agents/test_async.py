"""Conversations of several turns in the asynchronous modes: trained exactly once, aligned with what was drawn, also
where they are suspended in a turn or in a call, where tools are late, and where environments and servers fail."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents.clients import through_endpoint
from tests.agents.loops import AGENT, LOOP, TWO
from tests.agents.runs import KEY, WORLD, Server, reward
from tests.agents.talking import letter_rows, plan_format, write_rows
from tests.tiny_run import read_metrics
from verl.agents.base import ToolsLost
from verl.config.load import load_ppo_config

plan_format("always", [["ask"]])

MODE = "trainer.async_training.mode"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
POOL = ("actor_rollout_ref.rollout.n_gpus_per_node=1", "actor_rollout_ref.rollout.nnodes=1")
CARRY_OVER = (f"{MODE}=carry_over", "trainer.async_training.over_sampling=1.0", BYPASS)
ONE_STEP = (f"{MODE}=one_step_off", BYPASS, *POOL)
FULLY = (f"{MODE}=fully_async", BYPASS, *POOL)
MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(CARRY_OVER, id="carry_over"),
        pytest.param(ONE_STEP, id="one_step_off", marks=pytest.mark.slow(seconds=3)),
        pytest.param(FULLY, id="fully_async"),
    ],
)
N, BATCH, ROWS = 2, 3, 12
"""One epoch has four steps."""
STEADY = "actor_rollout_ref.actor.optim.lr=0.0"
"""Every version is the same policy: log-probs of the trainer must be those of the rollout."""


@pytest.fixture
def go(keys: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Train one epoch; `prepare(loop)` is called before the first step and `within(loop)` after each."""
    from tests.trainer.pool import PoolGroup
    from verl.trainer import assembly
    from verl.trainer.loop import RLLoop
    from verl.trainer.main_ppo import run_once

    step, build = RLLoop.step, assembly.build_group
    data = write_rows(tmp_path / "epoch.jsonl", letter_rows(ROWS, start=lambda number: number))

    def train(
        *extra: str, folder: str = "run", world: str = WORLD, within: Any = None, prepare: Any = None
    ) -> Any:
        found: list[Any] = []

        def watched(loop: Any) -> dict[str, float]:
            if not found:
                found.append(loop)
                if prepare is not None:
                    prepare(loop)
            metrics = step(loop)
            if within is not None:
                within(loop)
            return metrics

        def group(cfg: Any, tokenizer: Any, **rest: Any) -> Any:
            if not cfg.actor_rollout_ref.rollout.n_gpus_per_node:
                return build(cfg, tokenizer, **rest)
            return PoolGroup(cfg, tokenizer, training_steps=rest["training_steps"])

        with monkeypatch.context() as patch:
            patch.setattr(RLLoop, "step", watched)
            patch.setattr(assembly, "build_group", group)
            arguments = keys(
                f"data.train_files={data}",
                f"actor_rollout_ref.rollout.n={N}",
                f"trainer.total_training_steps={ROWS // BATCH}",
                *extra,
                world=world,
                folder=folder,
            )
            run_once(load_ppo_config(arguments), {}, model=None, live=False)
        return found[0]

    return train


def trained(folder: Path) -> list[list[str]]:
    """The prompts of each step, as the run folder has them."""
    files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
    rows = [
        [json.loads(line)["uid"].split("#")[0] for line in file.read_text().splitlines()] for file in files
    ]
    assert all(set(Counter(uids).values()) == {N} for uids in rows), "a group is not whole"
    return [list(dict.fromkeys(uids)) for uids in rows]


def assert_each_prompt_once(folder: Path) -> None:
    steps = trained(folder)
    assert [len(uids) for uids in steps] == [BATCH] * (ROWS // BATCH)
    assert Counter(chain(*steps)) == Counter(f"0-{row}" for row in range(ROWS))


def assert_aligned(loop: Any, world: bool = True) -> None:
    """The last batch has every conversation once and whole, and what the trainer sees is what was drawn. `world`: the
    environment is `World`, whose answers show that it saw every call once and in order."""
    batch = loop.batch
    talks = list(batch.non_tensor_batch["conversation"])
    assert [talk.sample for talk in talks] == list(range(N)) * BATCH
    for row, talk in enumerate(talks):
        length = len(talk.token_ids)
        for name, expected in {
            "responses": talk.token_ids,
            "response_mask": talk.response_mask,
            "rollout_log_probs": torch.tensor(talk.log_probs).tolist(),
            "token_versions": talk.versions,
        }.items():
            assert batch.batch[name][row, :length].tolist() == expected, name
        assert not batch.batch["response_mask"][row, length:].any()
        assert talk.finish_reason in ("stop", "length", "turns") and talk.turns[-1].role == "assistant"
        assert [turn.start for turn in talk.turns] == [0, *(turn.end for turn in talk.turns[:-1])]
        assert talk.turns[-1].end == length
        assert [m for turn in talk.turns for m in turn.messages] == talk.messages[1:], "a turn is missing"
        for turn in talk.turns:
            own = turn.role == "assistant"
            assert set(talk.response_mask[turn.start : turn.end]) == {int(own)}
            if own:
                text = loop.tokenizer.decode(talk.token_ids[turn.start : turn.end], skip_special_tokens=True)
                assert text == turn.messages[0]["content"]
        if world:
            total = int(batch.non_tensor_batch["columns"][row]["start"])
            for record in [
                record for turn in talk.turns for record in turn.records if record.failure is None
            ]:
                total += len(record.arguments["text"])
                assert record.result == "now " + "abcdefgh"[total % 8]
            assert talk.environment_reward == total % 5
            heard = [turn.reward for turn in talk.model_turns if turn.reward is not None]
            assert heard == [0.25 * number for number in range(1, len(heard) + 1)]
    policy = batch.batch["response_mask"].bool()
    ages = (loop.step_number - 1 - batch.batch["token_versions"])[policy]
    assert int(ages.min()) >= 0 and int(ages.max()) <= loop.experience.staleness
    log_probs = loop.workers.forward("actor", batch, ["old_log_probs"]).batch["old_log_probs"][policy]
    assert torch.isfinite(log_probs).all()
    if loop.cfg.actor_rollout_ref.actor.optim.lr == 0:
        torch.testing.assert_close(log_probs, batch.batch["rollout_log_probs"][policy], atol=1e-5, rtol=0)


def drawn_by(talk: Any) -> list[set[int]]:
    """The versions of each of the model's turns."""
    return [set(talk.versions[turn.start : turn.end]) for turn in talk.model_turns]


@MODES
def test_every_prompt_is_trained_once_and_no_token_is_too_old(go, tmp_path, mode):
    batches: list[Any] = []

    def within(loop: Any) -> None:
        assert_aligned(loop)
        batches.append(loop.batch)

    go(*mode, STEADY, within=within)
    assert_each_prompt_once(tmp_path / "run")
    talks = list(chain(*(batch.non_tensor_batch["conversation"] for batch in batches)))
    assert any(len(talk.model_turns) > 1 for talk in talks)
    rows = read_metrics(tmp_path / "run")
    assert all(row["agents/turns/mean"] >= 1 and row["reward/failed"] == 0 for row in rows)
    if mode is ONE_STEP:
        for step, batch in enumerate(batches, start=1):
            versions = set(batch.batch["token_versions"][batch.batch["response_mask"].bool()].tolist())
            assert versions == {max(step - 2, 0)}, "a batch is drawn by one version"


def counting(tmp_path: Path) -> tuple[str, ...]:
    """The keys of a run of `LOOP` instead of an environment."""
    (tmp_path / "counting_loop.py").write_text(LOOP)
    (tmp_path / "loops.json").write_text('[{"name": "counting", "_target_": "counting_loop.py:Counting"}]')
    return (
        *TWO,
        f"{KEY}.enable=False",
        f"{KEY}.environment=[]",
        f"{AGENT}.agent_loop_config_path={tmp_path}/loops.json",
        f"{AGENT}.default_agent_loop=counting",
    )


AGENTS = pytest.mark.parametrize(
    "agents", [counting, pytest.param(through_endpoint, marks=pytest.mark.slow(seconds=4))]
)


@AGENTS
@MODES
def test_agents_of_users_are_trained_once_and_aligned(go, tmp_path, mode, agents):
    """Suspended and drawn by several versions as conversations of ours are."""
    turns: set[int] = set()

    def within(loop: Any) -> None:
        assert_aligned(loop, world=False)
        turns.update(len(talk.model_turns) for talk in loop.batch.non_tensor_batch["conversation"])

    go(*mode, *agents(tmp_path), STEADY, within=within)
    assert_each_prompt_once(tmp_path / "run")
    assert turns == {1, 2}
    assert all(row["reward/failed"] == 0 for row in read_metrics(tmp_path / "run"))


@pytest.mark.slow(seconds=4)
@AGENTS
@MODES
def test_a_killed_run_of_agents_trains_every_prompt_once(go, tmp_path, mode, agents):
    """From what is on the disk after the third step, of which no checkpoint is: it is trained again."""
    keys = (*mode, *agents(tmp_path), STEADY, "trainer.save_freq=1")

    def within(loop: Any) -> None:
        assert_aligned(loop, world=False)
        if loop.step_number == 3 and not (tmp_path / "killed").exists():
            shutil.copytree(tmp_path / "run", tmp_path / "killed")  # what a killed process leaves

    go(*keys, within=within)
    assert (tmp_path / "killed" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    go(*keys, folder="killed", within=within)
    assert_each_prompt_once(tmp_path / "killed")
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == [1, 2, 3, 4]


GATED = WORLD.replace("import random", "import os, pathlib, random, time").replace(
    "        self.sum += len(text)",
    """        folder = pathlib.Path(__file__).parent
        if self.first in (1, 2):
            (folder / f"called-{self.first}-{os.getpid()}").touch()
            while not (folder / f"open-{self.first}").exists():
                time.sleep(0.005)
        else:
            while len(list(folder.glob("called-*"))) < 4:
                time.sleep(0.005)
        self.sum += len(text)""",
)
GATED = GATED.replace("self.sum, self.turns = start, 0", "self.sum, self.turns, self.first = start, 0, start")
"""The tools of prompts 1 and 2 answer when the test allows it, all others when these are at work."""
GATES = ("data.shuffle=False", f"{KEY}.format=always", f"{KEY}.tool_timeout_s=280", STEADY)


@pytest.mark.slow(seconds=2)
def test_conversations_suspended_in_a_turn_and_in_a_call_go_on_with_the_next_weights(go, tmp_path):
    steps: dict[int, list[Any]] = {}

    def prepare(loop: Any) -> None:
        sampler = loop.experience.sampler
        suspend = sampler.suspend

        def suspend_in_a_turn() -> None:
            if loop.step_number == 1:
                (tmp_path / "open-2").touch()
                sampler.run(lambda: any(name.startswith("0-2#") for name in sampler._tasks))
                sampler.poll_s, polled = 0.0, itertools.count()
                sampler.run(lambda: next(polled) >= 1)
            suspend()

        sampler.suspend = suspend_in_a_turn

    def within(loop: Any) -> None:
        assert_aligned(loop)
        steps[loop.step_number] = list(loop.batch.non_tensor_batch["conversation"])
        sampler = loop.experience.sampler
        if loop.step_number > 1:
            return
        assert (sampler._groups["0-1"], sampler._groups["0-2"]) == (N, N)
        begun = [name for name, task in sampler._tasks.items() if task.missing[0] is not None]
        assert any(name.startswith("0-2#") for name in begun), "none is in a turn"
        assert not any(name.startswith("0-1#") for name in sampler._tasks), "its tools are at work"
        (tmp_path / "open-1").touch()
        while sum(name.startswith("0-1#") for name in list(sampler._tasks)) < N:
            time.sleep(0.005)  # they answer while the trainer trains

    go(*CARRY_OVER, *GATES, world=GATED, within=within, prepare=prepare)
    assert_each_prompt_once(tmp_path / "run")
    by_uid = {uid: [talk for talk in steps[2] if talk.uid == uid] for uid in ("0-1", "0-2")}
    assert [drawn_by(talk) for talk in by_uid["0-1"]] == [[{0}, {1}, {1}]] * N
    assert any({0, 1} in drawn_by(talk) for talk in by_uid["0-2"]), "the turn that was suspended"


@pytest.mark.slow(seconds=2)
def test_a_late_tool_holds_up_no_batch_and_weights_change_between_turns(go, tmp_path):
    """The tool of prompt 1 answers only when a step was trained without it."""
    steps: dict[int, list[Any]] = {}

    def within(loop: Any) -> None:
        assert_aligned(loop)
        steps[loop.step_number] = list(loop.batch.non_tensor_batch["conversation"])
        (tmp_path / "open-1").touch()

    (tmp_path / "open-2").touch()
    go(*FULLY, *GATES, "trainer.async_training.staleness=1", world=GATED, within=within)
    assert_each_prompt_once(tmp_path / "run")
    assert all(talk.uid != "0-1" for talk in steps[1])
    late = [talk for talk in steps[2] if talk.uid == "0-1"]
    for talk in late:
        first, *later = drawn_by(talk)
        assert first == {0} and later and all(min(versions) >= 1 for versions in later)
    assert len(late) == N


FAILING = WORLD.replace("import random", "import pathlib").replace(
    "self.sum, self.turns = start, 0",
    """self.sum, self.turns = start, 0
        if start in (1, 4):
            path = pathlib.Path(__file__).parent / f"resets-{start}"
            with path.open("a") as file:
                file.write("x")
            assert start == 4 and len(path.read_text()) > 2, "out of order"
""",
)


@pytest.mark.slow(seconds=3)
@MODES
def test_a_prompt_whose_environment_fails_is_drawn_again_once_and_then_masked(go, tmp_path, mode):
    """That of prompt 1 always fails, that of prompt 4 the first time."""
    failed: list[tuple[str, Any]] = []

    def within(loop: Any) -> None:
        masked = loop.batch.batch["response_mask"].sum(-1) == 0
        talks = loop.batch.non_tensor_batch["conversation"]
        failed.extend((talk.uid, talk.error) for talk, off in zip(talks, masked, strict=True) if off)

    go(*mode, "reward.max_failure_ratio=1", world=FAILING, within=within)
    assert_each_prompt_once(tmp_path / "run")
    assert [uid for uid, _ in failed] == ["0-1"] * N
    assert all("could not be reset" in error and "out of order" in error for _, error in failed)
    assert {len((tmp_path / f"resets-{number}").read_text()) for number in (1, 4)} == {2 * N}
    assert sum(row["reward/failed"] for row in read_metrics(tmp_path / "run")) == N


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("while_", ["training", "validating"])
@MODES
def test_a_lost_tool_server_leaves_a_checkpoint_and_the_resumed_run_trains_every_prompt_once(
    go, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...], while_: str
) -> None:
    from verl.agents import remote

    monkeypatch.setattr(remote, "LOST_AFTER_S", 0.3)
    val = write_rows(tmp_path / "val.jsonl", letter_rows(2))
    more = [
        *mode,
        f"{KEY}.environment=[]",
        f"{KEY}.tool_server={server.address}",
        f"{KEY}.format=always",
        *reward(tmp_path),
        f"data.val_files={val}",
        f"trainer.test_freq={2 if while_ == 'validating' else -1}",
        "trainer.val_before_train=False",
    ]

    def within(loop: Any) -> None:
        if loop.step_number == 2:
            server.stop()

    with pytest.raises(ToolsLost, match="went away"):
        go(*more, within=within)
    complete = len(trained(tmp_path / "run"))
    assert complete == 2 if while_ == "validating" else complete in (2, 3)
    assert int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text()) == complete
    server.start()
    go(*more, within=lambda loop: assert_aligned(loop, world=False))
    assert_each_prompt_once(tmp_path / "run")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("mode", [ONE_STEP, FULLY], ids=["one_step_off", "fully_async"])
def test_tools_lost_while_the_trainer_saves_do_not_cost_the_checkpoint(go, tmp_path, mode):
    def prepare(loop: Any) -> None:
        saving, save = threading.Event(), loop.save

        def before_poll() -> None:
            if loop.experience.admission.clock >= 2:  # what follows the second batch is being generated
                while not saving.wait(0.01) and not loop.experience._closing:
                    pass
                raise ToolsLost("it went away")

        def watched(*given: Any) -> Any:
            saving.set()
            return save(*given)

        loop.workers.rollout.before_poll, loop.save = before_poll, watched

    with pytest.raises(ToolsLost, match="went away"):
        go(*mode, "trainer.save_freq=2", prepare=prepare)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert len(read_metrics(tmp_path / "run")) == 2, "the step is logged"
    go(*mode, "trainer.save_freq=2")
    assert_each_prompt_once(tmp_path / "run")


@pytest.mark.slow(seconds=4)
@MODES
def test_validation_beside_more_conversations_than_there_are_places(go, tmp_path, monkeypatch, mode):
    """Equal policies have equal validation, whatever runs or is suspended beside it."""
    from verl.agents import tool_processes

    val = write_rows(tmp_path / "val.jsonl", letter_rows(4, start=lambda number: number + 2))
    sampled = (
        f"data.val_files={val}",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        STEADY,
    )
    go(*sampled, folder="off")
    monkeypatch.setattr(tool_processes, "MAX_CONVERSATIONS", 2)
    suspended: list[int] = []

    def prepare(loop: Any) -> None:
        score = loop.experience.score

        def watched(*given: Any) -> Any:
            if mode is CARRY_OVER:
                suspended.append(loop.experience.sampler.outstanding)
            return score(*given)

        loop.experience.score = watched

    go(*mode, *sampled, folder="on", prepare=prepare, within=assert_aligned)
    assert_each_prompt_once(tmp_path / "on")
    assert mode is not CARRY_OVER or suspended[0] > 2
    off, on = (read_metrics(tmp_path / folder) for folder in ("off", "on"))
    for one, other in zip(off, on, strict=True):
        validation = {name for name in one if name.startswith("val")}
        assert validation and {n: one[n] for n in validation} == {n: other[n] for n in validation}
