"""Every path the viewer's page reads, on real runs: the numbers are those of the files."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.big_run import sample, write_run, write_samples
from tests.report_data import report_data
from tests.tiny_run import read_metrics, tiny_run
from verl import cli
from verl.algorithms.preference_losses import _METRICS
from verl.config.load import from_dict, load_ppo_config, recorded
from verl.config.schema import PPOConfig
from verl.observe import run_facts
from verl.observe.diagnoses import validation_summary
from verl.observe.report import write_report
from verl.observe.run_facts import config_changes, default_config, description, flat_config
from verl.observe.token_table import TokenFile
from verl.observe.web_data import WebData, whole_characters
from verl.trainer.main_ppo import run as train

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def parent(tiny_model_dir: Path, digits_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with validation, tokens and a finding; a checkpoint at the second."""
    folder = tmp_path_factory.mktemp("runs") / "project" / "parent"
    keys = (
        f"data.val_files={digits_data}/val.jsonl",
        "data.val_max_samples=8",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.total_training_steps=3",
        "trainer.resume_mode=disable",
    )
    train(load_ppo_config(tiny_run(tiny_model_dir, digits_data, *keys, folder=folder)))
    shutil.copy(folder / "report.html", folder.parent / "at-the-end.html")
    return folder


@pytest.fixture(scope="module")
def fork(parent: Path) -> Path:
    assert cli.main(["fork", str(parent), "--step", "2", "--name", "fork", f"{LR}=1e-4"]) == 0
    return parent.parent / "fork"


def asker(*folders: Path, outside: bool = False) -> Callable[..., Any]:
    data = WebData(folders, live=True, outside=outside)

    def ask(path: str, **query: str) -> Any:
        return json.loads(data.get(path, query))

    return ask


def samples(folder: Path, kind: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / kind / f"{step}.jsonl").read_text().splitlines()]


# -- a run --------------------------------------------------------------------------------------------------------


def test_curves_are_the_numbers_of_metrics_jsonl(parent: Path) -> None:
    metrics, rows = asker(parent)("run/0/metrics.json"), read_metrics(parent)
    assert metrics["step"] == [row["step"] for row in rows] == [0, 1, 2, 3]
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)} - {"step"}
    assert set(metrics["series"]) == names
    for name, values in metrics["series"].items():
        assert values == [row.get(name) for row in rows], name
    assert {"reward/mean", "actor/entropy", "timing_s/step"} < set(metrics["shown"]) <= names


def test_the_summary_has_state_findings_and_the_keys_that_were_set(parent: Path) -> None:
    ask = asker(parent)
    summary, rows = ask("run/0/summary.json"), read_metrics(parent)
    (run,) = ask("runs.json")["runs"]
    assert {name: run[name] for name in ("id", "name", "state", "step", "total_steps", "kind", "parent")} == {
        "id": "0",
        "name": "project/parent",
        "state": "finished",
        "step": 3,
        "total_steps": 3,
        "kind": "rl",
        "parent": None,
    }
    recorded = [(row["step"], found) for row in rows for found in row.get("findings", [])]
    assert recorded and {found["rule"] for found in summary["findings"]} == {
        found["rule"] for _, found in recorded
    }
    for found in summary["findings"]:
        steps = [step for step, each in recorded if each["rule"] == found["rule"]]
        newest = [each for _, each in recorded if each["rule"] == found["rule"]][-1]
        when = {"first": steps[0], "last": steps[-1], "times": len(steps), "recent": True}
        assert found == newest | when
        assert found["seen"] and found["meaning"] and found["try"]
    assert summary["config"]["data.train_batch_size"] == 8 and summary["crash"] is None
    changes = {key: (before, after) for key, before, after in summary["config_changes"]}
    assert changes["data.train_batch_size"][1] == 8 and changes["trainer.save_freq"] == (-1, 2)
    assert "trainer.token_data" not in changes and summary["notes"] == []


