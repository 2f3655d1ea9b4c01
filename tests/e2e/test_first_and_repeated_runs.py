"""First runs and repeated runs: minimal settings, changed settings, a disk that is too small."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from verl.trainer.main_ppo import main


def test_resuming_with_another_model_path_warns_that_the_weights_are_the_checkpoints(
    overrides, tiny_model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides("trainer.total_training_steps=1", "trainer.logger=[console]")) == 0
    other = tmp_path / "other model é"
    other.symlink_to(tiny_model_dir)
    capfd.readouterr()
    line = overrides("trainer.total_training_steps=1", "trainer.logger=[console]")
    assert main([*line, f"actor_rollout_ref.model.path={other}"]) == 0
    out, said = capfd.readouterr()
    assert f"started from '{tiny_model_dir}'" in said and str(other) in said
    assert "nothing left to do: 1 of 1 steps are done" in out and "step 1/1" not in out


def test_metrics_of_a_run_killed_before_its_first_checkpoint_are_moved_aside(train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0, "x": 1}\n{"step": 1, "x": 1}\n{"step": 2, "x": 1}\n')
    assert [row["step"] for row in train("trainer.total_training_steps=1")] == [1]
    assert len((folder / "metrics.previous.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow(seconds=2)
def test_sampled_validation_after_resuming_equals_that_of_an_uninterrupted_run(
    train, digits_data: Path, tmp_path: Path
) -> None:
    line = [
        f"data.val_files={digits_data}/val.jsonl",
        "data.val_max_samples=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    ]
    train(*line, "trainer.total_training_steps=2", folder="whole")
    train(*line, "trainer.total_training_steps=1", folder="cut")
    train(*line, "trainer.total_training_steps=2", folder="cut")
    whole, cut = ((tmp_path / name / "validation" / "2.jsonl").read_text() for name in ("whole", "cut"))
    assert whole == cut and whole.count("\n") == 8


def test_a_disk_without_room_for_weights_ends_the_run_at_its_second_checkpoint(
    overrides, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 * 1024, before[1]))  # the weights alone take 300 kB
    try:
        code = main(overrides("trainer.total_training_steps=4", "trainer.save_freq=1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    assert code == 2 and "Traceback" not in said
    assert "the checkpoint of step 1 could not be saved" in said
    assert "error: the checkpoints of steps 1 and 2 could not be saved: [Errno 27] File too large" in said
    assert "trainer.continue_without_checkpoints" in said
    run = tmp_path / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert not list(run.glob("global_step_*")) and (run / "crash.txt").is_file()


def test_missing_files_are_reported_before_torch_is_imported(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from verl.trainer.main_ppo import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    line = ["actor_rollout_ref.model.path=/nowhere/m", f"data.train_files={tmp_path}/no.jsonl"]
    out = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["2", "False", "False"], out.stderr
    assert "no.jsonl does not exist" in out.stderr and "'/nowhere/m'" in out.stderr


def test_a_model_a_reward_and_few_rows_are_enough(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is given but lengths that fit the tiny model: batches follow the data."""
    monkeypatch.chdir(tmp_path)
    rows = (digits_data / "train.jsonl").read_text().splitlines(keepends=True)[:11]
    (tmp_path / "few.jsonl").write_text("".join(rows))
    line = [
        "data.train_files=few.jsonl",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        f"reward.custom_reward_function.path={digits_data}/digits_reward.py",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
    ]
    assert main(line) == 0
    (folder,) = (tmp_path / "checkpoints").glob("*/*")
    saved = (folder / "config.yaml").read_text()
    assert "train_batch_size: 11" in saved and "ppo_mini_batch_size: 11" in saved
    assert len((folder / "rollouts" / "1.jsonl").read_text().splitlines()) == 11
