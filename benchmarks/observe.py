"""`python -m benchmarks.observe`: what observing a run costs, as a ratio of step times in one process.

Runs alternate: everything on (metrics endpoint scraped once a second by another process, token data, phases, live
table, findings, TensorBoard where it is installed), everything off. What no key switches off (live table, phases,
findings) is taken out for the runs that are off. A step's time is that between two lines of metrics, so what happens
between steps counts. Random draws are equal, so both sides compute the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import command
from benchmarks.step import make_data, make_model

_SCRAPER = """import sys, time, urllib.request
while True:
    try: urllib.request.urlopen(sys.argv[1], timeout=5).read()
    except OSError: pass
    time.sleep(1)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama of --hidden")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument("--warm-up", type=int, default=2, help="of these, not counted")
    parser.add_argument("--pairs", type=int, default=4, help="runs of each kind")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of the process in place of time that passed"
    )
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    seconds: dict[str, list[list[float]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = Path(args.model) if args.model else make_model(work / "model", args.hidden)
        data = make_data(work, args.prompts * args.steps)
        for pair in range(args.pairs):
            # The order alternates too: a machine that gets slower must not count for one side.
            for kind in ("off", "on") if pair % 2 == 0 else ("on", "off"):
                seconds[kind].append(step_seconds(args, model, data, work / f"{kind}-{pair}", kind == "on"))
    figures = summary(seconds)
    sys.stdout.write(
        f"GRPO step, {args.prompts} prompts x {args.n} responses of at most {args.max_tokens} tokens: "
        f"off {figures['off_s']:.4f} s, on {figures['on_s']:.4f} s\n"
        f"ratio on/off {figures['ratio']:.4f}; of the {args.pairs} pairs "
        f"{', '.join(f'{ratio:.4f}' for ratio in figures['pairs'])}\n"
    )
    if args.json:
        args.json.write_text(json.dumps({**figures, "seconds": seconds}, indent=1))
    return 0


def summary(seconds: Mapping[str, list[list[float]]]) -> dict[str, Any]:
    """Of the same step in all runs of a kind the quickest counts: other programs only add time."""
    best = {kind: [min(step) for step in zip(*runs, strict=True)] for kind, runs in seconds.items()}
    pairs = [sum(on) / sum(off) for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "off_s": statistics.mean(best["off"]),
        "on_s": statistics.mean(best["on"]),
        "ratio": sum(best["on"]) / sum(best["off"]),
        "pairs": pairs,
    }


def step_seconds(
    args: argparse.Namespace, model: Path, data: Path, folder: Path, observed: bool
) -> list[float]:
    """The times of the counted steps of one run."""
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import run as train

    ends: list[float] = []
    log, clock = FanOut.log, time.process_time if args.cpu_time else time.perf_counter

    def timed_log(self: FanOut, *row: Any) -> None:
        log(self, *row)
        ends.append(clock())

    port = free_port()
    loggers = ["tensorboard"] if observed and importlib.util.find_spec("tensorboard") else []
    values: dict[str, Any] = {
        "data.train_files": [str(data)],
        "data.train_batch_size": args.prompts,
        "data.max_response_length": args.max_tokens,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.n": args.n,
        "actor_rollout_ref.actor.ppo_mini_batch_size": args.prompts,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": str(data.parent / "reward.py"),
        "trainer.total_training_steps": args.steps,
        "trainer.logger": loggers,
        "trainer.token_data": observed,
        "trainer.prometheus.enable": observed,
        "trainer.prometheus.port": port,
        "trainer.default_local_dir": str(folder),
        "actor_rollout_ref.actor.checkpoint.save_contents": ["extra"],
        **dict(item.split("=", 1) for item in args.set),
    }
    with mock.patch.object(FanOut, "log", timed_log), scraped(port) if observed else unobserved():
        train(from_dict(PPOConfig, values))
    return [after - before for before, after in itertools.pairwise(ends)][args.warm_up - 1 :]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def scraped(port: int) -> Iterator[None]:
    scraper = subprocess.Popen([sys.executable, "-c", _SCRAPER, f"http://127.0.0.1:{port}/metrics"])
    try:
        yield
    finally:
        scraper.kill()
        scraper.wait()


@contextmanager
def unobserved() -> Iterator[None]:
    """Without the live table, phases and findings, which no key switches off."""
    from verl.observe.health import HealthMonitor
    from verl.observe.live import Live

    nothing = {name: lambda self, *args: None for name in ("set", "add", "observe", "record_phases")}
    with (
        mock.patch.multiple(Live, phase=lambda self, name: nullcontext(), **nothing),
        mock.patch.object(HealthMonitor, "check", lambda self, *args, **options: []),
    ):
        yield


def main(argv: list[str] | None = None) -> int:
    return command("observe", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
