"""The Hugging Face side of a checkpoint: config, tokenizer, chat template, whole weights, LoRA adapter."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from verl.engines.base import TrainEngine

HF_FOLDER = "huggingface"
ADAPTER_FOLDER = "lora_adapter"


def write_hf_folder(
    part_folder: Path, engine: TrainEngine, tokenizer: Any, *, weights: bool, writer: bool
) -> None:
    """`huggingface/` of a part, and `lora_adapter/` where there are adapters. Every rank calls it (weights are
    gathered); one is the `writer`."""
    folder = part_folder / HF_FOLDER
    model = getattr(engine, "model", None)
    if weights:
        engine.save_hf(folder)
    elif writer and model is not None:
        write_config(model, folder)
    if writer and tokenizer is not None and folder.is_dir():
        tokenizer.save_pretrained(folder)
    from verl.models.lora import has_lora, save_adapter

    if model is not None and has_lora(model):
        save_adapter(model, part_folder / ADAPTER_FOLDER, write=writer)


def write_config(model: Any, folder: Path) -> None:
    """config.json and generation_config.json of a live model, without touching it."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_config"):  # a value model knows its own
        model.save_config(folder)
        return
    config = copy.deepcopy(model.config)
    config._attn_implementation = None
    if not config.architectures:
        config.architectures = [_class_name(model)]
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _class_name(model: Any) -> str:
    """Sharding puts a class of its own in front, named FSDP + the model's."""
    names = [kind.__name__ for kind in type(model).__mro__]
    return names[1] if names[0] == f"FSDP{names[1]}" else names[0]
