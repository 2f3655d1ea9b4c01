"""`verl replay` repeats a run bit for bit, and finds what changed since: reward, weights, tool, data, numerics."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_run import MULTI_TURN, agent_run, chat_tokenizer, save_chat_model, save_task
from tests.tiny_run import read_metrics, tiny_run, untimed
from verl import cli
from verl.config.load import load_ppo_config
from verl.trainer import dpo_trainer, reward_trainer, sft_trainer
from verl.trainer.compare import DATA, NUMERICS, OFFLINE, RESPONSE, SCORE, TOOL
from verl.trainer.main_ppo import run as train

REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return sum(word == ground_truth for word in solution_str.split()) / {parts}\n"
)


@pytest.fixture(scope="module")
def recorded(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, validated and saved at the second and at the end, by model, data and reward of its own."""
    folder = tmp_path_factory.mktemp("recorded")
    shutil.copytree(tiny_model_dir, folder / "model")
    shutil.copytree(digits_data, folder / "data")
    (folder / "data" / "digits_reward.py").write_text(REWARD.format(parts=4))
    train(
        load_ppo_config(
            tiny_run(
                folder / "model",
                folder / "data",
                f"data.val_files={folder}/data/val.jsonl",
                "data.val_max_samples=8",
                "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
                "trainer.save_freq=2",
                "trainer.test_freq=2",
                "trainer.total_training_steps=3",
                folder=folder / "run",
            )
        )
    )
    return folder


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Callable[..., Path]:
    """The run folder again, with changed values in its config."""

    def make(changes: dict[str, str] | None = None) -> Path:
        shutil.copytree(recorded / "run", tmp_path / "run")
        file = tmp_path / "run" / "config.yaml"
        for old, new in (changes or {}).items():
            assert old in file.read_text()
            file.write_text(file.read_text().replace(old, new))
        return tmp_path / "run"

    return make


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def edit_row(file: Path, line: int, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    change(rows[line])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow(seconds=2)
def test_a_run_repeats_from_a_checkpoint_and_from_its_start_and_stays_as_it_is(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded / "run"
    before = contents(run)
    assert cli.main(["replay", str(run), "--step", "3"]) == 0
    assert (
        "and 40 responses of step 3 are equal" in capsys.readouterr().out
    )  # 32 of training, 8 of validation
    assert cli.main(["replay", str(run), "--step", "2", "--from", "0"]) == 0
    assert "and 80 responses of steps 1 to 2 are equal" in capsys.readouterr().out
    assert contents(run) == before and not (run / "replays").exists()


def test_a_changed_reward_function_is_found(
    recorded: Path, copy: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other_reward.py").write_text(REWARD.format(parts=3))
    run = copy({f"{recorded}/data/digits_reward.py": f"{tmp_path}/other_reward.py"})
    assert cli.main(["replay", str(run), "--step", "3", "--keep"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: step 3, score in line" in shown and SCORE in shown
    kept = next((run / "replays").iterdir())
    assert f"the repetition is in {kept}" in shown
    assert (kept / "rollouts" / "3.jsonl").is_file() and not list(kept.glob("global_step_*"))


def test_other_weights_in_the_model_folder_are_found(
    recorded: Path, copy: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(recorded / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1.5
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    run = copy({f"path: {recorded}/model": f"path: {tmp_path}/model"})
    assert cli.main(["replay", str(run), "--step", "1"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: step 0, response in line" in shown and "of validation/0.jsonl" in shown
    shutil.rmtree(run / "validation")
    edit_row(run / "metrics.jsonl", 0, lambda row: [row.pop(name) for name in list(row) if name != "step"])
    assert cli.main(["replay", str(run), "--step", "1"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: step 1, response in line" in shown and RESPONSE in shown


@pytest.mark.parametrize(
    ("change", "name", "cause"),
    [
        ({"prompt": "user : repeat 77 assistant :"}, "prompt in line 2", DATA),
        ({"response": "0", "score": 9.0}, "response in line 2", RESPONSE),
        ({"finish_reason": "other"}, "finish_reason in line 2", RESPONSE),
        ({"error": "TypeError: no"}, "error in line 2", SCORE),
    ],
)
def test_the_cause_is_the_earliest_thing_that_differs(
    recorded: Path, change: dict[str, Any], name: str, cause: str, tmp_path: Path
) -> None:
    from verl.observe.run_reader import Run
    from verl.trainer.compare import Files, compare

    shutil.copytree(recorded / "run", tmp_path / "run")
    edit_row(tmp_path / "run" / "rollouts" / "2.jsonl", 1, lambda row: row.update(change))
    edit_row(tmp_path / "run" / "rollouts" / "2.jsonl", 0, lambda row: row.update(reward_extra=1))
    found = compare(Files.of(Run(tmp_path / "run")), Files.of(Run(recorded / "run")), range(4), samples=True)
    assert found.difference is not None and found.difference.step == 2
    assert found.difference.name.startswith(name) and found.difference.cause == cause


def test_a_number_that_differs_in_its_last_bit_is_found(
    copy: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import math

    run, seen = copy(), {}

    def change(row: dict[str, Any]) -> None:
        seen["before"] = row["actor/grad_norm"]
        row["actor/grad_norm"] = math.nextafter(row["actor/grad_norm"], 10.0)

    edit_row(run / "metrics.jsonl", 3, change)
    assert cli.main(["replay", str(run), "--step", "3"]) == 1
    shown = capsys.readouterr().out
    assert "first difference: step 3, actor/grad_norm" in shown and NUMERICS in shown
    assert f"repeated  {seen['before']!r}" in shown


def test_what_cannot_be_repeated_is_refused(
    recorded: Path, copy: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert cli.main(["replay", *arguments]) == 2
        return capsys.readouterr().err

    run = str(recorded / "run")
    assert "has no step 9: it has steps 1 to 3" in refused(run, "--step", "9")
    assert "no complete checkpoint of step 1; steps with one: 2, 3" in refused(
        run, "--step", "3", "--from", "1"
    )
    assert "--from 3: it must be 0" in refused(run, "--step", "3", "--from", "3")
    assert "has no config.yaml" in refused(str(tmp_path), "--step", "1")
    other = str(copy({"mode: 'off'": "mode: fully_async"}))
    assert "mode=fully_async: when weights arrive depends on time" in refused(other, "--step", "3")
    shutil.rmtree(other)
    other = str(
        copy({"over_sample_rate: 0.0": "over_sample_rate: 0.1", "n_gpus_per_node: 1": "n_gpus_per_node: 2"})
    )
    assert "over_sample_rate=0.1: with several engines" in refused(other, "--step", "3")


@pytest.mark.slow(seconds=3)
def test_a_tool_that_answers_at_random_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = LlamaConfig(
        vocab_size=len(chat_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = save_chat_model(LlamaForCausalLM(size), tmp_path / "model")
    task = save_task(tmp_path, longest_delay_s=0.0)
    tool = "import os\nfrom pathlib import Path\n\ndef lookup(key: int) -> str:\n" + (
        '    """Look something up.\n\n    Args:\n        key: what to look up\n    """\n'
        f"    return str((os.urandom(1)[0] if Path({str(tmp_path / 'random')!r}).exists() else key) % 96)\n"
    )
    (tmp_path / "tools.py").write_text(tool)
    run = tmp_path / "run"
    train(load_ppo_config(agent_run(model, task, run, f"{MULTI_TURN}.tools=[{tmp_path}/tools.py:lookup]")))
    assert cli.main(["replay", str(run), "--step", "1"]) == 0
    (tmp_path / "random").touch()
    assert cli.main(["replay", str(run), "--step", "1"]) == 1
    shown = capsys.readouterr().out
    assert "content of turn 2 (tool) in line" in shown and TOOL in shown


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    ("command", "main"),
    [("sft", sft_trainer.main), ("dpo", dpo_trainer.main), ("reward", reward_trainer.main)],
)
def test_training_on_given_answers_repeats_and_forks_and_other_rows_are_found(
    tiny_model_dir: Path, tmp_path: Path, command: str, main: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_rows(other: str) -> None:
        rows = [
            {
                "prompt": f"repeat {n % 10}",
                "chosen": str(n % 10),
                "rejected": other,
                "response": f"{n} {other}",
            }
            for n in range(12)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write_rows("the answer")
    run = tmp_path / "run"
    arguments = [
        f"model.path={tiny_model_dir}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.train_batch_size=4",
        "data.max_length=32",
        "optim.lr_scheduler_type=cosine",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=1",
        "trainer.early_stop_patience=50",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainer.logger=[]",
    ]
    assert main(arguments) == 0
    before = contents(run)
    assert cli.main(["replay", str(run), "--step", "3", "--from", "2"]) == 0
    assert "numbers of step 3 are equal" in capsys.readouterr().out
    assert cli.main(["replay", str(run), "--step", "4", "--from", "0"]) == 0
    assert contents(run) == before and not (run / "replays").exists()
    assert cli.main(["fork", str(run), "--step", "2", "--name", "fork"]) == 0
    assert untimed(read_metrics(tmp_path / "fork")) == untimed(read_metrics(run)[2:])
    write_rows("of of of")
    assert cli.main(["replay", str(run), "--step", "4", "--from", "0", "--keep"]) == 1
    assert OFFLINE in capsys.readouterr().out
    kept = next((run / "replays").iterdir())
    assert not list(kept.glob("global_step_*"))
    assert len(read_metrics(kept)) < 4  # it stopped after the difference
