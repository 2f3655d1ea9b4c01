"""What the training loop sees of the roles: batches in, batches or metrics out, wherever the roles run.

Updates are cut into mini-batches here, so that these do not depend on the number of ranks.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.aggregation import batch_counts
from verl.algorithms.registry import Prepare, get_policy_loss_prepare
from verl.algorithms.sessions import Sessions
from verl.config.known import CRITIC_ESTIMATORS, ESTIMATORS, GROUP_LOSSES
from verl.config.parallelism import needs_reference as needs_reference
from verl.data.proto import DataProto
from verl.observe.live import Snapshot
from verl.observe.metrics import Metric, average_metrics
from verl.rollout.base import GenerationSettings
from verl.rollout.sampler import Sampler
from verl.workers.roles import Kept, OnFinish, joined_outputs, rollouts_of
from verl.workers.shard_batch import TOKEN_ROW

if TYPE_CHECKING:
    from verl.agents.runner import ConversationRunner
    from verl.config.schema import PPOConfig
    from verl.rollout.base import RolloutEngine


class WorkerGroup(ABC):
    """The roles of one run."""

    rollout: RolloutEngine

    def __init__(self, cfg: PPOConfig) -> None:
        self.cfg = cfg
        self.policy_version = 0
        self.pad_token_id = 0
        self.agents: ConversationRunner | None = None
        """Set where responses are conversations of several turns."""

    def sampler(self) -> Sampler:
        """A new owner of requests to the rollout engine, driven inside `generating`."""
        if self.agents is None:
            return Sampler(self.rollout)
        return self.agents.sampler(self.rollout)

    @abstractmethod
    def generating(self) -> AbstractContextManager[None]:
        """The rollout engine has its weights and memory inside this block."""

    def generate(
        self, prompts: DataProto, settings: GenerationSettings, on_finish: OnFinish | None = None
    ) -> DataProto:
        """`settings.n` responses for each prompt from the current policy; `on_finish` is called as each finishes."""
        with self.generating():
            samples = self.sampler().collect(prompts, settings, on_finish)
        return rollouts_of(prompts, samples, settings.n, self.pad_token_id)

    @abstractmethod
    def log_probs(self, batch: DataProto, *, with_sum_pi_squared: bool = False) -> DataProto:
        """`old_log_probs` and, where asked, `sum_pi_squared`."""

    @abstractmethod
    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """`ref_log_prob`."""

    @abstractmethod
    def teacher_outputs(self, batch: DataProto) -> DataProto:
        """What the update needs of the teacher (`TEACHER_TENSORS` of `verl.models.distillation`)."""

    @abstractmethod
    def values(self, batch: DataProto) -> DataProto:
        """`values`."""

    @abstractmethod
    def start_log_probs(self, batch: DataProto) -> DataProto:
        """`start_log_prob`: those of the implicit reward model before training."""

    @abstractmethod
    def implicit_rewards(self, batch: DataProto) -> DataProto:
        """`process_rewards` of the implicit reward model; the batch has `start_log_prob`."""

    @abstractmethod
    def train_mini_batch(
        self, role: str, mini: DataProto, prepared: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Metric]:
        """One optimiser step of `role` (actor, critic or implicit_reward) on one mini-batch, over all ranks.
        `prepared`: what the policy loss's `prepare` computed from the mini-batch, a row for each of its rows."""

    @abstractmethod
    def kept_tokens(self) -> list[Kept]:
        """What the ranks kept in an update with `keep_tokens` (`TokenOutputs.take`)."""

    @abstractmethod
    def refresh_reference(self) -> None:
        """The reference policy becomes the actor as it is now."""

    @abstractmethod
    def sync_weights(self) -> dict[str, float]:
        """Let the rollout engine generate from the actor's current weights, as `policy_version`. Returns what the
        engine reports about them; over several engines, the worst."""

    @abstractmethod
    def profile(self, step: int, run_folder: Path) -> AbstractContextManager[None]:
        """Around step `step`: its traces of torch's profiler, where `trainer.profile` asks for them."""

    @abstractmethod
    def checkpoint_parts(self) -> dict[str, Any]:
        """The engines whose state a checkpoint holds, by name (actor, critic, implicit_reward)."""

    def live_snapshots(self) -> list[Snapshot]:
        """The newest live numbers of the other processes; waits a moment at most, and may be called from any thread."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes."""

    def section(self, role: str) -> Any:
        """The config of the engine that works as `role`: under LoRA the reference is the actor's, adapters off."""
        arr = self.cfg.actor_rollout_ref
        ref = arr.ref if arr.model.lora_rank == 0 else arr.actor
        implicit = dict.fromkeys(("implicit_reward", "implicit_reward_start"), self.cfg.implicit_reward)
        return {
            "actor": arr.actor,
            "ref": ref,
            "teacher": arr.teacher,
            "critic": self.cfg.critic,
            **implicit,
        }[role]

    def update(
        self, role: str, batch: DataProto, *, sync: bool = True, keep_tokens: bool = False
    ) -> dict[str, float]:
        """Train `role` (actor, critic or implicit_reward) on the batch; with `sync` the rollout engine then has the
        actor's new weights. `keep_tokens`: `token_outputs` will be asked for."""
        section = self.section(role)
        prepare, together = None, 1
        if role == "actor":
            prepare = get_policy_loss_prepare(section.policy_loss.loss_mode)
            if section.policy_loss.loss_mode in GROUP_LOSSES:
                together = responses_per_prompt(self.cfg)
        size = section.ppo_mini_batch_size * responses_per_prompt(self.cfg)
        seed = self.cfg.data.seed + self.policy_version
        steps: list[dict[str, Metric]] = []
        for number, mini in enumerate(
            mini_batches(batch, size, section.ppo_epochs, seed=seed, together=together, numbered=keep_tokens)
        ):
            if mini.meta_info["batch_num_tokens"] == 0:
                continue
            prepared = None
            if prepare is not None:
                prepared = self.prepared(mini, prepare, number, unchanged=not steps)
            steps.append(self.train_mini_batch(role, mini, prepared))
        metrics = average_metrics(steps)
        if role == "actor":
            self.policy_version += 1
            if sync:
                metrics |= self.sync_weights()
        return metrics

    def token_outputs(self, batch: DataProto) -> Callable[[], dict[str, torch.Tensor] | None]:
        """A call that waits for `log_probs` and `entropy` [B, T] of the actor in the first pass over each row of the
        last update, which was on `batch` and with `keep_tokens`; 0 where a token was not trained, NaN in rows that were
        left out."""
        kept, rows = self.kept_tokens(), len(batch)
        return lambda: joined_outputs([part() for part in kept], rows)

    def prepared(
        self, mini: DataProto, prepare: Prepare, number: int, *, unchanged: bool = False
    ) -> dict[str, torch.Tensor]:
        """What a loss chooses by comparing tokens across the mini-batch, before that is split into micro-batches.
        `unchanged`: no step was taken since the batch was made."""
        actor = self.cfg.actor_rollout_ref.actor
        parameters = inspect.signature(prepare).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        offered: dict[str, Any] = {
            "advantages": mini.batch["advantages"],
            "response_mask": mini.batch["response_mask"],
            "config": actor,
            "batch": mini,
        }
        if takes_all or "log_prob" in parameters or "old_log_prob" in parameters:
            if unchanged and mini.meta_info.get("old_log_probs_version") == self.policy_version:
                offered["log_prob"] = mini.batch["old_log_probs"]
            else:
                offered["log_prob"] = self.log_probs(mini).batch["old_log_probs"]
            offered["old_log_prob"] = mini.batch.get("old_log_probs", offered["log_prob"])
        # A seed per mini-batch instead of a generator's state: a resumed run draws the same tokens.
        key = [actor.policy_loss.seed, self.policy_version, number]
        offered["generator"] = torch.Generator().manual_seed(
            int(np.random.SeedSequence(key).generate_state(1)[0])
        )
        return dict(prepare(**{name: offered[name] for name in offered if takes_all or name in parameters}))


