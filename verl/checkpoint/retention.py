"""Which checkpoints are kept.

The newest complete one, the best one and those in use are kept always; limits count what is on the disk, so they hold
across restarts. With different limits for actor and critic, a step may keep one of them: it can be merged, but not
resumed from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl.checkpoint.files import remove_folder
from verl.checkpoint.manifest import Manifest, write_manifest
from verl.checkpoint.steps import StepFolder, delete, exclusive, list_steps

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How many newest steps keep each part (None: all), and the metric whose best step is kept."""

    keep: Mapping[str, int | None]
    best: str | None = None
    best_mode: str = "max"


@dataclass(frozen=True)
class Decision:
    """Steps to delete, and parts to delete from steps that are kept."""

    steps: tuple[StepFolder, ...] = ()
    parts: tuple[tuple[StepFolder, str], ...] = ()


def best_step(entries: Sequence[StepFolder], metric: str | None, mode: str = "max") -> StepFolder | None:
    """The step whose metric is best; of equals the newest."""
    if metric is None:
        return None
    scored = [
        (e.manifest.metrics[metric], e.step, e)
        for e in entries
        if e.manifest is not None and not math.isnan(e.manifest.metrics.get(metric, math.nan))
    ]
    sign = 1.0 if mode == "max" else -1.0
    return max(scored, key=lambda item: (sign * item[0], item[1]))[2] if scored else None


def decide(entries: Sequence[StepFolder], limits: Limits, saved: int | None = None) -> Decision:
    """What is beyond the limits. `entries` newest first, those without a manifest are ignored; the step just `saved`
    is kept."""
    complete = [e for e in entries if e.manifest is not None]
    protected = {step for step in (complete[0].step if complete else None, saved) if step is not None}
    best = best_step(complete, limits.best, limits.best_mode)
    if best is not None:
        protected.add(best.step)
    steps: list[StepFolder] = []
    parts: list[tuple[StepFolder, str]] = []
    seen: dict[str, int] = {}
    for entry in complete:
        assert entry.manifest is not None
        beyond = []
        for part in entry.manifest.parts:
            seen[part] = seen.get(part, 0) + 1
            limit = limits.keep.get(part)
            if limit is not None and seen[part] > limit:
                beyond.append(part)
        if entry.step in protected or not beyond:
            continue
        if len(beyond) == len(entry.manifest.parts):
            steps.append(entry)
        else:
            parts += [(entry, part) for part in beyond]
    return Decision(tuple(steps), tuple(parts))


def apply(run_folder: Path, limits: Limits, saved: int | None = None) -> list[str]:
    """Delete what is beyond the limits; the names of what was deleted."""
    decision = decide(list_steps(run_folder), limits, saved)
    deleted = [entry.path.name for entry in decision.steps if delete(entry.path, wait=False)]
    for entry, part in decision.parts:
        if _delete_part(entry, part):
            deleted.append(f"{entry.path.name}/{part}")
    if deleted:
        logger.info("deleted beyond the limits on checkpoints: %s", ", ".join(deleted))
    return deleted


def _delete_part(entry: StepFolder, part: str) -> bool:
    """The manifest first: from then on the part's files do not belong to the checkpoint."""
    assert entry.manifest is not None
    manifest: Manifest = replace(
        entry.manifest,
        parts={name: contents for name, contents in entry.manifest.parts.items() if name != part},
        files={name: r for name, r in entry.manifest.files.items() if not name.startswith(f"{part}/")},
    )
    with exclusive(entry.path) as unused:
        if unused:
            write_manifest(entry.path, manifest, replace=True)
            remove_folder(entry.path / part, wait=False)
        return unused
