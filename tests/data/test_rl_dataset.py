"""Rows to prompts: columns, truth, lengths, truncation, and the loaders built from the data section."""

from __future__ import annotations

import csv
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from verl.config.schema import DataConfig, MixtureConfig
from verl.data import rl_dataset
from verl.data.chat import ChatFormat
from verl.data.files import Rows, read_rows
from verl.data.rl_dataset import (
    RLDataset,
    measure_lengths,
    prompt_lengths,
    training_loader,
    validation_loader,
)
from verl.errors import ConfigError, DataError, ModelError


def config(**changes: Any) -> DataConfig:
    return DataConfig(
        **{"train_files": ["unused"], "train_batch_size": 2, "max_prompt_length": 100, **changes}
    )


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(*prompts: str) -> Rows:
    return Rows.from_list([{"prompt": prompt} for prompt in prompts])


def test_a_full_row(tokenizer: Any, tmp_path: Path) -> None:
    row = {
        "prompt": user("1+1?"),
        "data_source": "gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 5},
        "agent_name": "tool_agent",
        "tools_kwargs": {"f": 1},
    }
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    dataset = RLDataset(config(), str(tmp_path / "x.parquet"), tokenizer)
    batch = dataset.batch([0], ["0-0"])
    columns = {name: column[0] for name, column in batch.non_tensor_batch.items()}
    assert columns == {
        "uid": "0-0",
        "prompt_ids": tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        ),
        "raw_prompt": row["prompt"],
        "prompt_text": "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "data_source": "gsm8k",
        "ground_truth": "2",
        "extra_info": {"index": 5},
        "index": 0,
        "columns": {name: row[name] for name in ("ability", "reward_model", "agent_name", "tools_kwargs")},
    }
    assert not batch.batch and dataset[0]["ground_truth"] == "2"


def test_a_bare_row_gets_defaults(tokenizer: Any) -> None:
    item = RLDataset(config(), texts("hi"), tokenizer)[0]
    assert (item["data_source"], item["ground_truth"], item["extra_info"], item["columns"]) == (
        "",
        None,
        {},
        {},
    )


def test_a_csv_file_with_json_in_its_cells(tokenizer: Any, tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer", "extra_info"])
        writer.writeheader()
        writer.writerow({"prompt": json.dumps(user("hi")), "answer": "007", "extra_info": '{"level": 1}'})
        writer.writerow({"prompt": "[1, 2] is a list", "answer": "b", "extra_info": ""})
    dataset = RLDataset(config(), str(tmp_path / "t.csv"), tokenizer)
    assert dataset[0]["raw_prompt"] == user("hi") and dataset[0]["ground_truth"] == "007"
    assert dataset[0]["extra_info"] == {"level": 1} and dataset[1]["extra_info"] == {}
    assert dataset[1]["prompt_text"] == "[1, 2] is a list"


def test_missing_prompt_column(tokenizer: Any) -> None:
    rows = Rows.from_list([{"question": "q", "answer": "a"}])
    with pytest.raises(DataError, match=r"data.val_files: .*question, answer.*Then data.prompt_key=question"):
        RLDataset(config(), rows, tokenizer, training=False)
    assert len(RLDataset(config(prompt_key="question"), rows, tokenizer)) == 1
    asked = RLDataset(config(prompt_key="question", apply_chat_template="always"), rows, tokenizer)[0]
    assert asked["raw_prompt"] == user("q") and asked["prompt_text"].startswith("<|im_start|>user\nq")


@pytest.mark.parametrize(
    ("value", "strings"), [("q", True), (user("q"), False), (json.dumps(user("q")), False)]
)
def test_a_prompt_column_of_strings_is_pointed_out(value: Any, strings: bool, tokenizer: Any) -> None:
    with pytest.raises(DataError) as raised:
        RLDataset(config(), Rows.from_list([{"question": value}]), tokenizer)
    assert ("data.apply_chat_template=always" in str(raised.value)) is strings


HALF = "x\ud800y"


@pytest.mark.parametrize("prompt", [HALF, user(HALF), json.dumps(user(HALF))])
@pytest.mark.parametrize("limits", [{}, {"truncation": "left"}])
def test_half_of_a_surrogate_pair_is_named(prompt: Any, limits: dict[str, Any], tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"row 1 of f.jsonl holds half of a surrogate pair.*ud800"):
        rows = Rows.from_list([{"prompt": "q"}, {"prompt": prompt}], "f.jsonl")
        RLDataset(config(**limits), rows, tokenizer)[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, "row 1 of the given rows (is|has) neither a string nor"),
        ({"prompt": ""}, "row 1 of the given rows is empty"),
        ({"prompt": [{"role": "user"}]}, "row 1 of the given rows (is|has) neither"),
    ],
)
@pytest.mark.parametrize("truncation", ["error", "left"])
def test_bad_rows_are_named(tokenizer: Any, row: dict, message: str, truncation: str) -> None:
    with pytest.raises(DataError, match=message):
        RLDataset(config(truncation=truncation), Rows.from_list([{"prompt": "x"}, row]), tokenizer).batch(
            [1], ["u"]
        )


