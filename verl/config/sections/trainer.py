"""The run: machines, length, validation, checkpoints, logging, what happens when something dies."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.keys import key, section, shared

POOL_ASYNC_MODES = ("one_step_off", "fully_async")  # those in which generation has its own processes
TRACKER_SERVICES = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab")
LOGGERS = ("console", "file", *TRACKER_SERVICES)


@dataclass
class PrometheusConfig:
    """A metrics endpoint for Prometheus."""

    enable: bool = key(False, "serve metrics over HTTP")
    port: int = key(9090, "its port", ge=1, le=65535, used_if=".enable")
    host: str = key("127.0.0.1", "address; 0.0.0.0: open to other machines", used_if=".enable")


@dataclass
class HealthConfig:
    """Bounds beyond which a health rule warns."""

    kl_bound: float = key(1.0, "actor/kl above this is reported", gt=0)
    probs_diff_bound: float = key(0.01, "training/rollout_probs_diff_mean above this is reported", gt=0)
    max_skipped_steps: int = key(3, "non-finite updates in a row after which the run stops", ge=1)


@dataclass
class ProfileConfig:
    """Traces of torch's profiler."""

    steps: list[int] = key(
        [], "training steps to profile, e.g. [2,3]; traces go to profile/ in the run folder", ge=1
    )
    ranks: list[int] = key([0], "ranks to profile", ge=0, used_if=".steps")


@dataclass
class PlacementConfig:
    """Where a command runs, the same for training and generating."""

    n_gpus_per_node: int = key(1, "GPUs per node (with device=cpu: processes)", ge=1)
    nnodes: int = key(1, "nodes", ge=1)
    device: str = key(
        "auto", "auto: a GPU if there is one, always with several processes", known=("auto", "cpu", "cuda")
    )
    seed: int = key(1, "seed of everything random")
    watchdog_s: float = key(
        600.0, "seconds without progress until a worker counts as dead", gt=0, used_if="@workers"
    )
    plugins: list[str] = key([], "modules or files to import first (register your own things there)")


