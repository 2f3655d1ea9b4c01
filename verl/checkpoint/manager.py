"""Save, resume, retain: what a training loop calls.

The order of a save: files into a hidden folder, each synced to the disk; the manifest; a rename to `global_step_N`;
`latest_checkpointed_iteration.txt`; only then are old checkpoints deleted. Checkpoints beyond the step a run starts
from (it started afresh, or from an earlier step) are renamed at its first save: none may be taken for its newest.

At every moment the newest complete checkpoint is loadable, however the process ends. A save that fails leaves the
earlier ones alone and the run continues; the second in a row stops it. Every rank makes the same calls in the same
order.
"""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint import save_op, steps
from verl.checkpoint.files import finish_removals, in_background
from verl.checkpoint.resume import RANDOM_STATE, SCHEDULES, TRAINER_STATE, Found, Resuming, resume_newest
from verl.checkpoint.save_op import SaveOperation
from verl.checkpoint.state import StateSnapshot, capture_rng, check_tree, encode, snapshot
from verl.config.recipes import COMMANDS
from verl.config.roles import checkpoint_sections
from verl.config.sections.actor import HF_BY_DEFAULT_BELOW
from verl.distributed import Ranks
from verl.engines.base import TrainEngine
from verl.errors import CheckpointError
from verl.memory import free_host_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartSettings:
    """What to save and load of one part (None: the default, everything)."""

    save_contents: Sequence[str] | None = None
    load_contents: Sequence[str] | None = None
    async_save: bool = False


