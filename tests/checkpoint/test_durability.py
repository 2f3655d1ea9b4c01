"""What a power cut would leave: the order in which files, folders and names reach the disk."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl.checkpoint import CheckpointManager, PartSettings
from verl.checkpoint.manifest import MANIFEST


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_everything_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, job: ModuleType, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    events: list[tuple[str, Path]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("synced", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def noted(what: str, action: Any) -> Any:
        def call(source: Any, target: Any) -> None:
            action(source, target)
            events.append((what, Path(target)))

        return call

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see which file was synced")
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted("renamed", rename))
    monkeypatch.setattr(os, "replace", noted("replaced", replace))
    everything = ["model", "optimizer", "extra", "hf_model"]
    run = tmp_path / "run"
    manager = CheckpointManager(run, {"actor": PartSettings(everything, None, background)})
    engines = {"actor": job.make_engine(dtype="bfloat16"), "critic": job.make_engine("critic")}
    manager.save(1, engines, {"step": 1}, tokenizer=tiny_tokenizer)
    manager.wait()

    final, work = run / "global_step_1", run / ".global_step_1.tmp"
    named = events.index(("renamed", final))
    synced = {path: number for number, (what, path) in enumerate(events) if what == "synced"}
    inside = [work / path.relative_to(final) for path in final.rglob("*")]
    assert len(inside) > 20
    for path in [work, *inside]:
        assert path in synced and synced[path] < named, f"{path.relative_to(run)} was not on the disk"
    last = max(
        synced[path] for path in inside if path.is_relative_to(work) and path.name != MANIFEST and path.suffix
    )
    first_manifest = events.index(("synced", work / MANIFEST))
    assert last < first_manifest < named, "the manifest must come last"
    tracker = events.index(("replaced", run / "latest_checkpointed_iteration.txt"))
    assert named < tracker
    assert any(path == run and named < number for path, number in synced.items()), (
        "the name is not on the disk"
    )
    after_name = events[named + 1 : tracker]
    assert ("synced", run) in after_name
