"""`python -m verl.trainer.main_ppo`: reinforcement learning, from a config to a trained model.

Checked before the model is loaded, in this order: config, packages and files, tokenizer, rows, reward function, run
folder.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import RESUME
from verl.missing_names import explain
from verl.runtime import (
    STOPPED,
    StopRequest,
    exits_as_errors,
    run_command,
    short_switch_interval,
    stop_on_signal,
)

if TYPE_CHECKING:
    from torch import nn

    from verl.config.plan import RunPlan
    from verl.config.schema import PPOConfig
    from verl.trainer.setup import Events

logger = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a finished run leaves behind."""

    folder: Path
    """The run folder: `metrics.jsonl`, `report.html`, `rollouts/`, checkpoints."""
    metrics: dict[str, float]
    """Of the last step, e.g. `reward/mean`; empty where no step was left to do."""
    steps: int
    """Steps done, those before a resume included."""
    stopped: bool = False
    """Whether a signal (SIGTERM, Ctrl-C, SIGHUP) ended the run before its last step, with a checkpoint."""


def exit_code(result: RunResult, resume: str = RESUME) -> int:
    """Of a command whose run ended without an error; `resume` says how to continue one that was stopped."""
    if not result.stopped:
        return 0
    logger.warning("stopped after step %d, not the last one: %s. Exit code %d", result.steps, resume, STOPPED)
    return STOPPED


def main(argv: list[str] | None = None) -> int:
    """The command: config from the arguments, then `run`."""
    arguments = sys.argv[1:] if argv is None else argv

    def body() -> int:
        from verl.config.load import load_ppo_config

        return exit_code(run(load_ppo_config(arguments)))

    return run_command(body, trains=True)


def run(
    cfg: PPOConfig,
    *,
    reward_function: Callable[..., Any] | None = None,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    train_loader: Any = None,
    live: bool = True,
    events: Events | None = None,
) -> RunResult:
    """Train with `cfg`, as `verl train` does; objects passed in replace what the config names.

    Args:
        cfg: A checked config, from `verl.config.load.from_dict` or `load_ppo_config`.
        reward_function: A function or a list of functions.
        model: A loaded model, which is trained in place; one process only.
        tokenizer: The model's tokenizer.
        train_loader: The source of prompts: rows, or what has the interface of `verl.data.loader`.
        live: Show the live display, where output is a terminal.
        events: Told what happens, e.g. to call callbacks.

    Returns:
        The run folder, the metrics of the last step, the number of steps, and whether a signal ended it early.
    """
    from verl.trainer.preflight import preflight

    plan = preflight(cfg, given_model=model is not None, given_data=train_loader is not None)
    from verl.trainer.setup import with_closing_lines
    from verl.workers.placement import with_restarts

    given = {"tokenizer": tokenizer, "reward_function": reward_function, "train_loader": train_loader}
    with exits_as_errors(), stop_on_signal() as stop:

        def attempt() -> RunResult:
            return run_once(cfg, given, model=model, live=live, stop=stop, plan=plan, events=events)

        return with_closing_lines(cfg, lambda: with_restarts(cfg, attempt, stop))


def run_once(
    cfg: PPOConfig,
    given: dict[str, Any],
    *,
    model: nn.Module | None,
    live: bool,
    stop: StopRequest | None = None,
    plan: RunPlan | None = None,
    events: Events | None = None,
) -> RunResult:
    """One attempt: from the last checkpoint (or the start) to the end. `plan`: that of the first attempt, whose ranks
    may have been more."""
    from verl.config.plan import RunPlan
    from verl.trainer.assembly import build_loop, open_run
    from verl.trainer.preflight import require_disk
    from verl.trainer.setup import require_saved

    stop = stop or StopRequest()
    plan = RunPlan(cfg, model=model) if plan is None or model is not None else plan.renewed()
    with open_run(cfg, **given) as parts:
        require_disk(plan, parts.folder.path, parts.total_steps)
        loop = build_loop(cfg, parts, model=model, live=live)
        if events is not None:
            loop.events = events
            events.start(parts.total_steps)
        with closing(loop.workers), closing(loop.tracker):
            with stop.stops(loop), short_switch_interval():
                metrics = loop.fit()
            if metrics and not cfg.trainer.val_only:
                require_saved(parts.folder, loop.step_number, loop.saved_step, loop.checkpoints.failure)
        early = loop.step_number < parts.total_steps and not cfg.trainer.val_only
        return RunResult(parts.folder.path, metrics, loop.step_number, stopped=stop.asked and early)


__getattr__ = explain(__name__)

if __name__ == "__main__":
    sys.exit(main())
