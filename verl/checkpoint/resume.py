"""Which checkpoint a run resumes from, and loading it into the engines.

With `trainer.resume_mode=auto` it is the newest usable one; a newer one that is not is skipped with a warning that says
why. Everything but the values of tensors is checked before anything of the run changes, and all ranks take the same
one. A run starts from scratch only where every checkpoint is incomplete or damaged: one with valid checksums that
cannot be used (of another model or other data, or forged) is an error unless an older one can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import Manifest, read_manifest
from verl.checkpoint.state import SavedPart, check_rng, load_tree, restore_rng
from verl.checkpoint.steps import checked_path, in_use, newest_complete, step_name
from verl.checkpoint.weights import HF_FOLDER
from verl.distributed import Ranks
from verl.engines.base import TrainEngine
from verl.errors import CheckpointError, VerlError
from verl.memory import is_out_of_memory

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state"
RANDOM_STATE = "random/rank_{}"
SCHEDULES = "schedules"
"""In the trainer's state: where the learning rate of each part was. `extra` has it too, but may be left out."""

Found = tuple[int, bool, dict[str, Any]]
"""The step of a checkpoint, whether the user named it, and its trainer state."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint whose state was read and checked; tensors of engines were not read."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    parts: Sequence[SavedPart]
    random: Any
    """This rank's random states; None where another number of processes saved them."""


@dataclass
class Resuming:
    """Finds and loads a checkpoint on one rank; every rank makes the same calls."""

    run_folder: Path
    ranks: Ranks
    load_contents: Callable[[str], Sequence[str] | None]
    """What to load of a part; None: all that was saved."""
    mode: str
    path: Path | str | None
    """The checkpoint that the user named."""
    command: str = ""
    _candidate: Candidate | None = None
    _overwritten: set[tuple[str, str]] = field(default_factory=set)
    """Parts and sections of the engines that a failed load may have left half changed."""

    def find(self, engines: Mapping[str, TrainEngine], below: int | None = None) -> Found | None:
        """The checkpoint to resume from, which `load` loads then; None to start from scratch."""
        self._candidate = None
        if self.mode == "disable":
            return None
        if self.mode == "resume_path":
            path = checked_path(Path(str(self.path)).expanduser(), list(engines))
            with checkpoint_errors(path):
                self._candidate = self._examine(path, engines)
            return self._candidate.manifest.step, True, self._candidate.state
        return self._newest_usable(engines, below)

    def _newest_usable(self, engines: Mapping[str, TrainEngine], below: int | None) -> Found | None:
        first: tuple[Path, Exception] | None = None
        while True:
            newest = newest_complete(self.run_folder, engines, below) if self.ranks.rank == 0 else None
            step = self.ranks.from_first(-1 if newest is None else newest.step)
            if step < 0:
                break
            path = self.run_folder / step_name(step)
            if not self.ranks.all_true(path.is_dir()):
                raise CheckpointError(
                    f"not every process sees {path}: trainer.default_local_dir must be a folder that all nodes share"
                )
            problem: Exception | None = None
            try:
                self._candidate = self._examine(path, engines)
            except Exception as error:  # the files are not trusted
                problem = error
            if self._all_can(path, problem):
                assert self._candidate is not None
                return self._candidate.manifest.step, False, self._candidate.state
            first = first or (path, problem or CheckpointError(f"{path} cannot be used by another rank"))
            below = step
        if first is not None:
            with checkpoint_errors(first[0]):
                raise first[1]
        if self._overwritten:
            raise CheckpointError(
                f"loading a checkpoint failed (see the warning above), and {self.run_folder} has no older one: "
                "start again, or set trainer.resume_mode=disable to start from scratch"
            )
        return None

    def _examine(self, path: Path, engines: Mapping[str, TrainEngine]) -> Candidate:
        """Read and check everything but the values of tensors."""
        with in_use(path):
            manifest = read_manifest(path)
            refuse_other_command(path, manifest, self.command)
            state = load_tree(path, manifest, TRAINER_STATE)
            if not isinstance(state, dict):
                raise CheckpointError(f"its {TRAINER_STATE}.json is not an object")
            if state.get("step", manifest.step) != manifest.step:
                raise CheckpointError(
                    f"its {TRAINER_STATE}.json is of step {str(state['step'])[:40]}, its manifest of {manifest.step}"
                )
            schedules = state.pop(SCHEDULES, {})
            if not isinstance(schedules, dict):
                raise CheckpointError(f"the {SCHEDULES} in its {TRAINER_STATE}.json are no object")
            random = None
            if manifest.world_size == self.ranks.world_size:
                random = load_tree(path, manifest, RANDOM_STATE.format(self.ranks.rank))
                check_rng(random)
            parts = [
                SavedPart(path, manifest, name, engine, self.load_contents(name), schedules.get(name))
                for name, engine in engines.items()
            ]
            for part in parts:
                part.check()
            lacking = self._overwritten - {
                (part.name, section) for part in parts for section in part.sections()
            }
            if lacking:
                raise CheckpointError(
                    f"it holds no {' of the '.join(min(lacking)[::-1])}, which must be loaded anew"
                )
        return Candidate(path, manifest, state, parts, random)

    def load(self) -> Candidate | None:
        """Load what `find` found into its engines, and restore random states. None where a rank could not, and another
        checkpoint is to be tried."""
        assert self._candidate is not None
        candidate, self._candidate = self._candidate, None
        if self.mode == "resume_path":
            with checkpoint_errors(candidate.path):
                self._load(candidate)
            return candidate
        problem: Exception | None = None
        try:
            self._load(candidate)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # of which an older checkpoint needs as much
            problem = error
        if self._all_can(candidate.path, problem):
            return candidate
        self._overwritten |= {(part.name, section) for part in candidate.parts for section in part.sections()}
        return None

    def _load(self, candidate: Candidate) -> None:
        path, manifest = candidate.path, candidate.manifest
        with in_use(path):
            for part in candidate.parts:
                part.load()
        if candidate.random is not None:
            restore_rng(candidate.random)
        else:
            logger.warning(
                "checkpoint %s was saved by %d processes and is loaded by %d: random draws will differ from those of "
                "an uninterrupted run",
                path.name,
                manifest.world_size,
                self.ranks.world_size,
            )

    def _all_can(self, path: Path, problem: Exception | None) -> bool:
        """Whether no rank has a problem with a checkpoint; the first that has one says it."""
        failed = self.ranks.first_failed(problem is None)
        if problem is not None and failed == self.ranks.rank:
            logger.warning("checkpoint %s is skipped: %s", path.name, _reason(problem))
        return failed is None


