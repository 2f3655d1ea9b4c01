"""The state of a run on disk and back: engines, trainer, random generators. Nothing is ever unpickled.

    model/model_world_size_{W}_rank_{R}.safetensors          the master weights, under their own names
    optimizer/optimizer_world_size_{W}_rank_{R}.safetensors  moments and counts
    {model,optimizer,extra}/{...}_rank_{R}.json              what is not a tensor, such as the schedule

An engine must not change during `snapshot` only; writing needs no other rank; loading takes any sharding into any
other and refuses, by name, what does not fit.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint.files import FileRecord, inside, write_file
from verl.checkpoint.manifest import Manifest
from verl.checkpoint.tensors import (
    TensorChunk,
    check_fit,
    local_chunks,
    read_into,
    read_tensors,
    saved_tensors,
    write_chunks,
)
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER
from verl.engines.base import TrainEngine
from verl.errors import CheckpointError
from verl.json_input import parse_json, read_json
from verl.models.lora import name_in_file

logger = logging.getLogger(__name__)

Encoded = tuple[str, dict[str, torch.Tensor]]
"""JSON text in which tensors are references, and the tensors by name."""

_TAGS = ("__tensor__", "__array__", "__tuple__", "__pairs__", "__bytes__")

# Which entries of an engine's state belong to which entry of `checkpoint.save_contents`.
SECTIONS = {"model": ("model",), "optimizer": ("optimizer",), "extra": ("scheduler", "extra")}


# -- engines ---------------------------------------------------------------------------------------------------------


@dataclass
class StateSnapshot:
    """A rank's share of an engine's state, by section."""

    chunks: dict[str, list[TensorChunk]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, TensorChunk]]:
        for section, chunks in self.chunks.items():
            for chunk in chunks:
                yield section, chunk

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(chunk.tensor.numel() * chunk.tensor.element_size() for _, chunk in self.tensors())


def snapshot(state: Mapping[str, Any], contents: Sequence[str], rank: int = 0) -> StateSnapshot:
    """A rank's share of what `contents` asks for of an engine's state. Tensors are the engine's own, not copies."""
    taken = StateSnapshot()
    for section in SECTIONS:
        if section not in contents:
            continue
        tree = _tree_of(state, section)
        taken.chunks[section] = local_chunks(_tensors_by_name(tree), rank)
        taken.plain[section] = _without_tensors(tree)
    return taken


def _tree_of(state: Mapping[str, Any], section: str) -> Any:
    entries = {entry: state.get(entry, {}) for entry in SECTIONS[section]}
    return entries if section == "extra" else entries[section]


def write_snapshot(
    folder: Path, taken: StateSnapshot, rank: int = 0, world_size: int = 1
) -> dict[str, FileRecord]:
    """Write this rank's files below `folder`; returns their records by name relative to it."""

    def write(section: str) -> dict[str, FileRecord]:
        records = {}
        (folder / section).mkdir(parents=True, exist_ok=True)
        stem = f"{section}/{section}_world_size_{world_size}_rank_{rank}"
        if taken.chunks[section]:
            records[f"{stem}.safetensors"] = write_chunks(
                folder / f"{stem}.safetensors", taken.chunks[section]
            )
        if taken.plain[section]:
            text, _ = encode(taken.plain[section])
            records[f"{stem}.json"] = write_file(folder / f"{stem}.json", text)
        return records

    with ThreadPoolExecutor(len(SECTIONS)) as pool:
        return {name: record for part in pool.map(write, taken.chunks) for name, record in part.items()}


_RESTARTS = {
    "optimizer": "the optimiser's moments start at zero",
    "extra": "the loss scale and the reference of trainer.ref_update_freq start anew",
}


