"""`verl plan --learn`: draw a few prompts with the model, engine and reward of a config, and say from their scores how
many groups would have something to learn from. Trains nothing and keeps nothing."""

from __future__ import annotations

import math
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from verl.algorithms.group_signal import (
    SizeSignal,
    all_pass_or_fail,
    proposed_size,
    signal_by_size,
    signal_window,
    wilson_interval,
)
from verl.config.keys import to_dict
from verl.config.load import from_dict
from verl.config.parallelism import counted
from verl.config.schema import PPOConfig
from verl.config.sources import set_path
from verl.data.curriculum import scored_groups
from verl.data.proto import DataProto
from verl.errors import RewardError
from verl.observe.console import show_lines
from verl.observe.metrics import Timer
from verl.observe.run_reader import duration
from verl.reward.base import causes
from verl.runtime import exits_as_errors

WARM_UP = 8
"""Prompts before the time is taken."""
DEFAULT_N = 8
"""Responses to a prompt where `rollout.n` is 1."""


@dataclass(frozen=True)
class Draws:
    """Scored responses to some prompts."""

    scores: list[list[float]]
    """Of each prompt with two scored responses or more."""
    passes: list[list[float]]
    """As `data.curriculum` reads them: `acc`, or the score."""
    n: int
    """Responses to each prompt."""
    left_out: int
    """Prompts of which fewer than two responses have a score."""
    errors: list[str]
    """Of responses without one."""
    seconds: float
    """Per response, drawn and scored."""


def drawing_config(config: PPOConfig, folder: str) -> PPOConfig:
    """A config that draws what training would draw from all of its data, and trains nothing."""
    values, data = to_dict(config), config.data
    n = config.actor_rollout_ref.rollout.n
    changed = {
        "trainer.val_only": True,
        "trainer.default_local_dir": folder,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "trainer.logger": [],
        "trainer.prometheus.enable": False,
        "trainer.profile.steps": [],
        "trainer.max_restarts": 0,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "data.val_files": [file for part in data.mixture for file in part.files] or data.train_files,
        "data.val_max_samples": 1,
        "data.train_batch_size": 1,
        # A sample of all prompts, not the first ones of an order.
        "data.shuffle": True,
        "data.curriculum": None,
        "data.curriculum_key": None,
        "data.sampler.class_path": None,
        "data.sampler.class_name": None,
        "actor_rollout_ref.rollout.n": n if n > 1 else DEFAULT_N,
    }
    for name, value in changed.items():
        set_path(values, name, value)
    return from_dict(PPOConfig, values, quiet=True)


def draw(config: PPOConfig, count: int) -> Draws:
    """Responses to at most `count` prompts, drawn with the settings of training and scored with its reward."""
    from verl.data.rl_dataset import training_loader
    from verl.trainer.assembly import build_loop, open_run
    from verl.trainer.preflight import preflight
    from verl.workers.roles import training_settings

    with tempfile.TemporaryDirectory(prefix="verl-plan-") as folder:
        cfg = drawing_config(config, folder)
        preflight(cfg, saves=False)
        with exits_as_errors(), open_run(cfg) as parts:
            tools = None if parts.agents is None else parts.agents.schemas
            loader = training_loader(cfg.data, parts.tokenizer, tools=tools)
            prompts = DataProto.concat(list(islice(loader, count)))
            loop = build_loop(cfg, parts)
            settings = training_settings(cfg.actor_rollout_ref.rollout, cfg.data.max_response_length, step=0)
            with closing(loop.workers), closing(loop.tracker), closing(loop.experience):
                begun, batches = 0.0, []
                for part in (prompts[:WARM_UP], prompts[WARM_UP:]):
                    if len(part):
                        begun = time.perf_counter()
                        batches.append(loop.experience.score(part, settings, Timer()))
                seconds = (time.perf_counter() - begun) / len(batches[-1])
    groups = [list(group) for batch in batches for group in scored_groups(batch).values()]
    several = [group for group in groups if len(group) > 1]
    errors = [str(e) for batch in batches for e in batch.non_tensor_batch["reward_error"] if e is not None]
    return Draws(
        scores=[[score for score, _ in group] for group in several],
        passes=[[passed for _, passed in group] for group in several],
        n=settings.n,
        left_out=len(prompts) - len(several),
        errors=errors,
        seconds=seconds,
    )