def test_keys_that_follow_from_others_are_not_listed_as_changes() -> None:
    """But those that were set to something else are."""
    keys = {
        "actor_rollout_ref.model.path": "org/model",
        "data.train_files": ["train.parquet"],
        "data.train_batch_size": 6,
        "data.max_response_length": 77,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 8,
        "critic.ppo_epochs": 3,
        "trainer.seed": 5,
    }
    resolved = recorded(from_dict(PPOConfig, keys, quiet=True))
    assert resolved["critic"]["model"]["path"] == "org/model" and resolved["data"]["seed"] == 5
    changes = config_changes(default_config(resolved), flat_config(resolved))
    assert {name: after for name, _, after in changes} == keys
    resolved["data"]["max_response_length"] = "damaged"
    assert "critic.model.path" in {
        name for name, *_ in config_changes(default_config(resolved), flat_config(resolved))
    }


def test_the_timeline_is_that_of_the_recorded_phases(parent: Path) -> None:
    timeline = asker(parent)("run/0/timeline.json")
    recorded = [
        (file.stem, row["name"], row["step"], row["end"] - row["start"])
        for file in (parent / "phases").iterdir()
        for row in map(json.loads, file.read_text().splitlines())
    ]
    shown = [(process, name, step, end - start) for process, name, start, end, step in timeline["spans"]]
    assert len(shown) == len(recorded) > 10 and {"gen", "update_actor", "step"} <= {each[1] for each in shown}
    for one, other in zip(sorted(shown), sorted(recorded), strict=True):
        assert one[:3] == other[:3] and abs(one[3] - other[3]) < 1e-3
    assert min(span[2] for span in timeline["spans"]) == 0.0


@pytest.mark.parametrize("kind", ["rollouts", "validation"])
def test_the_index_and_the_groups_are_those_of_the_files(parent: Path, kind: str) -> None:
    ask = asker(parent)
    index = ask(f"run/0/index/{kind}.json")
    steps = sorted(set(index["step"]))
    rows = [(step, line, row) for step in steps for line, row in enumerate(samples(parent, kind, step))]
    assert steps == ([1, 2, 3] if kind == "rollouts" else [0, 2, 3])
    assert list(zip(index["step"], index["line"], strict=True)) == [(step, line) for step, line, _ in rows]
    assert index["count"] == len(rows) and index["left_out"] == ""
    for name in ("score", "length"):
        assert index[name] == [row[name] for *_, row in rows]
    advantages = [row.get("advantage") for *_, row in rows]
    assert [value is None for value in index["advantage"]] == [kind == "validation"] * len(rows)
    if kind == "rollouts":
        assert index["advantage"] == pytest.approx(advantages, rel=1e-5)
    for name, field in (("uid", "uid"), ("finish", "finish_reason"), ("source", "data_source")):
        column = [index[name]["names"][code] for code in index[name]["codes"]]
        assert column == [row.get(field) or "" for *_, row in rows]
    seen = 0
    for step, code in sorted(set(zip(index["step"], index["uid"]["codes"], strict=True))):
        group = ask(f"run/0/group/{kind}/{step}/{code}.json")
        assert group["step"] == step and group["uid"] == index["uid"]["names"][code]
        for row in group["rows"]:
            recorded = samples(parent, kind, step)[row["line"]]
            assert {name: row[name] for name in recorded.keys() & row.keys()} == {
                name: recorded[name] for name in recorded.keys() & row.keys()
            }
            assert recorded["uid"] == group["uid"] and recorded.keys() - row.keys() == {"uid", *row["extra"]}
            seen += 1
        assert group["tokens"] == (kind == "rollouts")
    assert seen == len(rows)


def test_tokens_are_those_of_the_file_and_join_to_the_response(parent: Path) -> None:
    ask = asker(parent)
    index = ask("run/0/index/rollouts.json")
    code = index["uid"]["codes"][index["step"].index(2)]
    group, file = ask(f"run/0/group/rollouts/2/{code}.json"), TokenFile(parent / "rollouts" / "2.parquet")
    assert len(group["rows"]) == 4 and group["tokens_note"] == ""
    for row in group["rows"]:
        tokens, recorded = row["tokens"], file.row(row["line"])
        assert "".join(tokens["texts"]) == b"".join(recorded.texts).decode()
        assert len(tokens["texts"]) == row["length"]
        for name in ("log_prob", "entropy", "ratio"):
            assert tokens[name] == pytest.approx(getattr(recorded, name).tolist(), rel=6e-3), name
        assert tokens["mask"] == recorded.mask.tolist() == [1] * row["length"]  # type: ignore[union-attr]
        assert tokens["advantage"] == pytest.approx(row["advantage"], rel=6e-3, abs=1e-6)


