"""Checkpoints of 1, 2 and 3 processes, each loaded by the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from verl.checkpoint.manifest import read_manifest
from verl.checkpoint.merge import MergeOptions, merge
from verl.checkpoint.tensors import saved_tensors

WORLDS = (1, 2, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"lora_rank": 3}], ids=["all weights", "lora"])
def test_every_world_loads_every_other_exactly(
    children: Any, tmp_path: Path, options: dict[str, int]
) -> None:
    folders = {str(world): str(tmp_path / f"world_{world}") for world in WORLDS}
    started = {
        world: children.start_ranks("rank", tmp_path, world, folders=folders, **options) for world in WORLDS
    }
    said: dict[str, dict[str, float]] = {}
    for world, ranks in started.items():
        for rank, text in enumerate(children.texts_of(ranks)):
            equal = [line.split() for line in text.splitlines() if line.startswith("equal ")]
            assert [name for _, name, _ in equal] == [f"world_{w}" for w in WORLDS]
            for _, name, norm in equal:
                said.setdefault(name, {})[f"{world}/{rank}"] = float(norm)
    # And training goes on alike (the batch is per rank, so compare within worlds).
    for name, norms in said.items():
        for world in WORLDS:
            same = {norms[f"{world}/{rank}"] for rank in range(world)}
            assert len(same) == 1, (name, norms)

    for world in WORLDS:
        step = tmp_path / f"world_{world}" / "global_step_3"
        manifest = read_manifest(step)
        assert manifest.world_size == world
        files = [f for f in manifest.files_of(step, "actor/model/") if f.suffix == ".safetensors"]
        assert len(files) == world
        chunks = [len(entry.chunks) for entry in saved_tensors(files).values()]
        assert max(chunks) == world, "nothing was sharded, so nothing was tested"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_of_several_processes_merge_to_the_same_folder_the_run_saved(
    children: Any, tmp_path: Path
) -> None:
    ranks = children.start_ranks("rank", tmp_path, 2, folders={"2": str(tmp_path / "run")})
    children.texts_of(ranks)
    part = tmp_path / "run/global_step_3/actor"
    target = merge(MergeOptions(part, tmp_path / "merged"))
    live = load_file(tmp_path / "run/live/model.safetensors")  # gathered and written by the engine itself
    for folder in (target, part / "huggingface"):
        found = load_file(folder / "model.safetensors")
        assert set(found) == set(live)
        assert all(torch.equal(found[name], live[name]) for name in live)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_problem_of_one_rank_alone_is_answered_by_all(children: Any, tmp_path: Path) -> None:
    """A save that fails on rank 0 between two gathers, a checkpoint whose random states of rank 1 cannot be used."""
    ranks = children.start_ranks("fall_back", tmp_path, 2, folder=str(tmp_path / "run"))
    for rank, text in enumerate(children.texts_of(ranks)):
        lines = text.splitlines()
        assert [line for line in lines if line.startswith("saved")] == [
            "saved True",
            "saved True",
            "saved False",
        ]
        assert "took 1 True" in lines
        skipped = [line for line in lines if "global_step_2 is skipped" in line]
        assert len(skipped) == (1 if rank == 1 else 0)  # said by the rank that knows why
        assert any("(os error 28)" in line for line in lines) == (rank == 0)
    assert sorted(path.name for path in (tmp_path / "run").glob("*global_step*")) == [
        "global_step_1",
        "global_step_2",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_that_ranks_do_not_share_is_named_at_start_and_stalls_no_save(
    children: Any, tmp_path: Path
) -> None:
    folders = [str(tmp_path / "run"), str(tmp_path / "elsewhere" / "run")]
    ranks = children.start_ranks("apart", tmp_path, 2, folders=folders)
    for rank, text in enumerate(children.texts_of(ranks)):
        start, first, second, saved = [
            line
            for line in text.splitlines()
            if line.startswith(("result", "ConfigError", "CheckpointError", "saved"))
        ]
        assert f"ConfigError trainer.default_local_dir={folders[rank]}" in start
        assert "what rank 0 on " in start and "is not seen by rank 1 on " in start
        assert "result None rank 1: [Errno 2] No such file or directory" in first
        assert "must be a folder that all nodes share" in first and "space" not in first
        assert second.startswith(
            "CheckpointError the checkpoints of steps 1 and 1 could not be saved: rank 1: [Errno 2]"
        )
        assert saved == "saved True"
    assert not list(tmp_path.rglob(".global_step*"))
