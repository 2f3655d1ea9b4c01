"""Save, resume, retain: the part of checkpointing a training loop talks to.

The order of a save: files into a hidden folder, each on the disk before it counts; the manifest; a rename to
`global_step_N`; `latest_checkpointed_iteration.txt`; only then are old checkpoints deleted. A run that begins before
checkpoints that are there already (afresh, or from an earlier step) puts them aside at its first save: they are not of
its line, and nobody may take them for its newest.

What always holds: at every moment the newest complete checkpoint is whole and loadable, however the process
ends; a save that fails for lack of space or rights leaves the earlier ones alone and the run going; loading
changes nothing on the disk. Every rank of a job makes the same calls in the same order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from verl.checkpoint import rng
from verl.checkpoint.collect import Records
from verl.checkpoint.files import finish_removals
from verl.checkpoint.job import SaveJob
from verl.checkpoint.manifest import read_manifest
from verl.checkpoint.parts import Snapshot, load_part, load_tree, snapshot
from verl.checkpoint.plain import encode
from verl.checkpoint.ranks import Ranks
from verl.checkpoint.retention import Limits, apply
from verl.checkpoint.staging import Staging, free_memory
from verl.checkpoint.steps import (
    checked_path,
    in_use,
    list_steps,
    newest_complete,
    recover,
    set_aside,
    step_name,
    step_of,
    work_folder,
    write_tracker,
)
from verl.engines.base import TrainEngine
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state"
RANDOM_STATE = "random/rank_{}"
HF_BY_DEFAULT_BELOW = 10_000_000_000


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
    ) -> None:
        self.run_folder = Path(run_folder)
        self.settings = dict(settings or {})
        self.limits = Limits(
            {"actor": max_actor_to_keep, "critic": max_critic_to_keep}, keep_best, keep_best_mode
        )
        self.resume_mode = resume_mode
        self.resume_from_path = resume_from_path
        self._peer_timeout_s = peer_timeout_s
        self._ranks = Ranks()
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._reserving: threading.Thread | None = None
        self._outcome: Path | None = None
        self._error: BaseException | None = None
        self._tidied = False
        self._told_about_best = False
        self._strangers: list[Path] = []
        """Checkpoints in the run folder beyond the step this run began from."""

    @classmethod
    def from_config(cls, config: Any, run_folder: Path | str) -> CheckpointManager:
        """From the resolved configuration of reinforcement learning or of supervised fine-tuning."""
        trainer = config.trainer
        if hasattr(config, "actor_rollout_ref"):
            sections = {
                "actor": config.actor_rollout_ref.actor.checkpoint,
                "critic": config.critic.checkpoint,
            }
        else:
            sections = {"actor": config.checkpoint}
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
        )

    # -- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        parts: Mapping[str, TrainEngine | None],
        trainer_state: Mapping[str, Any],
        *,
        tokenizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path | None:
        """Save a step. Returns its folder, or None when saving failed (the reason is logged as a warning) or goes
        on in the background (`wait` returns the folder then)."""
        self.wait()
        engines = {name: engine for name, engine in parts.items() if engine is not None}
        job, background = self._start(step, engines, trainer_state, metrics or {})
        steps = (lambda: self._open(job), lambda: job.write_hf(engines, tokenizer))
        # After each, all ranks agree whether to go on: one that failed alone would leave the others waiting.
        if not all(self._ranks.all_true(self._guarded(action, job)) for action in steps):
            job.discard()
            return None
        if background:
            self._thread = threading.Thread(target=self._background, args=(job,), name="checkpoint")
            self._thread.start()
            return None
        done = self._finish(job)
        return job.final if self._ranks.from_first(int(done is not None)) else None

    def wait(self) -> Path | None:
        """Until a save in the background is done; the folder it made, or None."""
        finish_removals()
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._outcome

    def _start(
        self,
        step: int,
        engines: Mapping[str, TrainEngine],
        trainer_state: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> tuple[SaveJob, bool]:
        """Everything as it is at this moment, and whether it is a copy, which can be written in the background."""
        contents, snapshots = {}, {}
        for name, engine in engines.items():
            state = engine.state_dict()
            contents[name] = self._contents(name, state)
            snapshots[name] = snapshot(state, contents[name], engine.rank)
        copied = self._is_async(engines) and self._ranks.all_true(self._reserve(snapshots))
        if copied:
            snapshots = {name: self._staging.copy(name, taken) for name, taken in snapshots.items()}
        trees = {RANDOM_STATE.format(self._ranks.rank): encode(rng.capture(), for_people=False)}
        if self._ranks.first:
            trees[TRAINER_STATE] = encode(dict(trainer_state))
        job = SaveJob(
            step=step,
            work=work_folder(self.run_folder, step),
            final=self.run_folder / step_name(step),
            ranks=self._ranks,
            snapshots=snapshots,
            contents=contents,
            trees=trees,
            metrics=self._kept_metrics(metrics),
        )
        return job, copied

    def _is_async(self, parts: Iterable[str]) -> bool:
        return any(self._of(name).async_save for name in parts)

    def _reserve(self, snapshots: Mapping[str, Snapshot]) -> bool:
        """Host memory for a save in the background, or a word on why there is none."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        for name, taken in snapshots.items():
            if not self._staging.reserve(name, taken):
                logger.warning(
                    "checkpoint.async_save needs %.1f GB of host memory for a copy of the %s, and %.1f GB are free: "
                    "this save is not in the background. Free some memory, or set async_save=False",
                    taken.size / 1e9,
                    name,
                    (free_memory() or 0) / 1e9,
                )
                return False
        return True

    def _reserve_ahead(self, parts: Mapping[str, TrainEngine | None]) -> None:
        """While training begins: the system takes longer to give memory than it takes to copy into it."""
        engines = {name: engine for name, engine in parts.items() if engine is not None}
        # To ask for a state makes the moments of an optimiser that has none yet. In the memory of a device that
        # would come too early: others are still to find out how much there is.
        if not self._is_async(engines) or any(engine.device.type != "cpu" for engine in engines.values()):
            return
        states = {name: engine.state_dict() for name, engine in engines.items()}
        taken = {n: snapshot(s, self._contents(n, s), engines[n].rank) for n, s in states.items()}

        def reserve() -> None:
            for name, each in taken.items():
                self._staging.reserve(name, each)

        # Waited for at the end of Python, which may not stop a thread in the middle of torch.
        self._reserving = threading.Thread(target=reserve, name="memory for checkpoints")
        self._reserving.start()

    def _open(self, job: SaveJob) -> None:
        if self._ranks.first:
            finish_removals()
            self._tidy()
        job.open()

    def _finish(self, job: SaveJob) -> Path | None:
        """Write the tensors, wait for the other ranks' files, commit. Needs no collective, so that it may run
        beside training."""
        peers = Records(job.work, self._ranks.rank, self._ranks.world_size, self._peer_timeout_s)
        written = self._guarded(job.write, job)
        written = written and self._guarded(lambda: peers.post(job.records), job)
        if not written:
            peers.give_up()
        if not self._ranks.first:
            return job.final if written else None
        if not (written and self._guarded(lambda: self._commit(job, peers), job)):
            job.discard()
            return None
        # The checkpoint is complete; what follows can only fail to be tidy.
        for action in (
            lambda: write_tracker(self.run_folder, job.step),
            self._set_strangers_aside,
            lambda: apply(self.run_folder, self.limits, job.step),
        ):
            try:
                action()
            except OSError as error:
                logger.warning("checkpoint %s is complete, but tidying up failed: %s", job.final.name, error)
        return job.final

    def _commit(self, job: SaveJob, peers: Records) -> None:
        if job.final in self._strangers:
            set_aside(job.final)
            self._strangers.remove(job.final)
        job.commit(peers)

    def _set_strangers_aside(self) -> None:
        self._strangers = [path for path in self._strangers if not set_aside(path)]

    def _background(self, job: SaveJob) -> None:
        try:
            self._outcome = self._finish(job)
        except BaseException as error:  # handed to the training thread by `wait`
            self._error = error

    def _guarded(self, action: Any, job: SaveJob) -> bool:
        """Run it; what the disk may do to us is a warning, not the end of the run."""
        try:
            action()
        except (OSError, SafetensorError, TimeoutError) as error:
            logger.warning(
                "the checkpoint of step %d could not be saved: %s. The run goes on; the last complete checkpoint "
                "stays valid. Free some space or set trainer.default_local_dir to another disk",
                job.step,
                error,
            )
            return False
        return True

    def _contents(self, name: str, state: Mapping[str, Any]) -> list[str]:
        chosen = self._of(name).save_contents
        if chosen is not None:
            return list(chosen)
        small = sum(tensor.numel() for tensor in state["model"].values()) < HF_BY_DEFAULT_BELOW
        return ["model", "optimizer", "extra", *(["hf_model"] if small else [])]

    def _kept_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Validation results and whatever `keep_best` asks for; a manifest is not a log."""
        best = self.limits.best
        kept = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and (name == best or name.startswith("val-core/"))
        }
        if best is not None and best not in kept and metrics and not self._told_about_best:
            self._told_about_best = True
            known = ", ".join(sorted(n for n in metrics if n.startswith(("val", "reward")))[:8])
            logger.warning(
                "trainer.keep_best=%s was not measured at this step, so this checkpoint cannot be the best one. "
                "Measured: %s. Set trainer.test_freq so that each saved step is validated",
                best,
                known or "no validation",
            )
        return kept

    def _of(self, part: str) -> PartSettings:
        return self.settings.get(part, PartSettings())

    def _tidy(self) -> None:
        if not self._tidied:
            recover(self.run_folder)
            self._tidied = True

    # -- resuming -----------------------------------------------------------------------------------------------

    def latest(self, parts: Sequence[str] = ()) -> Path | None:
        """The newest complete checkpoint; damaged and incomplete ones are named in the log and skipped."""
        chosen = -1
        if self._ranks.first:
            self._tidy()
            found = newest_complete(self.run_folder, parts)
            chosen = found.step if found is not None else -1
        chosen = self._ranks.from_first(chosen)
        return None if chosen < 0 else self.run_folder / step_name(chosen)

    def resolve(
        self,
        resume_mode: str | None = None,
        resume_from_path: Path | str | None = None,
        parts: Sequence[str] = (),
    ) -> Path | None:
        """The checkpoint to resume from, or None to start afresh."""
        mode = resume_mode or self.resume_mode
        given = resume_from_path or self.resume_from_path
        if mode == "disable":
            return None
        if mode == "auto":
            return self.latest(parts)
        if mode != "resume_path":
            raise ConfigError(
                f"trainer.resume_mode={mode!r} is not known; allowed: auto, disable, resume_path"
            )
        if not given:
            raise ConfigError(
                "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N folder or a run folder"
            )
        return checked_path(Path(given).expanduser(), parts)

    def load(self, path: Path | str, parts: Mapping[str, TrainEngine | None]) -> Any:
        """Load a checkpoint into the engines, put the random states back, return the trainer's state."""
        path = Path(path)
        with in_use(path):
            manifest = read_manifest(path)
            for name, engine in parts.items():
                if engine is not None:
                    load_part(path, manifest, name, engine, self._of(name).load_contents)
            if manifest.world_size != self._ranks.world_size:
                logger.warning(
                    "checkpoint %s was saved by %d processes and is loaded by %d: weights and optimiser are equal, "
                    "random draws will differ from those of an uninterrupted run",
                    path.name,
                    manifest.world_size,
                    self._ranks.world_size,
                )
            else:
                rng.restore(load_tree(path, manifest, RANDOM_STATE.format(self._ranks.rank)))
            return load_tree(path, manifest, TRAINER_STATE)

    def resume(self, parts: Mapping[str, TrainEngine | None]) -> Any | None:
        """Find and load what `resume_mode` asks for; the trainer's state, or None for a fresh start."""
        path = self.resolve(parts=[name for name, engine in parts.items() if engine is not None])
        state = None
        if path is not None:
            state = self.load(path, parts)
            logger.info("resumed from %s", path)
        if self._ranks.first:
            begun = step_of(path) or 0 if path is not None else 0
            self._strangers = [entry.path for entry in list_steps(self.run_folder) if entry.step > begun]
        self._reserve_ahead(parts)
        return state