@dataclass
class BaseTrainerConfig(PlacementConfig):
    """What reinforcement learning and supervised fine-tuning share."""

    total_epochs: int = key(1, "passes over the training data", ge=1)
    total_training_steps: int | None = key(None, "stop after this many steps; default: all epochs", ge=1)
    save_freq: int = key(-1, "steps between checkpoints; -1: at the end", ge=-1)
    test_freq: int = key(-1, "steps between validations; -1: at the end", ge=-1, used_if="data.val_files")
    logger: list[str] = key(["console"], "metrics go there, too", known=LOGGERS, plugin="tracker")
    project_name: str = key("verl", "first part of the run folder's name")
    experiment_name: str = key("default", "second part of the run folder's name")
    default_local_dir: str = key("", "default: checkpoints/{project_name}/{experiment_name}", path=True)
    resume_mode: str = key(
        "auto", "auto: the newest complete checkpoint", known=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = key(
        None, "checkpoint folder", path=True, used_if=".resume_mode=resume_path"
    )
    max_actor_ckpt_to_keep: int | None = key(None, "number of newest checkpoints to keep; default: all", ge=1)
    keep_best: str | None = key(None, "metric whose best checkpoint is kept, e.g. val-core/gsm8k/acc/mean@1")
    keep_best_mode: str = key("max", "which is better", known=("max", "min"), used_if=".keep_best")
    continue_without_checkpoints: bool = key(
        False, "train on though two checkpoints in a row could not be saved; otherwise the run ends"
    )
    wandb_proxy: str | None = key(None, "HTTP proxy used for wandb only", used_if=".logger=wandb")
    prometheus: PrometheusConfig = section(PrometheusConfig, "metrics endpoint")
    health: HealthConfig = section(HealthConfig, "bounds of the health rules")
    profile: ProfileConfig = section(ProfileConfig, "traces of torch's profiler")
    max_restarts: int = key(0, "restarts after a worker died", ge=0, used_if="@workers")
    restart_wait_s: float = key(
        120.0, "seconds a restart waits for a lost node before it takes fewer", ge=0, used_if=".max_restarts"
    )

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        yield from self.profile_errors(name, self.total_training_steps)
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            yield (
                f"'{name}.resume_mode' is resume_path; it needs '{name}.resume_from_path', a global_step_N folder"
            )

    def profile_errors(self, name: str, total_steps: int | None) -> list[str]:
        """Profiled ranks and steps that the run does not have; `total_steps`: None while it is not known."""
        profile, ranks = self.profile, self.n_gpus_per_node * self.nnodes
        errors = []
        if profile.steps and not profile.ranks:
            errors.append(f"'{name}.profile.steps' is {profile.steps}, but '{name}.profile.ranks' is empty")
        if profile.steps and (absent := [rank for rank in profile.ranks if rank >= ranks]):
            errors.append(
                f"'{name}.profile.ranks' has {', '.join(map(str, absent))}; this run has {ranks} "
                f"({name}.n_gpus_per_node={self.n_gpus_per_node} x {name}.nnodes={self.nnodes}), counted from 0"
            )
        if total_steps is not None and (absent := [step for step in profile.steps if step > total_steps]):
            errors.append(
                f"'{name}.profile.steps' has {', '.join(map(str, absent))}; this run has steps 1 to {total_steps}"
            )
        return errors


@dataclass
class OfflineTrainerConfig(BaseTrainerConfig):
    """A run that trains on given answers."""

    save_freq: int = shared(
        BaseTrainerConfig, "save_freq", "steps between checkpoints; -1: at the end, 0: after each epoch"
    )
    test_freq: int = shared(
        BaseTrainerConfig, "test_freq", "steps between validations; -1: at the end, 0: after each epoch"
    )
    keep_best: str | None = shared(
        BaseTrainerConfig,
        "keep_best",
        "metric whose best checkpoint is kept; default: val/loss where checkpoints are validated",
    )
    keep_best_mode: str = shared(
        BaseTrainerConfig, "keep_best_mode", "which is better; default: min of losses and perplexities"
    )
    early_stop_patience: int | None = key(
        None,
        "end after so many validations in a row without a better keep_best, and save whenever it is better; without "
        "save_freq only the best and the newest are kept",
        ge=1,
    )


@dataclass
class AsyncTrainingConfig:
    """Generating ahead of training, from weights that may be some steps old."""

    mode: str = key(
        "off",
        "carry_over: unfinished responses continue in the next step; one_step_off: the next batch is generated while "
        "one trains; fully_async: generated all the time, by weights that are replaced meanwhile",
        known=("off", "carry_over", "one_step_off", "fully_async"),
    )
    staleness: int | None = key(
        None,
        "steps by which the weights that start a response may be older than those it trains; default: 1",
        ge=0,
        used_if=".mode!=off",
    )
    window: int | None = key(
        None,
        "a step takes finished prompts from so many of the oldest, 1: in order; default: all, with one_step_off 1",
        ge=1,
        used_if=".mode=carry_over|fully_async",
    )
    sync_every: int = key(1, "steps after which the pool gets new weights", ge=1, used_if=".mode=fully_async")
    over_sampling: float = key(
        1.0, "prompts in progress beyond a batch, as a share of it", gt=0, used_if=".mode=carry_over"
    )


@dataclass
class TrainerConfig(BaseTrainerConfig):
    """A reinforcement-learning run."""

    val_before_train: bool = key(True, "validate once before the first step", used_if="data.val_files")
    val_only: bool = key(False, "validate and stop")
    critic_warmup: int = key(0, "first steps in which only the critic learns", ge=0)
    ref_update_freq: int = key(
        -1, "steps after which the reference becomes the current policy; -1: never", ge=-1
    )
    balance_batch: bool = key(True, "give every rank about the same work", used_if="@ranks")
    max_critic_ckpt_to_keep: int | None = key(
        None, "number of newest checkpoints to keep; default: all", ge=1, used_if="critic.enable"
    )
    rollout_data_dir: str | None = key(
        None, "training responses; default: rollouts/ in the run folder", path=True
    )
    validation_data_dir: str | None = key(
        None,
        "validation responses; default: validation/ in the run folder",
        path=True,
        used_if="data.val_files",
    )
    token_data: bool = key(
        True,
        "write log-prob, entropy, ratio, mask and age of every token of the training responses for the viewer",
    )
    log_val_generations: int = key(0, "validation samples for the loggers", ge=0, used_if="data.val_files")
    exact: bool = key(
        False, "sampled and trained log-probs are equal bit for bit, which every step checks: see exact.md"
    )
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, "generating ahead of training")


@dataclass
class RayInitConfig:
    """Arguments of ray.init."""

    num_cpus: int | None = key(None, "CPUs Ray may use; needed under Slurm", ge=1)
    runtime_env: dict[str, Any] = key({}, "Ray's runtime environment")


@dataclass
class RayKwargsConfig:
    """Ray, used when there is more than one process."""

    ray_init: RayInitConfig = section(RayInitConfig, "arguments of ray.init")
    timeline_json_file: str | None = key(None, "file for a timeline that Perfetto opens", path=True)
