"""`python -m benchmarks.async`: training while generating, against generating and training in turn.

Response lengths are planted (`planted_lengths.py`): log-normal with a tail of very long ones, keyed by prompt and
sample, so that every mode generates and trains the same responses.

`--processes 2`, the default on a CPU: one process trains, one generates (Ray); `off` uses the same two in turn. The
passes over a batch (`ppo_epochs`) are chosen so that training costs about as much as generating.
`--processes 1`, the default on a GPU: `carry_over` against `off` in this process, without Ray.
`--learn`: the task of `verl demo` in every mode, held-out accuracy by step.

Steps before the samples ahead of training have built up, and those in which they run out, are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.planted_lengths import PROMPT_WORDS, Lengths, make_data, make_model
from benchmarks.rollout import SHAPES
from verl.observe.trackers import register_tracker

BARS = {"one_step_off": 1.4, "fully_async": 1.7, "carry_over": 1.25}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": "tiny",
        "prompts": 16,
        "n": 8,
        "median": 12.0,
        "longest": 64,
        "tail": 256,
        "tail_share": 0.02,
        "steps": 6,
        "warm_up": 2,
        "epochs": 0,
        "staleness": "2",
    },
    "cuda": {
        "model": "smollm2-135m",
        "prompts": 32,
        "n": 8,
        "median": 200.0,
        "longest": 1024,
        "tail": 4096,
        "tail_share": 0.01,
        "steps": 6,
        "warm_up": 1,
        "epochs": 1,
        "staleness": "1,2",
    },
}
CALIBRATION_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--processes", type=int, choices=[1, 2], help="default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--model", help=f"a shape, with random weights: {', '.join(SHAPES)}")
    parser.add_argument("--prompts", type=int, help="per step")
    parser.add_argument("--n", type=int, help="samples per prompt")
    parser.add_argument("--median", type=float, help="of the response lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal distribution")
    parser.add_argument("--longest", type=int, help="response that the distribution gives")
    parser.add_argument("--tail", type=int, help="length of the very long responses")
    parser.add_argument("--tail-share", type=float, help="of the samples")
    parser.add_argument("--steps", type=int, help="measured in each mode")
    parser.add_argument("--warm-up", type=int, help="steps before, and as many as the staleness")
    parser.add_argument(
        "--epochs", type=int, help="passes over a batch; 0: so that training costs as generating"
    )
    parser.add_argument("--staleness", help="values to measure, comma separated")
    parser.add_argument("--over-sampling", default="0.5,1.0", help="values to measure (carry_over)")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--learn", action="store_true", help="the demo's task in every mode instead")
    parser.add_argument("--out", type=Path, help="with --learn: folder of the runs, of table and curves")


def run(args: argparse.Namespace) -> int:
    if args.learn:
        from benchmarks.async_learn import learn

        return learn(args.out, args.json)
    complete(args)
    args.load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        if not args.epochs:
            args.epochs = bench.calibrate()
        figures = {case.name: bench.measure(case) for case in cases(args)}
    report(args, figures)
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(json.dumps({"settings": settings, "figures": figures}, indent=1, default=str))
    return 0


def complete(args: argparse.Namespace) -> None:
    """Arguments that were not given: their defaults depend on the device."""
    import torch

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.processes = args.processes or (2 if args.device == "cpu" else 1)
    if args.processes == 2:
        os.environ.setdefault("RAY_ADDRESS", "local")  # not a cluster that happens to run on this machine
    if args.device == "cpu":
        torch.set_num_threads(1)  # also the number that each process of the pools gets


@dataclass
class Case:
    """One mode; `staleness` in steps."""

    mode: str
    staleness: int = 0
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        values = {"staleness": self.staleness, **self.keys} if self.staleness else {}
        return " ".join([self.mode, *(f"{name}={value}" for name, value in values.items())])

    @property
    def runs_out(self) -> int:
        """Last steps in which fewer prompts are generated than trained."""
        return math.ceil(self.keys.get("over_sampling", self.staleness))

    def overrides(self) -> dict[str, Any]:
        found = {f"trainer.async_training.{name}": value for name, value in self.keys.items()}
        if self.mode == "off":
            return found
        mode = {"mode": self.mode, "staleness": self.staleness}
        return found | {f"trainer.async_training.{name}": value for name, value in mode.items()}


def cases(args: argparse.Namespace) -> list[Case]:
    ages = [int(value) for value in args.staleness.split(",")]
    if args.processes == 2:
        return [
            Case("off"),
            Case("one_step_off", 1),
            *(Case("fully_async", age) for age in ages),
        ]
    shares = [float(value) for value in args.over_sampling.split(",")]
    return [
        Case("off"),
        *(
            Case("carry_over", age, {"over_sampling": share})
            for age in ages
            for share in shares
            if share <= age
        ),
    ]


@dataclass
class StepClock:
    """A tracker that keeps every step's metrics with the time at which the step was over."""

    steps: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append((time.monotonic(), dict(metrics)))

    def log_samples(self, step: int, rows: list[Any]) -> None:
        return None

    def close(self) -> None:
        return None


