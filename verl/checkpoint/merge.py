"""From a checkpoint to a Hugging Face folder, verified before it gets its name.

The target appears complete and checked, or not at all; what it replaces is an earlier merge, never what is read, a part
of a checkpoint or a folder with other files. A running training does not delete the checkpoint meanwhile. Memory holds
about one tensor while writing; with an adapter of a mixture of experts, its base model."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint import hf_folder, weights
from verl.checkpoint.files import disk_is_full, files_below, lock, sync_all
from verl.checkpoint.hf_folder import check_names, empty_model
from verl.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from verl.checkpoint.megatron.distcp import METADATA
from verl.checkpoint.megatron.reader import MegatronReader, find_megatron, holds_megatron
from verl.checkpoint.steps import TRACKER, in_use, list_steps, publish, step_of
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER, CheckpointReader, ShardedReader, same_bits
from verl.errors import CheckpointError
from verl.json_input import read_json
from verl.memory import free_host_bytes
from verl.models.loading import let_others_read, torch_dtype
from verl.models.lora import transposed_weights
from verl.models.value_model import set_in_config
from verl.runtime import quiet_transformers

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 12


@dataclass(frozen=True)
class MergeOptions:
    local_dir: Path
    target_dir: Path
    dtype: str = "auto"
    tie_word_embedding: bool = False
    lora: str = "merge"
    is_value_model: bool = False
    base_dir: Path | None = None
    """For a LoRA checkpoint: the folder of the base model; default: where the adapter says it is. For a Megatron
    checkpoint: where config.json and tokenizer are; default: next to it."""
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

    def model_files(self) -> list[Path]:
        files = self.manifest.files_of(self.step_folder, f"{self.name}/model/")
        return [file for file in files if file.suffix == ".safetensors"]


def find_part(local_dir: Path) -> PartFolder:
    """`global_step_N/actor`, or `global_step_N` (its actor)."""
    path = local_dir
    if not path.is_dir():
        raise CheckpointError(f"--local_dir {local_dir} is not a folder; give .../global_step_N/actor")
    step_folder, name = (path, "actor") if (path / MANIFEST).exists() else (path.parent, path.name)
    steps = [] if (step_folder / MANIFEST).exists() else list_steps(path)
    if steps:
        newest = max(steps, key=lambda entry: entry.step).path / "actor"
        raise CheckpointError(
            f"--local_dir {local_dir} is a run folder; give one of its steps, e.g. {newest}"
        )
    if not (step_folder / MANIFEST).exists():
        raise CheckpointError(
            f"--local_dir {local_dir} holds no checkpoint: no {MANIFEST} (ours of any strategy; without it the save "
            f"was not finished) and no folder with {METADATA} (Megatron-core's); give .../global_step_N/actor"
        )
    manifest = read_manifest(step_folder)
    if name not in manifest.parts:
        raise CheckpointError(f"{step_folder} holds no '{name}'; it holds: {', '.join(manifest.parts)}")
    if "model" not in manifest.parts[name]:
        raise CheckpointError(f"{step_folder / name} was saved without 'model' (checkpoint.save_contents)")
    return PartFolder(step_folder, name, manifest)


def merge(options: MergeOptions) -> Path:
    """Merge, verify, rename to the target; returns it."""
    target = Path(os.path.realpath(options.target_dir.expanduser()))
    local = options.local_dir.expanduser()
    if holds_megatron(local):
        if options.lora == "keep":
            raise CheckpointError("--lora keep: adapters cannot be read from a Megatron checkpoint")
        tensors, hf = find_megatron(local, options.base_dir)
        _keep_apart(target, tensors, hf)
        with _new_folder(target, hf, overwrite=options.overwrite) as work:
            _merge_megatron(work, tensors, hf, options)
        return target
    part = find_part(local)
    _keep_apart(target, part.step_folder)
    small_files = part.path / HF_FOLDER
    with in_use(part.step_folder), _new_folder(target, small_files, overwrite=options.overwrite) as work:
        damage = [p for p in verify(part.step_folder, part.manifest) if p.startswith(f"{part.name}/")]
        if damage:
            raise CheckpointError(f"{part.path} is damaged: {damage[0]}")
        base = _base_files(part, options)
        _keep_apart(target, *{file.parent for file in base})
        _merge_part(work, part, base, options)
    return target


def _keep_apart(target: Path, *sources: Path) -> None:
    """Refuse a target that is or contains a folder that is read, and one in a checkpoint, with which it would be
    deleted."""
    for source in (Path(os.path.realpath(source)) for source in sources):
        if source.is_relative_to(target):
            raise CheckpointError(
                f"--target_dir {target} {'is' if source == target else 'holds'} {source}, which is read; give a new "
                "folder"
            )
    for folder in (target, *target.parents):
        step_of_run = step_of(folder) is not None and (folder.parent / TRACKER).exists()
        if step_of_run or any((folder / name).exists() for name in (MANIFEST, METADATA)):
            raise CheckpointError(
                f"--target_dir {target} is part of the checkpoint {folder}; give a folder beside it, e.g. "
                f"{folder.parent / 'merged'}"
            )


_WRITTEN = re.compile(
    r"((generation_|adapter_)?config\.json|model\.safetensors\.index\.json"
    r"|(adapter_)?model(-\d+-of-\d+)?\.safetensors)"
)
"""Names that a merge writes, besides the small files it copies."""


def _check_replaceable(target: Path, small_files: Path, overwrite: bool) -> None:
    """Refuse a target that holds anything but a folder that `merge` makes from these `small_files`."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"--target_dir {target} is a file; give a folder")
    present = sorted(target.iterdir()) if target.exists() else []
    if present and not overwrite:
        raise CheckpointError(f"--target_dir {target} is not empty; give a new folder, or add --overwrite")
    for path in present:
        known = _WRITTEN.fullmatch(path.name) or (small_files / path.name).is_file()
        if not known or path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"--overwrite replaces only the model files of an earlier merge, and --target_dir {target} also holds "
                f"'{path.name}'; give a new folder, or move that away"
            )


