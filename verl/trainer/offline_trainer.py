"""Training on given answers, on the engine and the run folder of RL: the commands `sft_trainer`, `dpo_trainer` and
`reward_trainer`.

Every rank runs the same `OfflineLoop` on its shard of each batch: in this process, on the processes of torchrun, or on
Ray. Rank 0 (on Ray, the driver) writes metrics and the run folder. A resumed run continues exactly.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.schema import PreferenceConfig
from verl.errors import RESUME, ConfigError
from verl.runtime import StopRequest, exits_as_errors, run_command, stop_on_signal

if TYPE_CHECKING:
    from torch import nn

    from verl.config.schema import OfflineConfig
    from verl.observe.run_folder import RunFolder
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import RunResult
    from verl.trainer.offline_loop import OfflineLoop, RayLoop, Update
    from verl.trainer.setup import Events
    from verl.workers.torchrun import Job, RankMonitor

logger = logging.getLogger(__name__)

_REPORT_S = 5.0
"""For rank 0 to report an error that every rank has, before another rank does."""


def command(kind: type[OfflineConfig], argv: list[str] | None = None) -> int:
    """A command whose config is a `kind`: config from the arguments, then `run`; under torchrun on every rank."""
    arguments = sys.argv[1:] if argv is None else argv
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        from verl.workers.torchrun import Job

        job = Job.from_environment()
        if job is not None:
            return _torchrun_main(kind, arguments, job)

    def body() -> int:
        from verl.config.load import load_config
        from verl.trainer.main_ppo import exit_code

        return exit_code(run(load_config(kind, arguments)))

    return run_command(body, trains=True)


def _torchrun_main(kind: type[OfflineConfig], arguments: list[str], job: Job) -> int:
    from verl.trainer.preflight import preflight
    from verl.trainer.setup import with_closing_lines
    from verl.workers.torchrun import Reported, joined

    def body() -> int:
        from verl.config.load import load_config

        if job.rank > 0:
            # Rank 0 logs what all ranks would; what only this rank's engine has to say is a warning.
            logging.getLogger("verl").setLevel(logging.ERROR)
            logging.getLogger("verl.engines").setLevel(logging.WARNING)
        try:
            cfg = load_config(kind, with_sizes(arguments, job))
            refuse_conflicts(cfg, job)
        except Exception:
            if job.rank > 0:
                time.sleep(_REPORT_S)  # torchrun ends this process when rank 0 has failed too
            raise
        try:
            with (
                joined(job, cfg.trainer.device, cfg.trainer.watchdog_s) as monitor,
                exits_as_errors(),
                stop_on_signal() as stop,
            ):
                preflight(cfg)

                def train() -> RunResult | None:
                    return run_once(cfg, stop, live=False, monitor=monitor)

                result = with_closing_lines(cfg, train) if job.rank == 0 else train()
        except Reported:
            return 1
        if result is not None and result.stopped:
            logger.warning("stopped after step %d, not the last one: %s", result.steps, RESUME)
        return 0  # also then: torchrun takes anything else for a crash, and may start the ranks again

    code = run_command(body, trains=True)
    if code:
        # Threads may be inside the store or a collective, which Python cannot end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def with_sizes(arguments: list[str], job: Job) -> list[str]:
    """The command line with the number of processes torchrun started, where the user gave none."""
    from verl.config.sources import parse_command_line, read_yaml

    line = parse_command_line(arguments)
    given = read_yaml(line.config_path, line.config_name).get("trainer") or {}
    sizes = []
    if "n_gpus_per_node" not in given:
        sizes.append(f"trainer.n_gpus_per_node={job.local_world_size}")
    if not any(name in given for name in ("nnodes", "nnode")):
        sizes.append(f"trainer.nnodes={job.world_size // job.local_world_size}")
    return [*sizes, *arguments]


def refuse_conflicts(cfg: OfflineConfig, job: Job) -> None:
    """Keys that contradict torchrun."""
    from verl.config.parallelism import world_size

    trainer = cfg.trainer
    if world_size(cfg) != job.world_size:
        raise ConfigError(
            f"torchrun started WORLD_SIZE={job.world_size} processes, but trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node} x trainer.nnodes={trainer.nnodes} asks for {world_size(cfg)}; leave both keys "
            f"out, or give torchrun --nnodes={trainer.nnodes} --nproc_per_node={trainer.n_gpus_per_node}"
        )
    if trainer.max_restarts > 0:
        raise ConfigError(
            f"trainer.max_restarts={trainer.max_restarts}, but torchrun restarts its processes itself; leave the key "
            f"out and give torchrun --max-restarts={trainer.max_restarts}"
        )
    for name in sorted(key for key in cfg.user_set if key.startswith("ray_kwargs.")):
        logger.warning("'%s' has no effect: a run started by torchrun does without Ray", name)


def run(
    cfg: OfflineConfig,
    *,
    live: bool = True,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    events: Events | None = None,
) -> RunResult:
    """Train as `cfg` says, in this process or on Ray. `model`, which is trained in place in this process, and
    `tokenizer` replace those that the config names; `events` is told what happens."""
    from verl.trainer.preflight import preflight
    from verl.trainer.setup import with_closing_lines
    from verl.workers.placement import with_restarts

    preflight(cfg, given_model=model is not None)
    given = {"model": model, "tokenizer": tokenizer, "events": events}
    with exits_as_errors(), stop_on_signal() as stop:
        result = with_closing_lines(
            cfg, lambda: with_restarts(cfg, lambda: run_once(cfg, stop, live=live, **given), stop)
        )
    assert result is not None
    return result


def run_once(
    cfg: OfflineConfig,
    stop: StopRequest,
    *,
    live: bool,
    monitor: RankMonitor | None = None,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    events: Events | None = None,
) -> RunResult | None:
    """One start of a run, from its last checkpoint (or afresh) to its end; None on ranks above 0 of torchrun."""
    from verl.config.parallelism import world_size
    from verl.config.plan import RunPlan, batch_plan
    from verl.trainer.main_ppo import RunResult
    from verl.trainer.offline_loop import OfflineLoop, RayLoop, load_data
    from verl.trainer.preflight import require_disk
    from verl.trainer.setup import (
        open_run_folder,
        open_tracker,
        record_config,
        require_profiled_steps,
        require_saved,
        try_write_report,
    )
    from verl.workers.rank import record_rank_phases

    data = load_data(cfg, tokenizer)
    trainer = cfg.trainer
    require_profiled_steps(trainer, data.total_steps)
    if monitor is not None and monitor.job.rank > 0:
        path = Path(trainer.default_local_dir).absolute()
        record_rank_phases(path, monitor.job.rank)
        with (
            closing(OfflineLoop(cfg, data, path, monitor.watchdog)) as follower,
            stop.stops(follower),
        ):
            for _ in follower.run():
                pass
        return None
    with open_run_folder(trainer) as folder:
        record_config(cfg, folder)
        require_disk(RunPlan(cfg, model=model), folder.path, data.total_steps)
        logger.info("%s", batch_plan(cfg, total_steps=data.total_steps))

        def lost(error: Exception) -> None:
            folder.write_crash(error, likely_cure(cfg, error))
            try_write_report(folder)

        if monitor is not None:
            monitor.on_lost = lost
        try:
            with (
                exits_as_errors(),
                closing(open_tracker(cfg, folder, total_steps=data.total_steps, live=live)) as tracker,
            ):
                loop: OfflineLoop | RayLoop
                if monitor is None and world_size(cfg) > 1:
                    loop = RayLoop(cfg, data, folder.path)
                else:
                    watchdog = None if monitor is None else monitor.watchdog
                    loop = OfflineLoop(cfg, data, folder.path, watchdog, model=model)
                    loop.events = events or loop.events
                if events is not None:
                    events.start(data.total_steps)
                with closing(loop), stop.stops(loop):
                    updates = loop.run()
                    if events is not None and isinstance(loop, RayLoop):
                        updates = relayed(updates, loop, events)
                    last = record(updates, folder, tracker, data.total_steps)
                if "val/accuracy" in last.metrics:
                    assert data.val is not None
                    what = "pairs" if isinstance(cfg, PreferenceConfig) and cfg.pairs else "answers"
                    tracker.note(
                        f"held-out accuracy {last.metrics['val/accuracy']:.4f} ({len(data.val.dataset)} {what})"
                    )
                best = best_checkpoint(cfg, folder)
                if best:
                    tracker.note(best)
                if last.metrics:
                    require_saved(folder, last.step, last.saved_step, last.failure)
        except Exception as error:
            error = error if monitor is None else monitor.explain(error)
            folder.write_crash(error, likely_cure(cfg, error))
            raise error
        finally:
            try_write_report(folder)
        early = last.step < data.total_steps and not last.notice
        return RunResult(folder.path, last.metrics, last.step, stopped=stop.asked and early)


def relayed(updates: Iterable[Update], loop: RayLoop, events: Events) -> Iterator[Update]:
    """The updates of ranks on Ray, which are told to `events` here, in the driver, once their step is over."""
    for update in updates:
        if update.kind == "step":
            events.begin_step(update.step)
            events.end_step(update.step)
            asked = events.log(update.step, update.metrics)
            if update.saved_step == update.step:
                events.save(update.step)
            if asked.save and update.saved_step != update.step:
                raise ConfigError(
                    f"a callback asks for a checkpoint after step {update.step}, but with several processes a step is "
                    "over when its callbacks are called; set save_steps instead"
                )
            if asked.stop:
                loop.request_stop()
        yield update


def record(updates: Iterable[Update], folder: RunFolder, tracker: FanOut, total_steps: int) -> Update:
    """Write a loop's updates to the run folder and the trackers; returns the last one."""
    from verl.observe.live import live
    from verl.trainer.setup import resume_note

    live.record_phases(folder.phases_dir / "controller.jsonl")
    last: Update | None = None
    for update in updates:
        live.begin_step(update.step)
        if update.kind == "start":
            folder.restart()
        elif update.kind == "resumed":
            if not folder.rewind(update.step) and update.metrics:
                # The run ended between the checkpoint and its line in the metrics.
                tracker.log(update.step, update.metrics, update.findings)
            tracker.note(resume_note(update.step, total_steps))
        elif update.kind == "step":
            live.end_step(update.step)
            if "rollouts" in update.samples:
                folder.write_rollouts(update.step, update.samples["rollouts"])
            if "validation" in update.samples:
                folder.write_validation(update.step, update.samples["validation"])
            tracker.log(update.step, update.metrics, update.findings)
        if update.notice:
            tracker.note(update.notice)
        last = update
    live.record_phases(None)
    assert last is not None
    return last