def learn(config: PPOConfig, *, prompts: int, groups: int, share: float) -> int:
    """Draw, and print what was seen and what to set."""
    draws = draw(config, prompts)
    if not draws.scores:
        raise RewardError(f"no prompt has two responses with a score. {causes(draws.errors)}")
    show_lines(report(draws, groups=groups, share=share))
    return 0


def report(draws: Draws, *, groups: int, share: float) -> list[tuple[str, str]]:
    """Labels and texts. `groups`: those with signal that are wanted per step; `share`: of all groups."""
    count = len(draws.scores)
    signal = sum(len(set(scores)) > 1 for scores in draws.scores)
    low, high = wilson_interval(signal / count, count)
    seen = f"in {signal} of {counted(count, 'prompt')} the responses differ in score: {signal / count:.0%}"
    lines = [
        ("signal", f"{seen} ({low:.0%} to {high:.0%}, 95 % interval), {counted(draws.n, 'response')} each")
    ]
    if draws.left_out:
        lines.append(("no score", f"{counted(draws.left_out, 'prompt')} left out. {causes(draws.errors)}"))
    sizes = signal_by_size(draws.scores, draws.passes)
    lines += [("rollout.n", _size_line(each)) for each in sizes]
    chosen = proposed_size(sizes, share)
    basis = chosen or next(each for each in sizes if each.n >= draws.n or each is sizes[-1])
    if chosen is not None:
        lines.append(
            ("proposed", f"rollout.n={chosen.n}, the smallest with signal in {share:.0%} of the groups")
        )
    else:
        why = f"no n up to {sizes[-1].n} gives {share:.0%} of the groups a signal"
        advice = (
            "choose others, fine-tune first (verl sft), or keep those that teach (data.curriculum=pass_rate)"
        )
        lines.append(("proposed", f"{why}, as too many prompts are too hard or too easy: {advice}"))
    if basis.share:
        size = f"data.train_batch_size={math.ceil(groups / basis.share)}"
        lines.append(
            ("", f"{size} for {counted(groups, 'group')} with signal per step at rollout.n={basis.n}")
        )
    if all_pass_or_fail(draws.passes):
        rates = [sum(values) / len(values) for values in draws.passes]
        never, always = rates.count(0), rates.count(1)
        lower, upper = (round(rate, 2) for rate in signal_window(basis.n))
        inside = sum(lower <= rate <= upper for rate in rates)
        keys = f"data.curriculum=pass_rate data.curriculum_window=[{lower:.2f},{upper:.2f}]"
        reason = f"where groups of {basis.n} have signal at least half as often as at best"
        lines.insert(
            1, ("pass rates", f"{never} never pass, {always} always, {count - never - always} sometimes")
        )
        lines.append(("", f"{keys}, {reason}: {inside} of {counted(count, 'prompt')} now"))
    if basis.share:
        taken = duration(groups / basis.share * basis.n * draws.seconds)
        rate = f"{1 / draws.seconds:,.1f} responses per second here"
        lines.append(("time", f"{taken} to draw and score these groups, at {rate}; updates come on top"))
    return lines


def _size_line(size: SizeSignal) -> str:
    source = ", extrapolated" if size.extrapolated else ""
    return (
        f"{size.n:>2}: {size.share:.0%} of the groups with signal ({size.low:.0%} to {size.high:.0%}{source}), "
        f"{100 * size.per_response:.1f} in 100 responses"
    )