def test_a_search_finds_what_the_files_hold_in_any_case(parent: Path) -> None:
    ask = asker(parent)
    index = ask("run/0/index/rollouts.json")
    response = samples(parent, "rollouts", 1)[0]["response"]
    for word in ("REPEAT 3", response, index["uid"]["names"][0], "nowhere"):
        matches = ask("run/0/search/rollouts", q=word)["matches"]
        expected = [
            place
            for place, (step, line) in enumerate(zip(index["step"], index["line"], strict=True))
            if (row := samples(parent, "rollouts", step)[line])
            and any(
                word.casefold() in str(row.get(name)).casefold()
                for name in ("prompt", "response", "uid", "ground_truth")
            )
        ]
        assert matches == expected, word
        assert bool(matches) == (word != "nowhere")


def test_every_metric_of_a_run_is_described(parent: Path) -> None:
    metrics = asker(parent)("run/0/metrics.json")
    assert metrics["series"].keys() - metrics["about"].keys() == set()
    assert "cut at the longest length" in metrics["about"]["response_length/clip_ratio"]


def test_every_metric_that_the_code_names_is_described() -> None:
    """Also those of methods and devices that no run here has."""
    sections = (
        "actor|critic|implicit_reward|train|val|agents|tools|training|perf|timing_s|rollout_corr|reward"
    )
    name = re.compile(rf'f?"((?:{sections})(?:/(?:\w|{{[^}}]*}})+)+)"')
    texts = {path: path.read_text() for path in Path(run_facts.__file__).parents[1].rglob("*.py")}
    written = {
        found
        for path, text in texts.items()
        if "checkpoint" not in path.parts
        for found in name.findall(text)
    }
    filled = {re.sub(r"{[^}]*}", "all", each) for each in written} | {f"actor/{each}" for each in _METRICS}
    others = {
        "actor/all",
        "agents/finish/all",
        "critic/all",
        "critic/score",
        "critic/rewards",
        "train/all",
        "tools/all/all",
    }
    assert len(filled) > 80 and {each for each in filled - others if not description(each)} == set()


def test_the_results_of_a_run_are_its_newest_numbers(parent: Path) -> None:
    (run,), rows = asker(parent)("runs.json")["runs"], read_metrics(parent)
    results, scores = run["results"], [validation_summary(row) for row in rows]
    assert results["reward"] == rows[-1]["reward/mean"] and results["loss"] is None
    assert [results["validation_first"], results["validation"]] == [scores[0], scores[-1]]


def test_previews_are_the_words_of_the_texts(tmp_path: Path) -> None:
    turns = [
        {"role": "assistant", "content": "I ask"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "six"},
    ]
    rows = [sample(1, line) for line in range(3)]
    rows[1]["response"] = "<|im_start|>first" + 3000 * " many words" + " the last<|im_end|>\n"
    rows[2] |= {"turns": [*turns, "no turn"], "response": "I ask6six"}
    rows[2]["prompt"] = rows[0]["prompt"] = "<|user|>How\n\nmany?<|end|><|assistant|>"
    index = asker(write_run(tmp_path / "p" / "run", {1: rows}))("run/0/index/rollouts.json")
    assert index["turns"] == [0, 0, 2] and index["uid"]["prompts"] == ["How many?"]
    assert index["text"][0] == "answer 0 to 0" and index["text"][2] == "I ask · six"
    assert index["text"][1].startswith("first many") and index["text"][1].endswith("words the last")
    assert len(index["text"][1]) <= 123


