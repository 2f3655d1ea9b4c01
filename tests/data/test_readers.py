"""Files as people have them: compressed, misnamed, damaged, with a column twice."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.files import read_rows
from verl.errors import DataError

ROWS = [{"prompt": "é 1", "answer": "1"}, {"prompt": "b", "answer": "2"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl.gz", LINES),
        ("rows.JSONL.GZ", LINES),
        ("rows.json.gz", json.dumps(ROWS)),
        ("rows.csv.gz", "prompt,answer\né 1,1\nb,2\n"),
        ("rows.tsv.gz", "prompt\tanswer\né 1\t1\nb\t2\n"),
    ],
)
def test_compressed_text_is_read_as_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    assert list(read_rows(tmp_path / name)) == ROWS
    assert list(read_rows(tmp_path)) == ROWS  # also as one of a folder's files


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode())
    assert list(read_rows(file)) == ROWS


def parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", parquet, "looks like a parquet file: give it the ending .parquet"),
        ("j.parquet", LINES.encode(), "looks like JSON: give it the ending .jsonl"),
        (
            "l.jsonl",
            json.dumps(ROWS, indent=1).encode(),
            "looks like one list of JSON: give it the ending .json",
        ),
        ("g.jsonl", gzip.compress(LINES.encode()), "looks like a file compressed by gzip"),
        ("u.jsonl", LINES.encode("utf-16"), "looks like UTF-16 text: save it as UTF-8"),
        ("v.csv", b"\xfe\xff" + "prompt".encode("utf-16-be"), "looks like UTF-16 text"),
        ("s.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("h.jsonl", b"<!DOCTYPE html><html>", "looks like a page of HTML"),
        ("z.jsonl.zst", b"\x28\xb5\x2f\xfd0", "unknown ending '.zst'.*a file compressed by zstd"),
        ("t.jsonl.gz", gzip.compress(LINES.encode())[:-12], "cannot be read as jsonl: [^.]*[.]$"),
        ("n.jsonl.gz", LINES.encode(), "cannot be read as jsonl.*looks like JSON"),
        ("e.jsonl", '{"prompt": "café"}'.encode("latin-1"), "is not UTF-8 text"),
        ("x.txt", LINES.encode(), "unknown ending '.txt'.*give it the ending .jsonl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_misnamed_file_is_is_said(tmp_path: Path, name: str, content: object, words: str) -> None:
    file = tmp_path / name
    if callable(content):
        content(file)
    else:
        assert isinstance(content, bytes)
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"^data.val_files: .*{name}.*{words}"):
        read_rows(file, key="data.val_files")


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table.append_column("prompt", table["prompt"]), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("prompt,answer,answer\na,1,2\n")
    with pytest.raises(DataError, match="column 'prompt' 2 times.*prompt, answer, prompt"):
        read_rows(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 'answer' 2 times"):
        read_rows(tmp_path / "t.csv")


def test_a_link_to_nothing_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").symlink_to(tmp_path / "gone.parquet")
    with pytest.raises(DataError, match="is a link to .*gone.parquet, which does not exist"):
        read_rows(tmp_path / "t.parquet")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.jsonl", f'{{"prompt": "a"}}\n{{"prompt": {DEEP}}}\n', "line 2 cannot be used: nested deeper"),
        (
            "rows.jsonl",
            f'{{"prompt": "a", "x": {"[" * 200}{"]" * 200}}}\n',
            "line 1 cannot be used: nested deeper than 100",
        ),
        (
            "rows.jsonl",
            f'{{"prompt": "a"}}\n{{"prompt": {"9" * 100_000}}}\n',
            "line 2 cannot be used: .*digits",
        ),
        ("rows.json", f'[{{"prompt": {DEEP}}}]', "rows.json cannot be used: nested deeper"),
        ("rows.json", f'[{{"prompt": {"9" * 100_000}}}]', "rows.json cannot be used: .*digits"),
    ],
    ids=["deep line", "line of 200 levels", "long number in a line", "deep file", "long number in a file"],
)
def test_json_nested_too_deeply_or_with_too_many_digits_is_refused_by_file_and_line(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        read_rows(tmp_path / name)


def test_json_text_in_a_column_that_is_nested_too_deeply_is_no_value() -> None:
    from verl.data.columns import truth_of
    from verl.data.messages import read_messages

    with pytest.raises(DataError, match="row 3 looks like messages, but .*nested deeper"):
        read_messages(f'[{{"role": "user", "content": {DEEP}}}]', "row 3")
    assert truth_of({"reward_model": f'{{"ground_truth": {DEEP}}}', "answer": "1"}) == "1"


def test_a_fifo_is_no_data_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="rows.jsonl is neither a regular file nor a folder"):
        read_rows(tmp_path / "rows.jsonl")
