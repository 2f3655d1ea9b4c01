"""The Hugging Face folder of a checkpoint: config, tokenizer, unsharded weights, LoRA adapter.

Weights are written from what was just saved, so the engine does not wait for them. Only with LoRA, whose base weights
are not in the checkpoint, and for architectures that cannot be built from their config, the engine writes them itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from verl.checkpoint.files import FileRecord, write_file
from verl.checkpoint.tensors import TensorChunk, write_stream
from verl.checkpoint.weights import (
    HF_FOLDER,
    INDEX,
    WEIGHTS,
    Cast,
    CheckpointReader,
    ShardedReader,
    TensorReader,
)
from verl.config.model_path import config_problem
from verl.errors import CheckpointError
from verl.models.introspection import kept_in_float32, tied_names
from verl.models.loading import DTYPES
from verl.models.value_model import ValueModel
from verl.runtime import quiet_transformers

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine

SHARD_BYTES = 5_000_000_000
_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


# -- saving ---------------------------------------------------------------------------------------------------------


def takes_shards(engine: TrainEngine, contents: Sequence[str]) -> bool:
    """Whether the Hugging Face folder gets its weights from the part's model files."""
    if engine.info.lora_config is not None or not {"model", "hf_model"} <= set(contents):
        return False
    with engine.weights().structure() as model:
        return _can_build(model)


def replaces_shards(engine: TrainEngine, contents: Sequence[str]) -> bool:
    """Whether what is saved without 'model' has the weights that training continues with, bit for bit: the adapter, or
    the Hugging Face folder, in the precision of the master weights."""
    weights = engine.saved_weights()
    with engine.weights().structure() as model:
        if engine.info.lora_config is not None:
            params = dict(model.named_parameters())
            return all(params[name].dtype == weight.dtype for name, weight in weights.items())
        floats = [weight for weight in weights.values() if weight.is_floating_point()]
        same = all(weight.dtype == engine.info.dtype for weight in floats)
        return "hf_model" in contents and same and not _converts(model)


def write_small_files(folder: Path, engine: TrainEngine, tokenizer: Any) -> None:
    """Config, generation config and tokenizer."""
    engine.save_hf_config(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_from_shards(
    part: Path, shards: Mapping[str, FileRecord], chunks: Sequence[TensorChunk] | None = None
) -> dict[str, FileRecord]:
    """Unsharded weights into `huggingface/`, from the part's model files (`shards`) or, where one process has all of
    them in memory, from its `chunks`. Names in and out are relative to the part. A model file that already is what
    transformers reads gets a hard link instead of a copy."""
    folder = part / HF_FOLDER
    config = read_config(folder)
    model = empty_model(config)
    reader: CheckpointReader
    if chunks is None:
        reader = ShardedReader(part / name for name in shards)
    else:
        reader = TensorReader({chunk.key: chunk.tensor for chunk in chunks})
    dtype = default_dtype(config, reader)
    if chunks is not None and stored_as_is(reader, model, dtype):
        ((shard, record),) = shards.items()
        try:
            os.link(part / shard, folder / WEIGHTS)
            return {f"{HF_FOLDER}/{WEIGHTS}": record}
        except OSError:  # a file system without hard links
            pass
    written = write_weights(folder, reader, model, dtype)
    return {f"{HF_FOLDER}/{name}": record for name, record in written.items()}


_buildable: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _can_build(model: Any) -> bool:
    """Whether what is built from the saved config has the names and shapes of the model."""
    if model not in _buildable:
        try:
            built = empty_model(model.saved_config() if isinstance(model, ValueModel) else model.config)
            _buildable[model] = _shapes(built) == _shapes(model)
        except CheckpointError:
            _buildable[model] = False
    return _buildable[model]


def _shapes(model: Any) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.state_dict(keep_vars=True).items()}


# -- config ---------------------------------------------------------------------------------------------------------


def copy_small_files(source: Path, target: Path) -> None:
    """Config, tokenizer, templates: everything in the folder but weights."""
    if not (source / "config.json").exists():
        raise CheckpointError(
            f"{source} has no config.json: the checkpoint was saved without its Hugging Face folder"
        )
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)


def read_config(folder: Path) -> Any:
    """The model's configuration; code that came with the model is never run."""
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json, so the architecture is not known")
    problem = config_problem(folder)
    if problem:
        raise CheckpointError(problem)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers lets whatever its own checks raise come through
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {error}") from None


def is_value_config(config: Any) -> bool:
    """Whether it is a critic or a reward model: numbers, no text."""
    return "Classification" in auto_class(config).__name__


def auto_class(config: Any) -> Any:
    """The class of transformers that opens the folder of a policy, a critic or a reward model."""
    import transformers

    named = " ".join(config.architectures or ())
    for kind in ("TokenClassification", "SequenceClassification"):
        if f"For{kind}" in named:
            return getattr(transformers, f"AutoModelFor{kind}")
    return transformers.AutoModelForCausalLM


def empty_model(config: Any) -> Any:
    """The architecture on the meta device: what names and shapes must be. A critic for which transformers has no class
    is our own `ValueModel`."""
    from transformers import AutoModel

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if opens_with_transformers(config):
                return auto_class(config).from_config(config, trust_remote_code=False)
            return ValueModel(AutoModel.from_config(config, trust_remote_code=False))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"no model can be built from the configuration: {error}") from None


def opens_with_transformers(config: Any) -> bool:
    """False for a critic of an architecture without `...ForTokenClassification`."""
    kind = auto_class(config)
    return "TokenClassification" not in kind.__name__ or type(config) in kind._model_mapping


