"""Reading rows from every kind of file, and saying what is wrong with one that cannot be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl.data.columns import likely_column, require_column
from verl.data.file_search import split_of
from verl.data.files import Rows, read_rows
from verl.errors import DataError, MissingPackage

ROWS = [{"prompt": 'a,b\n"c"', "n": 1}, {"prompt": "é", "n": 2}, {"prompt": "z", "n": 3}]


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        quoted = [[str(value).replace('"', '""') for value in row.values()] for row in rows]
        lines = [mark.join(rows[0])] + [mark.join(f'"{value}"' for value in row) for row in quoted]
        path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "arrow"])
def test_every_typed_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    rows = read_rows(str(write(tmp_path / f"x.{ending}")))
    assert list(rows) == ROWS and len(rows) == 3
    assert rows[1] == ROWS[1] and rows[-1] == ROWS[2] and rows[0:2] == ROWS[:2]
    assert rows.column_names == ["prompt", "n"]
    assert rows.origin(2) == f"row 2 of {tmp_path}/x.{ending}"


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_csv_values_stay_strings(tmp_path: Path, ending: str) -> None:
    rows = read_rows(write(tmp_path / f"x.{ending}"))
    assert list(rows) == [{"prompt": row["prompt"], "n": str(row["n"])} for row in ROWS]


def test_lists_folders_and_globs_keep_order(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", ROWS[2:])
    write(tmp_path / "a.jsonl", ROWS[:2])
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / ".hidden.json").write_text("broken")
    assert list(read_rows(tmp_path)) == ROWS
    assert list(read_rows(str(tmp_path / "*.[jp]*"))) == ROWS
    assert [r["n"] for r in read_rows([tmp_path / "b.parquet", str(tmp_path / "a.jsonl")])] == [3, 1, 2]
    several = read_rows([tmp_path / "b.parquet", tmp_path / "a.jsonl"])
    assert several.origin(1).endswith("row 0 of " + str(tmp_path / "a.jsonl"))
    assert several[1] == ROWS[0] and several[0] == ROWS[2]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_rows("~/x.jsonl")) == 3


def test_json_in_its_other_shapes(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert list(read_rows(file)) == ROWS
    file.write_text("\n".join(map(json.dumps, ROWS)))
    assert list(read_rows(file)) == ROWS
    file.write_text("\ufeff" + json.dumps(ROWS[0]))
    assert list(read_rows(file)) == ROWS[:1]


def test_rows_with_different_columns_and_types_are_kept_as_written(tmp_path: Path) -> None:
    mixed = [{"a": 1, "extra": {"x": [1]}}, {"a": "1", "b": None}]
    rows = read_rows(write(tmp_path / "x.jsonl", mixed))
    assert list(rows) == mixed and rows.column_names == ["a", "extra", "b"]


def test_a_folder_saved_by_datasets_reads_only_its_tables(tmp_path: Path) -> None:
    write(tmp_path / "data-00000-of-00001.arrow")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text('{"_split": null}')
    assert list(read_rows(tmp_path)) == ROWS


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("Validation.jsonl", "val"),
        ("dev_1.csv", "val"),
        ("data/test-0.parquet", "test"),
        ("test/part-0.parquet", "test"),
        ("test/train.jsonl", "train"),
        ("gsm8k_eval.json", "test"),
        ("trainer.json", None),
        ("latest/x.json", None),
    ],
)
def test_the_split_of_a_file_is_a_word_of_its_name_or_folder(name: str, split: str | None) -> None:
    assert split_of(Path(name)) == split


def folder_of(folder: Path, *names: str) -> Path:
    """Each file has one row, its own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, [{"name": name}])
    return folder


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (
            [
                "data/train-0.parquet",
                "data/train-1.parquet",
                "data/test-0.parquet",
                "data/validation-0.parquet",
            ],
            ["data/train-0.parquet", "data/train-1.parquet"],
            ["data/test-0.parquet"],
        ),
        (["train/a.arrow", "validation/a.arrow"], ["train/a.arrow"], ["validation/a.arrow"]),
        (["a.jsonl", "test.jsonl"], ["a.jsonl"], ["test.jsonl"]),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["a.jsonl", "train.jsonl"], ["a.jsonl", "train.jsonl"], ["a.jsonl", "train.jsonl"]),
        (["test.jsonl"], ["test.jsonl"], ["test.jsonl"]),
    ],
)
def test_of_a_folder_with_several_splits_one_is_read(
    names: list[str], train: list[str], test: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, *names)
    for split, expected in (("train", train), ("test", test)):
        caplog.clear()
        with caplog.at_level("INFO", logger="verl.data.file_search"):
            assert [row["name"] for row in read_rows(folder, split=split, key="KEY")] == expected
        left_out = sorted(set(names) - set(expected))
        said = "".join(caplog.messages)
        other = (names, split) in ((["test.jsonl"], "train"), (["a.jsonl", "train.jsonl"], "test"))
        assert len(caplog.messages) == (1 if left_out or other else 0)
        assert all(name in said for name in left_out)


