"""The code of docs/from-trl.md runs: that of TRL, unchanged but for the import, and ours."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-trl.md"
TAB = re.compile(r'^=== "(TRL|here)"\n\n((?:    .*\n|\n)+)', re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    """The name of a tab and its code, in order."""
    found = []
    for name, text in TAB.findall(PAGE.read_text(encoding="utf-8")):
        code = textwrap.dedent(text).strip()
        assert code.startswith("```python\n") and code.endswith("```")
        found.append((name, code.removeprefix("```python\n").removesuffix("```")))
    return found


def test_each_block_of_trl_differs_from_ours_by_its_import() -> None:
    names, codes = zip(*blocks(), strict=True)
    assert names == ("TRL", "here") * 5
    for theirs, ours in zip(codes[::2], codes[1::2], strict=True):
        assert theirs.replace("from trl import", "from verl import") == ours != theirs


@pytest.mark.slow(seconds=12)
def test_the_blocks_run(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any
) -> None:
    from transformers import AutoModelForSequenceClassification

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sft_model").symlink_to(tiny_model_dir)
    AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(
        tmp_path / "data" / "rm"
    )
    tiny_tokenizer.save_pretrained(tmp_path / "data" / "rm")
    monkeypatch.chdir(tmp_path)
    for name, code in blocks():
        if name == "here":
            exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert (tmp_path / "runs" / "grpo-model" / "config.json").is_file()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "grpo",
        "grpo-model",
        "sft",
        "dpo",
        "reward",
    }