def default_dtype(config: Any, reader: CheckpointReader) -> torch.dtype:
    """The type the model computed with; masters are float32 whatever that was."""
    return _config_dtype(config) or next((weight.dtype for weight in reader.weights.values()), torch.float32)


def _config_dtype(config: Any) -> torch.dtype | None:
    dtype = getattr(config, "dtype", None)
    return DTYPES.get(dtype) if isinstance(dtype, str) else dtype


# -- weights --------------------------------------------------------------------------------------------------------


def check_names(reader: CheckpointReader, model: Any) -> list[str]:
    """The names to write, in the model's order. Refuses what is missing, surplus or of another shape."""
    wanted, saved = model.state_dict(), reader.weights
    ties = tied_names(model)
    missing = [name for name in wanted if name not in saved and ties.get(name) not in saved]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} weights of the architecture, first {missing[0]!r}"
        )
    for name, weight in saved.items():
        if name not in wanted:
            raise CheckpointError(f"the checkpoint has {name!r}, which {type(model).__name__} does not have")
        if weight.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {list(weight.shape)}; the architecture needs {list(wanted[name].shape)}"
            )
    both = {name for name, twin in ties.items() if name in saved and twin in saved}
    for name in both:
        value, twin = reader.get(name), reader.get(ties[name])
        # On the meta device only the names are checked.
        if not value.is_meta and not torch.equal(value, twin):
            raise CheckpointError(
                f"{name!r} differs from {ties[name]!r}, to which config.json ties it: set tie_word_embeddings to false"
            )
    return [name for name in wanted if name in saved and name not in both]


def write_weights(
    folder: Path, reader: CheckpointReader, model: Any, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> dict[str, FileRecord]:
    """model.safetensors, or numbered shards with an index; one tensor in memory at a time."""
    cast = cast_to(dtype, model)
    shards: list[list[tuple[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]]] = [[]]
    used = total = 0
    for name in check_names(reader, model):
        outputs = on_disk(model, name, cast(name, reader.weights[name]))
        size = sum(value.nbytes for value in outputs.values())
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, [(key, value.dtype, tuple(value.shape)) for key, value in outputs.items()]))
        used += size
        total += size
    files = {}
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # Larger elements first keeps tensors aligned.
        shard.sort(key=lambda item: -max((dtype.itemsize for _, dtype, _ in item[1]), default=0))
        entries = [entry for _, outputs in shard for entry in outputs]
        tensors = (
            tensor
            for name, _ in shard
            for tensor in on_disk(model, name, cast(name, reader.get(name))).values()
        )
        files[file] = write_stream(folder / file, entries, tensors, {"format": "pt"})
        index |= {key: file for key, _, _ in entries}
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        files[INDEX] = write_file(folder / INDEX, text + "\n")
    return files


def cast_to(dtype: torch.dtype, model: Any) -> Cast:
    """Floating-point weights in `dtype`, except those that have another type when transformers loads `model` in it, and
    buffers, which stay as they are."""
    kept, built = kept_in_float32(model, dtype), _config_dtype(model.config) or torch.float32
    buffers = {name for name, _ in model.named_buffers()}
    own = {name: param.dtype for name, param in model.named_parameters() if param.dtype != built}

    def cast(name: str, weight: torch.Tensor) -> torch.Tensor:
        if kept and kept.search(name):
            return weight.to(torch.float32)
        if name in buffers or not weight.is_floating_point():
            return weight
        return weight.to(own.get(name, dtype))

    return cast


def stored_as_is(reader: CheckpointReader, model: Any, dtype: torch.dtype) -> bool:
    """Whether `write_weights` would write exactly the reader's tensors under the reader's names."""
    cast = cast_to(dtype, model)
    return (
        set(check_names(reader, model)) == set(reader.weights)
        and not _converts(model)
        and all(cast(name, weight).dtype == weight.dtype for name, weight in reader.weights.items())
    )


def on_disk(model: Any, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as Hugging Face stores it: some architectures fuse weights in memory that are separate on the disk."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: weight})) if _converts(model) else {name: weight}


_converting: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _converts(model: Any) -> bool:
    """Whether this architecture fuses weights; asked once, because the question is slow."""
    from transformers.core_model_loading import revert_weight_conversion

    if isinstance(model, ValueModel):
        return False
    if model not in _converting:
        nothing: dict[str, torch.Tensor] = {}
        _converting[model] = revert_weight_conversion(model, nothing) is not nothing
    return _converting[model]


def base_weights(files: Sequence[Path], model: Any) -> Sequence[Path] | dict[str, torch.Tensor]:
    """Of a Hugging Face folder, for `ShardedReader`: the files, or where transformers joins their tensors on loading
    (the experts of a mixture) the weights as it has them in memory."""
    if not files or not _converts(model):
        return files
    with quiet_transformers():
        loaded = type(model).from_pretrained(files[0].parent, dtype="auto", trust_remote_code=False)
    return dict(loaded.state_dict())


class ConvertedReader(CheckpointReader):
    """A checkpoint's weights under the names a Hugging Face folder gives them."""

    def __init__(self, reader: CheckpointReader, model: Any) -> None:
        self._reader, self._model = reader, model
        self._sources: dict[str, str] = {}
        self.weights = {}
        for name in check_names(reader, model):
            converted = on_disk(model, name, reader.weights[name])
            self._sources |= dict.fromkeys(converted, name)
            self.weights |= converted

    def get(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return on_disk(self._model, source, self._reader.get(source))[name]
