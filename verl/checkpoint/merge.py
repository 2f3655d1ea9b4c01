"""From a checkpoint to a Hugging Face folder, verified before anyone can see it.

What always holds: memory holds about one tensor while writing; the target appears complete and checked, or not at
all; the checkpoint is only read, and cannot be deleted by a running training while it is.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.files import files_below, remove_folder, sync_all, sync_folder
from verl.checkpoint.hf_check import check_logits, check_tensors, memory_allows
from verl.checkpoint.hf_folder import ADAPTER_FOLDER, HF_FOLDER, copy_small_files, set_in_config
from verl.checkpoint.hf_weights import (
    default_dtype,
    empty_model,
    is_value_config,
    read_config,
    write_weights,
)
from verl.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from verl.checkpoint.megatron.folder import find_megatron, holds_megatron
from verl.checkpoint.megatron.merge import merge_megatron
from verl.checkpoint.source import LoraSettings, WeightSource
from verl.checkpoint.steps import in_use, list_steps
from verl.errors import CheckpointError
from verl.json_input import read_json
from verl.models.dtypes import torch_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeOptions:
    local_dir: Path
    target_dir: Path
    dtype: str = "auto"
    tie_word_embedding: bool = False
    backend: str = "fsdp"
    lora: str = "merge"
    is_value_model: bool = False
    base_dir: Path | None = None
    """For a LoRA checkpoint: the folder of the model below the adapter; default: where the adapter says it is. For a
    Megatron checkpoint: where config.json and tokenizer are; default: beside it."""
    overwrite: bool = False
    logits: bool = True


@dataclass(frozen=True)
class PartFolder:
    """One part (actor, critic) of a complete checkpoint."""

    step_folder: Path
    name: str
    manifest: Manifest

    @property
    def path(self) -> Path:
        return self.step_folder / self.name

    def files(self, below: str) -> list[Path]:
        return self.manifest.files_of(self.step_folder, f"{self.name}/{below}/")

    def model_files(self) -> list[Path]:
        return [file for file in self.files("model") if file.suffix == ".safetensors"]


def find_part(local_dir: Path) -> PartFolder:
    """`global_step_N/actor`, or `global_step_N` (its actor). `global_steps_N`, as some pages write it, is taken too."""
    path = local_dir.expanduser()
    if not path.exists():
        path = Path(*(p.replace("global_steps_", "global_step_", 1) for p in path.parts))
    if not path.is_dir():
        raise CheckpointError(f"--local_dir {local_dir} is not a folder; give .../global_step_N/actor")
    step_folder, name = (path, "actor") if (path / MANIFEST).exists() else (path.parent, path.name)
    inside = [] if (step_folder / MANIFEST).exists() else list_steps(path)
    if inside:
        newest = max(inside, key=lambda entry: entry.step).path / "actor"
        raise CheckpointError(
            f"--local_dir {local_dir} is a run folder; give one of its steps, e.g. {newest}"
        )
    manifest = read_manifest(step_folder)
    if name not in manifest.parts:
        raise CheckpointError(f"{step_folder} holds no '{name}'; it holds: {', '.join(manifest.parts)}")
    if "model" not in manifest.parts[name]:
        raise CheckpointError(f"{step_folder / name} was saved without 'model' (checkpoint.save_contents)")
    return PartFolder(step_folder, name, manifest)


def merge(options: MergeOptions) -> Path:
    """Merge, verify, put in place; returns the target."""
    target = options.target_dir.expanduser().absolute()
    if target.exists() and not options.overwrite and any(target.iterdir()):
        raise CheckpointError(f"--target_dir {target} is not empty; give a new folder, or add --overwrite")
    local = options.local_dir.expanduser()
    if holds_megatron(local):
        if options.backend != "megatron":
            raise CheckpointError(f"--local_dir {local} is a Megatron checkpoint: add --backend megatron")
        if options.lora == "keep":
            raise CheckpointError(
                "--lora keep: adapters cannot be read from a Megatron checkpoint, only whole weights"
            )
        found = find_megatron(local, options.base_dir)
        with _new_folder(target) as work:
            merge_megatron(
                work,
                found,
                dtype=options.dtype,
                tie=options.tie_word_embedding,
                value_model=options.is_value_model,
                logits=options.logits,
            )
        return target
    part = find_part(options.local_dir)
    with in_use(part.step_folder):
        damage = [p for p in verify(part.step_folder, part.manifest) if p.startswith(f"{part.name}/")]
        if damage:
            raise CheckpointError(f"{part.path} is damaged: {damage[0]}")
        with _new_folder(target) as work:
            _merge_into(work, part, options)
    return target


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes the target when all went well, and vanishes otherwise."""
    work = target.with_name(f".{target.name}.merging")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
        sync_all(files_below(work))
        if target.exists():
            remove_folder(target)
        os.rename(work, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _merge_into(work: Path, part: PartFolder, options: MergeOptions) -> None:
    lora = LoraSettings.read(part.path / ADAPTER_FOLDER)
    copy_small_files(part.path / HF_FOLDER, work)
    if lora is not None and options.lora == "keep":
        _keep_adapter(work, part)
        return
    if options.tie_word_embedding:
        set_in_config(work, tie_word_embeddings=True)
    config = read_config(work)
    value_model = is_value_config(config)
    if options.is_value_model and not value_model:
        held = ", ".join(config.architectures or ["language model"])
        raise CheckpointError(f"--is-value-model was given, but {part.path} holds a {held}")
    model = empty_model(config, value_model=value_model)
    with _source(part, lora, options.base_dir) as source:
        source.computed_in = default_dtype(config, source)
        dtype = source.computed_in if options.dtype == "auto" else torch_dtype(options.dtype)
        set_in_config(work, dtype=str(dtype).removeprefix("torch."))
        write_weights(work, source, model, dtype)
        count = check_tensors(work, source, model, dtype)
        logger.info("%d tensors written and compared with the checkpoint, bit for bit", count)
        _check_answers(work, source, config, dtype, value_model, options.logits)


def _check_answers(
    work: Path, source: WeightSource, config: Any, dtype: torch.dtype, value_model: bool, wanted: bool
) -> None:
    if not wanted:
        logger.warning("logits were not compared (--no-logits)")
    elif not memory_allows(config, source, dtype):
        logger.warning("logits were not compared: one copy of the model does not fit into free memory")
    else:
        check_logits(work, source, config, dtype, value_model=value_model)
        logger.info("logits on a fixed prompt equal those of the training model")


@contextmanager
def _source(part: PartFolder, lora: LoraSettings | None, base_dir: Path | None) -> Iterator[WeightSource]:
    """The part's weights; for an adapter, on top of the model below it."""
    files = part.model_files()
    if lora is not None:
        files = files + _base_files(part, base_dir)
    with WeightSource(files, lora) as source:
        yield source


def _base_files(part: PartFolder, base_dir: Path | None) -> list[Path]:
    stated = read_json(
        part.path / ADAPTER_FOLDER / "adapter_config.json"
    )  # `LoraSettings` has read it before
    folder = base_dir or Path(stated.get("base_model_name_or_path") or "")
    files = sorted(folder.glob("*.safetensors")) if folder.parts and folder.is_dir() else []
    if not files:
        raise CheckpointError(
            f"{part.path} holds a LoRA adapter, and the model below it is not at {str(folder) or 'any stated place'}: "
            "give its folder with --base_dir, or keep the adapter as it is with --lora keep"
        )
    return files


def _keep_adapter(work: Path, part: PartFolder) -> None:
    """The adapter as peft opens it, from the master weights; bit-equal to them."""
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "generation_config.json"):
        (work / name).unlink(missing_ok=True)
    shutil.copyfile(part.path / ADAPTER_FOLDER / "adapter_config.json", work / "adapter_config.json")
    lora = LoraSettings.read(work)
    with WeightSource(part.model_files(), lora) as source:
        adapter = source.adapter()
    file = work / "adapter_model.safetensors"
    save_file(adapter, file, metadata={"format": "pt"})
    written = load_file(file)
    if set(written) != set(adapter) or any(not torch.equal(written[k], v) for k, v in adapter.items()):
        raise CheckpointError("the adapter that was written differs from the checkpoint")
    logger.info("%d adapter tensors written and compared with the checkpoint", len(adapter))
