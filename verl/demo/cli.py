"""`verl demo`: build a tiny model, fine-tune it on flawed demonstrations, then train it with rewards."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ConfigError, VerlError

if TYPE_CHECKING:
    from verl.demo.data import DemoFiles
    from verl.trainer.main_ppo import RunResult

HOME = Path("checkpoints") / "demo"
SFT_STEPS = 450
RL_STEPS = 45
REWARD_FILE = Path(__file__).with_name("reward.py")
_EXAMPLE_FILES = {
    "model": "a tiny Llama with random weights and a chat template",
    "sft_model": "the same after fine-tuning: answers in the right form, often wrong",
    "sft_train.parquet, sft_val.parquet": "demonstrations: prompt, response",
    "train.parquet, held_out.parquet": "problems: prompt, reward_model.ground_truth",
    "pairs_train.parquet, pairs_val.parquet": "pairs: prompt, chosen, rejected",
    "reward.py": "1 for a right answer, else 0",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    seed_help = "of weights, data, shuffling and sampling (default 0)"
    parser.add_argument("--seed", type=int, default=0, help=seed_help)
    out_help = f"a new or empty folder; default: the next free {HOME}/run-N"
    parser.add_argument("--out", type=Path, help=out_help)
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="only write the demo's data, its model before and after fine-tuning and its reward function, which the "
        "examples start from",
    )


def run(args: argparse.Namespace) -> int:
    """The whole demo. Its last line is `demo: held-out accuracy A -> B`."""
    if args.files is not None:
        return write_example_files(args.files, args.seed)
    started = time.monotonic()
    out = choose_folder(args.out)

    from verl.config.load import load_ppo_config, load_sft_config
    from verl.demo import show
    from verl.demo.data import write_files
    from verl.demo.model import build_model_folder
    from verl.observe.console import show_lines
    from verl.trainer import main_ppo, sft_trainer
    from verl.trainer.setup import places

    _prepare_libraries()
    show.line(
        "A tiny language model learns to answer word problems: no download, a few minutes, two CPU cores."
    )
    show.headline("1  a tiny model and its data")
    parameters = build_model_folder(out / "model", args.seed)
    files = write_files(out / "data", args.seed)
    reward = Path(shutil.copy(REWARD_FILE, out / "reward.py"))
    written = f"{parameters:,} random weights in {out / 'model'}"
    show.line(f"{written}; problems and demonstrations in {out / 'data'}")

    show.headline("2  imitation: fine-tuning on demonstrations that calculate well and read badly")
    arguments = sft_arguments(out / "model", files, out / "sft", args.seed)
    show.command("verl sft", arguments)
    sft = require_finished(sft_trainer.run(load_sft_config(arguments)), SFT_STEPS)

    show.headline("3  reinforcement learning: GRPO, a reward of 1 for a right answer")
    arguments = rl_arguments(trained_model(sft), files, out / "grpo", args.seed, reward)
    show.command("verl train", arguments)
    rl = require_finished(main_ppo.run(load_ppo_config(arguments)), RL_STEPS)

    show.headline("4  what it learned")
    before = show.read_validation(rl.folder, 0, files.held_out)
    after = show.read_validation(rl.folder, rl.steps, files.held_out)
    show.samples(before, after)
    show.results(before, after)
    saved = show.answer_with_transformers(trained_model(rl), [answer.prompt for answer in after])
    different = sum(text != answer.response for text, answer in zip(saved, after, strict=True))
    if different:
        raise VerlError(
            f"the saved model in {trained_model(rl)} answers {different} of {len(after)} held-out problems "
            "differently from the trained one: saving or loading is broken"
        )
    show.line(f"the saved model, loaded with transformers, gives the same {len(after)} answers")
    show_lines([*places(rl.folder), ("everything", str(out))])
    show.next_steps(out, out / "grpo")
    show.line(f"took {time.monotonic() - started:.0f} s")
    show.line(f"demo: held-out accuracy {show.accuracy(before):.2f} -> {show.accuracy(after):.2f}")
    return 0


def write_example_files(wanted: Path, seed: int) -> int:
    """What the examples and the pages of the documentation start from, in one folder."""
    out = choose_folder(wanted, "--files")

    from verl.config.load import load_sft_config
    from verl.demo.data import write_files, write_pairs
    from verl.demo.model import build_model_folder
    from verl.demo.show import line
    from verl.trainer import sft_trainer

    _prepare_libraries()
    build_model_folder(out / "model", seed)
    files = write_files(out, seed)
    write_pairs(out, seed)
    shutil.copy(REWARD_FILE, out / "reward.py")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        arguments = sft_arguments(out / "model", files, Path(folder) / "sft", seed)
        sft = require_finished(sft_trainer.run(load_sft_config(arguments)), SFT_STEPS)
        trained_model(sft).rename(out / "sft_model")
    for name, about in _EXAMPLE_FILES.items():
        line(f"  {name:40}  {about}")
    return 0


def sft_arguments(model: Path, files: DemoFiles, folder: Path, seed: int) -> list[str]:
    """For `verl sft`."""
    return [
        f"model.path={model}",
        f"data.train_files={files.demonstrations}",
        f"data.val_files={files.demonstrations_val}",
        "data.train_batch_size=64",
        "data.max_length=64",
        "optim.lr=3e-3",
        "optim.lr_scheduler_type=linear",
        "optim.min_lr_ratio=0.1",
        "optim.lr_warmup_steps=10",
        f"trainer.total_training_steps={SFT_STEPS}",
        *_run_arguments("sft", folder, seed),
    ]


def rl_arguments(
    model: Path, files: DemoFiles, folder: Path, seed: int, reward: Path = REWARD_FILE
) -> list[str]:
    """For `verl train`."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={files.train}",
        f"data.val_files={files.held_out}",
        "data.train_batch_size=64",
        "data.max_prompt_length=48",
        "data.max_response_length=20",
        f"reward.custom_reward_function.path={reward}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        f"trainer.total_training_steps={RL_STEPS}",
        "trainer.test_freq=15",
        *_run_arguments("grpo", folder, seed),
    ]


