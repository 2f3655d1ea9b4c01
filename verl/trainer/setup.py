"""Steps shared by training commands: batch size that fits the data, run folder, config record, resume notices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.checkpoint.resume import refuse_other_command
from verl.checkpoint.steps import list_steps
from verl.config.build import fit_batch
from verl.config.checks import check
from verl.config.load import recorded
from verl.config.recipes import COMMANDS
from verl.config.sources import leaves
from verl.data.tokenizer import generation_stop_ids
from verl.errors import CheckpointError, ConfigError
from verl.observe.jsonl import jsonable
from verl.observe.live import live as live_table
from verl.observe.run_folder import RunFolder, default_run_path
from verl.observe.trackers import FanOut, build_trackers

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner
    from verl.config.schema import BaseTrainerConfig, OfflineConfig, PPOConfig
    from verl.config.sections.data import PromptsConfig
    from verl.config.sections.rollout import MultiTurnConfig

logger = logging.getLogger(__name__)

_MODEL_KEYS = ("actor_rollout_ref.model.path", "model.path")
_SHOWN = 6


class Asked(NamedTuple):
    """What is wanted after a step, besides what the config says."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False


class Events:
    """What a loop tells about its run while it lasts; here nothing is done with it. `verl.trainer.callbacks` passes it
    on to callbacks."""

    def start(self, total_steps: int) -> None:
        """The run begins, or begins again after processes were lost."""

    def begin_step(self, step: int) -> None:
        """A step begins."""

    def end_step(self, step: int) -> Asked:
        """A step's update is complete; validation may follow."""
        return Asked()

    def log(self, step: int, metrics: Mapping[str, Any]) -> Asked:
        """The numbers of a step, or of the validation before the first one; a checkpoint may follow."""
        return Asked()

    def save(self, step: int) -> None:
        """A checkpoint is saved."""


def open_tracker(
    cfg: PPOConfig | OfflineConfig, folder: RunFolder, *, total_steps: int, live: bool
) -> FanOut:
    """The loggers of `trainer.logger`."""
    trainer = cfg.trainer
    prometheus = trainer.prometheus
    live_table.begin_run()
    return build_trackers(
        trainer.logger,
        trainer.project_name,
        trainer.experiment_name,
        recorded(cfg),
        folder,
        trainer.wandb_proxy,
        total_steps=total_steps,
        live=live,
        prometheus=(prometheus.host, prometheus.port) if prometheus.enable else None,
    )


def require_profiled_steps(cfg: BaseTrainerConfig, total_steps: int) -> None:
    """Refuse steps to profile that the run does not have, once its data says how many it has."""
    if errors := cfg.profile_errors("trainer", total_steps):
        raise ConfigError("\n".join(errors))


def open_agents(
    cfg: MultiTurnConfig, data: PromptsConfig, tokenizer: Any, model_path: str
) -> ConversationRunner | None:
    """The runner of conversations, where `rollout.multi_turn` is enabled."""
    if not cfg.enable:
        return None
    from verl.agents.runner import ConversationRunner

    return ConversationRunner(cfg, data, tokenizer, generation_stop_ids(model_path))


def open_run_folder(cfg: BaseTrainerConfig) -> RunFolder:
    """Create, check and lock `trainer.default_local_dir`."""
    return RunFolder(
        cfg.default_local_dir,
        rollout_dir=getattr(cfg, "rollout_data_dir", None),
        validation_dir=getattr(cfg, "validation_data_dir", None),
    )


def fit_to(cfg: PPOConfig | OfflineConfig) -> Callable[[int], None]:
    """For a loader: makes a batch the user did not choose no larger than the data."""

    def fit(rows: int) -> None:
        notices = fit_batch(cfg, rows)
        for notice in notices:
            logger.info("%s", notice)
        if notices:
            check(cfg)

    return fit


def record_config(cfg: PPOConfig | OfflineConfig, folder: RunFolder) -> None:
    """Write config.yaml; warn when a run resumes with other settings than it was started with. CheckpointError, before
    anything is written, where the folder is another command's."""
    newest = next((each for each in list_steps(folder.path) if each.manifest is not None), None)
    if cfg.trainer.resume_mode == "auto" and newest is not None and newest.manifest is not None:
        refuse_other_command(newest.path, newest.manifest, COMMANDS[type(cfg)])
    steps = _saved_steps(folder)
    resuming = cfg.trainer.resume_mode == "auto" and bool(steps)
    if cfg.trainer.resume_mode == "disable" and steps:
        logger.warning(
            "%s holds checkpoints up to step %d; trainer.resume_mode=disable starts over and renames them to "
            "global_step_N.earlier at the first checkpoint. For another folder set trainer.experiment_name",
            folder.path,
            max(steps),
        )
    before = folder.previous_config() if resuming else None
    now = recorded(cfg)
    if cfg.trainer.default_local_dir == str(
        default_run_path(cfg.trainer.project_name, cfg.trainer.experiment_name)
    ):
        now["trainer"]["default_local_dir"] = ""  # the same run under another name gets another folder
    changed = changes(before, jsonable(now)) if before is not None else []
    changed = [change for change in changed if not change[0].startswith("trainer.resume_")]
    if changed:
        shown = ", ".join(f"{key} {old!r} -> {new!r}" for key, old, new in changed[:_SHOWN])
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        other = [(old, new) for key, old, new in changed if key in _MODEL_KEYS]
        weights = f" The weights are those of its checkpoint, started from {other[0][0]!r}." if other else ""
        logger.warning(
            "the run in %s resumes with other settings: %s%s.%s For a new run set trainer.experiment_name, or "
            "trainer.resume_mode=disable to start over",
            folder.path,
            shown,
            more,
            weights,
        )
    folder.write_config(now)


def _saved_steps(folder: RunFolder) -> list[int]:
    names = (path.name.rpartition("_")[2] for path in folder.path.glob("global_step_*") if path.is_dir())
    return [int(name) for name in names if name.isdecimal()]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys both configs have with different values: name, value before, value after."""
    old, new = ({".".join(path): value for path, value in leaves(values)} for values in (before, after))
    return [(key, old[key], value) for key, value in new.items() if key in old and old[key] != value]


def resume_note(step: int, total: int) -> str:
    """The notice after resuming."""
    if step < total:
        return f"resumed after step {step}"
    return (
        f"nothing left to do: {step} of {total} steps are done. To continue, raise trainer.total_training_steps or "
        "trainer.total_epochs; for a new run set trainer.experiment_name, or trainer.resume_mode=disable"
    )


def whole_number(state: Mapping[str, Any], name: str) -> int:
    """A non-negative integer in the state of a checkpoint."""
    value = state[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise CheckpointError(f"its {name} is {str(value)[:40]!r}, which is no count")
    return value


def require_saved(folder: RunFolder, step: int, saved_step: int, failure: str | None) -> None:
    """A failed checkpoint during the run is a warning; a failed last one is an error. `failure`: its cause."""
    if saved_step == step:
        return
    steps = [saved for saved in _saved_steps(folder) if saved != step]
    left = f"the newest complete one is global_step_{max(steps)}" if steps else "there is none"
    raise CheckpointError(
        f"the checkpoint of the last step ({step}) could not be saved: {failure}. In {folder.path} {left}"
    )


def try_write_report(folder: RunFolder) -> None:
    """Write `report.html` of a run that is over; a failure is only a warning."""
    from verl.observe.report import write_report

    try:
        folder.wait()
        write_report(folder.path, ended=True, outside=True)
    except Exception as error:
        logger.warning(
            "the report in %s could not be written: %s: %s", folder.path, type(error).__name__, error
        )
