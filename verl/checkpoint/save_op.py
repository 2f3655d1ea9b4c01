"""One save on one rank: the files it writes, the rename that makes them a checkpoint, and the proof before the first
step that it can be done.

Until `commit` renames it, everything is in a hidden folder. `write` needs no other rank; `commit` runs on rank 0 alone,
after every rank has left a record of its files in that folder. No collective is involved, so a save in the background
does not use the communicators of training: a rank that cannot write removes the empty file it made at the beginning,
which works on a full disk too.

The rehearsal writes and reads back everything of a checkpoint but the bytes of its tensors: the folder that all ranks
must share; names, shapes and types of weights; config, generation config, tokenizer; the trainer's state. A run that
cannot save ends at once.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint import hf_folder
from verl.checkpoint.files import (
    FileRecord,
    disk_is_full,
    files_below,
    folders_below,
    os_error_number,
    record_of,
    sync_all,
)
from verl.checkpoint.manifest import MANIFEST, Manifest, installed_versions, write_manifest
from verl.checkpoint.state import Encoded, StateSnapshot, save_tree, write_snapshot
from verl.checkpoint.steps import publish
from verl.checkpoint.tensors import TensorChunk, file_header, local_chunks
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER, TensorReader, read_lora_scale
from verl.distributed import Ranks
from verl.engines.base import TrainEngine
from verl.errors import CheckpointError, ConfigError
from verl.json_input import read_json
from verl.memory import free_host_bytes
from verl.runtime import quiet_transformers

logger = logging.getLogger(__name__)


@dataclass
class SaveOperation:
    step: int
    work: Path
    final: Path
    ranks: Ranks
    peer_timeout_s: float
    command: str = ""
    snapshots: dict[str, StateSnapshot] = field(default_factory=dict)
    contents: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[str, Encoded] = field(default_factory=dict)
    """The trainer's state and this rank's random states at the moment of saving."""
    metrics: dict[str, float] = field(default_factory=dict)
    records: dict[str, FileRecord] = field(default_factory=dict)
    from_shards: list[str] = field(default_factory=list)
    """Parts whose unsharded weights are written from their shards."""

    def open(self) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(self.work, ignore_errors=True)
            (self.work / "random").mkdir(parents=True)
            for name in self.snapshots:
                (self.work / name).mkdir()

    def stage(self, staging: Staging) -> None:
        """Copy the snapshots into the memory that `staging` has reserved."""
        self.snapshots = {name: staging.copy(name, taken) for name, taken in self.snapshots.items()}

    def announce(self) -> None:
        """After `open`, on every rank: it will write into this folder."""
        self._pending(self.ranks.rank).touch()

    def hf_steps(self, engines: Mapping[str, TrainEngine], tokenizer: Any) -> list[Callable[[], None]]:
        """What only the live engine can write: `huggingface/` and `lora_adapter/`. Every rank takes every step. Rank 0
        may fail alone, so the ranks must agree after each step: the next one may be collective."""
        steps: list[Callable[[], None]] = []
        for name, engine in engines.items():
            part, contents = self.work / name, self.contents[name]
            if self.ranks.rank == 0:
                steps.append(partial(hf_folder.write_small_files, part / HF_FOLDER, engine, tokenizer))
            else:
                steps.append(lambda: None)
            if hf_folder.takes_shards(engine, contents):
                self.from_shards.append(name)
            elif "hf_model" in contents:
                steps.append(partial(engine.save_hf, part / HF_FOLDER))
            if engine.info.lora_config is not None:
                steps.append(partial(engine.save_adapter, part / ADAPTER_FOLDER))
        return steps

    def write(self) -> None:
        """This rank's files, then their record for rank 0."""
        for name, tree in self.trees.items():
            self.records |= save_tree(self.work, name, tree)
        for name, snapshot in self.snapshots.items():
            written = write_snapshot(self.work / name, snapshot, self.ranks.rank, self.ranks.world_size)
            self.records |= {f"{name}/{file}": record for file, record in written.items()}
        sync_all(self.work / name for name in self.records)
        path = self._record(self.ranks.rank)
        document = {name: asdict(record) for name, record in self.records.items()}
        path.with_suffix(".new").write_text(json.dumps(document), encoding="utf-8")
        os.replace(path.with_suffix(".new"), path)

    def give_up(self, cause: str) -> None:
        """Tell rank 0 that this rank could not write its files, and why where the disk can hold it."""
        with suppress(OSError):
            self._failure(self.ranks.rank).write_text(cause, encoding="utf-8")
        with suppress(OSError):
            self._pending(self.ranks.rank).unlink(missing_ok=True)

    def commit(self) -> None:
        records = self._collect_records()
        for name in self.from_shards:
            shards = {
                file.removeprefix(f"{name}/"): record
                for file, record in records.items()
                if file.startswith(f"{name}/model/") and file.endswith(".safetensors")
            }
            chunks = self.snapshots[name].chunks["model"] if self.ranks.world_size == 1 else None
            written = hf_folder.write_from_shards(self.work / name, shards, chunks)
            records |= {f"{name}/{file}": record for file, record in written.items()}
        names = {
            path.relative_to(self.work).as_posix(): path
            for path in files_below(self.work)
            if not path.name.startswith(".")
        }
        records |= {name: record_of(path) for name, path in names.items() if name not in records}
        sync_all([path for name, path in names.items() if name not in self.records], folders_below(self.work))
        for rank in range(self.ranks.world_size):
            self._record(rank).unlink(missing_ok=True)
            self._pending(rank).unlink(missing_ok=True)
        manifest = Manifest(
            step=self.step,
            world_size=self.ranks.world_size,
            parts=self.contents,
            files=records,
            metrics=self.metrics,
            versions=installed_versions(),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=self.command,
        )
        write_manifest(self.work, manifest)
        sync_all([self.work / MANIFEST])
        publish(self.work, self.final)

    def discard(self) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(self.work, ignore_errors=True)

    def _collect_records(self) -> dict[str, FileRecord]:
        """All ranks' files, once all are written. TimeoutError or OSError names the rank that is late or failed."""
        deadline = time.monotonic() + self.peer_timeout_s
        records: dict[str, FileRecord] = {}
        for rank in range(self.ranks.world_size):
            while not self._record(rank).exists():
                if not self._pending(rank).exists() and not self._record(rank).exists():
                    cause = ""
                    with suppress(OSError):
                        cause = f": {self._failure(rank).read_text(encoding='utf-8')}"
                    raise OSError(f"rank {rank} could not write its files{cause}")
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} has not written its files after {self.peer_timeout_s:g} s"
                    )
                time.sleep(0.01)
            document = read_json(self._record(rank))
            records |= {name: FileRecord(int(e["size"]), str(e["crc32"])) for name, e in document.items()}
        return records

    def _pending(self, rank: int) -> Path:
        return self.work / f".to_be_written_by_rank_{rank}"

    def _record(self, rank: int) -> Path:
        return self.work / f".written_by_rank_{rank}.json"

    def _failure(self, rank: int) -> Path:
        return self.work / f".not_written_by_rank_{rank}"