def sessions_of(batch: DataProto) -> Sessions:
    """The conversations of the batch: one per row, or several rows each where it has the column `session`."""
    return Sessions(batch.non_tensor_batch.get("session"), len(batch))


def mini_batches(
    batch: DataProto, size: int, epochs: int, *, seed: int, together: int = 1, numbered: bool = False
) -> Iterator[DataProto]:
    """`epochs` passes over `batch` in mini-batches of `size` sequences, each with its own denominators.

    The first pass keeps the order (groups stay together); later ones are shuffled, with `together` the sequences of a
    prompt stay neighbours. Rows that are turns of one
    conversation are one sequence: they stay together and count once, and `sequence_num_tokens` [B] has the policy
    tokens of all of them. `numbered`: those of the first pass have `TOKEN_ROW`."""
    generator = torch.Generator().manual_seed(seed)
    rows = sessions_of(batch).rows()
    for epoch in range(epochs):
        order = torch.arange(len(rows))
        if epoch:
            blocks = order.view(-1, together)
            order = blocks[torch.randperm(len(blocks), generator=generator)].flatten()
        for chosen in order.split(size):
            index = torch.cat([rows[number] for number in chosen.tolist()])
            mini = batch[index]
            if numbered and epoch == 0:
                mini.batch[TOKEN_ROW] = index
            mask = mini.batch["response_mask"]
            counts = batch_counts(mask)
            if "session" in mini.non_tensor_batch:
                sessions = sessions_of(mini)
                tokens = sessions.sum(mask.bool().sum(-1))
                mini.batch["sequence_num_tokens"] = tokens[sessions.ids]
                counts["global_batch_size"] = int((tokens > 0).sum())
            mini.meta_info = {**batch.meta_info, **counts}
            yield mini


