"""Weights of checkpoints under their Hugging Face names, one unsharded tensor at a time: in memory, in the ranks' files
of a part or in a Hugging Face folder; and whether two of them are equal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex

from verl.checkpoint.tensors import ShardReader
from verl.config.model_path import SAFETENSORS, weight_files
from verl.errors import CheckpointError
from verl.json_input import read_json
from verl.models.lora import lora_scale, merge_lora, name_in_file
from verl.models.value_model import HEADS

HF_FOLDER = "huggingface"
ADAPTER_FOLDER = "lora_adapter"
WEIGHTS, INDEX = SAFETENSORS
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
Cast = Callable[[str, torch.Tensor], torch.Tensor]
"""(name, weight) -> the weight in the type it is to have."""


class CheckpointReader(ABC):
    """Weights by name, each read when it is asked for."""

    weights: Mapping[str, torch.Tensor]
    """Every weight on the meta device: its shape and type."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """The unsharded tensor on the CPU."""


class TensorReader(CheckpointReader):
    """Weights that are in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.weights = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class ShardedReader(CheckpointReader):
    """Weights in the ranks' files of one part, or in a Hugging Face folder; LoRA adapters are merged in float32, as
    the training engine merges them."""

    def __init__(
        self,
        files: Iterable[Path],
        lora_scale: float | None = None,
        base: Iterable[Path] | Mapping[str, torch.Tensor] = (),
    ) -> None:
        """`base`: files with the weights that the adapter was trained on, or the weights themselves."""
        self._loaded = base if isinstance(base, Mapping) else {}
        base = () if isinstance(base, Mapping) else base
        self._known: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        # What was trained goes before the weights it was trained on: the head of a reward model is in both.
        for group in filter(None, (list(base), list(files))):
            metadata: Any = ShardReader(group).read_metadata()
            self._known |= metadata.state_dict_metadata
            self._storage |= metadata.storage_data
        self._scale = lora_scale
        self.cast_base: Cast | None = None
        """To the precision the base weights had while the adapter was trained; None: as they are in the files."""
        self.transposed: Collection[str] = ()
        """Weights to which the adapter's product is added transposed (`verl.models.lora`)."""
        self._open: dict[str, Any] = {}
        self._adapters = [key for key in self._known if key.endswith((_A, _B))]
        if self._adapters and lora_scale is None:
            raise CheckpointError(
                f"the checkpoint has LoRA weights ({self._adapters[0]!r}, ...) but no lora_adapter/adapter_config.json"
            )
        own = {key.replace(".base_layer.", "."): key for key in self._known if key not in set(self._adapters)}
        self._keys = {name: name for name in self._loaded} | own
        self.weights = {name: tensor.to("meta") for name, tensor in self._loaded.items()} | {
            name: torch.empty(self._known[key].size, dtype=self._known[key].properties.dtype, device="meta")
            for name, key in own.items()
        }

    def get(self, name: str) -> torch.Tensor:
        weight = self._gather(self._keys[name])
        stem = name.removesuffix(".weight")
        if self._scale is not None and stem + _A in self._known:
            weight = self.cast_base(name, weight) if self.cast_base else weight
            a, b = self._gather(stem + _A), self._gather(stem + _B)
            weight = merge_lora(weight, a, b, self._scale, transpose=name in self.transposed)
        return weight

    def only(self, names: Collection[str]) -> None:
        """Leave out other weights."""
        self.weights = {name: weight for name, weight in self.weights.items() if name in names}

    def adapter(self) -> dict[str, torch.Tensor]:
        """The LoRA weights and a value head under the names peft gives them on the disk."""
        keys = [*self._adapters, *(key for key in self._known if key.partition(".")[0] in HEADS)]
        return {name_in_file(key): self._gather(key) for key in keys}

    def _gather(self, key: str) -> torch.Tensor:
        if key not in self._known:
            return self._loaded[key]
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
    """The weights of a Hugging Face folder, or of an adapter's."""
    adapter = folder / "adapter_model.safetensors"
    files = safetensors_files(folder) or ([adapter] if adapter.is_file() else [])
    if not files:
        raise CheckpointError(f"{folder} holds no {WEIGHTS} and no {INDEX}")
    return ShardedReader(files)


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, where they are of this format."""
    try:
        files = weight_files(folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files, e.g. {missing[0].name}"
        )
    return [file for file in files if file.suffix == ".safetensors"]


def read_lora_scale(adapter_folder: Path) -> float | None:
    """What an adapter's product is multiplied by, from `adapter_config.json`; None where there is no adapter."""
    path = adapter_folder / "adapter_config.json"
    if not path.exists():
        return None
    try:
        return lora_scale(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in type, shape and every bit; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def compare_weights(a: CheckpointReader, b: CheckpointReader) -> tuple[list[str], str]:
    """One line for each tensor that differs; and how those that are equal but for their storage type are stored."""
    names_a, names_b = set(a.weights), set(b.weights)
    lines = [f"{name}: only in the first" for name in sorted(names_a - names_b)]
    lines += [f"{name}: only in the second" for name in sorted(names_b - names_a)]
    stored = ""
    for name in sorted(names_a & names_b):
        x, y = a.get(name), b.get(name)
        if x.shape != y.shape:
            lines.append(f"{name}: shape {list(x.shape)} and {list(y.shape)}")
            continue
        narrow = min(x.dtype, y.dtype, key=lambda dtype: dtype.itemsize)
        if same_bits(x.to(narrow), y.to(narrow)):
            if x.dtype != y.dtype:
                stored = f"equal as {narrow}, stored as {x.dtype} and {y.dtype}".replace("torch.", "")
            continue
        gap = (x.double() - y.double()).abs()
        changed, worst = int((gap != 0).sum()), float(gap.max())
        lines.append(f"{name}: {changed} of {x.numel()} numbers differ, by at most {worst:.3g}")
    return lines, stored
