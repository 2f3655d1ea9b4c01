"""One save on one rank: the files it writes, and the moment they become a checkpoint.

What always holds: until `commit` renames it, everything lies in a hidden folder; `write` needs no other rank;
`commit` happens on rank 0 alone, after every rank has told of its files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.engine_state import Snapshot, save_tree, write_snapshot
from verl.checkpoint.files import FileRecord, files_below, folders_below, record_of, sync_all
from verl.checkpoint.hf_folder import hf_steps, whole_weights
from verl.checkpoint.manifest import MANIFEST, Manifest, installed_versions, write_manifest
from verl.checkpoint.pytree_json import Encoded
from verl.checkpoint.rank_manifests import Records
from verl.checkpoint.ranks import Ranks
from verl.checkpoint.steps import put_in_place
from verl.engines.base import TrainEngine


@dataclass
class SaveJob:
    """One save under way on this rank."""

    step: int
    work: Path
    final: Path
    ranks: Ranks
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    contents: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[str, Encoded] = field(default_factory=dict)
    """The trainer's state and this rank's random states, as they were at the moment of saving."""
    metrics: dict[str, float] = field(default_factory=dict)
    records: dict[str, FileRecord] = field(default_factory=dict)
    to_stream: list[str] = field(default_factory=list)
    """Parts whose whole weights are made from their shards once those are written."""

    def open(self) -> None:
        if self.ranks.first:
            shutil.rmtree(self.work, ignore_errors=True)
            (self.work / "random").mkdir(parents=True)
            for name in self.snapshots:
                (self.work / name).mkdir()

    def hf_steps(self, engines: Mapping[str, TrainEngine], tokenizer: Any) -> list[Callable[[], None]]:
        """What only the live engine can write; every rank takes every step, and all agree after each."""
        steps: list[Callable[[], None]] = []
        for name, engine in engines.items():
            contents, writer = self.contents[name], self.ranks.first
            more, later = hf_steps(self.work / name, engine, tokenizer, contents=contents, writer=writer)
            steps += more
            if later:
                self.to_stream.append(name)
        return steps

    def write(self) -> None:
        for name, tree in self.trees.items():
            self.records |= save_tree(self.work, name, tree)
        for name, taken in self.snapshots.items():
            written = write_snapshot(self.work / name, taken, self.ranks.rank, self.ranks.world_size)
            self.records |= {f"{name}/{file}": record for file, record in written.items()}
        sync_all(self.work / name for name in self.records)

    def commit(self, peers: Records) -> None:
        records = peers.collect()
        for name in self.to_stream:
            begin = f"{name}/model/"
            shards = {
                file.removeprefix(f"{name}/"): record
                for file, record in records.items()
                if file.startswith(begin) and file.endswith(".safetensors")
            }
            chunks = self.snapshots[name].chunks["model"] if self.ranks.world_size == 1 else None
            written = whole_weights(self.work / name, shards, chunks)
            records |= {f"{name}/{file}": record for file, record in written.items()}
        others = [path for path in files_below(self.work) if not path.name.startswith(".")]
        for path in others:
            name = path.relative_to(self.work).as_posix()
            if name not in records:
                records[name] = record_of(path)
        late = [path for path in others if path.relative_to(self.work).as_posix() not in self.records]
        sync_all(late, folders_below(self.work))
        peers.clear()
        manifest = Manifest(
            step=self.step,
            world_size=self.ranks.world_size,
            parts=self.contents,
            files=records,
            metrics=self.metrics,
            versions=installed_versions(),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        write_manifest(self.work, manifest)
        sync_all([self.work / MANIFEST])
        put_in_place(self.work, self.final)

    def discard(self) -> None:
        if self.ranks.first:
            shutil.rmtree(self.work, ignore_errors=True)