def test_what_agents_did_is_shown_first_and_what_never_happened_is_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "p" / "run", {1: [sample(1, 0)]})
    numbers = {
        "agents/turns/mean": 3.0,
        "agents/finish/turns": 0.5,
        "agents/finish/abort": 0.0,
        "actor/ppo_kl": 0.0,
    }
    numbers |= {
        "tools/calls/all": 4.0,
        "tools/failed/all": 1.0,
        "tools/timeout/all": 0.0,
        "tools/calls/add": 4.0,
    }
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0, **numbers}) + "\n")
    shown = asker(run)("run/0/metrics.json")["shown"]
    agents = ["agents/turns/mean", "agents/finish/turns", "tools/calls/all", "tools/failed/all"]
    assert shown == ["reward/mean", *agents, "actor/ppo_kl"]


# -- a fork, other runs, and damage -------------------------------------------------------------------------------


def test_a_fork_comes_with_its_parent_and_shows_what_was_changed(parent: Path, fork: Path) -> None:
    ask = asker(fork, outside=True)
    first, second = ask("runs.json")["runs"]
    assert (first["name"], first["parent"], first["fork_step"]) == ("project/fork", "1", 2)
    assert (second["name"], second["parent"], second["path"]) == ("project/parent", None, str(parent))
    assert ask("run/0/metrics.json")["step"] == [3] and ask("run/1/metrics.json")["step"] == [0, 1, 2, 3]
    changes = {key: (before, after) for key, before, after in ask("run/0/summary.json")["config_changes"]}
    assert changes.pop(LR) == (3e-3, 1e-4)
    assert all(key.startswith("trainer.") for key in changes), changes
    data = report_data(write_report(fork, outside=True))
    assert data["run/1/metrics.json"] == ask("run/1/metrics.json")
    assert data["run/1/index/rollouts.json"]["count"] == 0 and data["run/1/index/rollouts.json"]["left_out"]
    assert data["run/0/index/rollouts.json"]["count"] == 32


def test_the_report_holds_what_the_server_answers(parent: Path) -> None:
    ask, data = asker(parent), report_data(write_report(parent))
    for path in ("run/0/summary.json", "run/0/metrics.json", "run/0/timeline.json"):
        assert data[path] == ask(path), path
    index = ask("run/0/index/rollouts.json")
    named = data["run/0/index/rollouts.json"]
    assert [named["uid"]["names"][code] for code in named["uid"]["codes"]] == [
        index["uid"]["names"][code] for code in index["uid"]["codes"]
    ]
    where = data["run/0/groups/rollouts.json"]["of"]
    for name, chunk in where.items():
        group = data[f"run/0/groups/rollouts/{chunk}"]["groups"][name]
        code = index["uid"]["names"].index(group["uid"])
        assert group == ask(f"run/0/group/rollouts/{group['step']}/{code}.json")
    assert len(where) == 24


def test_a_run_ends_with_a_report_that_has_its_end_and_its_last_step(parent: Path) -> None:
    data = report_data(parent.parent / "at-the-end.html")
    assert data["runs.json"]["runs"][0]["state_text"] == "finished after step 3"
    assert dict(data["run/0/summary.json"]["facts"])["state"] == "finished after step 3"
    ask = asker(parent)
    assert data["run/0/metrics.json"] == ask("run/0/metrics.json")
    assert data["run/0/index/rollouts.json"]["step"] == ask("run/0/index/rollouts.json")["step"]