def cause_of(error: Exception, several_ranks: bool = False) -> str:
    """Why a save failed, with what to do where that is known."""
    if disk_is_full(error):
        return f"{error}. Free some space or set trainer.default_local_dir to another disk"
    if isinstance(error, FileNotFoundError) and several_ranks:
        return f"{error}. trainer.default_local_dir must be a folder that all nodes share"
    if isinstance(error, OSError) or os_error_number(error) is not None:
        return str(error)
    return f"{type(error).__name__}: {error}"


_THREADS = min(4, os.cpu_count() or 1)
_SPARE = 0.1
"""Of free memory, this share is not used."""


class Staging:
    """Copies of snapshots in host memory (pinned for tensors on a device), so that training continues while they are
    written. The buffers are allocated once, ahead of the first save, and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[torch.Tensor]] = {}

    def reserve(self, part: str, snapshot: StateSnapshot) -> bool:
        """Have buffers for snapshots of these shapes. False when too little memory is free."""
        tensors = [chunk.tensor for _, chunk in snapshot.tensors()]
        buffers = self._buffers.get(part, [])
        if len(buffers) == len(tensors) and all(map(_fits, buffers, tensors)):
            return True
        reusable = sum(buffer.nbytes for buffer in buffers)
        if snapshot.size > free_host_bytes() * (1 - _SPARE) + reusable:
            return False
        self._buffers.pop(part, None)
        del buffers
        try:  # zeroed, because the system assigns memory only when it is written to
            self._buffers[part] = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda) for tensor in tensors
            ]
        except (MemoryError, RuntimeError):  # torch raises the second where it cannot pin memory
            return False
        return True

    def copy(self, part: str, snapshot: StateSnapshot) -> StateSnapshot:
        """The same snapshot in the buffers of `reserve`."""
        staged = StateSnapshot(
            plain=dict(snapshot.plain), chunks={section: [] for section in snapshot.chunks}
        )
        pairs = []
        for (section, chunk), buffer in zip(snapshot.tensors(), self._buffers[part], strict=True):
            staged.chunks[section].append(TensorChunk(chunk.key, chunk.offsets, buffer))
            pairs.append((buffer, chunk.tensor))
        pairs.sort(key=lambda pair: pair[1].nbytes)  # so that every n-th pair is an equal share
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_copy_all, [pairs[share::_THREADS] for share in range(_THREADS)]))
        if any(source.is_cuda for _, source in pairs):
            torch.cuda.synchronize()
        return staged


def _fits(buffer: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and buffer.is_pinned() == tensor.is_cuda
    )


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, source in pairs:
        if source.device.type == "cpu" and source.is_contiguous():
            # `copy_` would wake all of torch's threads for each of many tensors.
            ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            buffer.copy_(source, non_blocking=True)


# -- rehearsal -------------------------------------------------------------------------------------------------------

VISIBLE_S = 10.0
"""For a file of rank 0 to appear on the other nodes: network file systems keep what they saw for a while."""
_MARKER = "marker"


@contextmanager
def shared_folder(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Make a hidden folder in the run folder for the time of the context; ConfigError unless every rank sees it."""
    token, problem = secrets.randbits(60), None
    try:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / _MARKER).write_text(str(token), encoding="utf-8")
    except OSError as error:
        problem = cause_of(error)
    try:
        if (problem := ranks.gather(problem)[0]) is not None:
            raise CheckpointError(
                f"trainer.default_local_dir={folder.parent} cannot be written to: {problem}"
            )
        host = f"rank {ranks.rank} on {socket.gethostname()}"
        text, deadline, seen = str(ranks.from_first(token)), time.monotonic() + VISIBLE_S, False
        while True:
            with suppress(OSError, UnicodeDecodeError):
                seen = (folder / _MARKER).read_text(encoding="utf-8") == text
            if seen or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        first, *others = ranks.gather((host, seen))
        blind = [name for name, sees in others if not sees]
        if blind:
            raise ConfigError(
                f"trainer.default_local_dir={folder.parent} is not the same folder for all processes: what {first[0]} "
                f"wrote there is not seen by {', '.join(blind)}. Set it to a folder that all nodes share"
            )
        yield
    finally:
        ranks.barrier()
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def on_all_ranks(ranks: Ranks, what: str, action: Callable[[], None]) -> None:
    """Run it on every rank; all raise where one could not."""
    problem = None
    try:
        action()
    except Exception as error:
        problem = cause_of(error, ranks.world_size > 1)
    for rank, cause in enumerate(ranks.gather(problem)):
        if cause is not None:
            where = f" on rank {rank}" if ranks.world_size > 1 else ""
            raise CheckpointError(f"{what} cannot be saved{where}: {cause}")


