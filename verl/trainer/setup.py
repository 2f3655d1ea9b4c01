"""Steps shared by training commands: batch size that fits the data, run folder, config record, resume notices, and
the closing lines of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from verl.checkpoint.resume import refuse_other_command
from verl.checkpoint.steps import StepFolder, list_steps
from verl.checkpoint.weights import ADAPTER_FOLDER, HF_FOLDER
from verl.config.build import fit_batch
from verl.config.checks import check
from verl.config.load import recorded
from verl.config.recipes import COMMANDS
from verl.config.sources import leaves
from verl.data.tokenizer import generation_stop_ids
from verl.errors import CheckpointError, ConfigError, missing_package
from verl.observe.console import number_text, show_lines, shown_path, typed
from verl.observe.jsonl import jsonable
from verl.observe.live import live as live_table
from verl.observe.run_folder import RunFolder, default_run_path, read_lineage
from verl.observe.trackers import FanOut, build_trackers

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner
    from verl.config.schema import BaseTrainerConfig, GenerationConfig, OfflineConfig, PPOConfig
    from verl.config.sections.rollout import EngineConfig
    from verl.observe.run_reader import MetricsLog, Run
    from verl.trainer.main_ppo import RunResult

Result = TypeVar("Result", "RunResult", "RunResult | None")
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
    cfg: PPOConfig | GenerationConfig, rollout: EngineConfig, tokenizer: Any, model_path: str, folder: Path
) -> ConversationRunner | None:
    """The runner of conversations, where `rollout.multi_turn` is enabled or an agent loop is given. `folder`: where
    agents that run elsewhere find its address."""
    if not rollout.converses:
        return None
    from verl.agents.runner import AgentLoops, ConversationRunner

    multi_turn, stops, door = rollout.multi_turn, generation_stop_ids(model_path), None
    loops = AgentLoops(cfg, rollout, tokenizer)
    if multi_turn.own_agent:
        try:
            from verl.serve.fetching import AGENT_ENDPOINT
            from verl.serve.training import SessionServer
        except ImportError as error:
            key = f"rollout.multi_turn.{multi_turn.own_agent}"
            raise missing_package(str(error.name).partition(".")[0], "serve", key) from error
        door = SessionServer(folder / AGENT_ENDPOINT if multi_turn.agents_elsewhere else None)
    return ConversationRunner(multi_turn, cfg.data, tokenizer, stops, loops, door)


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
    newest = _newest_checkpoint(folder.path)
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


def _newest_checkpoint(folder: Path) -> StepFolder | None:
    return next((each for each in list_steps(folder) if each.manifest is not None), None)


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


# -- closing lines ----------------------------------------------------------------------------------------------------


def with_closing_lines(cfg: PPOConfig | OfflineConfig, body: Callable[[], Result]) -> Result:
    """The result of a run, however often it restarts. When it is over, well or not, its console says where everything
    is; not where it ended before its folder was written to, as its error says all then."""
    started, folder = time.monotonic(), Path(cfg.trainer.default_local_dir).expanduser()
    before, end = _written(folder), "crashed"
    try:
        result = body()
        end = "stopped" if result is not None and result.stopped else "finished"
        return result
    except KeyboardInterrupt:
        end = "interrupted"
        raise
    finally:
        if "console" in cfg.trainer.logger and _written(folder) != before:
            try:
                show_lines(closing_lines(folder, end, time.monotonic() - started, COMMANDS[type(cfg)]))
            except Exception as error:  # the end of the run matters more than its description
                logger.warning("%s cannot be described: %s: %s", folder, type(error).__name__, error)


def _written(folder: Path) -> tuple[int, int] | None:
    """Changes when a run records its config in the folder."""
    with suppress(OSError):
        found = (folder / "config.yaml").stat()
        return found.st_ino, found.st_mtime_ns
    return None


def closing_lines(folder: Path, end: str, seconds: float, command: str) -> list[tuple[str, str]]:
    """(label, text): how the run of `command` ended, what it reached, where its files are and what to do next. `end`:
    finished, stopped, interrupted or crashed."""
    from verl.observe.run_reader import duration, open_run

    run = open_run(folder)
    steps = "before its first step"
    if run.get("trainer.val_only"):
        steps = "validation"
    elif run.step:
        of = f" of {run.total_steps}" if run.total_steps and end != "finished" else ""
        steps = f"after step {run.step}{of}"
    rows = [("", ""), (end, f"{steps}, in {duration(seconds)}")]
    rows += _reached(run.log)
    rows += places(folder)
    if end == "crashed":
        rows.append(("cause", f"{shown_path(folder / 'crash.txt')} (and below)"))
    saved = _newest_checkpoint(folder)
    if end in ("crashed", "interrupted"):
        again = "the same command"
        if read_lineage(folder) is not None:  # `verl fork` would make another
            again = typed(*command.split()[1:], "--config-path", shown_path(folder / "config.yaml"))
        begins = "begins again, as there is no checkpoint"
        rows.append(("next", f"{again} {begins if saved is None else f'resumes after step {saved.step}'}"))
    elif end == "finished" and (model := model_folder(folder)) is not None:
        rows.append(("next", _use_of(command, shown_path(model), run)))
    return rows


def places(folder: Path) -> list[tuple[str, str]]:
    """(label, text): where a run put things, and the command that shows it."""
    rows = [("run folder", shown_path(folder))]
    model, saved = model_folder(folder), _newest_checkpoint(folder)
    if model is not None:
        rows.append(("trained model", shown_path(model)))
    elif saved is not None:
        part = shown_path(saved.path / "actor")
        merge = typed("merge", "--local_dir", part, "--target_dir", "OUT")
        rows.append(("trained model", f"sharded in {part}; to Hugging Face: {merge}"))
    if (folder / "report.html").is_file():
        rows.append(("report", f"{shown_path(folder / 'report.html')} (for the browser)"))
    return [*rows, ("look at it", typed("view", shown_path(folder), "--serve"))]


def model_folder(folder: Path) -> Path | None:
    """The Hugging Face folder of a run's newest checkpoint, or its adapter; None where weights are only sharded."""
    saved = _newest_checkpoint(folder)
    if saved is None or saved.manifest is None:
        return None
    part = saved.path / "actor"
    if "hf_model" in saved.manifest.parts.get("actor", ()):
        return part / HF_FOLDER
    return part / ADAPTER_FOLDER if (part / ADAPTER_FOLDER).is_dir() else None