def test_what_the_hub_and_datasets_keep_beside_the_data_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, "train/a.jsonl", "train/cache-0a1b.arrow", "train/cache-0a_00000_of_00002.arrow"
    )
    for name in ("dataset_infos.json", "dataset_dict.json", "train/dataset_info.json", "train/state.json"):
        write(folder / name)
    assert list(read_rows(folder)) == [{"name": "train/a.jsonl"}]


def test_a_folder_that_lacks_the_split_but_has_several_others(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "test.jsonl", "val.jsonl")
    with pytest.raises(DataError, match=r"KEY: .*no files of train.*test: test.jsonl; val: val.jsonl"):
        read_rows(folder, key="KEY")


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize(
    ("column", "turns"),
    [
        ("messages", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
        ("messages", [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": []}]),
        ("conversations", [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]),
        ("prompt", [{"role": "user", "content": "q"}]),
    ],
)
def test_one_conversation_is_one_row(column: str, turns: list[dict], ending: str, tmp_path: Path) -> None:
    row = {column: turns, "id": 1}
    (tmp_path / f"x.{ending}").write_text(json.dumps(row))
    assert list(read_rows(tmp_path / f"x.{ending}")) == [row]
    (tmp_path / "y.json").write_text(json.dumps(turns))
    assert list(read_rows(tmp_path / "y.json")) == [{"messages": turns}]


def test_a_table_has_the_columns_of_every_row() -> None:
    rows = Rows.joined(
        [
            Rows.from_list([{"a": 1}, {"a": 2, "b": {"k": "x"}}, {"c": [0.5]}]),
            Rows.from_list([{"b": {"l": 1}}]),
        ]
    )
    assert rows.table([1, 2, 3]).to_pylist() == [
        {"a": 2, "b": {"k": "x", "l": None}, "c": None},
        {"a": None, "b": None, "c": [0.5]},
        {"a": None, "b": {"k": None, "l": 1}, "c": None},
    ]
    numbered: list[Any] = [{0: "x"}, {1: "y"}]
    assert Rows.from_list(numbered).table([1]).to_pylist() == [{"0": None, "1": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": \n', r"line 2 is not valid JSON"),
        ("x.jsonl", '\n{"a": 1}\n[1]\n', r"line 3: expected an object of columns, got list"),
        ("x.json", '{"a": ', r"not valid JSON"),
        ("x.json", '"text"', r"must hold a list of objects, got str"),
        ("x.json", "[1, 2]", r"element 0: expected an object"),
        ("x.csv", "a,b\n1,2,3\n", r"line 2: the number of fields differs"),
        ("x.csv", "a,b\n1\n", r"line 2: the number of fields differs"),
        ("x.csv", 'a,b\n"1"x,2\n', r"not valid csv after line 1"),
        ("x.parquet", "not parquet", r"cannot be read as parquet"),
        ("x.arrow", "not arrow", r"cannot be read as arrow"),
        ("x.jsonl", "", r"has no rows"),
        ("x.json", "[]", r"has no rows"),
        ("x.csv", "a,b\n", r"has no rows"),
        ("x.txt", "text", r"unknown ending '.txt'; known: .parquet"),
    ],
)
def test_bad_files_are_named_with_the_place(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(tmp_path / name)
    assert name in str(caught.value)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_rows(tmp_path / "x.jsonl")


def test_missing_files_say_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"data.val_files: .*trian.jsonl does not exist.*holds: train.jsonl"):
        read_rows(tmp_path / "trian.jsonl", key="data.val_files")
    with pytest.raises(DataError, match="nearest that does"):
        read_rows(tmp_path / "no" / "such" / "x.parquet")
    with pytest.raises(DataError, match="no file matches"):
        read_rows(str(tmp_path / "*.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        read_rows(tmp_path / "empty")
    for nothing in ([], "", None, [""]):
        with pytest.raises(DataError, match="is empty"):
            read_rows(nothing)  # type: ignore[arg-type]


def test_an_empty_file_among_others_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    write(tmp_path / "b.jsonl")
    rows = read_rows(tmp_path)
    assert list(rows) == ROWS and rows[0] == ROWS[0]


def test_a_dataset_id_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackage, match="pip install .datasets>="):
        read_rows("someone/something")


def test_a_dataset_id_names_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cannot be reached in a test, so the call it would get is recorded."""
    asked = []

    class Table:
        _fingerprint = "f"

        def with_format(self, kind: str) -> Table:
            assert kind == "arrow"
            return self

        def __getitem__(self, rows: slice) -> pa.Table:
            return pa.Table.from_pylist(ROWS)[rows]

    def load_dataset(name: str, config: str | None, split: str) -> Table:
        asked.append((name, config, split))
        if name == "o/broken":
            raise ConnectionError("no route")
        return Table()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_rows("o/n")) == ROWS
    read_rows("o/n", split="test")
    read_rows("o/n:validation")
    read_rows(["o/n:main:train"])
    assert asked == [
        ("o/n", None, "train"),
        ("o/n", None, "test"),
        ("o/n", None, "validation"),
        ("o/n", "main", "train"),
    ]
    with pytest.raises(DataError, match="no route"):
        read_rows("o/broken")


@pytest.mark.components
def test_the_real_datasets_package_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a local folder for a dataset id, so nothing has to be downloaded."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o" / "n").mkdir(parents=True)
    write(tmp_path / "o" / "n" / "train.jsonl")
    write(tmp_path / "o" / "n" / "test.jsonl", ROWS[:1])
    assert list(read_rows("o/n:train")) == ROWS
    assert list(read_rows("o/n:test")) == ROWS[:1]
    with pytest.raises(DataError, match="split nothing"):
        read_rows("o/n:nothing")


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl")
    before = read_rows(file).fingerprint()
    assert before == read_rows(file).fingerprint()
    write(file, ROWS[:1])
    assert read_rows(file).fingerprint() != before
    assert Rows.from_list(ROWS).fingerprint() is None


def test_rows_from_memory_must_be_dictionaries() -> None:
    assert list(Rows.from_list(ROWS)) == ROWS
    with pytest.raises(DataError, match="Row 1"):
        Rows.from_list([{}, "x"])  # type: ignore[list-item]
    with pytest.raises(IndexError):
        Rows.from_list(ROWS)[3]


@pytest.mark.parametrize(
    ("wanted", "columns", "expected"),
    [
        ("prompt", ["question", "answer"], "question"),
        ("prompt", ["Prompts", "question"], "Prompts"),
        ("quesiton", ["question", "prompt"], "question"),
        ("prompt", ["a", "b"], "b"),
        ("prompt", ["c"], None),
    ],
)
def test_the_likely_column(wanted: str, columns: list[str], expected: str | None) -> None:
    sample = {"a": "x", "b": [{"role": "user", "content": "long text"}], "c": 3}
    assert (
        likely_column(wanted, "prompt", columns, {k: v for k, v in sample.items() if k in columns})
        == expected
    )


def test_only_a_prompt_is_guessed_by_its_length(tmp_path: Path) -> None:
    row = {"prompt": "a long prompt", "data_source": "s"}
    assert likely_column("response", "response", list(row), row) is None
    assert likely_column("response", "response", ["prompt"], {"prompt": "a"}) is None
    assert (
        likely_column("response", "response", ["prompt", "Answer"], {"prompt": "a", "Answer": "b"})
        == "Answer"
    )


def test_a_missing_column_names_file_columns_and_setting(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(
        DataError, match=r"b.jsonl has no column 'prompt'.*question, answer.*data.prompt_key=question"
    ):
        require_column(read_rows(tmp_path), "prompt", "data.prompt_key", "prompt", "data.train_files")


@pytest.mark.parametrize("ending", ["jsonl", "json"])
@pytest.mark.parametrize("bad", [{"prompt": "a\ud800"}, {"prompt": "a", "info": {"x": ["\udfff"]}}])
def test_half_of_a_surrogate_pair_is_refused_in_every_column(ending: str, bad: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a whole pair: \U0001f600"}, bad]
    lines = [json.dumps(row) for row in rows]
    file = tmp_path / f"t.{ending}"
    file.write_text("\n".join(lines) if ending == "jsonl" else f"[{', '.join(lines)}]")
    place = "line 2" if ending == "jsonl" else "element 1"
    with pytest.raises(
        DataError, match=f"FILES: '[a-z]*' of .*t.{ending}, {place} holds half of a surrogate pair"
    ):
        read_rows(file, key="FILES")
    file.write_text(lines[0] if ending == "jsonl" else f"[{lines[0]}]")
    assert read_rows(file)[0] == rows[0]