def refuse_other_command(path: Path, manifest: Manifest, command: str) -> None:
    """CheckpointError where another command than `command` wrote the checkpoint: its steps, rows and optimiser state
    mean something else."""
    if not manifest.command or not command or manifest.command == command:
        return
    saved = "hf_model" in manifest.parts.get("actor", ())
    weights = str(path / "actor" / HF_FOLDER) if saved else f"what `verl merge` makes of {path}"
    raise CheckpointError(
        f"{path} was written by `{manifest.command}`, and `{command}` cannot continue it. Set trainer.experiment_name "
        "or trainer.default_local_dir for a folder of its own, or trainer.resume_mode=disable to start over. To start "
        f"from its weights, give {weights} as model.path (in `verl train`: actor_rollout_ref.model.path)"
    )


@contextmanager
def checkpoint_errors(name: Path | str) -> Iterator[None]:
    """Turn whatever is wrong with a checkpoint into a CheckpointError."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        advice = ". Set trainer.resume_from_path to another checkpoint, or trainer.resume_mode=disable"
        raise CheckpointError(
            f"{name} cannot be used: {_reason(error)}{'' if isinstance(error, VerlError) else advice}"
        ) from error


def resume_newest(
    find: Callable[[int | None], Found | None],
    load: Callable[[], bool],
    take: Callable[[dict[str, Any]], None],
) -> dict[str, Any] | None:
    """Find and load the newest usable checkpoint; its trainer state, or None to start from scratch. `take` gets the
    state before engines change, and must change nothing where it raises."""
    below: int | None = None
    first: Exception | None = None
    while (found := find(below)) is not None:
        below, named_by_user, state = found
        try:
            take(state)
        except Exception as error:  # a state of any form
            if named_by_user:
                with checkpoint_errors(step_name(below)):
                    raise
            first = first or error
            logger.warning("checkpoint %s is skipped: %s", step_name(below), _reason(error))
        else:
            if load():
                return state
    if first is not None:
        with checkpoint_errors("the newest checkpoint"):
            raise first
    return None


def _reason(error: Exception) -> str:
    text = " ".join(
        (str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}").split()
    )
    return text if len(text) <= 500 else f"{text[:497]}..."
