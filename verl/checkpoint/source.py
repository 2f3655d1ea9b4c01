"""The weights of one part of a checkpoint under their Hugging Face names, one whole tensor at a time.

What always holds: at most one tensor is assembled at once; LoRA adapters are merged in float32, exactly as the
training engine merges them when it hands weights over, or left out (`merge_lora=False`: the base weights).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from verl.checkpoint.tensors import ShardReader
from verl.errors import CheckpointError
from verl.json_input import read_json

_BASE = ".base_layer."
_PEFT_PREFIX = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


class Source(Protocol):
    """Weights by their Hugging Face names, each read when it is asked for."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def get(self, name: str) -> torch.Tensor: ...

    def numel(self) -> int: ...


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter's product is multiplied by."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @classmethod
    def read(cls, adapter_folder: Path) -> LoraSettings | None:
        """From `adapter_config.json`, or None where there is no adapter."""
        path = adapter_folder / "adapter_config.json"
        if not path.exists():
            return None
        try:
            document = read_json(path)
            return cls(int(document["r"]), float(document["lora_alpha"]), bool(document.get("use_rslora")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{path} cannot be understood: {error!r}") from None


class TensorSource:
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

    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())


class WeightSource:
    """Opens a part's model files; use as a context."""

    def __init__(
        self, files: Iterable[Path], lora: LoraSettings | None = None, merge_lora: bool = True
    ) -> None:
        reader = ShardReader(files)
        metadata = reader.read_metadata()
        self._known: dict[str, TensorStorageMetadata] = metadata.state_dict_metadata  # type: ignore[assignment]
        self._places: Any = metadata.storage_data
        self._lora = lora if merge_lora else None
        self.computed_in: torch.dtype | None = None
        """The precision the base weights had while the adapter was trained; None: as they are in the files."""
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        adapters = [key for key in self._known if key.endswith((_A, _B))]
        if adapters and lora is None:
            raise CheckpointError(
                f"the checkpoint has LoRA weights ({adapters[0]!r}, ...) but no lora_adapter/adapter_config.json "
                "that says their rank and alpha"
            )
        self._keys: dict[str, str] = {
            key.replace(_BASE, "."): key for key in self._known if not key.endswith((_A, _B))
        }

    @property
    def names(self) -> Collection[str]:
        return self._keys

    def __enter__(self) -> WeightSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._known[self._keys[name]].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._known[self._keys[name]].properties.dtype

    def numel(self) -> int:
        return sum(self._known[key].size.numel() for key in self._keys.values())

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the type it was saved in."""
        weight = self._whole(self._keys[name])
        stem = name.removesuffix(".weight")
        if self._lora is not None and stem + _A in self._known:
            weight = weight.to(self.computed_in or weight.dtype)
            product = self._whole(stem + _B).float() @ self._whole(stem + _A).float()
            weight = (weight.float() + self._lora.scale * product).to(weight.dtype)
        return weight

    def adapter(self) -> dict[str, torch.Tensor]:
        """The LoRA weights under the names peft gives them on the disk."""
        keys = [key for key in self._known if key.endswith((_A, _B))]
        return {_PEFT_PREFIX + key.replace(".default.", "."): self._whole(key) for key in keys}

    @property
    def keys(self) -> list[str]:
        """The names in the files, adapters included."""
        return list(self._known)

    def raw(self, key: str) -> torch.Tensor:
        """A tensor under its name in the files, as it is there."""
        return self._whole(key)

    def _whole(self, key: str) -> torch.Tensor:
        entry = self._known[key]
        if len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.size:
            only: torch.Tensor = self._opened(
                self._places[MetadataIndex(key, entry.chunks[0].offsets)].file
            ).get_tensor(key)
            return only
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            file = self._places[MetadataIndex(key, chunk.offsets)].file
            piece = self._opened(file).get_tensor(key)
            spans = zip(chunk.offsets, chunk.sizes, strict=True)
            whole[tuple(slice(o, o + n) for o, n in spans)] = piece
            filled += piece.numel()
        if filled != whole.numel():
            raise CheckpointError(
                f"a shard of tensor {key!r} is missing: {filled} of {whole.numel()} numbers are there"
            )
        return whole

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(str(file), framework="pt"))
        return self._open[file]
