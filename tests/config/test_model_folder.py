"""What is wrong with a model folder is seen before anything is loaded from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.config.model_path import context_length, folder_problem, vocabulary_size
from verl.config.sizes import read_sizes
from verl.errors import ModelError
from verl.models.loading import SafetensorsFiles, load_config

KEY = "actor_rollout_ref.model.path"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64}


def weights(file: Path, numbers: int = 100) -> Path:
    """A safetensors file, written by its own definition: header length, header, data."""
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}
    ).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * numbers))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    weights(made / "model.safetensors")
    return made


def problem(path: Path | str, **kwargs: Any) -> str:
    found = folder_problem(str(path), KEY, **kwargs)
    assert found is not None and found.startswith(f"{KEY}: ")
    return found


def test_a_whole_folder_and_a_hub_id_are_no_problem(folder: Path) -> None:
    assert folder_problem(str(folder), KEY) is None
    assert folder_problem("org/name", KEY) is None


def test_a_real_saved_model_is_no_problem(tiny_model_dir: Path, tiny_tokenizer: Any) -> None:
    assert folder_problem(str(tiny_model_dir), KEY) is None
    assert context_length(str(tiny_model_dir)) == 256
    assert vocabulary_size(str(tiny_model_dir)) == len(tiny_tokenizer)


def test_a_file_and_a_missing_folder(folder: Path) -> None:
    assert f"give the folder it is in, '{folder}'" in problem(folder / "model.safetensors")
    assert "holds: model" in problem(folder.parent / "modle")
    assert "no model folder '/nowhere/at/all'" in problem("/nowhere/at/all")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda f: (f / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}'),
            "org/base",
        ),
        (lambda f: (f / "m.gguf").write_bytes(b"GGUF"), "GGUF"),
        (lambda f: (f / "notes.txt").write_text("x"), "It holds: notes.txt"),
        (lambda f: None, "It holds: nothing"),
    ],
)
def test_a_folder_without_config_says_what_it_is(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path)
    assert "no config.json" in problem(tmp_path) and words in problem(tmp_path)


def test_a_run_folder_names_the_model_of_its_newest_step(tmp_path: Path) -> None:
    for step in (5, 10):
        inner = tmp_path / f"global_step_{step}" / "actor" / "huggingface"
        inner.mkdir(parents=True)
        (inner / "config.json").write_text("{}")
    newest = tmp_path / "global_step_10"
    for place in (tmp_path, newest, newest / "actor"):
        assert f"give '{newest}/actor/huggingface'" in problem(place)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "a classifier (a reward model is set by reward.",
        ),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "an encoder"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "an encoder (BertModel)"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "encoder-decoder",
        ),
    ],
)
def test_other_kinds_of_models_are_refused_as_policy_only(folder: Path, config: dict, words: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert words in problem(folder)
    assert folder_problem(str(folder), KEY, language_model=False) is None


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["GPT2Model"], "model_type": "gpt2"},
        {"architectures": ["Qwen2Model"], "model_type": "qwen2", "tie_word_embeddings": True},
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"},
        {"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": True},
        {"model_type": "llama"},
        {},
    ],
)
def test_language_models_by_other_names_are_not_refused(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert folder_problem(str(folder), KEY) is None


def test_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json' cannot be read as JSON" in problem(folder)
    (folder / "config.json").write_text("[]")
    assert "describes no model" in problem(folder)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "9" * 100_000], ids=["nested", "digits"])
def test_a_config_nobody_can_parse_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json' cannot be read as JSON" in problem(folder)
    with pytest.raises(ModelError, match="no language model can be built"):
        read_sizes(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"text_config": {"num_experts": 10**400}},
        {"hidden_size": 10**9},
    ],
)
def test_counts_of_no_model_are_refused_before_anything_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict
) -> None:
    from transformers import AutoConfig

    built: list[Any] = []
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args, **kwargs: built.append(args))
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    assert "; at most" in problem(folder)
    with pytest.raises(ModelError, match="; at most"):
        read_sizes(str(folder))
    with pytest.raises(ModelError, match="; at most"):
        load_config(str(folder))
    assert not built


def test_a_generation_config_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1]")
    assert "generation_config.json' describes no model" in problem(folder)


def test_what_is_neither_file_nor_folder_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    assert "tokenizer.json' is neither a file nor a folder" in problem(folder)


@pytest.mark.parametrize("architectures", [5, {"a": 1}, [None], "LlamaForCausalLM"])
def test_architectures_that_are_no_list_of_names_are_passed_on(folder: Path, architectures: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": architectures}))
    assert folder_problem(str(folder), KEY) is None


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "a\0b", "", 5, None, ["a"]])
def test_an_index_names_files_beside_it_only(folder: Path, name: Any) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    assert "not a file beside it" in problem(folder)
    with pytest.raises(ModelError, match="not a file beside it"):
        SafetensorsFiles.of(str(folder))


def test_weights_that_are_not_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in problem(folder)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(folder / "one.safetensors")
    assert "lacks 1 of 2 weight files: two.safetensors" in problem(folder)
    weights(folder / "two.safetensors")
    assert folder_problem(str(folder), KEY) is None
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "index.json' is damaged" in problem(folder)


@pytest.mark.parametrize("size", [0, 7, 40, 200])
def test_weights_that_are_cut_off(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert str(file) in problem(folder) and "Download it again" in problem(folder)


def test_weights_that_are_something_else(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    assert "git lfs pull" in problem(folder)
    file.write_bytes((5).to_bytes(8, "little") + b"hello world")
    assert "no safetensors file" in problem(folder)


def test_context_length_follows_overrides_and_names(folder: Path) -> None:
    assert context_length(str(folder)) == 64
    assert context_length(str(folder), {"max_position_embeddings": 8}) == 8
    (folder / "config.json").write_text(json.dumps({"n_positions": 16}))
    assert context_length(str(folder)) == 16
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 5}}))
    assert context_length(str(folder)) == 5
    assert context_length("org/name") is None and vocabulary_size("org/name") is None


def test_looking_needs_no_torch() -> None:
    code = "import sys, verl.config.model_path, verl.trainer.preflight; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