def needs_critic(cfg: PPOConfig) -> bool:
    if cfg.critic.enable is not None:
        return cfg.critic.enable
    return cfg.algorithm.adv_estimator in CRITIC_ESTIMATORS


def needs_implicit_reward(cfg: PPOConfig) -> bool:
    return cfg.algorithm.adv_estimator == "prime"


def learns_from_data(cfg: PPOConfig) -> bool:
    """Whether the data's answers (`data.response_key`) are rows of the batch."""
    return cfg.actor_rollout_ref.actor.policy_loss.loss_mode == "spin"


def responses_per_prompt(cfg: PPOConfig) -> int:
    """In a batch to train on."""
    return cfg.actor_rollout_ref.rollout.n + learns_from_data(cfg)


def corrects_rollout(cfg: PPOConfig) -> bool:
    """In bypass mode there is nothing to correct: the update's own ratio is taken to the rollout policy."""
    correction = cfg.algorithm.rollout_correction
    return not correction.bypass_mode and bool(correction.rollout_is or correction.rollout_rs)


def needs_old_log_probs(cfg: PPOConfig, sequences: int) -> bool:
    """False when a batch is one optimiser step and nothing before it asks for log-probs: the update's own forward pass
    gives them. A user's own estimator may ask for them and gets them."""
    actor, estimator = cfg.actor_rollout_ref.actor, cfg.algorithm.adv_estimator
    per_update = actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n
    one_update = actor.ppo_epochs == 1 and per_update >= sequences
    by_estimator = estimator == "optimal_token_baseline" or estimator not in ESTIMATORS
    asked = cfg.algorithm.use_kl_in_reward or corrects_rollout(cfg) or learns_from_data(cfg)
    return not one_update or by_estimator or asked
