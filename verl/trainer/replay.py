"""`verl replay RUN --step N`: repeat steps of a run from a checkpoint and report the first number that differs.

The run is only read: the repetition has its own folder below RUN/replays, which is removed afterwards, and writes no
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import installed_versions, read_manifest
from verl.checkpoint.steps import checked_path, newest_complete
from verl.config.load import from_dict
from verl.config.parallelism import world_size
from verl.config.schema import OfflineConfig, PPOConfig
from verl.config.sections.rollout import OWN_AGENTS, AgentConfig
from verl.config.sources import set_path
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.observe.jsonl import dumps
from verl.observe.run_folder import expanded, read_lineage
from verl.observe.run_reader import Run
from verl.observe.trackers import Tracker
from verl.runtime import exits_as_errors
from verl.trainer.compare import ENGINE_LOG_PROBS, NUMERICS, Comparison, Files, compare, metrics_differ
from verl.trainer.fork import Recorded, open_recorded

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_SHOWN = 200

Watch = Callable[[Any, Any], None]
"""Called with the loop and the batch right before and right after each update."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_arguments(parser, "the last step to repeat")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folder of the repetition, below RUN/replays"
    )


def add_step_arguments(parser: argparse.ArgumentParser, step: str) -> None:
    """Those of a command that repeats a run up to a step, which is described by `step`."""
    parser.add_argument("run", type=Path, help="run folder (checkpoints/PROJECT/EXPERIMENT)")
    parser.add_argument("--step", type=int, required=True, help=step)
    parser.add_argument(
        "--from",
        dest="start",
        type=int,
        help="repeat from this checkpoint, 0: from the start; default: the last one before --step",
    )


def run(args: argparse.Namespace) -> int:
    repeated = repetition(open_recorded(args.run), args.step, args.start, keep=args.keep)
    sys.stdout.write(report(repeated.found, repeated.first, args.step, repeated.start) + "\n")
    return 1 if repeated.found.difference else 0


@dataclass(frozen=True)
class Repetition:
    """What was repeated, and how it compares."""

    found: Comparison
    first: int
    """The first step."""
    start: Path | None
    """The checkpoint before it; None: the start of the run."""


def repetition(
    recorded: Recorded, step: int, asked: int | None, *, keep: bool = False, watch: Watch | None = None
) -> Repetition:
    """Repeat a run up to `step` and compare. `asked`: the checkpoint to begin with."""
    start = first_checkpoint(recorded, step, asked)
    before = 0 if start is None else read_manifest(start).step
    several_turns = converses(recorded)
    files = Files.of(recorded, ENGINE_LOG_PROBS if several_turns else ())
    require_recorded(recorded, files, step)
    origin = "the start" if start is None else start.name
    logger.info("repeating steps %d to %d of %s from %s", before + 1, step, recorded.path, origin)
    with replay_folder(recorded.path, step, keep) as folder:
        cfg = replay_config(recorded, folder, start)
        repeat(cfg, step, files, watch)
        first = before + 1 if start is not None else 0
        found = compare(
            files, Files.of(Run(folder)), range(first, step + 1), samples=isinstance(cfg, PPOConfig)
        )
    found.notes += depends_on_time(cfg, found)
    if keep:
        found.notes.append(f"the repetition is in {folder}")
    return Repetition(found, before + 1, start)


def converses(recorded: Recorded) -> bool:
    """Whether responses are conversations."""
    agent = AgentConfig(
        recorded.get(f"{_ROLLOUT}.agent.default_agent_loop", OWN_AGENTS[0]),
        recorded.get(f"{_ROLLOUT}.agent.agent_loop_config_path"),
    )
    own = any(recorded.get(f"{_ROLLOUT}.multi_turn.{name}") for name in ("enable", "agent", "agent_command"))
    return own or agent.given