@contextmanager
def _new_folder(target: Path, small_files: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden folder that is renamed to the target on success and deleted otherwise."""
    work = target.with_name(f".{target.name}.merging")
    try:
        _check_replaceable(target, small_files, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target):
            shutil.rmtree(work, ignore_errors=True)  # left by a merge that was killed
            work.mkdir()
            try:
                yield work
                sync_all(files_below(work))
                _check_replaceable(target, small_files, overwrite)  # merging takes a while
                publish(work, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except Exception as error:
        full = disk_is_full(error)
        if not full and not isinstance(error, OSError):
            raise
        advice = ". Free some space, or give a --target_dir on another disk" if full else ""
        raise CheckpointError(f"merging into --target_dir {target} failed: {error}{advice}") from error


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Refuse a second merge into the target, which would use the same hidden folder."""
    file = target.with_name(f".{target.name}.merging.lock")
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        alone = lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other merge may have ended, and removed the file, after it was opened here.
        if not alone or not file.exists() or not os.path.samestat(file.stat(), os.fstat(descriptor)):
            raise CheckpointError(f"another merge into --target_dir {target} is running")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _merge_part(work: Path, part: PartFolder, base: list[Path], options: MergeOptions) -> None:
    scale = weights.read_lora_scale(part.path / ADAPTER_FOLDER)
    hf_folder.copy_small_files(part.path / HF_FOLDER, work)
    if scale is not None and options.lora == "keep":
        _keep_adapter(work, part, scale)
        return
    config = _read_config(work, options)
    value_model, model = hf_folder.is_value_config(config), empty_model(config)
    if options.is_value_model and not value_model:
        kind = ", ".join(config.architectures or ["language model"])
        raise CheckpointError(f"--is-value-model was given, but {part.path} holds a {kind}")
    reader = ShardedReader(part.model_files(), scale, hf_folder.base_weights(base, model))
    reader.transposed = transposed_weights(model)
    reader.cast_base = hf_folder.cast_to(hf_folder.default_dtype(config, reader), model)
    if value_model and base:
        reader.only(model.state_dict())  # the base model is a policy, with an output matrix
    _write_verified(work, reader, config, model, options)


def _merge_megatron(work: Path, tensors: Path, hf: Path, options: MergeOptions) -> None:
    hf_folder.copy_small_files(hf, work)
    config = _read_config(work, options)
    if options.is_value_model or hf_folder.is_value_config(config):
        raise CheckpointError("a Megatron checkpoint is read as a language model only, not as a value model")
    model = empty_model(config)
    reader = MegatronReader(tensors, model)
    if "lm_head.weight" not in reader.weights and not config.tie_word_embeddings:
        raise CheckpointError(
            f"{tensors} has no output matrix, and config.json does not tie it to the embedding: "
            "add --tie-word-embedding if the model was trained so"
        )
    _write_verified(work, reader, config, model, options)


def _read_config(work: Path, options: MergeOptions) -> Any:
    if options.tie_word_embedding:
        set_in_config(work, tie_word_embeddings=True)
    return hf_folder.read_config(work)


def _write_verified(
    work: Path, reader: CheckpointReader, config: Any, model: Any, options: MergeOptions
) -> None:
    dtype = hf_folder.default_dtype(config, reader) if options.dtype == "auto" else torch_dtype(options.dtype)
    set_in_config(work, dtype=str(dtype).removeprefix("torch."))
    hf_folder.write_weights(work, reader, model, dtype)
    count = check_tensors(work, reader, model, dtype)
    logger.info("%d tensors written and compared with the checkpoint, bit for bit", count)
    if not options.logits:
        logger.warning("logits were not compared (--no-logits)")
    elif sum(w.numel() for w in reader.weights.values()) * dtype.itemsize * 1.5 > free_host_bytes():
        logger.warning("logits were not compared: one copy of the model does not fit into free memory")
    elif not hf_folder.opens_with_transformers(config):
        logger.warning("logits were not compared: transformers has no %s", config.architectures[0])
    else:
        check_logits(work, reader, config, dtype)
        logger.info("logits on a fixed prompt equal those of the checkpoint")


def _base_files(part: PartFolder, options: MergeOptions) -> list[Path]:
    """The weights that an adapter is to be merged into."""
    stated = part.path / ADAPTER_FOLDER / "adapter_config.json"
    if options.lora == "keep" or not stated.exists():
        return []
    try:
        folder = options.base_dir or Path(str(read_json(stated).get("base_model_name_or_path") or ""))
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{stated} cannot be understood: {error}") from None
    files = weights.safetensors_files(folder) if folder.parts else []
    if not files:
        raise CheckpointError(
            f"{part.path} holds a LoRA adapter, and its base model is not at {str(folder) or 'any stated path'}, as "
            "safetensors: give its folder with --base_dir, or keep the adapter with --lora keep"
        )
    return files


def _keep_adapter(work: Path, part: PartFolder, scale: float) -> None:
    """The adapter as peft opens it, from the master weights; bit-equal to them."""
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "generation_config.json"):
        (work / name).unlink(missing_ok=True)
    shutil.copyfile(part.path / ADAPTER_FOLDER / "adapter_config.json", work / "adapter_config.json")
    adapter = ShardedReader(part.model_files(), scale).adapter()
    file = work / "adapter_model.safetensors"
    save_file(adapter, file, metadata={"format": "pt"})
    let_others_read(work)
    written = load_file(file)
    if set(written) != set(adapter) or any(not torch.equal(written[k], v) for k, v in adapter.items()):
        raise CheckpointError("the adapter that was written differs from the checkpoint")
    logger.info("%d adapter tensors written and compared with the checkpoint", len(adapter))


