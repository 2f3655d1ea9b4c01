"""What a run says when it is over: where things are, what it reached and what to do next."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import tiny_run
from verl.checkpoint.files import FileRecord
from verl.checkpoint.manifest import Manifest, write_manifest
from verl.config.load import from_dict, load_ppo_config
from verl.config.schema import SFTConfig
from verl.observe.console import typed
from verl.observe.run_folder import LINEAGE
from verl.trainer import main_eval, main_generation, main_ppo, sft_trainer
from verl.trainer.loop import RLLoop
from verl.trainer.setup import closing_lines, with_closing_lines


def said(text: str) -> dict[str, str]:
    """The closing lines of the output of a run."""
    lines = text.splitlines()
    (first,) = [
        n
        for n, line in enumerate(lines)
        if line.startswith(("finished ", "stopped  ", "interrupted ", "crashed "))
    ]
    return {line[:14].strip(): line[15:] for line in lines[first:] if line[14:15] == " "}


@pytest.fixture
def words(tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: Any) -> list[str]:
    """Of two steps with validation, in a folder below the working directory."""
    monkeypatch.chdir(tmp_path)
    val = f"data.val_files={digits_data}/train.jsonl"
    others = ("trainer.total_training_steps=2", "trainer.logger=[console]", "data.val_max_samples=4")
    return tiny_run(tiny_model_dir, digits_data, val, *others, folder=Path("runs/one"))


def test_a_finished_run_says_where_everything_is_and_the_next_command_works(
    words: list[str], digits_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo.main(words) == 0
    lines = said(capsys.readouterr().out)
    assert lines["finished"].startswith("after step 2, in ") and " s" in lines["finished"]
    rows = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    rewards = [f"{row['reward/mean']:.3f}" for row in rows if "reward/mean" in row]
    assert lines["reward"] == f"{rewards[0]} -> {rewards[-1]}"
    assert lines["validation"].count(" -> ") == 1 and lines["run folder"] == "runs/one"
    assert lines["report"].startswith("runs/one/report.html") and Path("runs/one/report.html").is_file()
    model = Path(lines["trained model"])
    assert model == Path("runs/one/global_step_2/actor/huggingface") and (model / "config.json").is_file()
    assert lines["look at it"] == typed("view", "runs/one", "--serve")
    command = shlex.split(lines["next"])
    assert command[-7:] == [
        "generate", f"model.path={model}", f"data.path={digits_data}/train.jsonl",
        "data.prompt_key=prompt", "data.max_prompt_length=16", "data.max_response_length=4",
        "data.output_path=responses.parquet",
    ]  # fmt: skip
    assert main_generation.main([*command[-6:], "data.max_samples=3", "trainer.device=cpu"]) == 0
    lines = said(capsys.readouterr().out)
    assert "3 prompts with 1 response each" in lines["finished"] and lines["model"] == str(model)
    assert lines["responses"] == "responses.parquet (column responses)"
    command = shlex.split(lines["next"].replace("FILE.py", f"{digits_data}/digits_reward.py"))
    assert main_eval.main([*command[-3:], "reward.in_process=True"]) == 0
    printed = capsys.readouterr()
    assert "is read as" not in printed.err
    lines = said(printed.out)
    assert lines["numbers"] == "responses.metrics.json" and "data.output_path" in lines["next"]
    assert main_eval.main([*command[-3:], "reward.in_process=True", "data.output_path=scored.jsonl"]) == 0
    assert said(capsys.readouterr().out)["scored rows"] == "scored.jsonl"


def test_runs_that_were_stopped_or_crashed_say_it_too(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    step = RLLoop.step

    def broken(loop: RLLoop) -> dict[str, float]:
        if loop.step_number == 2:
            raise RuntimeError("the cause")
        return step(loop)

    def hung_up(loop: RLLoop) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(loop)

    monkeypatch.setattr(RLLoop, "step", broken)
    with pytest.raises(RuntimeError, match="the cause"):
        main_ppo.main([*words, "trainer.save_freq=1"])
    lines = said(capsys.readouterr().out)
    assert lines["crashed"].startswith("after step 1 of 2, in ")
    assert lines["cause"].startswith("runs/one/crash.txt") and "runs/one" in lines["look at it"]
    assert lines["next"] == "the same command resumes after step 1"
    monkeypatch.setattr(RLLoop, "step", hung_up)
    assert main_ppo.main([*words, "trainer.total_training_steps=5"]) == 75
    lines = said(capsys.readouterr().out)
    assert lines["stopped"].startswith("after step 2 of 5, in ") and "next" not in lines
    assert lines["trained model"] == "runs/one/global_step_2/actor/huggingface"


def test_a_run_that_never_wrote_to_its_folder_only_has_an_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    raise ValueError('x')\n"
    )
    assert main_ppo.main([*words, "reward.custom_reward_function.path=bad.py"]) == 2
    out = capsys.readouterr()
    assert "run folder" not in out.out and "x" in out.err


def test_without_the_console_among_the_loggers_nothing_is_printed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main_ppo.run(load_ppo_config([*words, "trainer.logger=[]", "trainer.total_training_steps=1"]))
    assert "run folder" not in capsys.readouterr().out


def test_fine_tuning_ends_the_same_way(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"{n} =", "response": str(n)}) for n in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    keys = ["data.train_files=rows.jsonl", "data.val_files=rows.jsonl", "data.train_batch_size=4"]
    keys += ["trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.device=cpu"]
    assert sft_trainer.main([f"model.path={tiny_model_dir}", *keys, "trainer.default_local_dir=sft"]) == 0
    lines = said(capsys.readouterr().out)
    assert lines["run folder"] == "sft" and {"loss", "val loss"} <= lines.keys()
    assert lines["next"].endswith(
        "generate model.path=sft/global_step_2/actor/huggingface data.path=FILE data.output_path=responses.parquet"
    )


def written(folder: Path, contents: list[str], rows: list[dict[str, Any]], command: str = "verl dpo") -> Path:
    """A run folder with a checkpoint of step 3 that has these contents."""
    saved = folder / "global_step_3"
    (saved / "actor").mkdir(parents=True)
    manifest = Manifest(3, 1, {"actor": contents}, {"x": FileRecord(1, "0")}, command=command)
    write_manifest(saved, manifest)
    (folder / "config.yaml").write_text("trainer: {total_training_steps: 9}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_it_reached_is_the_first_and_the_last_value(tmp_path: Path) -> None:
    numbers: list[float | None] = [0.5, 0.625, None]
    rows = [
        {"step": n, "train/loss": 1 / n, "val/loss": 4e-4 / n, "val/accuracy": numbers[n - 1]}
        for n in (1, 2, 3)
    ]
    lines = dict(closing_lines(written(tmp_path, ["hf_model"], rows), "finished", 200, "verl dpo"))
    assert lines["finished"] == "after step 3, in 3 min"
    assert (lines["loss"], lines["val accuracy"]) == ("1.000 -> 0.333", "0.500 -> 0.625")
    assert lines["val loss"] == "4.0e-04 -> 1.3e-04"
    assert "validation" not in lines and "reward" not in lines


def test_weights_in_shards_adapters_reward_models_and_forks(tmp_path: Path) -> None:
    rows = [{"step": 3, "train/loss": 1.0}]
    folder = written(tmp_path / "run", ["model"], rows)
    lines = dict(closing_lines(folder, "finished", 1, "verl sft"))
    part = folder / "global_step_3" / "actor"
    assert lines["trained model"].endswith(typed("merge", "--local_dir", str(part), "--target_dir", "OUT"))
    assert "next" not in lines
    (part / "lora_adapter").mkdir()
    lines = dict(closing_lines(folder, "finished", 1, "verl reward train"))
    assert lines["trained model"] == str(part / "lora_adapter")
    assert f"reward.reward_model.model_path={part / 'lora_adapter'}" in lines["next"]
    about = {"parent": "p", "parent_name": "p/q", "step": 1, "overrides": [], "time": 0.0}
    (folder / LINEAGE).write_text(json.dumps(about))
    lines = dict(closing_lines(folder, "interrupted", 1, "verl sft"))
    assert (
        lines["next"] == f"{typed('sft', '--config-path', str(folder / 'config.yaml'))} resumes after step 3"
    )


def test_a_run_that_was_interrupted_at_once_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {
        "model.path": "org/a",
        "data.train_files": "x.parquet",
        "trainer.default_local_dir": str(tmp_path / "run"),
    }
    cfg = from_dict(SFTConfig, keys)

    def killed() -> main_ppo.RunResult:
        written(tmp_path / "run", ["hf_model"], [{"step": 4, "train/loss": 1.0}])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_closing_lines(cfg, killed)
    lines = said(capsys.readouterr().out)
    assert lines["interrupted"].startswith("after step 4 of 9, in ")
    assert lines["next"] == "the same command resumes after step 3"

    def broken() -> main_ppo.RunResult:
        (tmp_path / "run" / "config.yaml").unlink()
        (tmp_path / "run" / "metrics.jsonl").rename(tmp_path / "run" / "gone")
        (tmp_path / "run" / "metrics.jsonl").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # whatever became of the folder
        with_closing_lines(cfg, broken)


def test_a_run_that_only_validates_has_no_steps(tmp_path: Path) -> None:
    folder = written(tmp_path, ["hf_model"], [{"step": 0, "val-core/x/acc/mean@1": 0.25}])
    (folder / "config.yaml").write_text("trainer: {val_only: true}\n")
    lines = dict(closing_lines(folder, "finished", 1, "verl train"))
    assert (lines["finished"], lines["validation"]) == ("validation, in 1 s", "0.250")