def depends_on_time(cfg: PPOConfig | OfflineConfig, found: Comparison) -> list[str]:
    """A note where an equal repetition cannot be expected to the last bit."""
    if not isinstance(cfg, PPOConfig) or not cfg.actor_rollout_ref.rollout.converses:
        return []
    from verl.algorithms import corrects_rollout

    reason = "the engine's log-probs depend in their last bits on when tools answer"
    if cfg.trainer.exact:
        return []
    if corrects_rollout(cfg) or cfg.algorithm.rollout_correction.bypass_mode:
        if found.difference is None or found.difference.cause != NUMERICS:
            return []
        return [
            f"{reason}, and algorithm.rollout_correction uses them in the loss: the difference may be that"
        ]
    return [f"not compared: {', '.join(f'{name}*' for name in ENGINE_LOG_PROBS)}; {reason}"]


def first_checkpoint(recorded: Recorded, step: int, asked: int | None) -> Path | None:
    """The checkpoint to repeat from, verified; None: the start of the run."""
    if step < 1:
        raise ConfigError(f"--step {step}: the first step is 1")
    if asked is not None and not 0 <= asked < step:
        raise ConfigError(f"--from {asked}: it must be 0 (the start) or a checkpoint before step {step}")
    if asked:
        return recorded.checkpoint(asked).path
    if asked is None and (newest := newest_complete(recorded.path, below=step)) is not None:
        return newest.path
    lineage = read_lineage(recorded.path)
    if lineage is not None:
        raise DataError(
            f"{recorded.path} was forked from {lineage.parent_name} after step {lineage.step}, so it cannot be "
            f"repeated from its start, and it has no checkpoint before step {step}; {recorded.steps_text()}"
        )
    path = recorded.get("trainer.resume_from_path")
    if recorded.get("trainer.resume_mode") != "resume_path" or not path:
        return None
    try:
        found = checked_path(expanded(str(path)).absolute())
    except CheckpointError as error:
        raise DataError(f"{recorded.path} began at trainer.resume_from_path={path}: {error}") from None
    if read_manifest(found).step >= step:
        raise DataError(f"--step {step}: {recorded.path} began at {found}, after that step")
    return found


def require_recorded(recorded: Recorded, files: Files, step: int) -> None:
    """Refuse what cannot be compared."""
    if step not in files.metrics:
        steps = sorted(number for number in files.metrics if number > 0)
        there = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise DataError(f"{recorded.path / 'metrics.jsonl'} has no step {step}: {there}")
    mode = recorded.get("trainer.async_training.mode", "off")
    engines = recorded.get("trainer.n_gpus_per_node", 1) * recorded.get("trainer.nnodes", 1)
    if mode == "fully_async" or (mode == "carry_over" and engines > 1):
        what = "when weights arrive" if mode == "fully_async" else "which prompts are in a batch"
        raise ConfigError(
            f"trainer.async_training.mode={mode}: {what} depends on time, so two runs differ and a difference would "
            "say nothing. Runs with mode=off, one_step_off, or carry_over on one device can be repeated"
        )
    rate = recorded.get(f"{_ROLLOUT}.over_sample_rate", 0.0)
    if rate and (engines > 1 or converses(recorded)):
        raise ConfigError(
            f"{_ROLLOUT}.over_sample_rate={rate:g}: with several engines, or tools, which responses end first depends "
            "on time, so two runs differ and a difference would say nothing"
        )


@contextmanager
def replay_folder(run: Path, step: int, keep: bool) -> Iterator[Path]:
    """A new folder below RUN/replays, removed at the end unless it is kept."""
    parent = run / "replays"
    try:
        parent.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"step_{step}-", dir=parent))
    except OSError as error:
        raise VerlError(
            f"cannot write to {parent}: {error.strerror or error}. Repeat a copy of the run in a folder you may write "
            "to"
        ) from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # others may be kept there
                parent.rmdir()


