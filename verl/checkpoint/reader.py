"""Weights of a checkpoint under their Hugging Face names, one unsharded tensor at a time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex

from verl.checkpoint.tensors import ShardReader
from verl.errors import CheckpointError
from verl.json_input import read_json
from verl.models.lora import merge_lora

_BASE = ".base_layer."
_PEFT_PREFIX = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class CheckpointReader(ABC):
    """Weights by name, each read when it is asked for."""

    @property
    @abstractmethod
    def names(self) -> Collection[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype: ...

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """The unsharded tensor on the CPU."""

    def numel(self) -> int:
        return sum(math.prod(self.shape(name)) for name in self.names)


class TensorReader(CheckpointReader):
    """Weights that are in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class ShardedReader(CheckpointReader):
    """Weights in the ranks' files of one part, or in a Hugging Face folder; LoRA adapters are merged in float32, as
    the training engine merges them."""

    def __init__(self, files: Iterable[Path], lora_scale: float | None = None) -> None:
        metadata = ShardReader(files).read_metadata()
        self._known: dict[str, Any] = metadata.state_dict_metadata
        self._storage: Any = metadata.storage_data
        self._scale = lora_scale
        self.base_dtype: torch.dtype | None = None
        """The precision the base weights had while the adapter was trained; None: as they are in the files."""
        self._open: dict[str, Any] = {}
        self._adapters = [key for key in self._known if key.endswith((_A, _B))]
        if self._adapters and lora_scale is None:
            raise CheckpointError(
                f"the checkpoint has LoRA weights ({self._adapters[0]!r}, ...) but no lora_adapter/adapter_config.json"
            )
        self._keys = {key.replace(_BASE, "."): key for key in self._known if key not in set(self._adapters)}

    @property
    def names(self) -> Collection[str]:
        return self._keys

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._known[self._keys[name]].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._known[self._keys[name]].properties.dtype  # type: ignore[no-any-return]

    def get(self, name: str) -> torch.Tensor:
        weight = self._gather(self._keys[name])
        stem = name.removesuffix(".weight")
        if self._scale is not None and stem + _A in self._known:
            weight = weight.to(self.base_dtype or weight.dtype)
            weight = merge_lora(weight, self._gather(stem + _A), self._gather(stem + _B), self._scale)
        return weight

    def adapter(self) -> dict[str, torch.Tensor]:
        """The LoRA weights under the names peft gives them on the disk."""
        return {_PEFT_PREFIX + key.replace(".default.", "."): self._gather(key) for key in self._adapters}

    def _gather(self, key: str) -> torch.Tensor:
        entry = self._known[key]
        found = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if found != entry.size.numel():
            raise CheckpointError(
                f"a shard of tensor {key!r} is missing: {found} of {entry.size.numel()} numbers are there"
            )
        if len(entry.chunks) == 1:
            return self._read(key, entry.chunks[0].offsets)
        full = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            full[tuple(slice(first, first + n) for first, n in spans)] = self._read(key, chunk.offsets)
        return full

    def _read(self, key: str, offsets: torch.Size) -> torch.Tensor:
        file = self._storage[MetadataIndex(key, offsets)].relative_path
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_tensor(key)  # type: ignore[no-any-return]


def hf_reader(folder: Path) -> ShardedReader:
    """The weights of a Hugging Face folder."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    return ShardedReader(files)


def read_lora_scale(adapter_folder: Path) -> float | None:
    """What an adapter's product is multiplied by, from `adapter_config.json`; None where there is no adapter."""
    path = adapter_folder / "adapter_config.json"
    if not path.exists():
        return None
    try:
        settings = read_json(path)
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        return alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None
