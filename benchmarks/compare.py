"""`python -m benchmarks.compare --old PATH`: this checkout against another one, in the same run, on the CPU.

Three workloads run alternately under either checkout as `python -m verl.trainer.main_ppo`, which every version has: a
short GRPO step, longer responses (rollout) and a larger model saved at every step (checkpoint). Printed are the medians
of the metric each writes to `metrics.jsonl`, over all rounds, and their ratio. One thread by default: on a busy machine
threads that wait for each other would measure the other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command
from benchmarks.step import make_data, make_model
from verl.errors import ConfigError

NEW = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Workload:
    metric: str
    """Seconds, as `metrics.jsonl` names them."""
    prompts: int
    n: int
    max_tokens: int
    hidden_size: int
    save: bool = False


WORKLOADS = {
    "step": Workload("timing_s/step", 32, 8, 16, hidden_size=128),
    "rollout": Workload("timing_s/gen", 8, 4, 96, hidden_size=128),
    "checkpoint": Workload("timing_s/save_checkpoint", 4, 2, 4, hidden_size=640, save=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--only", choices=sorted(WORKLOADS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="processes per checkout and workload")
    parser.add_argument("--steps", type=int, default=6, help="steps of each process")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each process that do not count")
    parser.add_argument("--threads", type=int, default=1, help="of each process (OMP_NUM_THREADS)")


def run(args: argparse.Namespace) -> int:
    old = args.old.expanduser().resolve()
    if not (old / "verl" / "__init__.py").is_file():
        raise ConfigError(f"--old {old} has no verl/__init__.py; give the root of a checkout")
    write = sys.stdout.write
    write(
        f"{'workload':12} {'old s':>9} {'new s':>9} {'new/old':>8}   median of {args.rounds} processes each\n"
    )
    with tempfile.TemporaryDirectory(prefix="verl-compare-") as folder:
        for name in args.only or WORKLOADS:
            workload, found = WORKLOADS[name], {old: [], NEW: []}  # type: dict[Path, list[float]]
            rows = make_data(Path(folder), workload.prompts * args.steps)
            model = make_model(Path(folder) / f"model-{name}", workload.hidden_size)
            for number in range(args.rounds):
                # Who goes first alternates: a machine that slows down in between favours neither.
                for checkout in (old, NEW) if number % 2 == 0 else (NEW, old):
                    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
                        train(checkout, workload, model, rows, Path(run_folder), args)
                        found[checkout] += measured(Path(run_folder), workload.metric)[args.warm_up :]
            before, after = (statistics.median(found[checkout]) for checkout in (old, NEW))
            write(f"{name:12} {before:9.4f} {after:9.4f} {after / before:8.3f}\n")
            sys.stdout.flush()
    return 0


def train(
    checkout: Path, workload: Workload, model: Path, rows: Path, run_folder: Path, args: argparse.Namespace
) -> None:
    """One run of the command under the code of `checkout`."""
    overrides = [
        f"data.train_files={rows}",
        f"data.train_batch_size={workload.prompts}",
        "data.max_prompt_length=32",
        f"data.max_response_length={workload.max_tokens}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.n={workload.n}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={workload.prompts}",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={rows.with_name('reward.py')}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.save_freq={1 if workload.save else -1}",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.default_local_dir={run_folder}",
    ]
    if not workload.save:
        overrides.append("actor_rollout_ref.actor.checkpoint.save_contents=[extra]")
    program = (
        "import sys, verl.trainer.main_ppo as command; "
        f"assert command.__file__.startswith({str(checkout)!r}), command.__file__; sys.exit(command.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *overrides],
        cwd=run_folder,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(args.threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"training under {checkout} failed ({done.returncode}):\n{done.stderr[-2000:]}")


def measured(run_folder: Path, metric: str) -> list[float]:
    rows = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [row[metric] for row in rows if metric in row]


def main(argv: list[str] | None = None) -> int:
    return command("compare", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