def _use_of(command: str, model: str, run: Run) -> str:
    """A command that uses what `command` trained."""
    if command == "verl reward train":
        keys = ["reward.reward_model.enable=True", f"reward.reward_model.model_path={model}"]
        return f"{typed('train', *keys)} ..."
    keys = ["data.path=FILE"]
    if command == "verl train" and (val_files := run.get("data.val_files")):
        names = ("prompt_key", "max_prompt_length", "max_response_length")
        keys = [f"data.path={val_files[0]}", *(f"data.{name}={run.get(f'data.{name}')}" for name in names)]
    return typed("generate", f"model.path={model}", *keys, "data.output_path=responses.parquet")


def _reached(log: MetricsLog) -> list[tuple[str, str]]:
    """Rewards or losses, and validations: the first and the last of each."""
    from verl.observe.diagnoses import validation_summary

    # A long log keeps its first row only there.
    rows = log.rows if log.rows[:1] == [log.first] else [log.first, *log.rows]
    columns = {
        "reward": [row.get("reward/mean") for row in rows],
        "loss": [row.get("train/loss") for row in rows],
        "validation": [validation_summary(row) for row in rows],
        "val loss": [row.get("val/loss") for row in rows],
        "val accuracy": [row.get("val/accuracy") for row in rows],
    }
    reached = []
    for label, values in columns.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        if known:
            reached.append((label, " -> ".join(map(number_text, known[:1] + known[1:][-1:]))))
    return reached
