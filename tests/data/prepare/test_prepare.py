"""Recipes on the forms datasets are shared in, the files they make, and the commands around them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.data.columns import truth_of
from verl.data.files import read_rows
from verl.data.prepare import cli
from verl.data.prepare.cli import prepare
from verl.data.prepare.recipes import (
    RECIPES,
    DatasetRecipe,
    code,
    countdown,
    gsm8k,
    last_boxed,
    math,
    preference,
    sft_chat,
)
from verl.data.write import write_rows
from verl.errors import ConfigError, DataError
from verl.reward.scorers.code_tests import parse


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(arguments))


def test_a_gsm8k_row() -> None:
    row = gsm8k({"question": "How many? ", "answer": "600+634=1,234\n#### 1,234"}, 5, "train")
    assert row["reward_model"]["ground_truth"] == "1234" and row["data_source"] == "gsm8k"
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith("How many?\n\n")
    assert row["extra_info"] == {
        "split": "train",
        "index": 5,
        "question": "How many?",
        "answer": "600+634=1,234\n#### 1,234",
    }
    for bad in ({"question": "q", "answer": "42"}, {"question": "q", "answer": "#### "}, {"question": "q"}):
        with pytest.raises(DataError):
            gsm8k(bad, 0, "train")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"\boxed 12$ is it", "12"),
        (r"\boxed{3} and an open \boxed{4", "3"),
        (r"\boxedness{4}", None),
        ("no box", None),
    ],
)
def test_the_last_box(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_math_rows() -> None:
    made = math({"problem": "p", "solution": r"\boxed{5}", "level": "Level 1", "type": "Algebra"}, 0, "test")
    assert made is not None and truth_of(made) == "5" and made["extra_info"]["level"] == "Level 1"
    given = math({"question": "p", "answer": 42}, 0, "test")
    assert given is not None and truth_of(given) == "42"
    assert math({"problem": "p", "solution": "no box"}, 0, "test") is None
    with pytest.raises(DataError, match="no problem.*is it 'task'"):
        math({"task": "what is it", "answer": "1"}, 0, "test")


def test_countdown_rows_are_scored_by_the_task() -> None:
    from verl.data.tasks import get_task

    row = countdown({"nums": [3, 4, 5], "target": 17}, 0, "train")
    task = get_task(row["data_source"])
    assert (
        task.score("#### 3 * 4 + 5", truth_of(row)) == 1.0
        and task.score("#### 3 + 4 + 5", truth_of(row)) == 0.0
    )
    with pytest.raises(DataError, match="must be integers"):
        countdown({"nums": ["x"], "target": 1}, 0, "train")


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ({"text": "t", "test_list": ["assert f(1) == 2"]}, {"asserts": ["assert f(1) == 2"]}),
        (
            {"prompt": "t", "test_list": ["assert f(1) == 2"], "test_imports": ["import math"]},
            {"asserts": ["import math\nassert f(1) == 2"]},
        ),
        (
            {
                "prompt": "def f(x):",
                "test": "def check(candidate):\n    assert candidate(1) == 2",
                "entry_point": "f",
            },
            {"asserts": ["def check(candidate):\n    assert candidate(1) == 2"], "entry_point": "f"},
        ),
        (
            {"question": "q", "input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'},
            {"inputs": ["1\n"], "outputs": ["2\n"]},
        ),
        (
            {"question": "q", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}},
            {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
        ),
        (
            {"description": "q", "public_tests": {"input": ["1"], "output": ["2"]}},
            {"inputs": ["1"], "outputs": ["2"]},
        ),
        ({"problem": "q", "tests": [{"input": "1", "output": "2"}]}, {"inputs": ["1"], "outputs": ["2"]}),
    ],
)
def test_code_tests_in_every_form(source: dict, tests: dict) -> None:
    row = code(source, 0, "train")
    assert row is not None and json.loads(truth_of(row)) == tests
    parsed = parse(truth_of(row))  # the scorer takes every form
    assert len(parsed.stdin) + len(parsed.calls) == 1 and parsed.entry in (None, "f")
    by_stdin = "inputs" in tests and "fn_name" not in tests
    assert ("standard input" in row["prompt"][0]["content"]) == by_stdin


def test_code_rows_without_tests_or_with_broken_ones() -> None:
    assert code({"question": "q"}, 0, "train") is None
    for broken in ("{", '{"inputs": ["1"], "outputs": []}', '["x"]'):
        with pytest.raises(DataError, match="input_output"):
            code({"question": "q", "input_output": broken}, 0, "train")


HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    "source",
    [
        {"messages": HI},
        {"messages": [*HI, {"role": "user", "content": "and?"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"instruction": "hi", "input": "", "output": "yo"},
        {"prompt": "hi", "response": "yo"},
        {"prompt": HI[:1], "completion": "yo"},
        {"question": "hi", "answer": "yo"},
    ],
)
def test_conversations_in_every_form(source: dict) -> None:
    assert sft_chat(source, 0, "train") == {"messages": HI}


def test_other_conversations() -> None:
    made = sft_chat({"system": "S", "instruction": "a", "input": "b", "output": "c"}, 0, "train")
    assert made is not None and [m["content"] for m in made["messages"]] == ["S", "a\n\nb", "c"]
    assert sft_chat({"messages": HI[:1]}, 0, "train") is None
    assert sft_chat({"messages": HI[1:]}, 0, "train") is None
    with pytest.raises(DataError, match="unknown speaker 'alien'"):
        sft_chat({"conversations": [{"from": "alien", "value": "x"}]}, 0, "train")
    with pytest.raises(DataError, match="no conversation"):
        sft_chat({"x": 1}, 0, "train")


def test_tools_of_some_conversations(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    source = jsonl(tmp_path / "train.jsonl", {"messages": HI}, {"messages": HI, "tools": [tool]})
    assert run("sft_chat", "--from", source, "--to", str(tmp_path / "out")) == 0
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert [row["tools"] and json.loads(row["tools"]) for row in read_rows(file)] == [None, [tool]]


BAD = [{"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    "source",
    [
        {"prompt": "hi", "chosen": "yo", "rejected": "no"},
        {"prompt": "hi", "chosen": HI, "rejected": [*HI[:1], *BAD]},
        {"prompt": HI[:1], "chosen": HI[1:], "rejected": BAD},
        {"chosen": HI, "rejected": [*HI[:1], *BAD]},
        {"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
        {"question": "hi", "response_chosen": "yo", "response_rejected": "no"},
    ],
)
def test_preferences_in_every_form(source: dict) -> None:
    assert preference(source, 0, "train") == {"prompt": HI[:1], "chosen": HI[1:], "rejected": BAD}


def test_pairs_that_say_nothing_are_left_out() -> None:
    assert preference({"prompt": "p", "chosen": "x", "rejected": "x"}, 0, "train") is None
    other = "\n\nHuman: other\n\nAssistant: no"
    assert preference({"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": other}, 0, "train") is None
    with pytest.raises(DataError, match="no rejected"):
        preference({"prompt": "p", "chosen": "x"}, 0, "train")


@pytest.mark.gsm8k
def test_gsm8k_from_the_real_files(gsm8k_folder: Path, tmp_path: Path) -> None:
    from verl.reward.scorers import get_scorer

    assert run("gsm8k", "--from", str(gsm8k_folder), "--to", str(tmp_path)) == 0
    scorer = get_scorer("gsm8k")
    for split, count in (("train", 7473), ("test", 1319)):
        rows = list(read_rows(tmp_path / f"{split}.parquet"))
        assert len(rows) == count
        for number, row in enumerate(rows):
            assert row["extra_info"]["index"] == number and row["extra_info"]["split"] == split
            score: Any = scorer(solution_str=row["extra_info"]["answer"], ground_truth=truth_of(row))
            assert (score["score"] if isinstance(score, dict) else score) == 1.0, row


@pytest.mark.parametrize(
    "names",
    [
        ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),  # a hub clone
        ("train/a", "train/b", "test/a"),
        ("main/train_sft-0", "main/gsm8k_train", "main/gsm8k-test-0"),
        ("one", "train", "eval"),
    ],
)
@pytest.mark.parametrize("given", ["in", "in*", "in/*/*", "files"])
def test_splits_stay_apart_wherever_their_files_lie(
    names: tuple[str, ...], given: str, tmp_path: Path
) -> None:
    for name, number in zip(names, (1, 2, 3), strict=True):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        jsonl(tmp_path / "in" / f"{name}.jsonl", {"question": "How many?", "answer": f"#### {number}"})
    if given == "files" or (given == "in/*/*" and "/" not in names[0]):
        sources = [str(tmp_path / "in" / f"{name}.jsonl") for name in names]
    else:
        sources = [str(tmp_path / given)]
    assert run("gsm8k", "--from", *sources, "--to", str(tmp_path / "out")) == 0
    found = {
        file.stem: sorted(truth_of(row) for row in read_rows(file)) for file in (tmp_path / "out").iterdir()
    }
    assert found == {"train": ["1", "2"], "test": ["3"]}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_files_that_exist_are_not_replaced_untold(tmp_path: Path, form: str) -> None:
    row = {"question": "q", "answer": "#### 1"}
    jsonl(tmp_path / "train.jsonl", row)
    jsonl(tmp_path / "test.jsonl", row)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    command = ("gsm8k", "--from", str(tmp_path), "--format", form, "--to")
    for more in ((), ("--overwrite",)):
        if form == "jsonl":  # what is read is never replaced
            with pytest.raises(DataError, match=r"--to: .*train.jsonl is the file that is read \(--from\)"):
                run(*command, str(tmp_path), *more)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    out.mkdir()
    (out / f"test.{form}").write_text("earlier")
    with pytest.raises(DataError, match=rf"--to: .*test.{form} exists; set --overwrite, or another name"):
        run(*command, str(out))
    assert [path.read_text() for path in out.iterdir()] == ["earlier"]
    assert run(*command, str(out), "--overwrite") == 0
    assert len(read_rows(out / f"test.{form}")) == len(read_rows(out / f"train.{form}")) == 1


def test_generated_problems_replace_nothing_untold(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_text("earlier")
    command = ("countdown", "--to", str(tmp_path), "--count", "2", "--test_count", "1")
    with pytest.raises(DataError, match="test.parquet exists"):
        run(*command)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]
    assert run(*command, "--overwrite") == 0


def test_nan_is_no_value(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"problem": "p", "answer": float("nan"), "solution": r"\boxed{4}"})
    (written,) = prepare(RECIPES["math"], [source], tmp_path / "out")
    assert truth_of(written.example) == "4"
    source = jsonl(tmp_path / "b.jsonl", {"instruction": "i", "input": float("nan"), "output": "o"})
    (written,) = prepare(RECIPES["sft_chat"], [source], tmp_path / "chat")
    assert "nan" not in json.dumps(written.example)


def test_files_become_splits_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    row = {"question": "q", "answer": "#### 1"}
    jsonl(tmp_path / "train.jsonl", row, row)
    jsonl(tmp_path / "validation.jsonl", row)
    out = tmp_path / "out"
    assert run("gsm8k", "--from", str(tmp_path), "--to", str(out), "--format", "jsonl", "--limit", "1") == 0
    assert sorted(path.name for path in out.iterdir()) == ["train.jsonl", "val.jsonl"]
    assert len(read_rows(out / "train.jsonl")) == 1
    printed = capsys.readouterr().out
    assert "train.jsonl: 1 rows" in printed and "data_source: gsm8k" in printed


def test_left_out_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = jsonl(tmp_path / "train.jsonl", {"problem": "p", "solution": "?"}, {"problem": "p", "answer": "1"})
    assert run("math", "--from", file, "--to", str(tmp_path)) == 0
    assert "1 rows (1 source rows left out)" in capsys.readouterr().out


def test_a_bad_row_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "#### 1"})
    jsonl(tmp_path / "test.jsonl", {"question": "q", "answer": "no mark"})
    with pytest.raises(DataError, match=r"row 0 of .*test.jsonl is not a row of 'gsm8k'"):
        run("gsm8k", "--from", str(tmp_path), "--to", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="no row could be used"):
        run(
            "math",
            "--from",
            jsonl(tmp_path / "m.jsonl", {"problem": "p", "solution": "?"}),
            "--to",
            str(tmp_path),
        )


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not fit one table"):
        write_rows([{"a": 1}, {"a": "x"}], tmp_path / "x.parquet")
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        write_rows([{"a": 1}], tmp_path / "blocked" / "x.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["blocked"]


def test_procedural_problems(tmp_path: Path) -> None:
    made = ("--count", "30", "--test_count", "5", "--difficulty", "2")
    assert run("countdown", "--to", str(tmp_path), *made) == 0
    train, test = (list(read_rows(tmp_path / f"{name}.parquet")) for name in ("train", "test"))
    assert len(train) == 30 and len(test) == 5 and train[0]["data_source"] == "tasks/countdown"
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in test}
    assert run("word_problems", "--to", str(tmp_path / "w"), "--count", "10", "--test_count", "2") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", "--to", "x"), "no dataset 'nope'; known: .*gsm8k"),
        (("word_problems", "--from", "f.jsonl", "--to", "x"), "reads no files"),
        (("sft_chat", "--to", "x"), "no default source"),
        (
            ("gsm8k", "--from", "f.jsonl", "--to", "x", "--count", "3"),
            "--count: only for generated problems",
        ),
        (("gsm8k", "--to", "x", "--limit", "0"), "--limit=0"),
        (("word_problems", "--to", "x", "--count", "0"), "at least one row"),
    ],
)
def test_arguments_that_cannot_work(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(*arguments)


def test_hub_splits_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from verl.data.files import Rows

    asked = []

    def read(entries: list[str], key: str) -> Rows:
        asked.extend(entries)
        return Rows.from_list([{"question": "q", "answer": "#### 1"}], entries[0])

    monkeypatch.setattr(cli, "read_rows", read)
    recipe = DatasetRecipe("gsm8k", "", gsm8k, hub_id="o/n:main")
    assert [part.path.name for part in prepare(recipe, [], tmp_path)] == ["train.parquet", "test.parquet"]
    prepare(recipe, ["o/n:test"], tmp_path / "test")
    assert asked == ["o/n:main:train", "o/n:main:test", "o/n:test"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_example_script(name: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    file = root / "examples" / "data_preprocess" / f"{name}.py"
    assert f'main(["prepare", "{name}", *sys.argv[1:]])' in file.read_text()
    assert f"examples/data_preprocess/{name}.py --local_dir" in file.read_text()


def test_an_example_script_runs(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    source = jsonl(tmp_path / "train.jsonl", {"question": "q", "answer": "#### 1"})
    command = [sys.executable, str(root / "examples/data_preprocess/gsm8k.py")]
    where = ["--local_dir", str(tmp_path / "out"), "--source", source]
    done = subprocess.run(
        [*command, *where], capture_output=True, text=True, env={"PYTHONPATH": str(root)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "out" / "train.parquet")) == 1
    missing = subprocess.run(
        [*command, *where[:2], "--overwrite", "--source", "none.jsonl"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root)},
        check=False,
    )
    assert missing.returncode == 2 and "none.jsonl does not exist" in missing.stderr
