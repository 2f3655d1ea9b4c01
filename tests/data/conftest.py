"""A small byte-level tokenizer with a chat template, made on the spot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.data import chat

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, bos: bool = False, pad: bool = True) -> Any:
    """One token per byte, plus special ones; merges 'ab' so that not everything is a single byte."""
    specials = ["<pad>", "<|im_end|>", "<|im_start|>", "<bos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet, "ab", "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 3)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>" if pad else None,
        bos_token="<bos>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., Any]:
    return make_tokenizer


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[dict[str, Any]]], str]:
    def write(path: Path, rows: list[dict[str, Any]]) -> str:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """The GSM8K files, where they are at hand."""
    shared = os.environ.get("VERL_SHARED") or Path(__file__).resolve().parents[3] / "shared"
    folder = Path(shared) / "data" / "gsm8k"
    if not (folder / "train.jsonl").exists():
        pytest.skip("the GSM8K files are not here: set VERL_SHARED to the folder that holds data/gsm8k")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, or misses a notice that another has had."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(chat, "_SAID", WeakKeyDictionary())