def test_extra_info_must_be_a_dictionary(tokenizer: Any) -> None:
    rows = Rows.from_list([{"prompt": "x", "extra_info": "text"}])
    with pytest.raises(DataError, match="extra_info of row 0"):
        RLDataset(config(), rows, tokenizer)[0]


def test_too_long_prompts_are_refused_before_training(tokenizer: Any) -> None:
    rows = texts("x" * 10, "y" * 14, "z" * 12)
    with pytest.raises(DataError) as caught:
        RLDataset(config(max_prompt_length=10), rows, tokenizer)
    text = str(caught.value)
    assert "2 of 3 prompts" in text and "row 1 of the given rows, has 14" in text
    assert "data.max_prompt_length=14" in text and "filter_overlong_prompts=True" in text and "left" in text


def test_filtering_keeps_what_fits(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = texts("x" * 10, "y" * 11, "z" * 3)
    with caplog.at_level(logging.INFO):
        dataset = RLDataset(config(max_prompt_length=10, filter_overlong_prompts=True), rows, tokenizer)
    assert len(dataset) == 2 and dataset.batch([0, 1], ["a", "b"]).non_tensor_batch["index"].tolist() == [
        0,
        2,
    ]
    assert "1 of 3 prompts are longer" in caplog.text
    with pytest.raises(DataError, match="no prompt is left"):
        RLDataset(config(max_prompt_length=2, filter_overlong_prompts=True), rows, tokenizer)


@pytest.mark.parametrize(("mode", "text"), [("left", "cdef"), ("right", "abcde"), ("middle", "abcef")])
def test_truncated_prompts_keep_text_and_ids_together(tokenizer: Any, mode: str, text: str) -> None:
    assert len(tokenizer("abcdef")["input_ids"]) == 5  # 'ab' is one token
    item = RLDataset(config(max_prompt_length=4, truncation=mode), texts("abcdef"), tokenizer)[0]
    assert item["prompt_text"] == text and item["prompt_ids"] == tokenizer(text)["input_ids"]
    assert len(item["prompt_ids"]) == 4


def test_max_samples(tokenizer: Any) -> None:
    rows = texts(*map(str, range(50)))
    first = RLDataset(config(train_max_samples=5, shuffle=False), rows, tokenizer)
    assert first.kept.tolist() == [0, 1, 2, 3, 4]
    some = RLDataset(config(train_max_samples=5, seed=3), rows, tokenizer).kept.tolist()
    assert (
        len(set(some)) == 5
        and some == RLDataset(config(train_max_samples=5, seed=3), rows, tokenizer).kept.tolist()
    )
    assert some != RLDataset(config(train_max_samples=5, seed=4), rows, tokenizer).kept.tolist()
    assert len(RLDataset(config(train_max_samples=5), rows, tokenizer, training=False)) == 50
    assert len(RLDataset(config(val_max_samples=7), rows, tokenizer, training=False)) == 7
    assert len(RLDataset(config(train_max_samples=500), rows, tokenizer)) == 50
    with pytest.raises(ConfigError, match="max_samples"):
        RLDataset(config(train_max_samples=0), rows, tokenizer)


def test_chat_template_file_and_missing_template(new_tokenizer: Callable, tmp_path: Path) -> None:
    rows = Rows.from_list([{"prompt": user("hi")}])
    with pytest.raises(ModelError, match="has no chat template"):
        RLDataset(config(), rows, new_tokenizer(template=None))
    (tmp_path / "t.jinja").write_text("Q: {{ messages[-1].content }} A:")
    made = RLDataset(config(chat_template=str(tmp_path / "t.jinja")), rows, new_tokenizer(template=None))
    assert made[0]["prompt_text"] == "Q: hi A:"
    raw = RLDataset(config(apply_chat_template="never"), rows, new_tokenizer(template=None))
    assert raw[0]["prompt_text"] == "hi" and raw[0]["raw_prompt"] == user("hi")


def test_training_and_validation_loaders(
    tokenizer: Any, tmp_path: Path, write_jsonl: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": str(i), "answer": i} for i in range(7)])
    loader = training_loader(config(train_files=[file], train_batch_size=3), tokenizer)
    batches = list(loader)
    assert len(loader) == 2 and [len(b) for b in batches] == [3, 3]
    left_out = "1 of 7 prompts do not fill a batch (data.train_batch_size=3) and are left out of an epoch: "
    assert f"{left_out}others in each" in caplog.text
    training_loader(config(train_files=[file], train_batch_size=3, shuffle=False), tokenizer)
    assert f"{left_out}its last ones, always the same" in caplog.text
    drawn = [i for b in batches for i in b.non_tensor_batch["index"]]
    assert len(set(drawn)) == 6 and [u for b in batches for u in b.non_tensor_batch["uid"]] == [
        f"0-{i}" for i in drawn
    ]
    val = validation_loader(config(val_files=[file]), tokenizer)
    assert val is not None
    for _ in range(2):  # the same rows in the same order every time
        assert [b.non_tensor_batch["index"].tolist() for b in val] == [list(range(7))]
    assert validation_loader(config(), tokenizer) is None


def test_workers_change_nothing(tokenizer: Any, tmp_path: Path, write_jsonl: Callable) -> None:
    rows = [{"prompt": user("ab é" * (i % 9) + str(i)), "answer": i} for i in range(64)]
    file = write_jsonl(tmp_path / "t.jsonl", rows)
    settings = {"train_files": [file], "train_batch_size": 4, "max_prompt_length": 30, "truncation": "middle"}
    alone, many = (
        [
            batch
            for _ in range(2)
            for batch in training_loader(config(**settings, dataloader_num_workers=n), tokenizer)
        ]
        for n in (0, 4)
    )
    assert len(alone) == len(many) == 32
    for one, other in zip(alone, many, strict=True):
        assert (
            one.union(other).non_tensor_batch.keys() == one.non_tensor_batch.keys()
        )  # union refuses a difference


def test_curriculum(tokenizer: Any, tmp_path: Path, write_jsonl: Callable) -> None:
    levels = [3, 1, 2, 1, 3, 2]
    file = write_jsonl(
        tmp_path / "t.jsonl", [{"prompt": str(i), "level": level} for i, level in enumerate(levels)]
    )
    loader = training_loader(config(train_files=[file], curriculum_key="level"), tokenizer)
    for _ in range(2):
        seen = [levels[i] for b in loader for i in b.non_tensor_batch["index"]]
        assert seen == sorted(levels)
    bad = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "level": 1}, {"prompt": "y", "level": "hard"}])
    with pytest.raises(DataError, match="row 1 of .*'hard'"):
        training_loader(config(train_files=[bad], curriculum_key="level"), tokenizer)
    with pytest.raises(DataError, match="no column 'difficulty'"):
        training_loader(config(train_files=[file], curriculum_key="difficulty"), tokenizer)


