"""When the loop validates, saves and stops, and what a resumed run goes on with."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from verl.checkpoint import CheckpointManager


def steps_with(seen, prefix: str) -> list[int]:
    return [row["step"] for row in seen.rows if any(name.startswith(prefix) for name in row)]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


def test_validation_and_checkpoints_come_when_they_are_due_and_at_the_end(watch, digits_data):
    seen = watch(
        f"data.val_files={digits_data}/val.jsonl",
        "trainer.test_freq=2",
        "trainer.save_freq=3",
        "trainer.total_training_steps=5",
    )
    assert steps_with(seen, "val-core/") == [0, 2, 4, 5]
    assert sorted(int(file.stem) for file in (seen.folder / "validation").glob("*.jsonl")) == [0, 2, 4, 5]
    assert saved(seen.folder) == [3, 5]
    assert [row["step"] for row in seen.rows] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_cannot_save_its_critic_ends_before_its_first_step(watch, monkeypatch, tmp_path):
    from verl.checkpoint import hf_folder
    from verl.errors import CheckpointError

    write = hf_folder.write_small_files

    def refuse(folder, engine, tokenizer):
        if folder.parent.name == "critic":
            raise ValueError("no name for the head")
        write(folder, engine, tokenizer)

    monkeypatch.setattr(hf_folder, "write_small_files", refuse)
    folder = tmp_path / "run"
    with pytest.raises(
        CheckpointError, match="checkpoint of the critic cannot be saved: ValueError: no name"
    ):
        watch("algorithm.adv_estimator=gae", f"trainer.default_local_dir={folder}")
    assert not (folder / "metrics.jsonl").exists() and not list(folder.glob("*global_step*"))


def test_validation_before_training_is_a_choice(watch, digits_data):
    seen = watch(f"data.val_files={digits_data}/val.jsonl", "trainer.val_before_train=False")
    assert steps_with(seen, "val-core/") == [2]


def test_a_checkpoint_is_judged_by_the_validation_of_its_own_step(watch, digits_data, monkeypatch):
    given, save = [], CheckpointManager.save

    def watched(self, step, parts, state, **more):
        given.append((step, more["metrics"], sorted(parts)))
        return save(self, step, parts, state, **more)

    monkeypatch.setattr(CheckpointManager, "save", watched)
    seen = watch(
        "algorithm.adv_estimator=gae",
        f"data.val_files={digits_data}/val.jsonl",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    )
    assert [step for step, _, _ in given] == [1, 2]
    for step, metrics, parts in given:
        assert parts == ["actor", "critic"]
        for name in ("val-core/digits/reward/mean@1", "reward/mean", "actor/pg_loss"):
            assert metrics[name] == seen.row(step)[name]


def test_who_asks_a_run_to_stop_gets_a_checkpoint_of_its_last_step(watch):
    def after(loop):
        if loop.step_number == 2:
            loop.request_stop()

    seen = watch("trainer.total_training_steps=50", within=after)
    assert [row["step"] for row in seen.rows] == [1, 2] and saved(seen.folder) == [2]


def test_who_asks_while_a_step_is_being_logged_gets_one_too(watch, monkeypatch):
    """After the decision whether to save: the run goes on for one more step rather than ending without."""
    from verl.observe.trackers import FanOut

    log, loops = FanOut.log, []

    def late(self, step, *rest):
        if step == 2:
            loops[0].request_stop()
        return log(self, step, *rest)

    monkeypatch.setattr(FanOut, "log", late)
    seen = watch("trainer.total_training_steps=50", within=loops.append)
    assert saved(seen.folder) == [seen.rows[-1]["step"]] == [3]


def test_a_run_ends_only_when_its_last_checkpoint_is_on_the_disk(watch, monkeypatch):
    """The background save is held back until the loop waits for it."""
    waited = threading.Event()
    wait, open_files, write = CheckpointManager.wait, CheckpointManager._open, CheckpointManager._background

    def watched_wait(self):
        waited.set()
        return wait(self)

    def watched_open(self, *arguments):
        waited.clear()
        return open_files(self, *arguments)

    def held_back(self, job):
        assert waited.wait(timeout=120)
        return write(self, job)

    monkeypatch.setattr(CheckpointManager, "wait", watched_wait)
    monkeypatch.setattr(CheckpointManager, "_open", watched_open)
    monkeypatch.setattr(CheckpointManager, "_background", held_back)
    try:
        seen = watch("actor_rollout_ref.actor.checkpoint.async_save=True")
        assert saved(seen.folder) == [2]
        assert (seen.folder / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    finally:
        waited.set()


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_resumed_run_generates_as_the_version_it_has_reached(watch, engine):
    name = f"actor_rollout_ref.rollout.name={engine}"
    watch(name, "trainer.total_training_steps=2")
    seen = watch(name, "trainer.total_training_steps=3")
    assert sorted(seen.batches) == [3]
    assert set(seen.batches[3].non_tensor_batch["policy_version"]) == {2}
    assert [step for step, _ in seen.loop.health.history.steps] == [1, 2, 3], "and remembers how it went"
    assert seen.loop.workers.policy_version == 3


@pytest.mark.slow(seconds=2)
def test_a_resumed_run_goes_on_with_the_next_prompts(watch):
    whole = watch("trainer.total_training_steps=4", folder="whole")
    watch("trainer.total_training_steps=2", folder="parts")
    parts = watch("trainer.total_training_steps=4", folder="parts")
    for step in (3, 4):
        names = [list(seen.batches[step].non_tensor_batch["uid"]) for seen in (whole, parts)]
        assert names[0] == names[1]
    drawn = [uid for batch in whole.batches.values() for uid in set(batch.non_tensor_batch["uid"])]
    assert len(set(drawn)) == len(drawn) == 32, "within an epoch no prompt comes twice"


def test_draws_of_a_run_go_on_from_step_to_step(watch):
    states = []
    watch("algorithm.use_pf_ppo=True", within=lambda loop: states.append(loop.generator.get_state().tolist()))
    assert states[0] != states[1]


def test_validation_only_looks_at_the_checkpoint_and_leaves_the_rest(watch, digits_data):
    """A run of four steps; then the checkpoint of its second is validated, in the same folder."""
    val = f"data.val_files={digits_data}/val.jsonl"
    trained = watch(val, "trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2")
    before = trained.rows
    seen = watch(
        val,
        "trainer.val_only=True",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={trained.folder}/global_step_2",
    )
    assert seen.batches == {} and seen.updates == []
    assert seen.rows[: len(before)] == before, "the metrics of later steps are still there"
    (added,) = seen.rows[len(before) :]
    name = "val-core/digits/reward/mean@1"
    assert added["step"] == 2 and added[name] == trained.row(2)[name]
    assert (trained.folder / "rollouts" / "4.jsonl").exists() and saved(trained.folder) == [2, 4]


def test_validation_only_needs_no_training_data(watch, digits_data):
    """Neither for the model as it is loaded nor for a checkpoint of a run that had some."""
    val = f"data.val_files={digits_data}/val.jsonl"
    fresh = watch("~data.train_files", val, "trainer.val_only=True", folder="fresh")
    assert steps_with(fresh, "val-core/") == [0]
    trained = watch(val, folder="trained")
    seen = watch("~data.train_files", val, "trainer.val_only=True", folder="trained")
    assert steps_with(seen, "val-core/") == [0, 2, 2]
    name = "val-core/digits/reward/mean@1"
    assert seen.rows[-1][name] == trained.rows[-1][name]


def test_every_step_writes_the_responses_it_learned_from(watch):
    seen = watch()
    for step, batch in seen.batches.items():
        lines = (seen.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["uid"] for row in rows] == list(batch.non_tensor_batch["uid"])
        scores = batch.batch["token_level_scores"].sum(-1).tolist()
        assert [row["score"] for row in rows] == pytest.approx(scores)


def test_health_rules_watch_numbers_that_a_run_gives(watch):
    from verl.observe.health import WATCHED

    seen = watch("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
    others = {name for name in WATCHED if name.startswith(("train/", "val/", "tools/", "implicit_reward/"))}
    assert WATCHED - others <= set(seen.rows[-1]), "the others are those of fine-tuning, tools and prime"


def test_threads_get_the_interpreter_soon_while_a_run_lasts(watch):
    before, during = sys.getswitchinterval(), []
    watch("trainer.total_training_steps=1", within=lambda loop: during.append(sys.getswitchinterval()))
    assert during == [pytest.approx(0.0005)] and sys.getswitchinterval() == before