class Bench:
    """Model, data and planted lengths, the same for all modes."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.lengths = Lengths(args.median, args.sigma, args.longest, args.tail, args.tail_share)
        self.plugin = self.lengths.plugin(work)
        self.model = make_model(args.model, work / "model")
        self.runs = 0

    def calibrate(self) -> int:
        """The passes over a batch with which training takes as long as generating."""
        rows = self.train(Case("off"), CALIBRATION_STEPS, epochs=1).steps
        found = [metrics for _, metrics in rows[1:]]
        generating = statistics.median(row["timing_s/gen"] for row in found)
        one_pass = statistics.median(row["timing_s/update_actor"] for row in found)
        return max(1, round(generating / one_pass))

    def measure(self, case: Case) -> dict[str, Any]:
        before = max(self.args.warm_up, 1) + case.staleness
        clock = self.train(case, before + self.args.steps + case.runs_out, self.args.epochs)
        rows = [metrics for _, metrics in clock.steps]
        measured = rows[before : before + self.args.steps]
        started, ended = (clock.steps[index - 1][0] for index in (before, before + self.args.steps))
        saving = sum(row.get("timing_s/save_checkpoint", 0.0) for row in measured)
        trained = sum(row["response_length/mean"] for row in rows) * self.args.prompts * self.args.n
        return {
            "seconds": (ended - started - saving) / self.args.steps,
            **summary(measured),
            "trained_tokens": round(trained),
            "planted_tokens": self.planted(len(rows)),
            "rows": rows,
        }

    def planted(self, steps: int) -> int:
        """Tokens of all responses of so many steps."""
        uids = [f"0-{row}" for row in range(steps * self.args.prompts)]
        return sum(self.lengths.of(uid, sample) for uid in uids for sample in range(self.args.n))

    def train(self, case: Case, steps: int, epochs: int) -> StepClock:
        from verl.config.load import from_dict
        from verl.config.schema import PPOConfig
        from verl.trainer.main_ppo import run as train

        self.runs += 1
        clock, folder = StepClock(), self.work / f"run{self.runs}"
        register_tracker("step_clock")(lambda *_: clock)
        values = self.config(make_data(folder, self.args.prompts * steps), steps, epochs)
        values |= case.overrides() | dict(item.split("=", 1) for item in self.args.set)
        train(from_dict(PPOConfig, values))
        free_memory()
        return clock

    def config(self, folder: Path, steps: int, epochs: int) -> dict[str, Any]:
        args, rollout = self.args, "actor_rollout_ref.rollout"
        most = max(float(value) for value in args.over_sampling.split(","))
        pool = {"nnodes": 1, "n_gpus_per_node": 1} if args.processes == 2 else {}
        return {
            "data.train_files": [str(folder / "rows.jsonl")],
            "data.train_batch_size": args.prompts,
            "data.max_prompt_length": PROMPT_WORDS,
            "data.max_response_length": max(args.longest, args.tail),
            "data.shuffle": False,
            "actor_rollout_ref.model.path": str(self.model),
            "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
            "actor_rollout_ref.actor.ppo_epochs": epochs,
            "actor_rollout_ref.actor.checkpoint.save_contents": ["extra"],
            f"{rollout}.name": "planted",
            f"{rollout}.n": args.n,
            f"{rollout}.ignore_eos": True,
            f"{rollout}.max_num_seqs": round(args.prompts * args.n * (1 + most)),
            **{f"{rollout}.{name}": value for name, value in pool.items()},
            "algorithm.adv_estimator": "grpo",
            "algorithm.rollout_correction.bypass_mode": True,
            "reward.custom_reward_function.path": str(folder / "reward.py"),
            "reward.in_process": True,
            "trainer.device": args.device,
            "trainer.total_training_steps": steps,
            "trainer.logger": ["step_clock"],
            "trainer.plugins": [self.plugin],
            "trainer.default_local_dir": str(folder / "run"),
        }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the measured steps, and the share of tokens of each age."""

    def mean(name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return statistics.fmean(found) if found else None

    shares = sorted({name for row in rows for name in row if name.startswith("training/age/share_")})
    return {
        "gen_s": mean("timing_s/gen"),
        "update_s": mean("timing_s/update_actor"),
        "tokens": mean("response_length/mean"),
        "trainer_waits": mean("perf/wait_share/trainer"),
        "generation_waits": mean("perf/wait_share/generation"),
        "age_mean": mean("training/age/mean"),
        "age_max": max(row["training/age/max"] for row in rows),
        "age_shares": {name.removeprefix("training/age/share_"): mean(name) for name in shares},
    }


def report(args: argparse.Namespace, figures: dict[str, dict[str, Any]]) -> None:
    off = figures["off"]
    share = off["gen_s"] / off["seconds"]
    lines = [
        *busy_notice(args),
        f"{args.prompts} prompts x {args.n}, lengths of median {args.median:g}, sigma {args.sigma:g}, at most "
        f"{args.longest}, {args.tail_share:.1%} of {args.tail}; {args.epochs} passes over a batch, {args.device}",
        f"off: {share:.0%} of a step generates, {off['update_s'] / off['seconds']:.0%} trains and sends weights",
        f"{'':44}{'s/step':>8}{'against off':>13}{'gen':>7}{'update':>8}{'trainer waits':>15}"
        f"{'generation waits':>18}{'age mean':>10}{'max':>5}  share of tokens by age",
    ]
    for name, each in figures.items():
        ages = ", ".join(f"{age}: {value:.0%}" for age, value in each["age_shares"].items())
        lines.append(
            f"{name:44}{each['seconds']:8.2f}{off['seconds'] / each['seconds']:12.2f}x{each['gen_s']:7.2f}"
            f"{each['update_s']:8.2f}{_percent(each['trainer_waits']):>15}"
            f"{_percent(each['generation_waits']):>18}{each['age_mean']:10.2f}{each['age_max']:5.0f}  {ages}"
        )
    for mode, bar in BARS.items():
        found = {
            name: off["seconds"] / each["seconds"] for name, each in figures.items() if name.startswith(mode)
        }
        if found:
            best = max(found, key=lambda name: found[name])
            held = "held" if found[best] >= bar else "MISSED"
            lines.append(f"{best} against off: {found[best]:.2f}x, bar {bar}x: {held}")
    whole = all(each["trained_tokens"] == each["planted_tokens"] for each in figures.values())
    lines.append(f"every planted response trained once: {whole}")
    sys.stdout.write("\n".join(lines) + "\n")


def busy_notice(args: argparse.Namespace) -> list[str]:
    """With two processes the ratio is that of an idle machine only where each has a core."""
    if args.device != "cpu" or args.load <= 0.5:
        return []
    return [
        f"{args.load:.1f} cores were busy before the start: the processes wait for a core, ratios are too small"
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    return command("async", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
