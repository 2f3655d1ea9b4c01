"""`python -m benchmarks.reward`: many responses through a slow function in worker processes, against the ideal time.

The ideal is the function's own time divided by the number of workers; what is above it is the price of being
killable: packing, pipes, scheduling. Starting the processes is timed apart, because a run pays it once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import command
from verl.config.schema import RewardConfig
from verl.errors import ConfigError
from verl.reward import RewardManager, RewardSample, build_reward_manager

_FUNCTION = """
import time

def compute_score(solution_str, ground_truth, milliseconds):
    end = time.perf_counter() + milliseconds / 1000
    {wait}
    return 1.0 if ground_truth in solution_str else 0.0
"""
_WAITS = {"sleep": "time.sleep(milliseconds / 1000)", "spin": "while time.perf_counter() < end: pass"}
_LIMIT = 1.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--responses", type=int, default=4096, help="responses to score (default: 4096)")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="time of one call (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--repeat", type=int, default=2, help="batches; the quickest counts (default: 2)")
    parser.add_argument("--characters", type=int, default=2000, help="length of a response (default: 2000)")
    parser.add_argument(
        "--wait",
        choices=sorted(_WAITS),
        default="sleep",
        help="how the function spends its time (default: sleep)",
    )


def run(args: argparse.Namespace) -> int:
    if min(args.responses, args.workers, args.characters, args.repeat) < 1 or args.milliseconds <= 0:
        raise ConfigError(
            "--responses, --workers, --characters, --repeat and --milliseconds must be positive."
        )
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        path = Path(folder, "slow_reward.py")
        path.write_text(_FUNCTION.format(wait=_WAITS[args.wait]))
        samples = _samples(args.responses, args.characters)
        config = RewardConfig(num_workers=args.workers)
        config.reward_manager.name = "prime"
        config.custom_reward_function.path = str(path)
        config.custom_reward_function.reward_kwargs = {"milliseconds": args.milliseconds}
        start = time.perf_counter()
        manager = build_reward_manager(config, max_response_length=1)
        try:
            started = time.perf_counter() - start
            seconds = [_time(manager, samples) for _ in range(args.repeat)]
        finally:
            manager.close()
    ideal = args.responses * args.milliseconds / 1000 / args.workers
    lines = [
        f"{args.responses} responses of {args.characters} characters, {args.milliseconds:g} ms each ({args.wait}), "
        f"{args.workers} workers",
        f"  start of the processes  {started:8.3f} s  (once)",
        f"  ideal                   {ideal:8.3f} s",
        *(
            f"  batch {n}                 {t:8.3f} s   {t / ideal:.3f}x of the ideal"
            for n, t in enumerate(seconds, 1)
        ),
        f"reward workers: {min(seconds) / ideal:.2f}x of the ideal time (at most {_LIMIT}x wanted)",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if min(seconds) / ideal <= _LIMIT else 1


def _samples(count: int, characters: int) -> list[RewardSample]:
    text = "x" * (characters - 1)
    return [
        RewardSample(i, "p", text + str(i % 10), ground_truth=str(i % 10), data_source="bench")
        for i in range(count)
    ]


def _time(manager: RewardManager, samples: list[RewardSample]) -> float:
    began = time.perf_counter()
    for sample in samples:
        manager.submit(sample)
    results = manager.collect()
    seconds = time.perf_counter() - began
    if len(results) != len(samples) or any(result.score != 1.0 for result in results.values()):
        raise ConfigError(
            "the benchmark's function did not score every response; the figures would mean nothing"
        )
    return seconds


def main(argv: list[str] | None = None) -> int:
    return command("reward", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
