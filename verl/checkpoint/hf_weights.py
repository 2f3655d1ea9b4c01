"""Whole weights in a Hugging Face folder, streamed out of a checkpoint's shards.

What always holds: names, shapes and ties are those the architecture declares, checked before the first byte is
written; memory holds a tensor and the few that are still on their way to the disk; the type of every
floating-point weight is the one asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from verl.checkpoint.direct_io import Writers
from verl.checkpoint.files import FileRecord, write_file
from verl.checkpoint.source import Source
from verl.checkpoint.tensors import write_stream
from verl.errors import CheckpointError
from verl.models.dtypes import DTYPES

SHARD_BYTES = 5_000_000_000
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> Any:
    """The model's configuration; code that came with the model is never run."""
    from transformers import AutoConfig

    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json, so the architecture is not known")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers lets whatever its own checks raise come through
        raise CheckpointError(f"{folder / 'config.json'} cannot be used: {error}") from None


def is_value_config(config: Any) -> bool:
    return any("TokenClassification" in name for name in config.architectures or ())


def empty_model(config: Any, *, value_model: bool = False) -> Any:
    """The architecture without any memory for weights: what names and shapes must be."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if value_model else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"no model can be made from the configuration: {error}") from None


def tied_names(model: Any) -> dict[str, str]:
    """{name: the name it shares its values with}, for a model whose configuration ties them."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return {}
    tied = getattr(model, "_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, Mapping) else {}


def default_dtype(config: Any, source: Source) -> torch.dtype:
    """The type the model computed with; masters are float32 whatever that was."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = DTYPES.get(dtype)
    return dtype or next((source.dtype(name) for name in source.names), torch.float32)


def check_names(source: Source, model: Any) -> list[str]:
    """The source's names to write, in the model's order. Refuses what is missing, surplus or of another shape."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ties = tied_names(model)
    missing = [name for name in wanted if name not in source.names and ties.get(name) not in source.names]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} weights of the architecture, first {missing[0]!r}"
        )
    surplus = [name for name in source.names if name not in wanted]
    if surplus:
        raise CheckpointError(
            f"the checkpoint has {len(surplus)} weights that {type(model).__name__} does not have, first {surplus[0]!r}"
        )
    for name in source.names:
        if source.shape(name) != wanted[name]:
            raise CheckpointError(
                f"{name!r} has shape {list(source.shape(name))}; the architecture wants {list(wanted[name])}"
            )
    for name, twin in ties.items():
        if (
            name in source.names
            and twin in source.names
            and not torch.equal(source.get(name), source.get(twin))
        ):
            raise CheckpointError(
                f"{name!r} differs from {twin!r}, to which the configuration ties it: one of them would be lost. "
                "Set tie_word_embeddings to false in config.json"
            )
    return [
        name for name in wanted if name in source.names and not (name in ties and ties[name] in source.names)
    ]


def write_weights(
    folder: Path, source: Source, model: Any, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> dict[str, FileRecord]:
    """model.safetensors, or numbered shards with an index, in the names transformers and vLLM read."""
    shards: list[list[tuple[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]]] = [[]]
    used = 0
    total = 0
    for name in check_names(source, model):
        kind = out_dtype(source.dtype(name), dtype)
        outputs = on_disk(model, name, torch.empty(source.shape(name), dtype=kind, device="meta"))
        announced = [(key, value.dtype, tuple(value.shape)) for key, value in outputs.items()]
        size = sum(value.numel() * value.element_size() for value in outputs.values())
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append((name, announced))
        used += size
        total += size
    files = {}
    index: dict[str, str] = {}
    with Writers() as writers:
        for number, shard in enumerate(shards, start=1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # Larger elements first keeps tensors aligned.
            shard.sort(key=lambda item: -max((dtype.itemsize for _, dtype, _ in item[1]), default=0))
            entries = [entry for _, announced in shard for entry in announced]
            tensors = _stream(source, model, [name for name, _ in shard], dtype)
            files[file] = write_stream(folder / file, entries, tensors, {"format": "pt"}, writers)
            index |= {key: file for key, _, _ in entries}
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        files[INDEX] = write_file(folder / INDEX, text + "\n")
    return files


def _stream(source: Source, model: Any, names: list[str], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for name in names:
        weight = source.get(name)
        yield from on_disk(model, name, weight.to(out_dtype(weight.dtype, dtype))).values()


def out_dtype(own: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    return wanted if own.is_floating_point else own


def stored_as_is(source: Source, model: Any, dtype: torch.dtype) -> bool:
    """Whether `write_weights` would write exactly the source's tensors under the source's names."""
    return (
        set(check_names(source, model)) == set(source.names)
        and not _converts(model)
        and all(out_dtype(source.dtype(name), dtype) == source.dtype(name) for name in source.names)
    )


def on_disk(model: Any, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as Hugging Face stores it: some architectures fuse weights in memory that are apart on the disk."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: weight})) if _converts(model) else {name: weight}


_converting: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _converts(model: Any) -> bool:
    """Whether this architecture fuses weights. To ask once is enough, and asking is slow."""
    from transformers.core_model_loading import revert_weight_conversion

    if model not in _converting:
        nothing: dict[str, torch.Tensor] = {}
        _converting[model] = revert_weight_conversion(model, nothing) is not nothing
    return _converting[model]
