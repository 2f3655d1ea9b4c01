"""`verl eval --suite`: the numbers are those one counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from verl.trainer.main_eval import main
from verl.trainer.suites import suite_lines


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(text: str, **columns: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": text}]
    return {"prompt": prompt, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}, **columns}


def test_accuracies_and_their_standard_errors(tmp_path: Path) -> None:
    given = ["so #### 7", "it is 7", "#### 8", "none"]
    rows = [question("sum of 3 4 ?", responses=[text]) for text in given]
    found = dict(suite_lines("gsm8k", write(tmp_path / "responses.jsonl", rows), "responses"))
    # Of 1, 0, 0, 0 and of 1, 1, 0, 0.
    assert found["gsm8k strict"] == "0.2500 ± 0.2500 (standard error), 4 questions"
    assert found["gsm8k flexible"] == "0.5000 ± 0.2887 (standard error), 4 questions"


def test_a_model_answers_greedily_and_is_scored(
    tiny_model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    write(folder / "train.jsonl", [question("repeat 1")] * 5)
    write(folder / "test.jsonl", [question("sum of 3 4 ?")] * 3)
    keys = [f"model.path={tiny_model_dir}", f"data.path={folder}", f"data.output_path={tmp_path}/out.parquet"]
    more = ["data.max_response_length=6", "data.max_prompt_length=16", "rollout.dtype=float32"]
    assert main([*keys, "--suite", "gsm8k", *more]) == 0
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == 3 and len({text for row in rows for text in row["responses"]}) == 1, "greedily"
    said = "".join(capfd.readouterr())
    assert "gsm8k strict" in said and "gsm8k flexible" in said and "3 questions" in said


def test_what_is_missing_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ["model.path=nowhere", f"data.path={tmp_path}/gsm8k"]
    assert main(["--suite", "gsm8k", *keys]) == 2
    assert "verl prepare gsm8k --to DIR" in capfd.readouterr().err
    assert main(["--suite", "gsm9k", *keys]) == 2
    assert "--suite gsm9k: known: gsm8k" in capfd.readouterr().err
