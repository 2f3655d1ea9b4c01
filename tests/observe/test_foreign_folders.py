"""Run folders that somebody else made: only they are read, in bounded memory, and nothing in them is a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.big_run import sample, write_run
from tests.report_data import report_data
from verl import cli
from verl.errors import DataError
from verl.observe.prometheus import Counts
from verl.observe.report import page, write_report
from verl.observe.run_folder import RunFolder, read_lineage
from verl.observe.token_table import TokenTable
from verl.observe.web_data import WebData
from verl.observe.web_server import WebServer


def asker(*folders: Path, outside: bool = False) -> Callable[..., Any]:
    data = WebData(folders, live=True, outside=outside)
    return lambda path, **query: json.loads(data.get(path, query))


def test_of_very_many_tokens_in_a_group_the_first_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [{**sample(1, 0), "uid": "a"} for _ in range(3)]})
    table = TokenTable([b"x"], [4, 4, 4], {"code": np.zeros(12, np.int64)})
    table.write(run / "rollouts" / "1.parquet")
    monkeypatch.setattr("verl.observe.web_data.MAX_GROUP_TOKENS", 5)
    rows = asker(run)("run/0/group/rollouts/1/0.json")["rows"]
    assert [row["tokens"] is not None for row in rows] == [True, True, False]


def test_only_the_folders_that_were_given_are_read(tmp_path: Path) -> None:
    private = write_run(tmp_path / "private" / "other", {5: [{**sample(5, 0), "response": "SECRET"}]})
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    lineage = {"parent": str(private), "parent_name": "private/other", "step": 1, "overrides": [], "time": 1}
    (run / "lineage.json").write_text(json.dumps(lineage))
    (run / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {private / 'rollouts'}}}\n")
    ask = asker(run)
    assert [each["name"] for each in ask("runs.json")["runs"]] == ["p/run"]
    assert ask("run/0/index/rollouts.json")["step"] == [1]
    notes = "\n".join(ask("run/0/summary.json")["notes"])
    assert "trainer.rollout_data_dir is outside of the run folder" in notes and "private/other" in notes
    assert "SECRET" not in str(report_data(write_report(run)))
    asked = asker(run, outside=True)
    assert [each["name"] for each in asked("runs.json")["runs"]] == ["p/run", "private/other"]
    assert asked("run/0/index/rollouts.json")["step"] == [5]
    both = asker(run, private)("runs.json")["runs"]
    assert both[0]["parent"] == both[1]["id"]


@pytest.mark.parametrize(
    "name", ["rollouts/5.jsonl", "rollouts/5.parquet", "crash.txt", "metrics.jsonl", "phases"]
)
def test_links_out_of_the_run_folder_are_refused(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    (tmp_path / "private").mkdir()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "private")
    with pytest.raises(DataError, match=f"{name} leads out of the run folder; --outside"):
        WebData([run], live=True)
    WebData([run], live=True, outside=True)
    link = tmp_path / "link"
    (run / name).unlink()
    (run / "rollouts" / "2.jsonl").symlink_to("1.jsonl")
    link.symlink_to(run)
    assert asker(link)("run/0/index/rollouts.json")["step"] == [1, 2]


def test_a_link_that_appears_while_a_run_is_served_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    ask = asker(run)
    (tmp_path / "private.jsonl").write_text(json.dumps({**sample(5, 0), "response": "SECRET"}) + "\n")
    (run / "rollouts" / "5.jsonl").symlink_to(tmp_path / "private.jsonl")
    for path in ("run/0/index/rollouts.json", "run/0/group/rollouts/5/0.json", "run/0/search/rollouts"):
        with pytest.raises(DataError, match=r"5\.jsonl leads out of the run folder"):
            ask(path)


@pytest.mark.parametrize("folder", ["~nosuchuser/x", "a\0b", "\ud800"])
def test_a_folder_of_samples_that_cannot_exist_has_none(tmp_path: Path, folder: str) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    (run / "config.yaml").write_text(json.dumps({"trainer": {"rollout_data_dir": folder}}))
    for outside in (False, True):
        ask = asker(run, outside=outside)
        assert ask("run/0/index/rollouts.json")["step"] in ([], [1])
        ask("run/0/summary.json")
    write_report(run)
    assert cli.main(["view", str(run)]) == 0


def test_a_folder_whose_name_is_no_text_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / os.fsdecode(b"\xff\xfe"), {1: [sample(1, 0)]})
    assert report_data(write_report(run))["runs.json"]["runs"][0]["name"] == "p/\ufffd\ufffd"
    with WebServer(WebData([run], live=True), 0) as server:
        assert b"\xef\xbf\xbd" in server.document
    assert cli.main(["view", str(run)]) == 0


def test_a_name_that_looks_like_a_marker_is_a_name() -> None:
    before, after = page("{{STYLE}}{{SCRIPT}}{{NONE}}", served=False)
    assert "<title>{{STYLE}}{{SCRIPT}}{{NONE}}</title>" in before and "<style>{{" not in before
    assert "<script>{{" not in after


def test_numbers_no_float_can_hold_make_no_lineage(tmp_path: Path) -> None:
    text = '{"parent":"/","parent_name":"a","step":1,"overrides":[],"time":%s}' % ("9" * 400)
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    (run / "lineage.json").write_text(text)
    assert read_lineage(run) is None
    with RunFolder(run) as folder:  # as a run that resumes does
        folder.rewind(1)
    assert asker(run)("runs.json")["runs"][0]["fork_step"] is None


def test_phases_that_are_nested_deeply_end_where_they_are_cut_on_resume(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.phases_dir.mkdir()
        file = folder.phases_dir / "controller.jsonl"
        file.write_text('{"step":1}\n' + "[" * 100_000 + "\n")
        folder.rewind(3)
        assert file.read_text() == '{"step":1}\n'


@pytest.mark.parametrize(
    "text", ["[1]", '{"a": 5}', '{"a": [null]}', '{"a": [%s]}' % ("9" * 400), "[" * 100_000]
)
def test_counters_of_another_program_begin_at_zero(tmp_path: Path, text: str) -> None:
    (tmp_path / "counters.json").write_text(text)
    counts = Counts(tmp_path / "counters.json")
    assert counts.reached("p", "name", "", [2.0]) == [2.0]


def test_counters_with_other_buckets_begin_at_zero(tmp_path: Path) -> None:
    (tmp_path / "counters.json").write_text('{"p name": [1.0, 2.0]}')
    assert Counts(tmp_path / "counters.json").reached("p", "name", "", [5.0]) == [5.0]


@pytest.mark.parametrize(
    "config",
    [
        {
            "actor_rollout_ref": {},
            "trainer": {"rollout_data_dir": "~nosuchuser/x", "validation_data_dir": [1]},
        },
        {"model": {}, "trainer": {}, "algorithm": 5},
        {"actor_rollout_ref": {}, "trainer": 3},
    ],
)
def test_commands_that_repeat_a_run_refuse_a_foreign_one_with_an_error(tmp_path: Path, config: Any) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    (run / "config.yaml").write_text(json.dumps(config))
    for command in (["replay", str(run), "--step", "1"], ["fork", str(run), "--step", "1", "--name", "b"]):
        assert cli.main(command) == 2, command
