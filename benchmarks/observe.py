"""`python -m benchmarks.observe`: what observing a run costs, as a ratio of step times.

One run, in which blocks of steps alternate: everything on (metrics endpoint scraped every 5 s by another process as in
examples/monitoring, token data, phases, live table, findings, TensorBoard where it is installed), everything off. What
no key switches off (live table, phases, findings) is taken out for the blocks that are off. Every step has the same
prompts and responses of the full length, so that both sides have the same work. A step's time is that between two lines
of metrics, so what happens between steps counts. The first step of a block is not counted: samples of the step before
it are written during it. A block is compared with the mean of its two neighbours, so that a machine that gets slower or
faster does not count for one side.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import command
from benchmarks.step import make_data, make_model, run_values

_SCRAPER = """import sys, time, urllib.request
while True:
    try: urllib.request.urlopen(sys.argv[1], timeout=5).read()
    except OSError: pass
    time.sleep(5)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder; default: a random Llama of --hidden")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block", type=int, default=4, help="steps of a block, at least 2")
    parser.add_argument("--blocks", type=int, default=9, help="without those of the warm-up, at least 3")
    parser.add_argument("--warm-up", type=int, default=1, help="blocks at the start that are not counted")
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of the process in place of time that passed"
    )
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="further config keys")
    parser.add_argument("--json", type=Path, help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    args.steps = args.block * (args.warm_up + args.blocks)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = Path(args.model) if args.model else make_model(work / "model", args.hidden)
        data = make_data(work, args.prompts)
        data.write_text(data.read_text() * args.steps)
        figures = summary(block_seconds(args, model, data, work / "run"))
    sys.stdout.write(
        f"GRPO step, {args.prompts} prompts x {args.n} responses of at most {args.max_tokens} tokens: "
        f"off {figures['off_s']:.4f} s, on {figures['on_s']:.4f} s\n"
        f"ratio on/off {figures['ratio']:.4f} (median), quartiles {figures['quartiles'][0]:.4f} and "
        f"{figures['quartiles'][1]:.4f}, of {len(figures['ratios'])} blocks\n"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


def summary(blocks: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    """`blocks`: whether a block was observed, and the median time of its steps."""
    ratios = []
    for before, this, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        ratio = this[1] / statistics.mean((before[1], after[1]))
        ratios.append(ratio if this[0] else 1 / ratio)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
    return {
        "off_s": statistics.median(seconds for on, seconds in blocks if not on),
        "on_s": statistics.median(seconds for on, seconds in blocks if on),
        "ratio": middle,
        "quartiles": (low, high),
        "ratios": ratios,
    }


def block_seconds(
    args: argparse.Namespace, model: Path, data: Path, folder: Path
) -> list[tuple[bool, float]]:
    """The blocks after the warm-up."""
    from verl.config.load import from_dict
    from verl.config.schema import PPOConfig
    from verl.observe.trackers import FanOut
    from verl.trainer.main_ppo import run as train

    observed, ends, log = True, [], FanOut.log
    clock = time.process_time if args.cpu_time else time.perf_counter
    port = free_port()
    config = from_dict(
        PPOConfig,
        run_values(args, model, data, folder)
        | {"trainer.logger": ["tensorboard"] if importlib.util.find_spec("tensorboard") else []}
        | {"trainer.prometheus.enable": True, "trainer.prometheus.port": port}
        | {"actor_rollout_ref.rollout.ignore_eos": True}
        | dict(item.split("=", 1) for item in args.set),
    )

    def timed_log(self: FanOut, step: int, *row: Any) -> None:
        nonlocal observed
        if observed:
            log(self, step, *row)
        else:
            self.trackers["file"].log(step, row[0])
        ends.append(clock())
        observed = step // args.block % 2 == 0  # of the next step
        config.trainer.token_data = observed
        scraper.send_signal(signal.SIGCONT if observed else signal.SIGSTOP)

    with scraped(port) as scraper, switched(lambda: observed), mock.patch.object(FanOut, "log", timed_log):
        train(config)
    assert len(ends) == args.steps, f"{len(ends)} of {args.steps} steps"
    seconds = [after - before for before, after in itertools.pairwise([ends[0], *ends])]
    starts = range(args.block * args.warm_up, args.steps, args.block)
    return [
        (start // args.block % 2 == 0, statistics.median(seconds[start + 1 : start + args.block]))
        for start in starts
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def scraped(port: int) -> Iterator[subprocess.Popen[bytes]]:
    scraper = subprocess.Popen([sys.executable, "-c", _SCRAPER, f"http://127.0.0.1:{port}/metrics"])
    try:
        yield scraper
    finally:
        scraper.kill()
        scraper.wait()


@contextmanager
def switched(observed: Callable[[], bool]) -> Iterator[None]:
    """Live table, phases and findings, which no key switches off, work while `observed` says so."""
    from verl.observe.health import HealthMonitor
    from verl.observe.live import Live

    def when_observed(method: Any, otherwise: Callable[[], Any]) -> Any:
        return lambda self, *args, **options: method(self, *args, **options) if observed() else otherwise()

    live = {name: when_observed(getattr(Live, name), lambda: None) for name in ("set", "add", "observe")}
    with (
        mock.patch.multiple(Live, phase=when_observed(Live.phase, nullcontext), **live),
        mock.patch.object(HealthMonitor, "check", when_observed(HealthMonitor.check, list)),
    ):
        yield


def main(argv: list[str] | None = None) -> int:
    return command("observe", __doc__, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