# -- whether the folder holds what the checkpoint holds: every tensor, bit for bit, and the same logits


def check_tensors(folder: Path, reader: CheckpointReader, model: Any, dtype: torch.dtype) -> int:
    """Compare every tensor of the folder with the checkpoint; the number compared. CheckpointError names the first
    that is missing, surplus or different, or, where accelerate is installed, less precise than transformers would have
    it in memory."""
    from transformers.utils import is_accelerate_available

    written, cast = weights.hf_reader(folder), hf_folder.cast_to(dtype, model)
    loaded = {}  # the types in which transformers itself has the weights of the folder in memory
    if hasattr(type(model), "from_pretrained") and is_accelerate_available():  # for `device_map`
        with quiet_transformers():
            opened = type(model).from_pretrained(
                folder, dtype=dtype, device_map="meta", trust_remote_code=False
            )
        loaded = {name: weight.dtype for name, weight in opened.state_dict().items()}
    seen = set()
    for name in check_names(reader, model):
        weight = reader.get(name)
        kept = loaded.get(name, dtype)
        if not same_bits(cast(name, weight).to(kept), weight.to(kept)):
            raise CheckpointError(f"{name!r} was rounded; transformers keeps it in {kept}")
        for key, value in hf_folder.on_disk(model, name, cast(name, weight)).items():
            if key not in written.weights:
                raise CheckpointError(f"the merged folder lacks {key!r}")
            if not same_bits(written.get(key), value):
                raise CheckpointError(f"{key!r} in the merged folder differs from the checkpoint")
            seen.add(key)
    surplus = sorted(set(written.weights) - seen)
    if surplus:
        raise CheckpointError(f"the merged folder holds {surplus[0]!r}, which the checkpoint does not have")
    return len(seen)