class CheckpointManager:
    """The checkpoints of one run folder."""

    def __init__(
        self,
        run_folder: Path | str,
        settings: Mapping[str, PartSettings] | None = None,
        *,
        max_actor_to_keep: int | None = None,
        max_critic_to_keep: int | None = None,
        keep_best: str | None = None,
        keep_best_mode: str = "max",
        resume_mode: str = "auto",
        resume_from_path: Path | str | None = None,
        peer_timeout_s: float = 600.0,
        continue_without: bool = False,
        command: str = "",
    ) -> None:
        """`continue_without`: however many saves fail, the caller goes on. `command`: which is training; it resumes no
        checkpoint of another one."""
        self.run_folder = Path(run_folder)
        self.settings = defaultdict(PartSettings, settings or {})
        self.limits = steps.RetentionLimits(
            {**dict.fromkeys(("actor", *self.settings), max_actor_to_keep), "critic": max_critic_to_keep},
            keep_best,
            keep_best_mode,
        )
        self.resume_mode = resume_mode
        self._peer_timeout_s = peer_timeout_s
        self._command = command
        self._ranks = Ranks()
        contents = {name: part.load_contents for name, part in self.settings.items()}
        self._resuming = Resuming(
            self.run_folder, self._ranks, contents.get, resume_mode, resume_from_path, command
        )
        self._staging = save_op.Staging()
        self._reserving: Future[None] | None = None
        self._saving: tuple[SaveOperation, Future[str | None]] | None = None
        """The save in the background, and why it failed on this rank."""
        self.failure: str | None = None
        """Why the last save that failed did."""
        self._continue_without = continue_without
        self._failed: list[int] = []
        """The steps of the saves that failed since one succeeded."""
        self._recovered = False
        self._warned_about_best = False
        self._foreign_steps: list[Path] = []
        """Checkpoints in the run folder beyond the step this run started from."""

    @classmethod
    def from_config(cls, config: Any, run_folder: Path | str) -> CheckpointManager:
        """From the resolved configuration of reinforcement learning or of supervised fine-tuning."""
        trainer = config.trainer
        rl = hasattr(config, "actor_rollout_ref")
        sections = checkpoint_sections(config) if rl else {"actor": config.checkpoint}
        return cls(
            run_folder,
            {
                name: PartSettings(section.save_contents, section.load_contents, section.async_save)
                for name, section in sections.items()
            },
            max_actor_to_keep=trainer.max_actor_ckpt_to_keep,
            max_critic_to_keep=getattr(trainer, "max_critic_ckpt_to_keep", None),
            keep_best=trainer.keep_best,
            keep_best_mode=trainer.keep_best_mode,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            peer_timeout_s=trainer.watchdog_s,
            continue_without=trainer.continue_without_checkpoints,
            command=COMMANDS[type(config)],
        )

    # -- saving -------------------------------------------------------------------------------------------------

    def rehearse(
        self,
        parts: Mapping[str, TrainEngine | None],
        trainer_state: Mapping[str, Any],
        *,
        tokenizer: Any = None,
    ) -> None:
        """Before the first step: write and read back all of a checkpoint but the bytes of tensors. ConfigError or
        CheckpointError where a save could not succeed."""
        work = steps.work_folder(self.run_folder, 0)
        with save_op.shared_folder(work, self._ranks):
            save_op.on_all_ranks(self._ranks, "the trainer's state", lambda: check_tree(trainer_state))
            for name, engine in _present(parts).items():
                contents, writer = self._contents(name, engine.saved_weights()), self._ranks.rank == 0
                save_op.on_all_ranks(
                    self._ranks,
                    f"a checkpoint of the {name}",
                    partial(save_op.rehearse_part, work / name, engine, tokenizer, contents, writer),
                )
                tokenizer = None  # the same for every part
                if writer:
                    save_op.warn_of_contents(name, engine, contents)

    def save(
        self,
        step: int,
        parts: Mapping[str, TrainEngine | None],
        trainer_state: Mapping[str, Any],
        *,
        tokenizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Save a step. Returns its folder, or None when saving failed (logged as a warning) or continues in the
        background (`wait` returns the folder then). CheckpointError where the save before it failed too."""
        self.wait()
        engines = _present(parts)
        work, final = steps.work_folder(self.run_folder, step), self.run_folder / steps.step_name(step)
        op = SaveOperation(step, work, final, self._ranks, self._peer_timeout_s, self._command)
        background = False
        ready = self._on_all_ranks(lambda: self._snapshot(op, engines, trainer_state, metrics or {}), op)
        if ready and self._is_async(engines):
            background = self._ranks.all_true(self._reserve(op.snapshots))
            # From here on the engines may change while the copies are written.
            ready = not background or self._on_all_ranks(lambda: op.stage(self._staging), op)
        writes: list[Callable[[], None]] = [op.announce]
        ready = ready and self._on_all_ranks(lambda: writes.extend(self._open(op, engines, tokenizer)), op)
        ready = ready and all(self._on_all_ranks(write, op) for write in writes)
        if background and ready:
            self._saving = op, in_background(lambda: self._background(op), "checkpoint")
            return None
        ready = ready and self._on_all_ranks(op.write, op)
        return self._outcome(op, ready and self._on_all_ranks(lambda: self._commit(op), op))

    def wait(self) -> Path | None:
        """Wait for a save in the background; its folder, or None. CheckpointError as in `save`."""
        finish_removals()
        if self._saving is None:
            return None
        (op, saving), self._saving = self._saving, None
        (problem, *_) = self._ranks.gather(saving.result())  # rank 0 has that of any
        self.failure = problem or self.failure
        return self._outcome(op, problem is None)

    def _outcome(self, op: SaveOperation, saved: bool) -> Path | None:
        """The folder of a save that all ranks have ended; its cleaning up."""
        if saved:
            self._failed.clear()
            return op.final
        op.discard()
        self._failed.append(op.step)
        if len(self._failed) > 1 and not self._continue_without:
            failed = " and ".join(map(str, self._failed[-2:]))
            raise CheckpointError(
                f"the checkpoints of steps {failed} could not be saved: {self.failure}. The run ends here; to train on "
                "without checkpoints set trainer.continue_without_checkpoints=True"
            )
        return None

    def _snapshot(
        self,
        op: SaveOperation,
        engines: Mapping[str, TrainEngine],
        trainer_state: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> None:
        """Everything as it is at this moment; tensors are the engines' own, not copies."""
        schedules = {}
        for name, engine in engines.items():
            state = engine.state()
            schedules[name] = state["scheduler"]
            op.contents[name] = self._contents(name, state["model"])
            op.snapshots[name] = snapshot(state, op.contents[name], engine.info.rank)
        op.trees[RANDOM_STATE.format(self._ranks.rank)] = encode(capture_rng(), indent=False)
        if self._ranks.rank == 0:
            op.trees[TRAINER_STATE] = encode({**trainer_state, SCHEDULES: schedules})
        op.metrics = self._kept_metrics(metrics)

    def _is_async(self, parts: Iterable[str]) -> bool:
        return any(self.settings[name].async_save for name in parts)

    def _reserve(self, snapshots: Mapping[str, StateSnapshot]) -> bool:
        """Host memory for a save in the background; a warning where there is none."""
        if self._reserving is not None:
            self._reserving.result()
            self._reserving = None
        for name, taken in snapshots.items():
            if not self._staging.reserve(name, taken):
                logger.warning(
                    "checkpoint.async_save needs %.1f GB of host memory for a copy of the %s, %.1f GB are free: "
                    "this save is not in the background. Free some memory, or set async_save=False",
                    taken.size / 1e9,
                    name,
                    free_host_bytes() / 1e9,
                )
                return False
        return True

    def _reserve_ahead(self, parts: Mapping[str, TrainEngine | None]) -> None:
        """Allocate while training starts: allocating takes longer than copying into it."""
        engines = _present(parts)
        # `state_dict` creates the moments of an optimiser that has none yet. On a device that would be too early:
        # other components still measure how much memory is free.
        if not self._is_async(engines) or any(
            engine.info.device.type != "cpu" for engine in engines.values()
        ):
            return
        states = {name: engine.state() for name, engine in engines.items()}
        taken = {
            n: snapshot(s, self._contents(n, s["model"]), engines[n].info.rank) for n, s in states.items()
        }

        def reserve() -> None:
            for name, each in taken.items():
                self._staging.reserve(name, each)  # the save itself reports what is missing

        self._reserving = in_background(reserve, "checkpoint memory")

    def _open(
        self, op: SaveOperation, engines: Mapping[str, TrainEngine], tokenizer: Any
    ) -> list[Callable[[], None]]:
        """Create the folder; the steps that only the live engines can write."""
        if self._ranks.rank == 0:
            finish_removals()
            self._recover()
        op.open()
        return op.hf_steps(engines, tokenizer)

    def _commit(self, op: SaveOperation) -> None:
        """Make the ranks' files a checkpoint; rank 0 does."""
        if self._ranks.rank != 0:
            return
        if op.final in self._foreign_steps:
            steps.archive(op.final)
            self._foreign_steps.remove(op.final)
        op.commit()
        # The checkpoint is complete; what follows can only fail to clean up.
        for action in (
            lambda: steps.write_tracker(self.run_folder, op.step),
            self._archive_foreign_steps,
            lambda: steps.apply_limits(self.run_folder, self.limits, op.step),
        ):
            try:
                action()
            except Exception as error:
                logger.warning("checkpoint %s is complete, but cleaning up failed: %s", op.final.name, error)

    def _archive_foreign_steps(self) -> None:
        self._foreign_steps = [path for path in self._foreign_steps if not steps.archive(path)]

    def _background(self, op: SaveOperation) -> str | None:
        """Write the tensors, wait for the other ranks' files, commit; why that failed. Without collectives, as it runs
        during training."""
        problem = self._run_or_warn(op.write, op)
        if problem is not None:
            op.give_up(problem)
            return problem
        return self._run_or_warn(lambda: self._commit(op), op)

    def _on_all_ranks(self, action: Callable[[], object], op: SaveOperation) -> bool:
        """Run it on every rank; whether all could. One that failed alone would leave the others waiting."""
        problem = self._run_or_warn(action, op)
        if self._ranks.all_true(problem is None):
            return True
        found = [(rank, each) for rank, each in enumerate(self._ranks.gather(problem)) if each is not None]
        rank, cause = found[0]
        self.failure = cause if self._ranks.world_size == 1 else f"rank {rank}: {cause}"
        return False

    def _run_or_warn(self, action: Callable[[], object], op: SaveOperation) -> str | None:
        """Run it; a failure costs this checkpoint, not the run. Returns its cause."""
        try:
            action()
        except Exception as error:
            why = save_op.cause_of(error, self._ranks.world_size > 1)
            if why.startswith(type(error).__name__):  # no error of the system, whose text says all
                file = self.run_folder / "failed_save.txt"
                with suppress(OSError):
                    file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                    why += f" (traceback in {file})"
            ends = self._failed and not self._continue_without  # the save before this one failed too
            logger.warning(
                "the checkpoint of step %d could not be saved: %s. %sThe last complete checkpoint stays valid",
                op.step,
                why,
                "" if ends else "Training continues. ",
            )
            return why
        return None

    def _contents(self, name: str, weights: Mapping[str, torch.Tensor]) -> list[str]:
        chosen = self.settings[name].save_contents
        if chosen is not None:
            return list(chosen)
        small = sum(tensor.numel() for tensor in weights.values()) < HF_BY_DEFAULT_BELOW
        return ["model", "optimizer", "extra", *(["hf_model"] if small else [])]

    def _kept_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Validation results and the metric of `keep_best`."""
        best = self.limits.best
        kept = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and (name == best or name.startswith("val-core/"))
        }
        if best is not None and best not in kept and metrics and not self._warned_about_best:
            self._warned_about_best = True
            known = ", ".join(sorted(n for n in metrics if n.startswith(("val", "reward")))[:8])
            logger.warning(
                "trainer.keep_best=%s was not measured at this step (measured: %s), so this checkpoint cannot be the "
                "best one: set trainer.test_freq so that each saved step is validated",
                best,
                known or "no validation",
            )
        return kept

    def _recover(self) -> None:
        if not self._recovered:
            steps.recover(self.run_folder)
            self._recovered = True

    # -- resuming -----------------------------------------------------------------------------------------------

    def resume(
        self,
        parts: Mapping[str, TrainEngine | None],
        take: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> dict[str, Any] | None:
        """Find and load what `resume_mode` asks for; the trainer's state, or None for a fresh start. `take` gets the
        state before the engines change; where it raises, an older checkpoint is tried."""
        return resume_newest(lambda below: self.find(parts, below), lambda: self.load_found(parts), take)

    def find(self, parts: Mapping[str, TrainEngine | None], below: int | None = None) -> Found | None:
        """The newest checkpoint (before the step `below`) that can be used; nothing of the run changes."""
        if self._ranks.rank == 0 and self.resume_mode == "auto":
            self._recover()
        found = self._resuming.find(_present(parts), below)
        if found is None:
            self.start_from(0)
            self._reserve_ahead(parts)
        return found

    def load_found(self, parts: Mapping[str, TrainEngine | None]) -> bool:
        """Load what `find` found; False where that failed and another one is to be tried."""
        loaded = self._resuming.load()
        if loaded is not None:
            logger.info("resumed from %s", loaded.path)
            self.start_from(loaded.manifest.step)
            self._reserve_ahead(parts)
        return loaded is not None

    def start_from(self, step: int) -> None:
        """Checkpoints beyond this step are not of this run: its first save puts them aside."""
        if self._ranks.rank == 0:
            self._foreign_steps = [
                entry.path for entry in steps.list_steps(self.run_folder) if entry.step > step
            ]


def _present(parts: Mapping[str, TrainEngine | None]) -> dict[str, TrainEngine]:
    return {name: engine for name, engine in parts.items() if engine is not None}
