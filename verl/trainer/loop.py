"""The training loop, the same for every algorithm, on one process or many. Read `step` top to bottom.

The loop reaches models only through the worker group. Two runs of one config on one machine give the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms import (
    corrects_rollout,
    get_kl_controller,
    rollout_probs_diff_metrics,
    takes_rollout_log_probs,
)
from verl.config.methods import needed_columns
from verl.config.roles import ACTOR, refreshed, update_time
from verl.data.assemble import add_answers, sampled_rows, split_turns
from verl.data.proto import DataProto
from verl.errors import CheckpointError, ToolsLost
from verl.observe.batch_metrics import ModelSize, age_metrics, batch_metrics, step_metrics
from verl.observe.diagnoses import Finding, read_findings
from verl.observe.health import HealthMonitor
from verl.observe.live import live
from verl.observe.metrics import Timer
from verl.observe.token_table import TokenTable
from verl.trainer import advantage
from verl.trainer.experience import DynamicSampling, Experience, SyncExperience, ended_rows
from verl.trainer.setup import Events, resume_note, whole_number
from verl.trainer.validation import sample_rows, validate
from verl.workers.group import learns_from_data, old_log_probs_pass, sessions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl.checkpoint import CheckpointManager
    from verl.config.schema import PPOConfig
    from verl.data.loader import Loader
    from verl.observe.run_folder import RunFolder
    from verl.observe.trackers import FanOut
    from verl.reward.base import RewardManager
    from verl.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

TokenOutputs = Callable[[], Mapping[str, torch.Tensor] | None]
"""Waits for log-probs and entropies of the update's tokens."""
_REWARD_COLUMNS = {"old_log_probs", "sum_pi_squared", "ref_log_prob"}
"""Of roles, needed before the rewards are final."""


