"""User errors: one message that names the cause and the key, exit code 2, no file changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.trainer.main_ppo import main


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_reward(folder: Path, body: str, signature: str = "solution_str, ground_truth") -> Path:
    path = folder / "reward.py"
    path.write_text(f"def compute_score({signature}):\n    {body}\n")
    return path


@pytest.fixture
def refused(overrides: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run the command; assert exit code 2 and one message; return it."""

    def go(*extra: str, code: int = 2) -> str:
        before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
        assert main(overrides(*extra)) == code
        said = capsys.readouterr().err
        assert said.count("error: ") == 1 and "Traceback" not in said
        notices, _, message = said.partition("error: ")  # log lines may come before it, never after
        assert message.strip() and (not notices or notices.endswith("\n"))
        assert all(path.exists() and path.stat().st_mtime_ns == time for path, time in before.items())
        return message

    return go


def test_missing_file(refused):
    message = refused("data.train_files=/nowhere/train.parquet")
    assert "/nowhere/train.parquet" in message and "data.train_files" in message


def test_wrong_column_names_those_that_exist(refused, tmp_path):
    path = write_rows(tmp_path / "q.jsonl", [{"question": "repeat 1", "answer": "1"}] * 20)
    message = refused(f"data.train_files={path}")
    assert "question" in message and "answer" in message and "data.prompt_key=question" in message


def test_empty_dataset(refused, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    message = refused(f"data.train_files={path}")
    assert "empty.jsonl" in message and ("no rows" in message or "empty" in message)


def test_prompt_longer_than_allowed(refused):
    message = refused("data.max_prompt_length=3")
    assert "data.max_prompt_length" in message and "data.filter_overlong_prompts=True" in message


def test_batch_larger_than_the_dataset(refused):
    message = refused("data.train_batch_size=1000")
    assert "data.train_batch_size" in message and "256" in message


@pytest.mark.parametrize(
    ("override", "known"),
    [
        ("algorithm.adv_estimator=gpro", "grpo"),
        ("actor_rollout_ref.rollout.name=vlm", "vllm"),
        ("actor_rollout_ref.actor.strategy=deepspeed", "fsdp2"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "vanilla"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "token-mean"),
        ("reward.reward_manager.name=parallel", "prime"),
        ("trainer.logger=[tensorbord]", "tensorboard"),
        ("data.truncation=cut", "middle"),
    ],
)
def test_unknown_names_list_the_known_ones(refused, override, known):
    message = refused(override)
    key, value = override.split("=", 1)
    assert key in message and value.strip("[]") in message and known in message


def test_unknown_key_names_the_nearest(refused):
    message = refused("actor_rollout_ref.actor.clip_ration=0.1")
    assert "actor_rollout_ref.actor.clip_ratio" in message


def test_mini_batch_that_does_not_divide(refused):
    message = refused("actor_rollout_ref.actor.ppo_mini_batch_size=5")
    assert "ppo_mini_batch_size" in message and "16" in message and "8" in message


def test_mini_batch_larger_than_the_batch(refused):
    message = refused("actor_rollout_ref.actor.ppo_mini_batch_size=64")
    assert "ppo_mini_batch_size" in message and "train_batch_size" in message


def test_one_response_with_a_group_estimator(refused):
    message = refused("actor_rollout_ref.rollout.n=1")
    assert "rollout.n" in message and "grpo" in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('answer')", ["KeyError", "answer"]),
        ("return None", ["None"]),
        ("return float('nan')", ["nan"]),
        ("return 'right'", ["right"]),
        ("return {'points': 1.0}", ["score", "points"]),
    ],
)
def test_reward_function_that_fails_on_every_row(refused, tmp_path, body, words):
    path = write_reward(tmp_path, body)
    message = refused(f"reward.custom_reward_function.path={path}")
    assert "compute_score" in message
    for word in words:
        assert word.lower() in message.lower()


def test_batch_reward_of_the_wrong_length(refused, tmp_path):
    path = write_reward(tmp_path, "return [1.0]", "completions, **columns")
    message = refused(f"reward.custom_reward_function.path={path}", "reward.reward_manager.name=batch")
    assert "compute_score" in message and "1" in message


def test_reward_function_with_an_unknown_parameter(refused, tmp_path):
    path = write_reward(tmp_path, "return 1.0", "solution_str, solution_quality")
    message = refused(f"reward.custom_reward_function.path={path}")
    assert "solution_quality" in message


def test_reward_file_or_function_missing(refused, tmp_path):
    assert "nowhere.py" in refused("reward.custom_reward_function.path=/tmp/nowhere.py")
    path = write_reward(tmp_path, "return 1.0")
    message = refused(
        f"reward.custom_reward_function.path={path}", "reward.custom_reward_function.name=compute"
    )
    assert "compute_score" in message and "compute" in message


def test_unknown_data_source_without_a_function(refused):
    message = refused("~reward.custom_reward_function.path")
    assert "digits" in message and "gsm8k" in message and "reward.custom_reward_function.path" in message


def test_model_folder_that_does_not_exist(refused):
    message = refused("actor_rollout_ref.model.path=/nowhere/model")
    assert "/nowhere/model" in message and "actor_rollout_ref.model.path" in message


def test_model_folder_without_tokenizer(refused, tiny_model_dir, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, folder, ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    message = refused(f"actor_rollout_ref.model.path={folder}")
    assert "tokenizer" in message and str(folder) in message


def test_model_folder_without_chat_template(refused, tiny_model_dir, tmp_path):
    folder = tmp_path / "untemplated"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    message = refused(f"actor_rollout_ref.model.path={folder}")
    assert "chat template" in message and "data.chat_template" in message


def test_model_folder_without_weights(refused, tiny_model_dir, tmp_path):
    folder = tmp_path / "weightless"
    shutil.copytree(tiny_model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    message = refused(f"actor_rollout_ref.model.path={folder}")
    assert str(folder) in message


def test_run_folder_that_cannot_be_written(refused, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    message = refused(f"trainer.default_local_dir={blocker}/run")
    assert "trainer.default_local_dir" in message and str(blocker) in message


@pytest.mark.skipif(os.geteuid() != 0, reason="drops to an unprivileged user, which only root can")
def test_run_folder_without_permission(tmp_path):
    """Root may write anywhere, so the check runs as another user in a child process."""
    from verl.errors import VerlError
    from verl.observe.run_folder import RunFolder

    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent != Path("/") and parent.owner() == "root" and str(parent) != "/tmp":
            parent.chmod(parent.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            RunFolder(locked / "run")
        except VerlError as error:
            os._exit(0 if "trainer.default_local_dir" in str(error) else 3)
        except BaseException:
            os._exit(4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("override", "package", "extra"), [("trainer.logger=[wandb]", "wandb", "pip install 'wandb>=")]
)
def test_missing_optional_package_names_the_extra(refused, monkeypatch, override, package, extra):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    message = refused(override)
    assert package in message and extra in message


def test_two_runs_in_one_folder(overrides, refused, tmp_path):
    from verl.observe.run_folder import RunFolder

    with RunFolder(tmp_path / "run"):
        message = refused()
    assert str(tmp_path / "run") in message