def test_a_crash_is_in_the_report_of_its_run(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer.loop import RLLoop

    def fails(self: RLLoop) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(RLLoop, "fit", fails)
    folder = tmp_path / "project" / "run"
    with pytest.raises(RuntimeError):
        train(load_ppo_config(tiny_run(tiny_model_dir, digits_data, folder=folder)))
    data = report_data(folder / "report.html")
    summary = data["run/0/summary.json"]
    assert "the device is lost" in summary["crash"]["cause"]
    assert dict(summary["facts"])["state"] == "crashed in the first step" and "fix" not in dict(
        summary["facts"]
    )
    assert data["runs.json"]["runs"][0]["state"] == "crashed"


def test_a_fork_whose_parent_is_gone_stands_alone(fork: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(fork, tmp_path / "elsewhere" / "fork"))
    row = json.loads((moved / "lineage.json").read_text())
    (moved / "lineage.json").write_text(json.dumps({**row, "parent": str(tmp_path / "gone")}))
    (run,) = asker(moved)("runs.json")["runs"]
    assert run["parent"] is None and run["fork_step"] == 2 and run["parent_name"] == row["parent_name"]


def test_a_run_of_fine_tuning_has_curves_a_timeline_and_samples(tiny_model_dir: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"repeat {i}"}, {"role": "assistant", "content": f"{i}"}]}
            for i in range(8)]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=4",
        f"model.path={tiny_model_dir}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.total_training_steps=2",
        f"data.val_files={tmp_path}/train.jsonl",
        f"trainer.default_local_dir={tmp_path}/project/sft",
    )
    assert cli.main(["sft", *keys]) == 0
    ask = asker(tmp_path / "project" / "sft")
    (run,) = ask("runs.json")["runs"]
    assert (run["kind"], run["state"], run["step"]) == ("offline", "finished", 2)
    written = read_metrics(tmp_path / "project" / "sft")
    assert ask("run/0/metrics.json")["series"]["train/loss"] == [row["train/loss"] for row in written]
    assert {span[4] for span in ask("run/0/timeline.json")["spans"]} >= {1, 2}
    trained, index = (ask(f"run/0/index/{kind}.json") for kind in ("rollouts", "validation"))
    assert set(trained["step"]) == {1} and trained["count"] == 4 and trained["score"] == [None] * 4
    assert index["text"] == [f"{i}" for i in range(8)] and set(index["step"]) == {2}
    assert all(f"repeat {i}" in prompt for i, prompt in enumerate(index["uid"]["prompts"]))
    tokens = index["length"]
    mean = sum(score * count for score, count in zip(index["score"], tokens, strict=True)) / sum(tokens)
    assert -mean == pytest.approx(written[-1]["val/loss"]) and run["score"] == "log-prob"
    changes = [key for key, *_ in ask("run/0/summary.json")["config_changes"]]
    assert "model.path" in changes and "data.train_batch_size" in changes


def test_a_run_without_tokens_phases_and_config_opens(parent: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(parent, tmp_path / "project" / "old"))
    shutil.rmtree(old / "phases")
    (old / "config.yaml").unlink()
    for file in old.glob("rollouts/*.parquet"):
        file.unlink()
    (old / "health.jsonl").write_text('{"step": 2, "rule": "old", "line": "kl is 7.5. Set lr"}\n')
    ask = asker(old)
    summary = ask("run/0/summary.json")
    assert summary["config"] == {} and summary["config_changes"] == []
    assert summary["notes"] == ["there is no config.yaml"]
    assert "kl is 7.5. Set lr" in [found["seen"] for found in summary["findings"]]
    group_path = f"run/0/group/rollouts/3/{ask('run/0/index/rollouts.json')['uid']['codes'][-1]}.json"
    group = ask(group_path)
    assert not group["tokens"] and "trainer.token_data=True" in group["tokens_note"]
    (old / "rollouts" / "3.tokens").write_bytes(b"verltok1")
    assert "written by an earlier version" in ask(group_path)["tokens_note"]
    spans = ask("run/0/timeline.json")["spans"]
    steps = {span[4]: span[3] - span[2] for span in spans if span[1] == "step"}
    timed = {row["step"]: row["timing_s/step"] for row in read_metrics(old) if "timing_s/step" in row}
    assert steps == pytest.approx(timed, abs=1e-3) and {span[0] for span in spans} == {"controller"}