def check_logits(folder: Path, reader: CheckpointReader, config: Any, dtype: torch.dtype) -> None:
    """The model transformers loads from the folder answers a fixed prompt exactly as one built from the checkpoint's
    own tensors. The two are in memory one after the other."""
    kind = hf_folder.auto_class(config)

    def from_reader() -> Any:
        model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        own, cast = model.state_dict(keep_vars=True), hf_folder.cast_to(dtype, model)
        for name in reader.weights:
            own[name].data = cast(name, reader.get(name))
        model.tie_weights()
        return model

    def merged() -> Any:
        with quiet_transformers():
            return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False)

    expected = _logits(from_reader, config)
    found = _logits(merged, config)
    if not same_bits(expected, found):
        worst = float((expected.float() - found.float()).abs().max())
        raise CheckpointError(
            f"the merged model and the checkpoint differ on a fixed prompt: logits by up to {worst:.3g}"
        )


@torch.no_grad()
def _logits(build: Callable[[], Any], config: Any) -> torch.Tensor:
    """On a fixed prompt; the model is freed afterwards."""
    vocabulary = config.get_text_config().vocab_size
    prompt = torch.arange(PROMPT_LENGTH).mul(7919).add(3).remainder(vocabulary)
    logits: torch.Tensor = build().eval()(input_ids=prompt[None], use_cache=False).logits
    return logits.clone()


def open_weights(folder: Path) -> CheckpointReader:
    """The weights of a Hugging Face folder, or of a checkpoint (ours or Megatron's) under the same names."""
    if (folder / MANIFEST).exists() or (folder.parent / MANIFEST).exists():
        part = find_part(folder)
        config = hf_folder.read_config(part.path / HF_FOLDER)
        if weights.read_lora_scale(part.path / ADAPTER_FOLDER) is not None:
            raise CheckpointError(f"{folder} holds a LoRA adapter; merge it first, then compare the folders")
        model = empty_model(config)
        return hf_folder.ConvertedReader(ShardedReader(part.model_files()), model)
    if holds_megatron(folder):
        tensors, hf = find_megatron(folder)
        model = empty_model(hf_folder.read_config(hf))
        return hf_folder.ConvertedReader(MegatronReader(tensors, model), model)
    return weights.hf_reader(folder)