def replay_config(recorded: Recorded, folder: Path, start: Path | None) -> PPOConfig | OfflineConfig:
    """The config the run had, with a folder of its own, another beginning, and nobody told of it."""
    values = deepcopy(recorded.config)
    changed: dict[str, Any] = {
        "default_local_dir": str(folder),
        "resume_mode": "disable" if start is None else "resume_path",
        "resume_from_path": None if start is None else str(start),
        "logger": [],
        "prometheus.enable": False,
        "profile.steps": [],
        "max_restarts": 0,
    }
    if recorded.kind is PPOConfig:
        changed |= {"rollout_data_dir": None, "validation_data_dir": None}
        changed |= {"token_data": False, "val_only": False}
    for name, value in changed.items():
        set_path(values, f"trainer.{name}", value)
    return from_dict(recorded.kind, values, quiet=True)


def repeat(cfg: PPOConfig | OfflineConfig, step: int, recorded: Files, watch: Watch | None = None) -> None:
    """Run to `step`, or to the step after the first whose metrics differ."""
    from verl.trainer.preflight import preflight

    preflight(cfg, saves=False)
    with exits_as_errors():
        if isinstance(cfg, PPOConfig):
            _repeat_rl(cfg, step, recorded, watch)
        else:
            _repeat_offline(cfg, step, recorded)


def _repeat_rl(cfg: PPOConfig, step: int, recorded: Files, watch: Watch | None) -> None:
    from verl.trainer.assembly import build_loop, open_run

    with open_run(cfg) as parts:
        loop = build_loop(cfg, parts)
        with closing(loop.workers), closing(loop.tracker):
            loop.repeat_to = step
            loop.watch = None if watch is None else partial(watch, loop)
            loop.tracker.trackers["replay"] = StopAtDifference(loop, recorded)
            loop.fit()


def _repeat_offline(cfg: OfflineConfig, step: int, recorded: Files) -> None:
    from verl.trainer.offline_loop import OfflineLoop, RayLoop, load_data
    from verl.trainer.offline_trainer import record
    from verl.trainer.setup import open_run_folder, open_tracker

    data = load_data(cfg)
    with (
        open_run_folder(cfg.trainer) as folder,
        closing(open_tracker(cfg, folder, total_steps=data.total_steps, live=False)) as tracker,
    ):
        loop: OfflineLoop | RayLoop
        if world_size(cfg) > 1:
            loop = RayLoop(cfg, data, folder.path, step)
        else:
            loop = OfflineLoop(cfg, data, folder.path, repeat_to=step)
        tracker.trackers["replay"] = StopAtDifference(loop, recorded)
        with closing(loop):
            record(loop.run(), folder, tracker, data.total_steps)


class StopAtDifference(Tracker):
    """A tracker that ends a repetition early: what follows the first difference says nothing more."""

    def __init__(self, loop: Any, recorded: Files) -> None:
        self._loop, self._recorded = loop, recorded

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        # As both rows are read from files, where a number that is not finite is null.
        if metrics_differ(self._recorded, step, json.loads(dumps(metrics))):
            self._loop.request_stop()


def report(found: Comparison, first: int, last: int, start: Path | None) -> str:
    """The result for people."""
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    counted = f"{found.numbers:,} numbers" + (
        f" and {found.responses:,} responses" if found.responses else ""
    )
    lines = [f"note: {note}" for note in found.notes]
    if found.difference is None:
        return "\n".join([*lines, f"no difference: {counted} of {steps} are equal"])
    different = found.difference
    lines += [
        f"first difference: step {different.step}, {different.name}",
        f"  recorded  {_shown(different.recorded)}",
        f"  repeated  {_shown(different.repeated)}",
        f"  points to {different.cause}",
    ]
    now, before = installed_versions(), {} if start is None else read_manifest(start).versions
    others = [
        f"{name} was {version}, is {now.get(name, 'not installed')}"
        for name, version in sorted(before.items())
        if now.get(name) != version
    ]
    return "\n".join([*lines, f"  versions  {', '.join(others)}"] if others else lines)


def _shown(value: Any) -> str:
    text = dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"