def rehearse_part(
    part: Path, engine: TrainEngine, tokenizer: Any, contents: Sequence[str], writer: bool
) -> None:
    """Write and read one part on this rank, without the bytes of its weights."""
    weights = engine.saved_weights()
    if "model" in contents:
        chunks = local_chunks(weights, engine.info.rank)
        file_header([(chunk.key, chunk.tensor.dtype, tuple(chunk.tensor.shape)) for chunk in chunks])
    if not writer:
        return
    folder = part / HF_FOLDER
    hf_folder.write_small_files(folder, engine, tokenizer)
    if hf_folder.takes_shards(engine, contents):
        meta = {name: torch.empty(w.shape, dtype=w.dtype, device="meta") for name, w in weights.items()}
        hf_folder.check_names(TensorReader(meta), hf_folder.empty_model(hf_folder.read_config(folder)))
    if engine.info.lora_config is not None:
        engine.info.lora_config.save_pretrained(part / ADAPTER_FOLDER)
        read_lora_scale(part / ADAPTER_FOLDER)
    from transformers import GenerationConfig

    with quiet_transformers():
        if (folder / "generation_config.json").exists():
            GenerationConfig.from_pretrained(folder)
        if tokenizer is None or not hasattr(tokenizer, "from_pretrained"):
            return
        opened = type(tokenizer).from_pretrained(folder)
    if len(opened) != len(tokenizer):
        raise CheckpointError(f"the tokenizer has {len(tokenizer)} tokens, and {len(opened)} after saving it")


def warn_of_contents(name: str, engine: TrainEngine, contents: Sequence[str]) -> None:
    """A notice where checkpoints lack what a run continues from."""
    if "model" in contents:
        return
    shown = f"the checkpoints of the {name} have no master weights (checkpoint.save_contents=[{', '.join(contents)}])"
    if hf_folder.replaces_shards(engine, contents):
        logger.info("%s: a run resumes from their exported weights, which have the same precision", shown)
    else:
        logger.warning("%s: a run cannot be resumed from them; add 'model' to be able to", shown)
