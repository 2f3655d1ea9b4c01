"""Configs in saved folders: those that transformers refuses to write, and dropout."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl.checkpoint.manager import CheckpointManager, PartSettings
from verl.checkpoint.merge import MergeOptions, merge

EVERYTHING = ["model", "optimizer", "extra", "hf_model"]


def saved(engine: Any, run: Path) -> Path:
    manager = CheckpointManager(run, {"actor": PartSettings(EVERYTHING)})
    manager.rehearse({"actor": engine}, {})
    folder = manager.save(1, {"actor": engine}, {"step": 1})
    assert folder is not None, manager.failure
    return folder


@pytest.mark.parametrize(
    ("wrong", "rank"), [({"temperature": 0.9, "top_p": 0.6}, 0), ({"pad_token_id": -1}, 2)], ids=str
)
def test_a_generation_config_that_transformers_calls_invalid_is_saved_as_it_is(
    wrong: dict[str, Any], rank: int, tmp_path: Path, job: ModuleType
) -> None:
    model = job.make_model()
    for name, value in wrong.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError):
        model.generation_config.save_pretrained(tmp_path)
    folder = saved(job.make_engine(model=model, lora_rank=rank), tmp_path / "run")
    found = json.loads((folder / "actor/huggingface/generation_config.json").read_text())
    assert wrong.items() <= found.items()
    if not rank:
        merge(MergeOptions(folder / "actor", tmp_path / "merged"))
        assert wrong.items() <= json.loads((tmp_path / "merged/generation_config.json").read_text()).items()


def test_a_config_with_keys_of_generation_is_saved(tmp_path: Path, job: ModuleType) -> None:
    model = job.make_model()
    model.config.temperature = 0.7
    with pytest.raises(ValueError):
        model.config.save_pretrained(tmp_path)
    saved(job.make_engine(model=model), tmp_path / "run")


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_the_saved_config_has_the_dropout_the_model_came_with(
    kind: str, tmp_path: Path, job: ModuleType
) -> None:
    engine = job.make_engine(kind, model=job.make_model(attention_dropout=0.25))
    with engine.weights().structure() as model:
        assert model.config.attention_dropout == 0
    engine.save_hf_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_dropout"] == 0.25