@dataclass(eq=False, repr=False)
class RLLoop:
    """Trains a policy: generate, score, estimate advantages, update, and again."""

    cfg: PPOConfig
    _: KW_ONLY
    workers: WorkerGroup
    rewards: InitVar[RewardManager]
    tokenizer: Any
    train_loader: Loader
    val_loader: Loader | None
    run_folder: RunFolder
    tracker: FanOut
    checkpoints: CheckpointManager
    total_steps: int
    model_size: ModelSize | None = None
    batch: DataProto | None = field(default=None, init=False)
    step_number: int = field(default=0, init=False)
    saved_step: int = field(default=0, init=False)
    stop_requested: bool = field(default=False, init=False)
    repeat_to: int | None = field(default=None, init=False)
    """The last step of `verl replay`, which saves nothing."""
    watch: Callable[[DataProto], None] | None = field(default=None, init=False)
    """Sees the batch right before and right after its update (`verl why`)."""
    events: Events = field(default_factory=Events, init=False)

    def __post_init__(self, rewards: RewardManager) -> None:
        cfg, parts = self.cfg, (self.cfg, self.workers, rewards, self.tokenizer, self.train_loader)
        self.experience = build_experience(*parts, total_steps=self.total_steps)
        self.kl_controller = get_kl_controller(cfg.algorithm.kl_ctrl)
        self.health = HealthMonitor(cfg)
        self.generator = torch.Generator().manual_seed(cfg.trainer.seed)

    def fit(self) -> dict[str, float]:
        """Run to the end (or to `request_stop`) and return the last metrics."""
        try:
            return self._fit()
        finally:
            self.experience.close()
            live.record_phases(None)

    def _fit(self) -> dict[str, float]:
        trainer = self.cfg.trainer
        if not trainer.val_only and self.repeat_to is None:
            parts = self.workers.checkpoint_parts()
            self.checkpoints.rehearse(parts, self.state_dict(), tokenizer=self.tokenizer)
        self.resume()
        live.begin_step(self.step_number)
        live.record_phases(self.run_folder.phases_dir / "controller.jsonl")
        found = self.health.at_start(self.step_number)
        last: dict[str, float] = {}
        if trainer.val_only or (trainer.val_before_train and self.step_number == 0):
            last = self.validate()
            if last:
                self.tracker.log(self.step_number, last, found)
                self.events.log(self.step_number, last)
                found = []
        if trainer.val_only:
            return last
        stopping = self.stop_requested
        last_step = self.total_steps if self.repeat_to is None else self.repeat_to
        while self.step_number < last_step and not stopping:
            complete = self.step_number
            self.step_number += 1
            live.begin_step(self.step_number)
            self.events.begin_step(self.step_number)
            try:
                with self.workers.profile(self.step_number, self.run_folder.path) as measured:
                    last = self.step()
                last |= measured
                complete = self.step_number
                asked = self.events.end_step(self.step_number)
                ending = self.step_number == self.total_steps
                if self.due(trainer.test_freq) or ending or asked.evaluate:
                    last |= self.validate()
                asked = self.events.log(self.step_number, last)
            except ToolsLost:
                # Generation cannot continue: save the last step whose update is complete.
                self.step_number = complete
                if self.step_number > self.saved_step:
                    self.save(last)
                    self.checkpoints.wait()
                raise
            found += self.health.check(self.step_number, last, self.batch)
            # Read once: a stop requested after this gets another step, so that the last step has its checkpoint.
            stopping = self.stop_requested or asked.stop
            if self.due(trainer.save_freq) or ending or stopping or asked.save:
                last |= self.save(last, found)
            live.end_step(self.step_number)
            self.tracker.log(self.step_number, last, found)
            found = []
        if self.checkpoints.wait() is not None:
            self.saved_step = self.step_number
        return last

    def step(self) -> dict[str, float]:
        """One training step: a batch of prompts in, better weights out."""
        cfg, timer = self.cfg, Timer()
        with timer("step"):
            batch, metrics = self.collect(timer)
            metrics |= age_metrics(batch, self.workers.policy_version, self.experience.staleness)
            live.set("sample_age", metrics.get("training/age/max", 0.0))
            metrics |= self.workers.add_columns(batch, self.workers.columns, timer)
            with timer("adv"):
                batch, found = self.advantages(batch)
            version = self.workers.policy_version
            if self.watch is not None:
                self.watch(batch)
            updated, outputs = self.train(batch, timer)
            if self.watch is not None:
                self.watch(batch)
            metrics |= found | updated
            if hasattr(self.train_loader, "update"):
                metrics |= self.train_loader.update(batch)
            self.experience.trained(self.step_number)
        for role in self.workers.roles:
            for name in role.columns if role.temporary else ():
                batch.batch.pop(name, None)
        self.batch = ended_rows(sampled_rows(batch))
        self.write_samples(batch, outputs, version)
        return {
            **metrics,
            **batch_metrics(
                self.batch,
                max_response_length=cfg.data.max_response_length,
                max_prompt_length=cfg.data.max_prompt_length,
            ),
            **timer.metrics(),
            **step_metrics(
                batch,
                timer.seconds,
                devices=cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes,
                model=self.model_size,
                updates_per_token=cfg.actor_rollout_ref.actor.ppo_epochs,
            ),
            "training/global_step": self.step_number,
            "training/epoch": self.train_loader.last_epoch,
            "training/epochs_done": self.train_loader.epoch,
        }

    def train(self, batch: DataProto, timer: Timer) -> tuple[dict[str, float], TokenOutputs | None]:
        """Train the roles that learn from advantages, the actor last; with `trainer.token_data`, also a call that waits
        for the numbers of its tokens."""
        cfg, workers = self.cfg, self.workers
        metrics: dict[str, float] = {}
        for role in workers.roles[1:]:
            if role.trained and update_time(cfg, role) == "last":
                with timer(f"update_{role.name}"):
                    metrics |= workers.update(role.name, batch)
        outputs = None
        if self.trains_actor:
            workers.prepare_update(batch, timer)
            with timer("update_actor"):
                keep = cfg.trainer.token_data
                metrics |= workers.update(ACTOR, batch, sync=False, keep_tokens=keep)
                outputs = workers.token_outputs(batch) if keep else None
                metrics |= self.experience.weights_changed(self.step_number)
        for role in workers.roles:
            if self.due(refreshed(cfg, role)):
                with timer("refresh_reference"):
                    workers.refresh(role.name)
        return metrics, outputs

    def write_samples(self, batch: DataProto, outputs: TokenOutputs | None, version: int) -> None:
        """The responses of the step for people, and the numbers of their tokens; the next step does not wait for it."""
        step, folder, tokenizer = self.step_number, self.run_folder, self.tokenizer

        def tokens() -> None:
            TokenTable.of(batch, tokenizer, outputs and outputs(), version).write(folder.tokens_file(step))

        def samples() -> None:
            folder.write_rollouts(step, sample_rows(sampled_rows(batch), tokenizer))

        folder.in_background(*([tokens] if self.cfg.trainer.token_data else []), samples)

    def collect(self, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        """Scored responses with final rewards; with dynamic sampling, as many rounds as fill the batch."""
        if not self.cfg.algorithm.filter_groups.enable:
            batch, metrics = self.experience.collect(self.step_number, timer)
            batch = self.rows_to_train_on(batch)
            self.final_rewards(batch, timer)
            return batch, metrics
        sampling = DynamicSampling(self.cfg, self.tokenizer.pad_token_id or 0)
        full = False
        while not full:
            batch, metrics = self.experience.collect(self.step_number, timer)
            if sampling.needs_final_rewards:
                self.final_rewards(batch, timer)
            full = sampling.add(batch, metrics)
        batch, metrics = sampling.result()
        if not sampling.needs_final_rewards:
            batch = self.rows_to_train_on(batch)
            self.final_rewards(batch, timer)
        return batch, metrics

    def rows_to_train_on(self, batch: DataProto) -> DataProto:
        """With `multi_turn.history=split`, one row for each of the model's turns; with SPIN one more row for the data's
        answer to each prompt; otherwise the batch as it is."""
        if learns_from_data(self.cfg):
            n = self.cfg.actor_rollout_ref.rollout.n
            return add_answers(batch, n, self.tokenizer.pad_token_id or 0)
        if not self.cfg.actor_rollout_ref.rollout.multi_turn.splits:
            return batch
        return split_turns(batch, self.tokenizer.pad_token_id or 0)

    def final_rewards(self, batch: DataProto, timer: Timer) -> None:
        """Add the log-probs the step needs and `token_level_rewards`: the scores, with the KL penalty if configured."""
        cfg, tensors = self.cfg, batch.batch
        rollout = cfg.actor_rollout_ref.rollout
        batch.meta_info["temperature"] = 1.0 if rollout.raw_log_probs else rollout.temperature
        columns = self.workers.columns & _REWARD_COLUMNS
        if takes_rollout_log_probs(cfg):
            tensors["old_log_probs"] = tensors["rollout_log_probs"]
        else:
            rows = old_log_probs_pass(cfg, sessions_of(batch).count)
            if rows == "all" or (rows == "later" and not self.trains_actor):
                columns |= {"old_log_probs"}
        if "old_log_probs" in columns - tensors.keys():
            batch.meta_info["old_log_probs_version"] = self.workers.policy_version
        self.workers.add_columns(batch, columns, timer)
        tensors["token_level_rewards"] = tensors["token_level_scores"]
        if cfg.algorithm.use_kl_in_reward:
            coef = self.kl_controller.value
            tensors["token_level_rewards"], kl = advantage.kl_in_reward(batch, cfg.algorithm, coef)
            batch.non_tensor_batch["kl"] = np.full(len(batch), kl, dtype=object)

    def advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Advantages and returns, then masking (rejection, overlong) and resampling."""
        algorithm = self.cfg.algorithm
        metrics: dict[str, float] = {}
        if algorithm.use_kl_in_reward:
            kl = float(np.mean(batch.non_tensor_batch["kl"]))
            metrics |= {"actor/kl": kl, "actor/kl_coef": self.kl_controller.value}
            self.kl_controller.update(kl, sessions_of(batch).count)
        advantage.add_data_columns(batch, needed_columns(self.cfg))
        metrics |= advantage.estimate(batch, algorithm)
        mask = batch.batch["response_mask"]
        if "old_log_probs" in batch.batch and not takes_rollout_log_probs(self.cfg):
            drawn = sampled_rows(batch).batch
            metrics |= rollout_probs_diff_metrics(
                drawn["old_log_probs"], drawn["rollout_log_probs"], drawn["response_mask"]
            )
        if corrects_rollout(self.cfg):
            mask, found = advantage.correct_rollout(batch, algorithm)
            metrics |= found
        if algorithm.filter_overlong_responses:
            mask = advantage.drop_overlong(batch, mask)
        batch.batch["response_mask"] = mask
        metrics["training/masked_responses"] = float((sessions_of(batch).sum(mask.sum(-1)) == 0).sum())
        if algorithm.use_pf_ppo:
            batch = advantage.resample(batch, algorithm, self.generator)
        return batch, metrics

    @property
    def trains_actor(self) -> bool:
        """Whether this step does; else only the critic learns."""
        return self.step_number > self.cfg.trainer.critic_warmup

    def due(self, frequency: int) -> bool:
        return frequency > 0 and self.step_number % frequency == 0

    def validate(self) -> dict[str, float]:
        if self.val_loader is None:
            return {}
        timer = Timer()
        self.val_loader.restart()  # the same draws every time, and after resuming too
        with timer("testing"):
            metrics, rows = validate(self.cfg, self.experience, self.val_loader, self.tokenizer)
        self.run_folder.write_validation(self.step_number, rows)
        if self.cfg.trainer.log_val_generations:
            self.tracker.log_samples(self.step_number, rows[: self.cfg.trainer.log_val_generations])
        return metrics | timer.metrics()

    def save(self, metrics: dict[str, float], findings: Sequence[Finding] = ()) -> dict[str, float]:
        if self.repeat_to is not None:
            return {}
        timer = Timer()
        self.run_folder.wait()  # or a run resumed from this checkpoint would not have the samples of its step
        with timer("save_checkpoint"):
            saved = self.checkpoints.save(
                self.step_number,
                self.workers.checkpoint_parts(),
                {
                    **self.state_dict(),
                    "metrics": metrics,
                    "findings": [finding.to_row() for finding in findings],
                },
                tokenizer=self.tokenizer,
                metrics=metrics,
            )
        if saved is not None:
            self.saved_step = self.step_number
            self.events.save(self.step_number)
        return timer.metrics()

    def resume(self) -> None:
        state = self.checkpoints.resume(self.workers.checkpoint_parts(), self.load_state_dict)
        if state is None and not self.cfg.trainer.val_only:
            self.run_folder.restart()
        if state is not None:
            self.workers.sync_weights()
            self.saved_step = self.step_number
            if self.cfg.trainer.val_only:
                pass  # writes no steps, so keeps later ones in the run folder
            elif not self.run_folder.rewind(self.step_number) and "metrics" in state:
                # The run ended between the checkpoint and its line in the metrics.
                self.tracker.log(self.step_number, state["metrics"], read_findings(state.get("findings")))
            # val_only runs even after the last step.
            left = self.step_number + 1 if self.cfg.trainer.val_only else self.total_steps
            self.tracker.note(resume_note(self.step_number, left))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step_number,
            "policy_version": self.workers.policy_version,
            **self.experience.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "health": self.health.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`; if it is invalid, nothing changes."""
        before = self.state_dict()
        try:
            self._take(state)
        except Exception:
            self._take(before)
            raise

    def _take(self, state: dict[str, Any]) -> None:
        self.step_number = whole_number(state, "step")
        self.workers.policy_version = whole_number(state, "policy_version")
        if not self.cfg.trainer.val_only:  # which may have no training data
            self.experience.load_state_dict(state)
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.health.load_state_dict(state["health"])
        self.generator.set_state(state["generator"])
        if not isinstance(state.get("metrics", {}), dict):
            raise CheckpointError("its metrics are no mapping")

    def request_stop(self) -> None:
        """Stop after the current step, with a checkpoint."""
        self.stop_requested = True


def build_experience(*parts: Any, total_steps: int) -> Experience:
    """The source of batches that `trainer.async_training.mode` names; `parts` as `Experience` takes them. Modules of
    asynchronous modes are loaded where one is used."""
    trainer = parts[0].trainer
    mode = trainer.async_training.mode
    if mode == "off" or trainer.val_only:
        return SyncExperience(*parts)
    if mode == "carry_over":
        from verl.trainer.streaming import CarryOverExperience

        return CarryOverExperience(*parts, total_steps=total_steps)
    from verl.trainer.pool_experience import PoolExperience

    return PoolExperience(*parts, total_steps=total_steps)
