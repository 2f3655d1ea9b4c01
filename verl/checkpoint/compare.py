"""What differs between two sets of weights, or two checkpoints, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from verl.checkpoint.hf_check import HfTensors, same_bits
from verl.checkpoint.hf_folder import ADAPTER_FOLDER, HF_FOLDER
from verl.checkpoint.hf_weights import check_names, empty_model, is_value_config, on_disk, read_config
from verl.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from verl.checkpoint.megatron.distcp import DistTensors
from verl.checkpoint.megatron.folder import find_megatron, holds_megatron
from verl.checkpoint.megatron.source import MegatronSource
from verl.checkpoint.merge import find_part
from verl.checkpoint.source import LoraSettings, Source, WeightSource
from verl.errors import CheckpointError
from verl.json_input import read_json


class Weights(Protocol):
    """Tensors by name, each read on demand."""

    @property
    def names(self) -> Iterable[str]: ...

    def get(self, name: str) -> torch.Tensor: ...


class _AsOnDisk:
    """A checkpoint's weights under the names a Hugging Face folder would give them."""

    def __init__(self, source: Source, model: Any) -> None:
        self._source, self._model = source, model
        self._from: dict[str, str] = {}
        for name in check_names(source, model):
            empty = torch.empty(source.shape(name), dtype=source.dtype(name), device="meta")
            self._from |= dict.fromkeys(on_disk(model, name, empty), name)

    @property
    def names(self) -> Iterable[str]:
        return self._from

    def get(self, name: str) -> torch.Tensor:
        source = self._from[name]
        return on_disk(self._model, source, self._source.get(source))[name]


@contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """A Hugging Face folder, or a part of a checkpoint (ours or Megatron's) seen as one."""
    if (folder / MANIFEST).exists() or (folder.parent / MANIFEST).exists():
        part = find_part(folder)
        config = read_config(part.path / HF_FOLDER)
        lora = LoraSettings.read(part.path / ADAPTER_FOLDER)
        if lora is not None:
            raise CheckpointError(f"{folder} holds a LoRA adapter; merge it first, then compare the folders")
        with WeightSource(part.model_files()) as source:
            yield _AsOnDisk(source, empty_model(config, value_model=is_value_config(config)))
    elif holds_megatron(folder):
        found = find_megatron(folder)
        model = empty_model(read_config(found.hf))
        yield _AsOnDisk(MegatronSource(DistTensors(found.tensors), model), model)
    else:
        yield HfTensors(folder)


def compare_weights(a: Weights, b: Weights) -> list[str]:
    """One line for each tensor that is not the same in both. A change of precision alone is told as such."""
    lines = []
    names_a, names_b = set(a.names), set(b.names)
    lines += [f"{name}: only in the first" for name in sorted(names_a - names_b)]
    lines += [f"{name}: only in the second" for name in sorted(names_b - names_a)]
    for name in sorted(names_a & names_b):
        line = _difference(a.get(name), b.get(name))
        if line:
            lines.append(f"{name}: {line}")
    return lines


def _difference(x: torch.Tensor, y: torch.Tensor) -> str:
    if x.shape != y.shape:
        return f"shape {list(x.shape)} and {list(y.shape)}"
    if x.dtype != y.dtype:
        narrow = x.dtype if x.element_size() <= y.element_size() else y.dtype
        if same_bits(x.to(narrow), y.to(narrow)):
            return f"equal as {_short(narrow)}, stored as {_short(x.dtype)} and {_short(y.dtype)}"
    elif same_bits(x, y):
        return ""
    gap = (x.double() - y.double()).abs()
    changed = int((gap != 0).sum())
    return f"{changed} of {x.numel()} numbers differ, by at most {float(gap.max()):.3g}"


def only_precision(lines: Iterable[str]) -> bool:
    """Whether nothing but the storage type differs."""
    return all(": equal as " in line for line in lines)


def compare_checkpoints(a: Path, b: Path) -> list[str]:
    """What differs between two `global_step_N` folders: parts, tensors of every section, plain values."""
    one, two = read_manifest(a), read_manifest(b)
    lines = []
    for part in sorted(set(one.parts) | set(two.parts)):
        if part not in one.parts or part not in two.parts:
            lines.append(f"{part}: only in the {'first' if part in one.parts else 'second'}")
            continue
        for section in ("model", "optimizer"):
            found = compare_weights(_section(a, one, part, section), _section(b, two, part, section))
            lines += [f"{part}/{section}/{line}" for line in found]
    lines += _compare_plain("trainer_state", _plain(a, one, "trainer_state"), _plain(b, two, "trainer_state"))
    return lines


def _section(folder: Path, manifest: Manifest, part: str, section: str) -> Weights:
    files = [f for f in manifest.files_of(folder, f"{part}/{section}/") if f.suffix == ".safetensors"]
    return _Raw(files)


class _Raw:
    """Tensors under the names they have in the files, LoRA weights included."""

    def __init__(self, files: list[Path]) -> None:
        self._source = WeightSource(files, LoraSettings(1, 1), merge_lora=False)

    @property
    def names(self) -> Iterable[str]:
        return self._source.keys

    def get(self, name: str) -> torch.Tensor:
        return self._source.raw(name)


def _plain(folder: Path, manifest: Manifest, name: str) -> Any:
    files = [f for f in manifest.files_of(folder, f"{name}.json") if f.suffix == ".json"]
    try:
        return read_json(files[0]) if files else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{files[0]} cannot be read: {error}") from None


def _compare_plain(path: str, x: Any, y: Any) -> list[str]:
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        lines = []
        for key in [*x, *(k for k in y if k not in x)]:
            lines += _compare_plain(f"{path}.{key}", x.get(key, "nothing"), y.get(key, "nothing"))
        return lines
    return [] if x == y else [f"{path}: {_shorten(x)} and {_shorten(y)}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
