"""The demo's two stages as command lines: what `verl sft` and `verl train` are given, word for word.

What always holds: the stages run the code of the commands themselves, from the parsing of these arguments on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.demo.data import Files

if TYPE_CHECKING:
    from verl.trainer.main_ppo import RunResult

SFT_STEPS = 450
RL_STEPS = 45
REWARD_FILE = Path(__file__).with_name("reward.py")
LOGGER = "demo"


def sft_arguments(model: Path, files: Files, folder: Path, seed: int) -> list[str]:
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


def rl_arguments(model: Path, files: Files, folder: Path, seed: int) -> list[str]:
    """For `verl train`."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={files.train}",
        f"data.val_files={files.held_out}",
        "data.train_batch_size=64",
        "data.max_prompt_length=48",
        "data.max_response_length=20",
        f"reward.custom_reward_function.path={REWARD_FILE}",
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
        f"trainer.logger=[{LOGGER}]",
        "trainer.plugins=[verl.demo.show]",
    ]


def run_sft(arguments: list[str]) -> RunResult:
    """The body of `verl sft`."""
    from verl.config.load import load_sft_config
    from verl.trainer.sft_trainer import run

    return run(load_sft_config(arguments))


def run_rl(arguments: list[str]) -> RunResult:
    """The body of `verl train`."""
    from verl.config.load import load_ppo_config
    from verl.trainer.main_ppo import run

    return run(load_ppo_config(arguments))


def trained_model(result: RunResult) -> Path:
    """The Hugging Face folder a finished run leaves."""
    return result.folder / f"global_step_{result.steps}" / "actor" / "huggingface"
