"""A data script written for verl (that of docs/from-verl.md) runs as it is, and a run trains from what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.trainer.main_ppo import main

PAGE = Path(__file__).parents[2] / "docs" / "from-verl.md"


@pytest.mark.components
def test_a_run_trains_from_what_a_data_script_wrote(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("datasets", reason="the script imports it (extra `datasets`)")
    block = re.search(
        r"```python title=\"prepare.py\"\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    (tmp_path / "prepare.py").write_text(block[1])
    raw = tmp_path / "raw"
    raw.mkdir()
    for split, count in (("train", 24), ("test", 8)):
        rows = [
            {"question": f"repeat {n % 10}", "answer": f"it is $\\boxed{{{n % 10}}}$"} for n in range(count)
        ]
        (raw / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "prepare.py"), *words, "--hdfs_dir", str(tmp_path / "copies")],
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "copies").iterdir()} == {"train.parquet", "test.parquet"}

    run = tmp_path / "run"
    files = [
        f"data.train_files={tmp_path}/copies/train.parquet",
        f"data.val_files={tmp_path}/copies/test.parquet",
    ]
    assert (
        main(tiny_run(tiny_model_dir, digits_data, *files, "trainer.total_training_steps=2", folder=run)) == 0
    )
    assert [row["step"] for row in read_metrics(run) if row["step"]] == [1, 2]
    sample = json.loads((run / "rollouts/1.jsonl").read_text().splitlines()[0])
    assert f"repeat {sample['ground_truth']} " in sample["prompt"]
