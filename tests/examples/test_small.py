"""Every small example runs as typed, and its run folder is as the README beside it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import check_claims, check_example, run_script

pytestmark = pytest.mark.timeout(1500)


ALGORITHMS = ["grpo", "ppo", "dapo", "rloo", "reinforce_plus_plus", "remax", "lora", "async"]


TYPED = """
verl merge merge --backend fsdp --local_dir {run}/global_step_{step}/actor --target_dir merged
verl generate model.path=merged data.path={data}/held_out.parquet data.max_prompt_length=48 \\
    data.max_response_length=20 data.output_path=answers.parquet rollout.n=1 rollout.temperature=0
verl eval data.path=answers.parquet data.metrics_path=scores.json reward.custom_reward_function.path={data}/reward.py
"""


def check_merged(run: Path, data: Path, folder: Path, path: str) -> None:
    """Merged and scored as in docs/quickstart/sft-then-rl.md, a run has the accuracy of its last validation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (folder / "typed.sh").write_text("set -eu" + TYPED.format(run=run, data=data, step=rows[-1]["step"]))
    run_script(folder / "typed.sh", data, folder, path=path)
    accuracy = pytest.approx(rows[-1]["val-core/tasks/word_problems/reward/mean@1"], abs=1e-6)
    assert accuracy in numbers(json.loads((folder / "scores.json").read_text()))


def numbers(tree: object) -> list[float]:
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers(value)]
    return [float(tree)] if isinstance(tree, int | float) else []


@pytest.mark.slow(seconds=19)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_small_script_does_what_its_readme_says(
    name: str, demo_files: Path, tmp_path: Path, forked_path: str
) -> None:
    check_example(name, demo_files, tmp_path, forked_path)
    if name == "grpo":
        check_merged(tmp_path / "checkpoints" / "examples" / name, demo_files, tmp_path, forked_path)


@pytest.mark.components
def test_the_small_megatron_script_does_what_its_readme_says(
    demo_files: Path, tmp_path: Path, forked_path: str, joined: Any
) -> None:
    pytest.importorskip("megatron.core")
    check_example("megatron", demo_files, tmp_path, forked_path)


def readme_and_run(folder: Path, table: str) -> tuple[Path, Path]:
    (folder / "README.md").write_text(
        f"# X\n\n## What to expect\n\n| metric | first | last |\n|---|---|---|\n{table}\n\n"
        "- `metrics.jsonl`: numbers\n\n## Next\n"
    )
    rows = [{"reward/mean": 0.2}, {"other": 1.0}, {"reward/mean": 0.9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "README.md", folder


@pytest.mark.parametrize("table", ["| `reward/mean` | < 0.3 | > 0.8 |", "| `reward/mean` | | >= 0.9, <= 1 |"])
def test_true_claims_pass(table: str, tmp_path: Path) -> None:
    check_claims(*readme_and_run(tmp_path, table))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("| `reward/mean` | < 0.1 | > 0.8 |", "reward/mean, first: 0.2, not  < 0.1"),
        ("| `reward/mean` | | > 0.95 |", "reward/mean, last: 0.9, not  > 0.95"),
        ("| `reward/mean` | | > 0.8, < 0.9 |", "last: 0.9"),
        ("| `reward/means` | | > 0.8 |", "reward/means: not in metrics.jsonl"),
        ("| `reward/mean` | | about 0.9 |", "cannot be read"),
        ("| `reward/mean` | | |", "claims nothing"),
        ("", "says nothing"),
    ],
)
def test_false_and_unreadable_claims_fail(table: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        check_claims(*readme_and_run(tmp_path, table))


def test_a_missing_file_fails(tmp_path: Path) -> None:
    readme, run = readme_and_run(tmp_path, "| `reward/mean` | | > 0.8 |")
    readme.write_text(readme.read_text().replace("`metrics.jsonl`", "`global_step_*/actor`"))
    with pytest.raises(AssertionError, match="actor: missing or empty"):
        check_claims(readme, run)