def best_checkpoint(cfg: OfflineConfig, folder: RunFolder) -> str:
    """A line that names the best checkpoint; empty where none was validated."""
    from verl.checkpoint.steps import best_step, list_steps

    metric, mode = cfg.trainer.keep_best, cfg.trainer.keep_best_mode
    best = best_step(list_steps(folder.path), metric, mode)
    if metric is None or best is None or best.manifest is None:
        return ""
    return f"best checkpoint: {best.path} ({metric} {best.manifest.metrics[metric]:.6g})"


def likely_cure(cfg: OfflineConfig, error: BaseException) -> str:
    """The line of `crash.txt` that says what to do; with the keys of fine-tuning."""
    from verl.config.parallelism import offload_section
    from verl.observe.diagnoses.crashes import is_out_of_memory, likely_fix

    # The engine names its keys as reinforcement learning spells them.
    if not (is_out_of_memory(error) or "does not fit into device memory" in str(error)):
        return likely_fix(error)
    data, model = cfg.data, cfg.model
    if data.use_dynamic_bsz and data.max_token_len_per_gpu:
        keys = [f"data.max_token_len_per_gpu={max(1, data.max_token_len_per_gpu // 2)}"]
    else:
        keys = [f"data.micro_batch_size_per_gpu={max(1, (data.micro_batch_size_per_gpu or 8) // 2)}"]
    if not model.enable_gradient_checkpointing:
        keys.append("model.enable_gradient_checkpointing=True")
    section, offload = offload_section(model)
    if not offload.optimizer_offload:
        keys.append(f"model.{section}.optimizer_offload=True")
    return f"out of memory; try, in this order: {', '.join(keys)}"
