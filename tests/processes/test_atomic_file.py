"""Files that appear when they are complete, with the permissions of the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from verl.data.write import write_rows
from verl.json_input import mode_of_new_files, replacing
from verl.models.loading import let_others_read
from verl.observe.report import write_report
from verl.observe.run_folder import RunFolder


@pytest.fixture(params=[0o077, 0o027, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_everything_a_run_writes_has_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    with RunFolder(tmp_path / "p" / "run") as run:
        run.write_config({"trainer": {}})
        run.append_metrics(1, {"a": 1.0})
        run.write_rollouts(1, [{"uid": "a"}])
        run.write_validation(1, [{"uid": "a"}])
        run.write_crash(ValueError("x"))
        write_report(run.path)
    write_rows([{"a": 1}], tmp_path / "rows.jsonl")
    write_rows([{"a": 1}], tmp_path / "rows.parquet")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    let_others_read(tmp_path)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 10
    assert {file.name: file.stat().st_mode & 0o777 for file in files} == {
        file.name: 0o666 & ~umask for file in files
    }
    assert mode_of_new_files(tmp_path) == 0o666 & ~umask


def test_a_file_is_replaced_when_it_is_complete_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(KeyError), replacing(file) as draft:
        draft.write_text("half")
        raise KeyError
    assert file.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    with replacing(file) as draft:
        draft.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and [each.name for each in tmp_path.iterdir()] == ["a.txt"]