def _run_arguments(name: str, folder: Path, seed: int) -> list[str]:
    return [
        "trainer.project_name=demo",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder}",
        f"trainer.seed={seed}",
        "trainer.device=cpu",
        "trainer.logger=[demo]",
        "trainer.plugins=[verl.demo.show]",
    ]


def trained_model(result: RunResult) -> Path:
    """The Hugging Face folder a finished run leaves."""
    return result.folder / f"global_step_{result.steps}" / "actor" / "huggingface"


def require_finished(result: RunResult, steps: int) -> RunResult:
    """A stage that was stopped by hand ends with a checkpoint; the demo ends with it."""
    if result.steps < steps:
        raise KeyboardInterrupt
    return result


def _prepare_libraries() -> None:
    """Use one thread: threads that wait for each other at every small product are slow on busy cores, and one thread
    gives the same sums on any number of cores."""
    import torch

    from verl.runtime import quiet_transformers

    quiet_transformers()
    torch.set_num_threads(1)


def choose_folder(wanted: Path | None, flag: str = "--out") -> Path:
    """Make a folder with nothing in it, so that no earlier run is resumed or overwritten."""
    try:
        if wanted is None:
            HOME.mkdir(parents=True, exist_ok=True)
            return _next_free(HOME)
        wanted = wanted.expanduser()
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise ConfigError(f"{flag} {wanted} is not empty; give a new or empty folder")
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError as error:
        raise ConfigError(
            f"the demo cannot write to {wanted or HOME}: {error.strerror or error}. Give a folder with {flag}"
        ) from error


def _next_free(home: Path) -> Path:
    number = 1
    while True:
        try:
            (home / f"run-{number}").mkdir()
            return home / f"run-{number}"
        except FileExistsError:
            number += 1