@dataclass(frozen=True)
class SavedPart:
    """A part of a checkpoint and the engine that takes it."""

    folder: Path
    manifest: Manifest
    name: str
    engine: TrainEngine
    contents: Sequence[str] | None = None
    """What is loaded; None: all that was saved."""
    schedule: Any = None
    """Of the learning rate, where `extra`, which has it too, is not loaded."""

    @property
    def saved(self) -> list[str]:
        return self.manifest.parts.get(self.name, [])

    def sections(self) -> list[str]:
        """What of the engine's state the checkpoint replaces. Weights always are, as a run that continues at a step
        must not have those it began with."""
        saved = [*self.saved, "model"]
        return [
            name for name in SECTIONS if name in saved and (self.contents is None or name in self.contents)
        ]

    def check(self) -> None:
        """Raise unless `load` would do. Reads no values of tensors and changes nothing."""
        state = self.engine.state()
        for section in self.sections():
            where = f"{self.folder.name}/{self.name}/{section}"
            target, shards, tensors, plain = self._section(section, state)
            if tensors or shards:
                check_fit(shards, tensors, where)
            _merged(target, plain, where)
        if self.schedule is not None:
            _merged(state["scheduler"], self.schedule, f"{self.folder.name}: schedule of the {self.name}")

    def load(self) -> None:
        """Load it into the engine."""
        sections = self.sections()
        for section, restarts in _RESTARTS.items():
            if section not in sections and (self.contents is None or section in self.contents):
                logger.warning(
                    "checkpoint %s holds no '%s' of the %s (saved: %s): %s",
                    self.folder.name,
                    section,
                    self.name,
                    ", ".join(self.saved),
                    restarts,
                )
        state: Any = self.engine.state()
        for section in sections:
            target, shards, tensors, plain = self._section(section, state)
            if tensors or shards:
                read_into(shards, tensors, f"{self.folder.name}/{self.name}/{section}")
            merged = _merged(target, plain)
            state.update(merged if section == "extra" else {section: merged})
        if "extra" not in sections and state["scheduler"]:
            if self.schedule is None:
                logger.warning(
                    "checkpoint %s does not say where the schedule of the %s was: the learning rate begins as at step "
                    "1",
                    self.folder.name,
                    self.name,
                )
            else:
                state["scheduler"] = self.schedule
        self.engine.load_state(state)

    def _section(
        self, section: str, state: Mapping[str, Any]
    ) -> tuple[Any, list[Path], dict[str, torch.Tensor], Any]:
        """The engine's own tree of a section, the files with its tensors, these by their names there, and the saved
        plain values."""
        tree, rank = _tree_of(state, section), self.engine.info.rank
        files = self.manifest.files_of(self.folder, f"{self.name}/{section}/")
        shards, tensors = [file for file in files if file.suffix == ".safetensors"], _tensors_by_name(tree)
        if section == "model" and "model" not in self.saved:
            shards, tensors = self._instead_of_shards(tensors)
        by_rank = {int(file.stem.rpartition("_")[2]): file for file in files if file.suffix == ".json"}
        # Of the first rank where the checkpoint has none with this number.
        plain = by_rank and read_tree(by_rank.get(rank, by_rank[min(by_rank)]), {})
        return tree, shards, tensors, plain

    def _instead_of_shards(
        self, weights: Mapping[str, torch.Tensor]
    ) -> tuple[list[Path], dict[str, torch.Tensor]]:
        """Of a part that was saved without 'model': the files that hold its weights in full, and the weights by their
        names there. CheckpointError unless these are the weights training had, bit for bit."""
        lora = self.engine.info.lora_config is not None
        kind = ADAPTER_FOLDER if lora else HF_FOLDER
        files = self.manifest.files_of(self.folder, f"{self.name}/{kind}/")
        files = [file for file in files if file.suffix == ".safetensors"]
        named = {name_in_file(name) if lora else name: weight for name, weight in weights.items()}
        known = saved_tensors(files) if files else {}
        dtypes = {known[name].properties.dtype for name in named.keys() & known.keys()}
        held = {weight.dtype for weight in named.values()}
        if not files:
            why = f"there are none in its {kind}/ either"
        elif known.keys() != named.keys():
            why = f"{kind}/ stores them under other names, such as {min(known.keys() ^ named.keys())!r}"
        elif any(known[name].properties.dtype != weight.dtype for name, weight in named.items()):
            shown = [
                ", ".join(sorted(str(d).removeprefix("torch.") for d in each)) for each in (dtypes, held)
            ]
            why = f"{kind}/ has them in {shown[0]}, rounded from the {shown[1]} that training continues with"
        else:
            return files, named
        raise CheckpointError(
            f"the {self.name} was saved without its master weights (checkpoint.save_contents="
            f"[{', '.join(self.saved)}]), and {why}: a run cannot be resumed from it. Add 'model' to save_contents, or "
            "set model.path to its huggingface/ folder and trainer.resume_mode=disable"
        )


