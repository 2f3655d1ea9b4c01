"""`verl plan --learn` on a tiny model, with rewards whose pass rates are planted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_run import tiny_run
from verl.errors import ConfigError
from verl.trainer.plan_cli import main, run
from verl.trainer.plan_learn import Draws, report

REWARD = """
import zlib


def compute_score(solution_str, extra_info):
    kind = extra_info["number"] % 4
    if kind == 3:
        raise ValueError("no answer")
    return float([0, 1, zlib.crc32(solution_str.encode()) % 2][kind])
"""

NEVER = """
def compute_score(solution_str):
    if solution_str != "1":  # the ground truth, which is tried first
        raise ValueError("never")
    return 0.0
"""


@pytest.fixture
def keys(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """16 prompts: of each four one never passes, one always, one every other time, and of one the reward fails."""
    rows = [
        {"prompt": f"repeat {row % 10}", "reward_model": {"ground_truth": "1"}, "extra_info": {"number": row}}
        for row in range(16)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "digits_reward.py").write_text(REWARD)
    return tiny_run(tiny_model_dir, tmp_path, "actor_rollout_ref.rollout.n=8", "reward.max_failure_ratio=1")


def files(folder: Path) -> list[Path]:
    """Without what Python keeps of the reward function's file."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_the_planted_rates_are_found(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    assert run(["--learn", "--groups", "10", *keys]) == 0
    text = capsys.readouterr().out
    assert (
        "in 4 of 12 prompts the responses differ in score: 33% (14% to 61%, 95 % interval), 8 responses each"
        in text
    )
    assert re.search("4 prompts left out. Causes: 32x .* raised ValueError: no answer", text)
    assert "4 never pass, 4 always, 4 sometimes" in text
    assert re.search(r"8: 33% of the groups with signal \(14% to 61%\), 4.2 in 100 responses", text)
    assert "data.curriculum_window=[0.08,0.92]" in text and ": 4 of 12 prompts now" in text
    assert re.search(r"data.train_batch_size=30 for 10 groups with signal per step at rollout.n=8", text)
    assert files(tmp_path) == before  # nothing is kept


def test_fewer_prompts_are_drawn_from_all_rows_whatever_the_order(
    keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--learn", "--prompts", "9", *keys, "data.shuffle=False", "data.curriculum=pass_rate"]) == 0
    found = re.search(r"(\d+) never pass, (\d+) always, (\d+) sometimes", capsys.readouterr().out)
    assert found is not None
    assert 4 < sum(map(int, found.groups())) <= 9
    # In the order of the file it would be 3, 2 and 2.
    assert found.groups() != ("3", "2", "2")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--learn", "--gpus", "8"], "--learn draws on this machine"),
        (["--prompts", "8"], "--prompts is an option of --learn"),
        (["--learn", "--groups", "0"], "--groups is 0; it must be above 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], error: str, keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=error):
        run([*options, *keys])


def test_without_any_score_it_ends_with_the_cause(
    keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits_reward.py").write_text(NEVER)
    assert main(["--learn", *keys]) != 0
    error = capsys.readouterr().err
    assert re.search(
        "no prompt has two responses with a score. Causes: 128x .* raised ValueError: never", error
    )


def said(make: Callable[[int], list[float]], **options: float) -> str:
    scores = [make(row) for row in range(40)]
    draws = Draws(scores, scores, n=len(scores[0]), left_out=0, errors=[], seconds=0.01)
    given = {"groups": 30, "share": 0.5, **options}
    return "\n".join(f"{label} {text}" for label, text in report(draws, **given))  # type: ignore[arg-type]


def test_what_is_proposed_has_the_signal_that_was_asked_for() -> None:
    def right(row: int) -> list[float]:
        return [float(sample < 2 + row % 5) for sample in range(8)]  # 2 to 6 of 8

    text = said(right)
    assert "proposed rollout.n=4, the smallest with signal in 50% of the groups" in text
    share = re.search(r" 4: (\d+)% of the groups", text)
    step = re.search(r"data.train_batch_size=(\d+) for 30 groups with signal per step at rollout.n=4", text)
    assert share and step and int(step[1]) == pytest.approx(30 / int(share[1]) * 100, abs=1)
    assert "proposed rollout.n=8," in said(right, share=0.97)


def test_where_no_group_has_signal_nothing_is_proposed() -> None:
    text = said(lambda row: [float(row % 2)] * 8)
    assert "proposed no n up to 32 gives 50% of the groups a signal" in text
    assert "train_batch_size" not in text and "\ntime" not in text


def test_graded_scores_get_no_window() -> None:
    text = said(lambda row: [0.1 * (row % 3), 0.2, 0.3, 0.3])
    assert "proposed rollout.n=4" in text
    assert "curriculum_window" not in text and "never pass" not in text