def test_mixture_draws_by_weight_and_names_the_part(
    tokenizer: Any, tmp_path: Path, write_jsonl: Callable
) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", [{"prompt": f"s{i}"} for i in range(4)])
    large = write_jsonl(tmp_path / "large.jsonl", [{"prompt": f"l{i}"} for i in range(36)])
    parts = [MixtureConfig(files=[small], weight=1.0, name="few"), MixtureConfig(files=[large], weight=1.0)]
    loader = training_loader(config(mixture=parts, train_batch_size=10), tokenizer)
    uids: list[str] = []
    for batch in loader:
        names = batch.non_tensor_batch["mixture"].tolist()
        assert names.count("few") == 5 and names.count("large") == 5
        assert all(
            (name == "few") == text.startswith("s")
            for name, text in zip(names, batch.non_tensor_batch["prompt_text"], strict=True)
        )
        uids += batch.non_tensor_batch["uid"].tolist()
    assert len(uids) == 40 and len(set(uids)) == 40  # small rows come five times, each with a name of its own


def test_lengths_are_cached_and_the_cache_follows_its_inputs(
    new_tokenizer: Callable, tmp_path: Path, write_jsonl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": user("x" * n)} for n in (5, 9)])
    measured = []

    def counted(*arguments: Any) -> np.ndarray:
        measured.append(1)
        return measure_lengths(*arguments)

    monkeypatch.setattr(rl_dataset, "measure_lengths", counted)
    cache = str(tmp_path / "own_cache")

    def run(times: int, **changes: Any) -> np.ndarray:
        tokenizer = changes.pop("tokenizer", None) or new_tokenizer()
        chosen = changes.pop("chosen", np.arange(2))
        measured.clear()
        found = prompt_lengths(
            read_rows(file), chosen, "prompt", ChatFormat(tokenizer, **changes), cache_dir=cache
        )
        assert len(measured) == times
        return found

    first = run(1)
    assert run(0).tolist() == first.tolist() and first[1] - first[0] == 4
    assert run(1, system_prompt="abc").tolist() != first.tolist()
    run(1, template_kwargs={"x": 1})
    run(1, apply_chat_template="never")
    run(1, tokenizer=new_tokenizer(template="{{ messages[0].content }}"))
    run(1, tokenizer=new_tokenizer(bos=True))
    run(1, chosen=np.array([1]))
    run(0)
    np.savez(tmp_path / "archive.npz", lengths=np.zeros(3))
    for content in (b"damaged", b"PK\x03\x04", (tmp_path / "archive.npz").read_bytes()):
        for cached in Path(cache).iterdir():
            cached.write_bytes(content)
        assert run(1).tolist() == first.tolist()
    write_jsonl(tmp_path / "t.jsonl", [{"prompt": "changed"}, {"prompt": "too"}])
    assert run(1).tolist() == [7, 3]


TOOLS_TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def test_rows_may_show_different_tools(new_tokenizer: Callable) -> None:
    rows = Rows.from_list(
        [{"prompt": user("x"), "environment": name} for name in ("shop", "maze", "shop", "none")]
    )
    tools = {"shop": [tool("buy"), tool("sell")], "maze": [tool("go")], "none": []}
    tokenizer = new_tokenizer(template=TOOLS_TEMPLATE)
    dataset = RLDataset(
        config(max_prompt_length=6, filter_overlong_prompts=True),
        rows,
        tokenizer,
        tools=lambda row: tools[row["environment"]],
    )
    assert dataset.kept.tolist() == [1, 3]  # "buy sell x" is longer
    assert [dataset[position]["prompt_text"] for position in range(2)] == ["go x", "x"]
    same = RLDataset(config(), rows, tokenizer, tools=tools["maze"])
    assert [same[position]["prompt_text"] for position in range(4)] == ["go x"] * 4


def test_cached_lengths_depend_on_the_tools_of_each_row(
    new_tokenizer: Callable, tmp_path: Path, write_jsonl: Callable
) -> None:
    file = write_jsonl(
        tmp_path / "t.jsonl", [{"prompt": user("x"), "at": n} for n in range(1500)]
    )  # two chunks
    chat = ChatFormat(new_tokenizer(template=TOOLS_TEMPLATE))
    cache = str(tmp_path / "own_cache")
    chosen = np.array([0, 1, 7, *range(200, 1400)])

    def run(first: str, second: str) -> list[int]:
        lists = [[tool(first)], [tool(second)]]
        return prompt_lengths(
            read_rows(file), chosen, "prompt", chat, cache, lambda row: lists[row["at"] % 2]
        ).tolist()

    def expected(first: str, second: str) -> list[int]:
        return [len((first, second)[number % 2]) + 2 for number in chosen]

    for _ in range(2):  # measured, then from the cache
        assert run("buy", "sell") == expected("buy", "sell")
    assert len(list(Path(cache).iterdir())) == 1
    assert run("sell", "buy") == expected("sell", "buy")
    assert len(list(Path(cache).iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tokenizer: Any, tmp_path: Path, write_jsonl: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "abcd"}])
    (tmp_path / "blocked").write_text("a file, not a folder")
    dataset = RLDataset(config(cache_dir=str(tmp_path / "blocked" / "cache")), file, tokenizer)
    assert len(dataset) == 1 and "not cached" in caplog.text


def test_the_package_is_quick_to_import() -> None:
    """The hub client and the tokenizers are loaded when used, not before."""
    code = (
        "import sys, verl.data.files, verl.data.chat; "
        "sys.exit(int('transformers' in sys.modules or 'torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