def _tensors_by_name(tree: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _tensor_leaves(tree):
        if name in tensors:
            raise CheckpointError(f"two tensors of the engine's state have the name {name!r}")
        tensors[name] = tensor
    return tensors


def _tensor_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensor_leaves(value, f"{path}.{key}" if path else str(key))


def _without_tensors(tree: Any) -> Any:
    """The same tree without tensors; None in lists, where positions count."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, Mapping):
        kept = {key: _without_tensors(v) for key, v in tree.items() if not isinstance(v, torch.Tensor)}
        return {key: value for key, value in kept.items() if value != {} or tree[key] == {}}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_without_tensors(value) for value in tree)
    return tree


def _merged(target: Any, saved: Any, where: str | None = None) -> Any:
    """`target` with its plain values replaced by the saved ones; CheckpointError where these have other types, but for
    those in lists."""
    if isinstance(target, torch.Tensor):
        return target
    if isinstance(target, Mapping) and isinstance(saved, Mapping):
        paths = {key: where and f"{where}.{key}" for key in target}
        known = {key: _merged(target[key], saved[key], paths[key]) for key in target if key in saved}
        return {**target, **saved, **known}
    if isinstance(target, (int, float)) and not isinstance(target, bool):
        number = isinstance(saved, (int, float)) and not isinstance(saved, bool)
        if where and not (number and abs(saved) < 1 << 63):
            raise CheckpointError(f"{where} is {str(saved)[:40]!r}, not a number of this size")
    elif where and target is not None and not isinstance(saved, type(target)):
        raise CheckpointError(f"{where} is a {type(saved).__name__}, not a {type(target).__name__}")
    if isinstance(target, (list, tuple)) and isinstance(saved, (list, tuple)) and len(target) == len(saved):
        return type(target)(map(_merged, target, saved))
    return saved


# -- trees of plain values and tensors as JSON plus named tensors ----------------------------------------------------
# `decode(encode(tree))` equals `tree`, types included (tuples, integer keys, numpy arrays, NaN).


def save_tree(folder: Path, name: str, tree: Encoded) -> dict[str, FileRecord]:
    """An encoded tree as `{name}.json` and, where there are tensors, `{name}.safetensors`."""
    text, tensors = tree
    records = {f"{name}.json": write_file(folder / f"{name}.json", text)}
    if tensors:
        chunks = [TensorChunk(key, (0,) * tensor.ndim, tensor) for key, tensor in tensors.items()]
        records[f"{name}.safetensors"] = write_chunks(folder / f"{name}.safetensors", chunks)
    return records


def load_tree(folder: Path, manifest: Manifest, name: str) -> Any:
    if f"{name}.json" not in manifest.files:
        raise CheckpointError(f"{folder} holds no {name}.json")
    tensors = read_tensors(manifest.files_of(folder, f"{name}.safetensors"))
    return read_tree(inside(folder, f"{name}.json"), tensors)


def encode(tree: Any, *, indent: bool = True) -> Encoded:
    """The tree, with copies of its tensors on the CPU. Without `indent` the text is made many times faster."""
    tensors: dict[str, torch.Tensor] = {}
    document = _encode(tree, "", tensors)
    return json.dumps(document, ensure_ascii=False, indent=1 if indent else None), tensors


def decode(text: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree again."""
    try:
        return _decode(parse_json(text), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a state cannot be read: {error!r}") from None


def read_tree(path: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree whose text is in a file."""
    try:
        return _decode(read_json(path), tensors)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from None


def check_tree(tree: Mapping[str, Any]) -> None:
    """Raise unless the tree comes back as it was."""
    decode(*encode(dict(tree)))


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        return _encode(value.item(), path, tensors)
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    name = path or "value"
    while name in tensors:  # keys may contain dots, so two paths can be equal
        name += "'"
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().clone()
        return {"__tensor__": name}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise CheckpointError(f"state {path!r} is an array of objects; only numbers can be saved")
        array = np.ascontiguousarray(value)
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # the same bytes in a type torch knows
            array = array.view(f"i{array.dtype.itemsize}")
        tensors[name] = torch.from_numpy(array.copy())
        return {"__array__": name, "dtype": value.dtype.str}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _TAGS for key in value):
            front = f"{path}." if path else ""
            return {key: _encode(item, front + key, tensors) for key, item in value.items()}
        pairs = [
            [_encode(key, f"{path}.{i}.key", tensors), _encode(item, f"{path}.{i}", tensors)]
            for i, (key, item) in enumerate(value.items())
        ]
        return {"__pairs__": pairs}
    raise CheckpointError(
        f"state {path!r} is a {type(value).__name__}; only numbers, text, bytes, lists, tuples, dicts, arrays and "
        "tensors can be saved"
    )


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__array__" in value:
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject:
            raise ValueError("an array of objects")
        return tensors[value["__array__"]].numpy().view(dtype)
    if "__bytes__" in value:
        return base64.b64decode(value["__bytes__"], validate=True)
    if "__tuple__" in value:
        return tuple(_decode(item, tensors) for item in value["__tuple__"])
    if "__pairs__" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["__pairs__"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


# -- random generators -----------------------------------------------------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """The states of this process's generators: Python, numpy, torch on the CPU and on every device."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [tensor.cpu() for tensor in torch.cuda.get_rng_state_all()]
    return state


def check_rng(state: dict[str, Any]) -> None:
    """Raise where `restore_rng` would; no generator of this process changes."""
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])
    torch.Generator().set_state(state["torch"])
    for device, tensor in _of_devices(state):
        torch.Generator(f"cuda:{device}").set_state(tensor)


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator. Devices that are no longer there are left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, tensor in _of_devices(state):
        torch.cuda.set_rng_state(tensor, device)


def _of_devices(state: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(state.get("cuda", [])[: torch.cuda.device_count()]))
