"""`verl fork`: continues a checkpoint of another run under other settings, on its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.async_run import assert_same, states
from tests.tiny_run import read_metrics, tiny_run, untimed
from verl import cli
from verl.config.load import load_ppo_config
from verl.config.sources import load_yaml
from verl.observe.run_folder import read_lineage
from verl.trainer.fork import open_recorded
from verl.trainer.main_ppo import run as train

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def parent(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a cosine schedule, saved at the second and at the end; samples in a folder the user chose."""
    folder = tmp_path_factory.mktemp("runs") / "parent"
    train(
        load_ppo_config(
            tiny_run(
                tiny_model_dir,
                digits_data,
                "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
                "trainer.save_freq=2",
                "trainer.total_training_steps=3",
                "trainer.resume_mode=disable",
                f"trainer.rollout_data_dir={folder.parent}/samples",
                folder=folder,
            )
        )
    )
    return folder


def test_without_other_settings_a_fork_ends_as_its_parent_which_stays_as_it_is(parent: Path) -> None:
    samples = sorted((parent.parent / "samples").iterdir())
    assert cli.main(["fork", str(parent), "--step", "2", "--name", "same"]) == 0
    fork = parent.parent / "same"
    assert [row["step"] for row in read_metrics(fork)] == [3]
    assert untimed(read_metrics(fork)) == untimed(read_metrics(parent)[2:])
    assert_same(states(parent, 3), states(fork, 3))
    assert sorted((parent.parent / "samples").iterdir()) == samples
    assert {file.stem for file in (fork / "rollouts").iterdir()} == {"3"}
    lineage = read_lineage(fork)
    assert lineage is not None and lineage.overrides == ()
    assert (lineage.parent, lineage.parent_name, lineage.step) == (str(parent), "verl/default", 2)


@pytest.mark.slow(seconds=2)
def test_a_fork_trains_under_other_settings_also_after_its_parent_is_gone(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(parent, tmp_path / "old")
    arguments = [str(tmp_path / "old"), f"{LR}=1e-4", "--step", "2", "trainer.total_training_steps=4"]
    assert cli.main(["fork", *arguments, "--no-start"]) == 0
    fork = tmp_path / "old-fork-2"
    shown = capsys.readouterr().out
    command = shown.rpartition("start or resume it with: verl ")[2].split()
    assert not (fork / "metrics.jsonl").exists()
    inodes = {file.stat().st_ino for file in (tmp_path / "old").rglob("*.safetensors")}
    assert {file.stat().st_ino for file in (fork / "global_step_2").rglob("*.safetensors")} < inodes
    shutil.rmtree(tmp_path / "old")
    assert cli.main(command) == 0
    rows = read_metrics(fork)
    assert [row["step"] for row in rows] == [3, 4]
    assert 0 < rows[0]["actor/lr"] < 1e-4
    lineage = read_lineage(fork)
    assert lineage is not None and lineage.overrides == (f"{LR}=1e-4", "trainer.total_training_steps=4")
    assert cli.main(["replay", str(fork), "--step", "4"]) == 0
    assert "responses of steps 3 to 4 are equal" in capsys.readouterr().out
    shutil.rmtree(fork / "global_step_2")
    assert cli.main(["replay", str(fork), "--step", "3"]) == 2
    assert "was forked from verl/default after step 2" in capsys.readouterr().err


def test_names_that_are_taken_get_a_number_and_each_fork_its_own_checkpoint(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(parent, tmp_path / "old")

    def other_file_system(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    for _ in range(2):
        assert cli.main(["fork", str(tmp_path / "old"), "--step", "3", "--no-start"]) == 0
        monkeypatch.setattr(os, "link", other_file_system)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "old-fork-3", "old-fork-3-2"}
    again = open_recorded(tmp_path / "old-fork-3-2")
    assert again.checkpoint(3).path.is_dir() and again.get("trainer.experiment_name") == "old-fork-3-2"


def test_a_key_that_follows_another_follows_it_in_a_fork(parent: Path, tmp_path: Path) -> None:
    shutil.copytree(parent, tmp_path / "old")
    assert load_yaml(parent / "config.yaml")["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 8
    arguments = ["fork", str(tmp_path / "old"), "--step", "2", "--no-start", "data.train_batch_size=16"]
    assert cli.main(arguments) == 0
    config = load_yaml(tmp_path / "old-fork-2" / "config.yaml")
    assert config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 16
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr_scheduler_type"] == "cosine"
    assert config["trainer"]["resume_mode"] == "auto" and config["trainer"]["rollout_data_dir"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "1"], "no complete checkpoint of step 1; steps with one: 2, 3"),
        (["--step", "2", f"{LR}=fast"], "fast"),
        (["--step", "2", "actor_rollout_ref.actor.optim.rate=1"], "unknown key"),
        (["--step", "2", "trainer.resume_mode=disable"], "a fork resumes from the checkpoint of --step"),
        (["--step", "2", "--name", "parent"], "exists already"),
        (["--step", "2", "--name", "../x"], "must be the name of a folder"),
        (["--step", "2", "--name", "a", "trainer.experiment_name=b"], "differ; give one of them"),
    ],
)
def test_what_cannot_be_forked_is_refused_and_leaves_nothing(
    parent: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(parent.parent.iterdir())
    assert cli.main(["fork", str(parent), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert sorted(parent.parent.iterdir()) == before


def test_a_damaged_checkpoint_is_refused(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(parent, tmp_path / "old")
    file = next((tmp_path / "old" / "global_step_2").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert cli.main(["fork", str(tmp_path / "old"), "--step", "2"]) == 2
    assert "global_step_2 is damaged" in capsys.readouterr().err


def test_a_fork_that_starts_over_has_no_lineage(parent: Path, tmp_path: Path) -> None:
    shutil.copytree(parent, tmp_path / "old")
    assert cli.main(["fork", str(tmp_path / "old"), "--step", "2", "--no-start"]) == 0
    fork = tmp_path / "old-fork-2"
    assert read_lineage(fork) is not None
    again = ["trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    assert cli.main(["train", "--config-path", str(fork / "config.yaml"), *again]) == 0
    assert read_lineage(fork) is None
    (fork / "lineage.json").write_text(json.dumps({"step": "two"}))
    assert read_lineage(fork) is None


def test_help_and_a_missing_argument_are_answered_as_by_other_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, code in ((["--help"], 0), (["run"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["fork", *arguments])
        assert (ended.value.code or 0) == code
    printed = capsys.readouterr()
    assert "--no-start" in printed.out and "--step" in printed.err
