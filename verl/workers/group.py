"""What the training loop sees of the roles: batches in, batches or metrics out, wherever the roles run.

Updates are cut into mini-batches here, so that these do not depend on the number of ranks.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.aggregation import batch_counts
from verl.algorithms.groups import Trajectories
from verl.config.methods import Prepare, needed_columns, policy_loss
from verl.config.roles import ACTOR, find_role, roles_of, saved_roles, section_of, update_time
from verl.data.proto import DataProto
from verl.observe.live import Snapshot
from verl.observe.metrics import Metric, Timer, average_metrics
from verl.rollout.base import GenerationSettings
from verl.rollout.sampler import Sampler
from verl.workers.roles import PREPARED, TOKEN_ROW, Kept, OnFinish, joined_outputs, rollouts_of

if TYPE_CHECKING:
    from torch import nn

    from verl.agents.runner import ConversationRunner
    from verl.config.schema import PPOConfig
    from verl.rollout.base import RolloutEngine
    from verl.workers.own_loss import LossFunction


class WorkerGroup(ABC):
    """The roles of one run."""

    rollout: RolloutEngine

    def __init__(self, cfg: PPOConfig) -> None:
        self.cfg = cfg
        self.roles = roles_of(cfg)
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
    def forward(self, role: str, batch: DataProto, columns: Sequence[str]) -> DataProto:
        """Columns that `role` provides, by a forward pass over the batch."""

    @abstractmethod
    def train(
        self, role: str, mini: DataProto, *, loss: str | LossFunction | None = None, step: bool = True
    ) -> dict[str, Metric]:
        """Add the gradients of one mini-batch to those of `role`, over all ranks, and with `step` take an optimiser
        step. `loss`: another than the role's own; of the actor a policy loss by its name."""

    @abstractmethod
    def optim_step(self, role: str, lr: float | None = None) -> dict[str, float]:
        """Step with the gradients that were added (`TrainEngine.optimizer_step`)."""

    @abstractmethod
    def zero_grad(self, role: str) -> None:
        """Drop the gradients that were added."""

    @abstractmethod
    def add(self, role: str, model: nn.Module | None = None) -> None:
        """Build one more role: from `model`, or from the path of its model."""

    def has(self, role: str) -> bool:
        """Whether the role is built."""
        return any(built.name == role for built in self.roles)

    @abstractmethod
    def kept_tokens(self) -> list[Kept]:
        """What the ranks kept in an update with `keep_tokens` (`TokenOutputs.take`)."""

    @abstractmethod
    def refresh(self, role: str) -> None:
        """The frozen start that `role` is becomes what it is the start of, as that is now."""

    @abstractmethod
    def sync_weights(self) -> dict[str, float]:
        """Let the rollout engine generate from the actor's current weights, as `policy_version`. Returns what the
        engine reports about them; over several engines, the worst."""

    @abstractmethod
    def profile(self, step: int, run_folder: Path) -> AbstractContextManager[None]:
        """Around step `step`: its traces of torch's profiler, where `trainer.profile` asks for them."""

    def checkpoint_parts(self) -> dict[str, Any]:
        """The engines whose state a checkpoint holds, by the names of their roles; None where ranks have and save them
        (`RayCheckpoints`)."""
        return dict.fromkeys(saved_roles(self.cfg))

    def live_snapshots(self) -> list[Snapshot]:
        """The newest live numbers of the other processes; waits a moment at most, and may be called from any thread."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes."""

    @cached_property
    def columns(self) -> frozenset[str]:
        """What a step needs of the batch and roles provide: for the methods, for other roles, to train these on."""
        others = (column for role in self.roles[1:] for column in (*role.inputs, *role.trains_on))
        return frozenset((*needed_columns(self.cfg), *others))

    def add_columns(self, batch: DataProto, columns: Collection[str], timer: Timer) -> dict[str, float]:
        """Add those of `columns` that are missing, each by a forward pass of the role that provides it. A role may
        learn from the batch before or after that; returns the metrics of it."""
        metrics: dict[str, float] = {}
        for role in self.roles:
            missing = [name for name in role.columns if name in columns and name not in batch.batch]
            if not missing:
                continue
            role.worker_class().prepare(batch, self.section(role.name))
            metrics |= self.add_columns(batch, role.inputs, timer)
            learns = update_time(self.cfg, role) if role.trained else ""
            if learns == "before":
                with timer(f"update_{role.name}"):
                    metrics |= self.update(role.name, batch)
            with timer(role.timer):
                batch.batch |= self.forward(role.name, batch, missing).batch
            if learns == "after":
                with timer(f"update_{role.name}"):
                    metrics |= self.update(role.name, batch)
        return metrics

    def section(self, role: str) -> Any:
        """The config of the engine that works as `role`: under LoRA the reference is the actor's, adapters off."""
        return section_of(self.cfg, find_role(role))

    def update(
        self, role: str, batch: DataProto, *, sync: bool = True, keep_tokens: bool = False
    ) -> dict[str, float]:
        """Train `role` on the batch; with `sync` the rollout engine then has the actor's new weights. `keep_tokens`:
        `token_outputs` will be asked for."""
        section = self.section(role)
        prepare, together = None, 1
        if role == "actor":
            loss = policy_loss(section.policy_loss.loss_mode)
            prepare = loss.prepare
            if loss.whole_groups:
                together = responses_per_prompt(self.cfg)
        size = section.ppo_mini_batch_size * responses_per_prompt(self.cfg)
        seed = self.cfg.data.seed + self.policy_version
        steps: list[dict[str, Metric]] = []
        for number, mini in enumerate(
            mini_batches(batch, size, section.ppo_epochs, seed=seed, together=together, numbered=keep_tokens)
        ):
            if mini.meta_info["batch_num_tokens"] == 0:
                continue
            if prepare is not None:
                self.prepare(mini, prepare, number, unchanged=not steps)
            elif together > 1 and "session" not in mini.non_tensor_batch:  # the loss itself compares them
                mini.meta_info["rows_together"] = together
            steps.append(self.train(role, mini))
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

    def prepare(self, mini: DataProto, prepare: Prepare, number: int, *, unchanged: bool = False) -> None:
        """Add to a mini-batch what a loss chooses by comparing tokens across it, before it is split into micro-batches.
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
                offered["log_prob"] = self.forward(ACTOR, mini, ("old_log_probs",)).batch["old_log_probs"]
            offered["old_log_prob"] = mini.batch.get("old_log_probs", offered["log_prob"])
        # A seed per mini-batch instead of a generator's state: a resumed run draws the same tokens.
        key = [actor.policy_loss.seed, self.policy_version, number]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0])
        offered["generator"] = torch.Generator().manual_seed(seed)
        prepared = prepare(**{name: offered[name] for name in offered if takes_all or name in parameters})
        mini.batch |= {f"{PREPARED}{name}": rows for name, rows in prepared.items()}


def sessions_of(batch: DataProto) -> Trajectories:
    """The conversations of the batch: one per row, or several rows each where it has the column `session`."""
    return Trajectories(batch.non_tensor_batch.get("session"), len(batch))


def mini_batches(
    batch: DataProto, size: int, epochs: int, *, seed: int, together: int = 1, numbered: bool = False
) -> Iterator[DataProto]:
    """`epochs` passes over `batch` in mini-batches of `size` sequences, each with its own denominators.

    The first pass keeps the order (groups stay together); later ones are shuffled, with `together` the sequences of a
    prompt stay neighbours. Rows that are turns of one conversation are one sequence: they stay together and count once,
    and `sequence_num_tokens` [B] has the policy tokens of all of them. `numbered`: those of the first pass have
    `TOKEN_ROW`."""
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


def learns_from_data(cfg: PPOConfig) -> bool:
    """Whether the data's answers (`data.response_key`) are rows of the batch."""
    return "from_data" in needed_columns(cfg)


def responses_per_prompt(cfg: PPOConfig) -> int:
    """In a batch to train on."""
    return cfg.actor_rollout_ref.rollout.n + learns_from_data(cfg)


def needs_old_log_probs(cfg: PPOConfig, sequences: int) -> bool:
    """False when a batch is one optimiser step and nothing before it asks for log-probs: the update's own forward pass
    gives them."""
    actor = cfg.actor_rollout_ref.actor
    per_update = actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n
    one_update = actor.ppo_epochs == 1 and per_update >= sequences
    return not one_update or not {"old_log_probs", "sum_pi_squared"}.isdisjoint(needed_columns(cfg))