@pytest.mark.parametrize("damage", ["cut", "one byte of a row", "not its format"])
def test_damaged_tokens_leave_the_colours_of_their_step_out_and_say_so(
    parent: Path, tmp_path: Path, damage: str
) -> None:
    copy = Path(shutil.copytree(parent, tmp_path / "project" / "run"))
    file = copy / "rollouts" / "2.parquet"
    content = bytearray(file.read_bytes())
    if damage == "one byte of a row":
        content[len(content) // 3] ^= 0xFF
    file.write_bytes(bytes(content[:-9]) if damage == "cut" else b"other" if "format" in damage else content)
    ask = asker(copy)
    index = ask("run/0/index/rollouts.json")
    last = len(index["step"]) - 1 - index["step"][::-1].index(2)
    group = ask(f"run/0/group/rollouts/2/{index['uid']['codes'][last]}.json")
    assert "2.parquet" in group["tokens_note"] and group["rows"][-1]["tokens"] is None
    assert [row["response"] for row in group["rows"]] == [
        samples(copy, "rollouts", 2)[row["line"]]["response"] for row in group["rows"]
    ]
    other = ask(f"run/0/group/rollouts/3/{index['uid']['codes'][-1]}.json")
    assert other["tokens"] and other["tokens_note"] == ""
    assert report_data(write_report(copy))["run/0/index/rollouts.json"]["count"] == index["count"]


def test_a_character_spread_over_tokens_is_at_the_one_that_completes_it() -> None:
    euro = "€".encode()
    assert whole_characters([b"a", euro[:1], euro[1:2], euro[2:] + b"b"]) == ["a", "", "", "€b"]
    assert "".join(whole_characters([b"x", euro[:2]])) == "x\ufffd"


# -- while a run writes -------------------------------------------------------------------------------------------


def test_codes_stay_while_steps_come_change_and_go(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "p" / "run", {step: [sample(step, i) for i in range(16)] for step in (1, 2)}
    )
    data = WebData([folder], live=True)
    before = json.loads(data.get("run/0/index/rollouts.json", {}))
    write_samples(folder, 3, [sample(3, i) for i in range(8)])
    write_samples(folder, 1, [sample(1, i) for i in range(8)])
    after = json.loads(data.get("run/0/index/rollouts.json", {}))
    assert after["step"] == [1] * 8 + [2] * 16 + [3] * 8
    assert after["uid"]["names"][:4] == before["uid"]["names"]
    write_samples(folder, 2, [sample(2, i, " again") for i in range(8)])
    code = after["uid"]["codes"][8]
    with pytest.raises(KeyError):
        data.get(f"run/0/group/rollouts/2/{code}.json", {})
    (folder / "rollouts" / "3.jsonl").unlink()
    newest = json.loads(data.get("run/0/index/rollouts.json", {}))
    assert (
        newest["step"] == [1] * 8 + [2] * 8
        and newest["uid"]["names"][newest["uid"]["codes"][8]] == "2-0 again"
    )


def test_paths_are_answered_while_steps_are_written_and_removed(tmp_path: Path) -> None:
    """As a resumed run does to the files the page reads; only what is gone may be refused."""
    folder = write_run(tmp_path / "p" / "run", {1: [sample(1, i) for i in range(16)]})
    data = WebData([folder], live=True)
    problems: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                index = json.loads(data.get("run/0/index/rollouts.json", {}))
                assert len(index["step"]) == len(index["uid"]["codes"]) == index["count"]
                data.get("run/0/search/rollouts", {"q": "answer 3"})
                assert json.loads(data.get("run/0/group/rollouts/1/0.json", {}))["uid"] == "1-0"
        except BaseException as error:
            problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(30):
        write_samples(folder, 2 + turn % 3, [sample(2 + turn % 3, i) for i in range(16)])
        (folder / "rollouts" / f"{2 + (turn + 1) % 3}.jsonl").unlink(missing_ok=True)
    done.set()
    for reader in readers:
        reader.join()
    assert problems == []


def test_other_parts_of_a_run_are_answered_while_an_index_is_built(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.observe.sample_index import SampleIndex

    data = WebData([parent], live=True)
    building, allowed = threading.Event(), threading.Event()
    refresh = SampleIndex.refresh

    def waits(self: SampleIndex) -> None:
        building.set()
        assert allowed.wait(60)
        refresh(self)

    monkeypatch.setattr(SampleIndex, "refresh", waits)
    builder = threading.Thread(target=data.get, args=("run/0/index/rollouts.json", {}))
    builder.start()
    assert building.wait(60)
    try:
        for path in ("runs.json", "run/0/summary.json", "run/0/metrics.json", "run/0/timeline.json"):
            answered = threading.Thread(target=data.get, args=(path, {}), daemon=True)
            answered.start()
            answered.join(60)
            assert not answered.is_alive(), path
    finally:
        allowed.set()
        builder.join()
    assert np.isfinite(json.loads(data.get("run/0/index/rollouts.json", {}))["score"]).all()
