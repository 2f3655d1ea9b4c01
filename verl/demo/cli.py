"""`verl demo`: build a tiny model, let it imitate a careless pupil, then let it learn from rewards."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError, VerlError

if TYPE_CHECKING:
    from verl.trainer.main_ppo import RunResult

HOME = Path("checkpoints") / "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, data, shuffling and sampling (default 0)"
    )
    parser.add_argument(
        "--out", type=Path, help=f"a new or empty folder; default: the next free {HOME}/run-N"
    )


def run(args: argparse.Namespace) -> int:
    """The whole demo. Its last line is `demo: held-out accuracy A -> B`."""
    started = time.monotonic()
    out = choose_folder(args.out)

    from verl.demo import show
    from verl.demo.answers import accuracy, answer_with_transformers, read_validation
    from verl.demo.data import write_files
    from verl.demo.model import build_model_folder
    from verl.demo.stages import (
        RL_STEPS,
        SFT_STEPS,
        rl_arguments,
        run_rl,
        run_sft,
        sft_arguments,
        trained_model,
    )
    from verl.runtime import quiet_transformers

    quiet_transformers()
    use_one_thread()
    show.line(
        "A tiny language model learns to answer word problems: no download, a few minutes, two CPU cores."
    )
    show.headline("1  a tiny model and its data")
    parameters = build_model_folder(out / "model", args.seed)
    files = write_files(out / "data", args.seed)
    show.line(
        f"{parameters:,} random weights in {out / 'model'}; problems and demonstrations in {out / 'data'}"
    )

    show.headline("2  imitation: fine-tuning on demonstrations that calculate well and read badly")
    arguments = sft_arguments(out / "model", files, out / "sft", args.seed)
    show.command("verl sft", arguments)
    sft = whole(run_sft(arguments), SFT_STEPS)

    show.headline("3  reinforcement learning: GRPO, a reward of 1 for a right answer")
    arguments = rl_arguments(trained_model(sft), files, out / "grpo", args.seed)
    show.command("verl train", arguments)
    rl = whole(run_rl(arguments), RL_STEPS)

    show.headline("4  what it learned")
    before = read_validation(rl.folder, 0, files.held_out)
    after = read_validation(rl.folder, rl.steps, files.held_out)
    show.samples(before, after)
    show.results(before, after)
    saved = answer_with_transformers(trained_model(rl), [answer.prompt for answer in after])
    different = sum(text != answer.response for text, answer in zip(saved, after, strict=True))
    if different:
        raise VerlError(
            f"the saved model in {trained_model(rl)} answers {different} of {len(after)} held-out problems "
            "differently from the model that was trained: the save or the load is broken"
        )
    show.line(f"the saved model, loaded with transformers, gives the same {len(after)} answers")
    show.places(out, sft.folder, rl.folder, trained_model(rl))
    show.line(f"took {time.monotonic() - started:.0f} s")
    show.line(f"demo: held-out accuracy {accuracy(before):.2f} -> {accuracy(after):.2f}")
    return 0


def whole(result: RunResult, steps: int) -> RunResult:
    """A stage that was stopped by hand ends with a checkpoint; the demo ends with it."""
    if result.steps < steps:
        raise KeyboardInterrupt
    return result


def use_one_thread() -> None:
    """Two threads wait for each other at every small product, which is ruinous where another program holds a core;
    and with one thread sums are added in the same order whatever the number of cores."""
    import torch

    torch.set_num_threads(1)


def choose_folder(wanted: Path | None) -> Path:
    """Make a folder with nothing in it, so that no earlier run is resumed or overwritten."""
    try:
        if wanted is None:
            return _next_free(HOME)
        wanted = wanted.expanduser()
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise ConfigError(f"--out {wanted} is not empty; give a new or empty folder")
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        raise ConfigError(
            f"the demo cannot write to {wanted or HOME}: {error.strerror or error}. Give a folder with --out"
        ) from error


def _next_free(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = home / f"run-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")
