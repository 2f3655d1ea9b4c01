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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import Manifest, read_manifest
from verl.checkpoint.state import check_part, check_rng, load_part, load_tree, restore_rng, wanted_sections
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
    schedules: Mapping[str, Any]
    random: Any
    """This rank's random states; None where another number of processes saved them."""


class Resuming:
    """Finds and loads a checkpoint on one rank; every rank makes the same calls."""

    def __init__(
        self,
        run_folder: Path,
        ranks: Ranks,
        load_contents: Callable[[str], Sequence[str] | None],
        mode: str,
        resume_from_path: Path | str | None,
        command: str = "",
    ) -> None:
        self._run_folder = run_folder
        self._ranks = ranks
        self._contents = load_contents
        self._mode = mode
        self._path = resume_from_path
        self._command = command
        self._candidate: Candidate | None = None
        self._overwritten: set[tuple[str, str]] = set()
        """Parts and sections of the engines that a failed load may have left half changed."""

    def _newest(self, parts: Sequence[str], below: int | None) -> Path | None:
        """The newest complete checkpoint (before the step `below`); others are logged."""
        newest = newest_complete(self._run_folder, parts, below) if self._ranks.rank == 0 else None
        step = self._ranks.from_first(-1 if newest is None else newest.step)
        return None if step < 0 else self._run_folder / step_name(step)

    def find(self, engines: Mapping[str, TrainEngine], below: int | None = None) -> Found | None:
        """The checkpoint to resume from, which `load` loads then; None to start from scratch."""
        self._candidate = None
        if self._mode == "disable":
            return None
        if self._mode == "resume_path":
            path = checked_path(Path(str(self._path)).expanduser(), list(engines))
            with checkpoint_errors(path):
                self._candidate = self._examine(path, engines)
            return self._candidate.manifest.step, True, self._candidate.state
        return self._newest_usable(engines, below)

    def _newest_usable(self, engines: Mapping[str, TrainEngine], below: int | None) -> Found | None:
        first: tuple[Path, Exception] | None = None
        while (path := self._newest(list(engines), below)) is not None:
            if not self._ranks.all_true(path.is_dir()):
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
            below = int(path.name.rpartition("_")[2])
        if first is not None:
            with checkpoint_errors(first[0]):
                raise first[1]
        if self._overwritten:
            raise CheckpointError(
                f"loading a checkpoint failed (see the warning above), and {self._run_folder} has no older one: "
                "start again, or set trainer.resume_mode=disable to start from scratch"
            )
        return None

    def _examine(self, path: Path, engines: Mapping[str, TrainEngine]) -> Candidate:
        """Read and check everything but the values of tensors."""
        with in_use(path):
            manifest = read_manifest(path)
            refuse_other_command(path, manifest, self._command)
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
            if manifest.world_size == self._ranks.world_size:
                random = load_tree(path, manifest, RANDOM_STATE.format(self._ranks.rank))
                check_rng(random)
            for name, engine in engines.items():
                check_part(path, manifest, name, engine, self._contents(name), schedules.get(name))
            lacking = self._overwritten - self._sections(manifest, engines)
            if lacking:
                raise CheckpointError(
                    f"it holds no {' of the '.join(min(lacking)[::-1])}, which must be loaded anew"
                )
        return Candidate(path, manifest, state, schedules, random)

    def load(self, engines: Mapping[str, TrainEngine]) -> Candidate | None:
        """Load what `find` found, and restore random states. None where a rank could not, and another checkpoint is
        to be tried."""
        assert self._candidate is not None
        candidate, self._candidate = self._candidate, None
        if self._mode == "resume_path":
            with checkpoint_errors(candidate.path):
                self._load(candidate, engines)
            return candidate
        problem: Exception | None = None
        try:
            self._load(candidate, engines)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # of which an older checkpoint needs as much
            problem = error
        if self._all_can(candidate.path, problem):
            return candidate
        self._overwritten |= self._sections(candidate.manifest, engines)
        return None

    def _load(self, candidate: Candidate, engines: Mapping[str, TrainEngine]) -> None:
        path, manifest = candidate.path, candidate.manifest
        with in_use(path):
            for name, engine in engines.items():
                schedule = candidate.schedules.get(name)
                load_part(path, manifest, name, engine, self._contents(name), schedule)
        if candidate.random is not None:
            restore_rng(candidate.random)
        else:
            logger.warning(
                "checkpoint %s was saved by %d processes and is loaded by %d: random draws will differ from those of "
                "an uninterrupted run",
                path.name,
                manifest.world_size,
                self._ranks.world_size,
            )

    def _sections(self, manifest: Manifest, engines: Mapping[str, TrainEngine]) -> set[tuple[str, str]]:
        return {
            (part, section)
            for part in engines
            for section in wanted_sections(manifest, part, self._contents(part))
        }

    def _all_can(self, path: Path, problem: Exception | None) -> bool:
        """Whether no rank has a problem with a checkpoint; the first that has one says it."""
        failed = self._ranks.first_failed(problem is None)
        if problem is not None and failed == self._ranks.rank:
            warn_skipped(path.name, problem)
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
            warn_skipped(step_name(below), error)
        else:
            if load():
                return state
    if first is not None:
        with checkpoint_errors("the newest checkpoint"):
            raise first
    return None


def warn_skipped(name: str, problem: Exception) -> None:
    logger.warning("checkpoint %s is skipped: %s", name, _reason(problem))


def _reason(error: Exception) -> str:
    text = " ".join(
        (str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}").split()
    )
    return text if len(text) <= 500 else f"{text[:497]}..."
