"""Save, resume, retain: the part of checkpointing a training loop talks to.

The order of a save: files into a hidden folder, each on the disk before it counts; the manifest; a rename to
`global_step_N`; `latest_checkpointed_iteration.txt`; only then are old checkpoints deleted. A run that begins before
checkpoints that are there already (afresh, or from an earlier step) puts them aside at its first save: they are not of
its line, and nobody may take them for its newest.

At every moment the newest complete checkpoint is whole and loadable, however the process ends. A save that fails, for
whatever reason, leaves the earlier ones alone and the run going. Loading changes nothing on the disk. Every rank of a
job makes the same calls in the same order.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from verl.checkpoint import rng
from verl.checkpoint.engine_state import Snapshot, snapshot
from verl.checkpoint.files import finish_removals
from verl.checkpoint.pytree_json import encode
from verl.checkpoint.rank_manifests import Records
from verl.checkpoint.ranks import Ranks
from verl.checkpoint.resume import RANDOM_STATE, TRAINER_STATE, Found, Resuming, resume_newest
from verl.checkpoint.retention import Limits, apply
from verl.checkpoint.save_op import SaveJob
from verl.checkpoint.staging import Staging, free_memory
from verl.checkpoint.steps import list_steps, recover, set_aside, step_name, work_folder, write_tracker
from verl.config.disk import HF_BY_DEFAULT_BELOW
from verl.engines.base import TrainEngine

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
    ) -> None:
        self.run_folder = Path(run_folder)
        self.settings = dict(settings or {})
        self.limits = Limits(
            {"actor": max_actor_to_keep, "critic": max_critic_to_keep}, keep_best, keep_best_mode
        )
        self.resume_mode = resume_mode
        self._peer_timeout_s = peer_timeout_s
        self._ranks = Ranks()
        self._resuming = Resuming(
            self.run_folder,
            self._ranks,
            lambda part: self._of(part).load_contents,
            resume_mode,
            resume_from_path,
        )
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
        engines = _present(parts)
        work, final = work_folder(self.run_folder, step), self.run_folder / step_name(step)
        job = SaveJob(step=step, work=work, final=final, ranks=self._ranks)
        background = False
        ready = self._together(lambda: self._take(job, engines, trainer_state, metrics or {}), job)
        if ready and self._is_async(engines):
            background = self._ranks.all_true(self._reserve(job.snapshots))
            ready = not background or self._together(lambda: self._copy(job), job)
        live: list[Callable[[], None]] = []
        ready = ready and self._together(lambda: live.extend(self._open(job, engines, tokenizer)), job)
        if not ready or not all(self._together(each, job) for each in live):
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

    def _take(
        self,
        job: SaveJob,
        engines: Mapping[str, TrainEngine],
        trainer_state: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> None:
        """Everything as it is at this moment; tensors are the engines' own."""
        for name, engine in engines.items():
            state = engine.state_dict()
            job.contents[name] = self._contents(name, state)
            job.snapshots[name] = snapshot(state, job.contents[name], engine.info.rank)
        job.trees[RANDOM_STATE.format(self._ranks.rank)] = encode(rng.capture(), for_people=False)
        if self._ranks.first:
            job.trees[TRAINER_STATE] = encode(dict(trainer_state))
        job.metrics = self._kept_metrics(metrics)

    def _copy(self, job: SaveJob) -> None:
        """From here on the engines may go on while the copies are written."""
        job.snapshots = {name: self._staging.copy(name, taken) for name, taken in job.snapshots.items()}

    def _is_async(self, parts: Iterable[str]) -> bool:
        return any(self._of(name).async_save for name in parts)

    def _reserve(self, snapshots: Mapping[str, Snapshot]) -> bool:
        """Host memory for a save in the background, or a word on why there is none."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        for name, taken in snapshots.items():
            try:
                reserved = self._staging.reserve(name, taken)
            except (MemoryError, RuntimeError):  # torch raises the second where it cannot pin memory
                reserved = False
            if not reserved:
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
        engines = _present(parts)
        # To ask for a state makes the moments of an optimiser that has none yet. In the memory of a device that
        # would come too early: others are still to find out how much there is.
        if not self._is_async(engines) or any(
            engine.info.device.type != "cpu" for engine in engines.values()
        ):
            return
        states = {name: engine.state_dict() for name, engine in engines.items()}
        taken = {n: snapshot(s, self._contents(n, s), engines[n].info.rank) for n, s in states.items()}

        def reserve() -> None:
            for name, each in taken.items():
                with suppress(MemoryError, RuntimeError):  # the save itself says what is missing
                    self._staging.reserve(name, each)

        # Waited for at the end of Python, which may not stop a thread in the middle of torch.
        self._reserving = threading.Thread(target=reserve, name="memory for checkpoints")
        self._reserving.start()

    def _open(
        self, job: SaveJob, engines: Mapping[str, TrainEngine], tokenizer: Any
    ) -> list[Callable[[], None]]:
        """Make the folder; what only the live engines can write into it."""
        if self._ranks.first:
            finish_removals()
            self._tidy()
        job.open()
        return job.hf_steps(engines, tokenizer)

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
            except Exception as error:
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

    def _together(self, action: Callable[[], object], job: SaveJob) -> bool:
        """Run it on every rank; whether all could. One that failed alone would leave the others waiting."""
        return self._ranks.all_true(self._guarded(action, job))

    def _guarded(self, action: Callable[[], object], job: SaveJob) -> bool:
        """Run it; whatever goes wrong costs this checkpoint, not the run."""
        try:
            action()
        except Exception as error:
            # Libraries in Rust raise a bare Exception for a full disk: "No space left on device (os error 28)".
            if isinstance(error, (OSError, SafetensorError)) or "(os error " in str(error):
                why = f"{error}. Free some space or set trainer.default_local_dir to another disk"
            else:
                why = f"{type(error).__name__}: {error}{self._keep_traceback(error)}"
            logger.warning(
                "the checkpoint of step %d could not be saved: %s. The run goes on; the last complete checkpoint "
                "stays valid",
                job.step,
                why,
            )
            return False
        return True

    def _keep_traceback(self, error: Exception) -> str:
        """Where to read what went wrong in a way nobody thought of."""
        file = self.run_folder / "failed_save.txt"
        try:
            file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:
            return ""
        return f" (traceback in {file})"

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

    def resume(
        self,
        parts: Mapping[str, TrainEngine | None],
        take: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> dict[str, Any] | None:
        """Find and load what `resume_mode` asks for; the trainer's state, or None for a fresh start. `take` gets the
        state before the engines change; where it raises, an older checkpoint is looked for."""
        return resume_newest(lambda below: self.find(parts, below), lambda: self.load_found(parts), take)

    def find(self, parts: Mapping[str, TrainEngine | None], below: int | None = None) -> Found | None:
        """The newest checkpoint (before the step `below`) that can be used; nothing of the run changes."""
        if self._ranks.first and self.resume_mode == "auto":
            self._tidy()
        found = self._resuming.find(_present(parts), below)
        if found is None:
            self._begin(0, parts)
        return found

    def load_found(self, parts: Mapping[str, TrainEngine | None]) -> bool:
        """Load what `find` found; False where that failed and another one is to be found."""
        loaded = self._resuming.load(_present(parts))
        if loaded is not None:
            logger.info("resumed from %s", loaded.path)
            self._begin(loaded.manifest.step, parts)
        return loaded is not None

    def latest(self, parts: Sequence[str] = ()) -> Path | None:
        """The newest complete checkpoint; damaged and incomplete ones are named in the log and skipped."""
        if self._ranks.first:
            self._tidy()
        return self._resuming.latest(parts)

    def _begin(self, step: int, parts: Mapping[str, TrainEngine | None]) -> None:
        if self._ranks.first:
            self._strangers = [entry.path for entry in list_steps(self.run_folder) if entry.step > step]
        self._reserve_ahead(parts)


def _present(parts: Mapping[str, TrainEngine | None]) -> dict[str, TrainEngine]:
    return {name: engine for name, engine in parts.items() if engine is not None}
