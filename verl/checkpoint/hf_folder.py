"""The Hugging Face side of a checkpoint: config, tokenizer, chat template, whole weights, LoRA adapter.

Whole weights come from what was just written, so the live engine is not held up for them;
only where that cannot be done (LoRA, whose base weights are not in the checkpoint; an architecture transformers
cannot build from its configuration alone) does the engine write them itself, in the foreground.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from verl.checkpoint.files import FileRecord
from verl.checkpoint.hf_weights import (
    WEIGHTS,
    default_dtype,
    empty_model,
    is_value_config,
    read_config,
    stored_as_is,
    write_weights,
)
from verl.checkpoint.source import TensorSource, WeightSource
from verl.checkpoint.tensors import Chunk
from verl.engines.base import TrainEngine
from verl.errors import CheckpointError

HF_FOLDER = "huggingface"
ADAPTER_FOLDER = "lora_adapter"
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


def hf_steps(
    part: Path, engine: TrainEngine, tokenizer: Any, *, contents: Sequence[str], writer: bool
) -> tuple[list[Callable[[], None]], bool]:
    """What writes `huggingface/` of a part, and `lora_adapter/` where there are adapters; and whether whole weights
    are still to be made of the model files (`whole_weights`). Every rank takes every step; one is the `writer`, which
    may fail alone: the ranks must agree after each step, because the next one may gather shards."""
    from verl.models.lora import has_lora, save_adapter

    folder = part / HF_FOLDER
    model = getattr(engine, "model", None)
    adapters = model is not None and has_lora(model)
    weights = "hf_model" in contents
    later = weights and "model" in contents and model is not None and not adapters and _can_build(model)

    def small_files() -> None:
        if writer and model is not None:
            write_config(model, folder, dtype_of(engine))
        if writer and tokenizer is not None:
            tokenizer.save_pretrained(folder)

    steps = [small_files]
    if weights and not later:
        steps.append(lambda: engine.save_hf(folder))
    if adapters:
        steps.append(lambda: save_adapter(model, part / ADAPTER_FOLDER, write=writer))
    return steps, later


def whole_weights(
    part: Path, shards: Mapping[str, FileRecord], chunks: Sequence[Chunk] | None = None
) -> dict[str, FileRecord]:
    """Whole weights into `huggingface/`, from the part's model files (`shards`) or, where a single process has all of
    them in memory, from its `chunks`. Names in and out are relative to the part. A model file that already is what
    transformers wants gets a second name instead of a copy."""
    folder = part / HF_FOLDER
    config = read_config(folder)
    model = empty_model(config, value_model=is_value_config(config))
    if chunks is None:
        with WeightSource(part / name for name in shards) as source:
            written = write_weights(folder, source, model, default_dtype(config, source))
    else:
        own = TensorSource({chunk.key: chunk.tensor for chunk in chunks})
        dtype = default_dtype(config, own)
        ((shard, record),) = shards.items()
        if stored_as_is(own, model, dtype) and _same_file(part / shard, folder / WEIGHTS):
            return {f"{HF_FOLDER}/{WEIGHTS}": record}
        written = write_weights(folder, own, model, dtype)
    return {f"{HF_FOLDER}/{name}": record for name, record in written.items()}


def _same_file(existing: Path, name: Path) -> bool:
    """A second name for a file; False where the file system has no such thing."""
    try:
        os.link(existing, name)
    except OSError:
        return False
    return True


def write_config(model: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """config.json and generation_config.json of a live model, without touching it."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_config"):  # a value model knows its own
        model.save_config(folder)
    else:
        config = copy.deepcopy(model.config)
        config._attn_implementation = None
        config.architectures = [_class_name(model)]
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    if dtype is not None:
        set_in_config(folder, dtype=str(dtype).removeprefix("torch."))


def copy_small_files(source: Path, target: Path) -> None:
    """Config, tokenizer, templates: everything in the folder but weights."""
    if not (source / "config.json").exists():
        raise CheckpointError(
            f"{source} has no config.json: the checkpoint was saved without its Hugging Face folder"
        )
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)


def set_in_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def dtype_of(engine: TrainEngine) -> torch.dtype | None:
    """The precision the model computes with; its master weights may have another."""
    dtype = getattr(getattr(engine, "settings", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


_buildable: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _can_build(model: Any) -> bool:
    if model not in _buildable:
        try:
            empty_model(model.config, value_model=hasattr(model, "save_config"))
        except CheckpointError:
            _buildable[model] = False
        else:
            _buildable[model] = True
    return _buildable[model]


def _class_name(model: Any) -> str:
    """Sharding puts a class of its own in front, named FSDP + the model's."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return names[1] if names[0] == f"FSDP{names[1]}" else names[0]
