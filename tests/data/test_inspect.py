"""What `verl data inspect` says about files, good and bad."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agents.chat_tokenizers import chat_tokenizer
from verl.data import inspect
from verl.data.messages import PROBE_TOOL
from verl.errors import DataError


@pytest.fixture
def run(capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str]]:
    def call(*arguments: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        inspect.add_arguments(parser)
        status = inspect.run(parser.parse_args(arguments))
        return status, capsys.readouterr().out

    return call


@pytest.fixture
def model(new_tokenizer: Callable, tmp_path: Path) -> str:
    new_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_with_a_tokenizer(run: Callable, model: str, tmp_path: Path, write_jsonl: Callable) -> None:
    rows = [{"prompt": user("x" * n), "data_source": "d", "answer": n} for n in (5, 6, 50)]
    status, text = run(write_jsonl(tmp_path / "t.jsonl", rows), "--model", model, "--max_length", "60")
    assert status == 0
    assert "3 rows, columns:" in text and "prompt       messages" in text and "answer       int" in text
    assert "prompts for reinforcement learning" in text
    assert "longest 69" in text and "longer than 60: 1 of 3 rows (33.3%)" in text
    assert "rows without a truth: 0" in text and "data_source: d (3)" in text
    assert "  | <|im_start|>user\n  | xxxxx<|im_end|>\n  | <|im_start|>assistant" in text


def test_token_lengths_are_the_trainers(
    run: Callable, model: str, tokenizer: Any, tmp_path: Path, write_jsonl: Callable
) -> None:
    length = len(tokenizer.apply_chat_template(user("abab"), add_generation_prompt=True, return_dict=False))
    _, text = run(write_jsonl(tmp_path / "t.jsonl", [{"prompt": user("abab")}]), "--model", model)
    assert f"prompt length in tokens: mean {length}, median {length}" in text and f"longest {length}" in text
    assert "rows without a truth: 1" in text and "data_source: (none) (1)" in text


def test_fine_tuning_rows(run: Callable, model: str, tmp_path: Path, write_jsonl: Callable) -> None:
    _, text = run(write_jsonl(tmp_path / "p.jsonl", [{"prompt": "q", "response": "rr"}]), "--model", model)
    assert "prompts with responses for fine-tuning" in text
    assert "full length in tokens: mean 4" in text and "learned from length in tokens: mean 3" in text
    talk = [*user("hi"), {"role": "assistant", "content": "yo"}]
    status, text = run(write_jsonl(tmp_path / "c.jsonl", [{"messages": talk}]), "--model", model)
    assert (
        status == 0
        and "conversations for fine-tuning" in text
        and "learned from length in tokens: mean 3" in text
    )
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    assert "preference pairs" in run(write_jsonl(tmp_path / "f.jsonl", [pair]), "--model", model)[1]
    labelled = {"prompt": "p", "completion": "cc", "label": True}
    status, text = run(write_jsonl(tmp_path / "k.jsonl", [labelled]), "--model", model)
    assert status == 0 and "answers with a label" in text
    assert "full length in tokens: mean 4" in text and "learned from length in tokens: mean 3" in text


def test_pairs_are_read_as_the_trainer_reads_them(
    run: Callable, model: str, tmp_path: Path, write_jsonl: Callable
) -> None:
    shared = [*user("a"), {"role": "assistant", "content": "EARLIER"}, *user("b")]
    sides = {name: [*shared, {"role": "assistant", "content": name * 9}] for name in ("chosen", "rejected")}
    file = write_jsonl(tmp_path / "p.jsonl", [sides])
    status, text = run(file, "--model", model, "--max_length", "120")
    seen, learned = text.split("of it, learned from:\n")
    assert status == 0 and "EARLIER" in seen and "EARLIER" not in learned and "chosen" in learned
    assert "longer than 120: 1 of 1 rows" in seen  # by the longer answer, which is the rejected one
    named = write_jsonl(tmp_path / "o.jsonl", [{"good": sides["chosen"], "rejected": sides["rejected"]}])
    _, text = run(named, "--model", model, "--chosen_key", "good")
    assert text.endswith(f"of it, learned from:\n{learned}")
    status, text = run(write_jsonl(tmp_path / "n.jsonl", [{**sides, "rejected": None}]), "--model", model)
    assert status == 1 and "refused: 1 of 1 rows" in text


def test_what_is_learned_is_shown(run: Callable, tmp_path: Path, write_jsonl: Callable) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    call = {"function": {"name": "lookup", "arguments": {"word": "x"}}}
    answer = {"role": "assistant", "content": "<think>\nWhy.\n</think>\n\nFive."}
    calls = {"role": "assistant", "tool_calls": [call]}
    row = {"messages": [*user("a"), answer, *user("b"), calls], "functions": json.dumps([PROBE_TOOL])}
    file = write_jsonl(tmp_path / "c.jsonl", [row])
    status, text = run(file, "--model", str(tmp_path / "qwen3"), "--tools_key", "functions")
    assert status == 0 and "1 conversations become 2 rows" in text
    seen, learned = text.split("of it, learned from:\n")
    assert '  | {"type": "function"' in seen and "tools" not in learned
    assert learned == "  > <think>\n  | Why.\n  | </think>\n  | \n  | Five.<|im_end|>\n"


def test_refused_rows_are_listed_and_counted(
    run: Callable, model: str, tmp_path: Path, write_jsonl: Callable
) -> None:
    rows = [{"prompt": "ok"}, {"prompt": None}, {"prompt": ""}, {"prompt": [{"role": "user"}]}]
    status, text = run(write_jsonl(tmp_path / "t.jsonl", rows), "--model", model)
    assert status == 1 and "refused: 3 of 4 rows" in text
    assert "row 1 of" in text and "row 2 of" in text and "is empty" in text
    assert "prompt  str | messages, 1 missing" in text


def test_a_file_without_a_prompt_column(run: Callable, tmp_path: Path, write_jsonl: Callable) -> None:
    file = write_jsonl(tmp_path / "t.jsonl", [{"question": "q", "answer": "a"}])
    status, text = run(file)
    assert status == 1 and "set data.prompt_key=question" in text
    assert "It holds strings: data.apply_chat_template=always" in text
    assert run(file, "--prompt_key", "question")[0] == 0


def test_string_prompts_are_shown_as_the_model_sees_them(
    run: Callable,
    new_tokenizer: Callable,
    tmp_path: Path,
    write_jsonl: Callable,
    caplog: pytest.LogCaptureFixture,
) -> None:
    new_tokenizer(bos=True).save_pretrained(tmp_path / "model")
    arguments = [write_jsonl(tmp_path / "t.jsonl", [{"prompt": "q"}]), "--model", str(tmp_path / "model")]
    assert "  | <bos>q\n" in run(*arguments)[1] and "without the chat template" in caplog.text
    templated = run(*arguments, "--apply_chat_template", "always")[1]
    assert "  | <|im_start|>user\n  | q<|im_end|>\n  | <|im_start|>assistant" in templated


def test_a_missing_template_is_a_reason(
    run: Callable, new_tokenizer: Callable, tmp_path: Path, write_jsonl: Callable
) -> None:
    new_tokenizer(template=None).save_pretrained(tmp_path / "m")
    file = write_jsonl(tmp_path / "t.jsonl", [{"prompt": user("x")}])
    status, text = run(file, "--model", str(tmp_path / "m"))
    assert status == 1 and "has no chat template" in text
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    assert run(file, "--model", str(tmp_path / "m"), "--chat_template", str(tmp_path / "t.jinja"))[0] == 0


def test_files_that_cannot_be_read(run: Callable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        run(str(tmp_path / "none.parquet"))
