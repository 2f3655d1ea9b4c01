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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from verl.algorithms.aggregation import batch_counts
from verl.algorithms.groups import Trajectories
from verl.algorithms.rollout_correction import mean_bypass_weight
from verl.config.methods import Prepare, needed_columns, policy_loss, skips_zero_advantage
from verl.config.roles import ACTOR, find_role, roles_of, saved_roles, section_of, update_time
from verl.data.proto import DataProto
from verl.observe.live import Snapshot
from verl.observe.metrics import Metric, Timer, average_metrics
from verl.rollout.base import GenerationSettings
from verl.rollout.sampler import Sampler
from verl.workers.roles import (
    EXACT_TOKENS,
    PREPARED,
    ROW_WEIGHT,
    TOKEN_ROW,
    WEIGHT_MEAN,
    Kept,
    OnFinish,
    RolloutGap,
    joined_outputs,
    rollouts_of,
)

if TYPE_CHECKING:
    from torch import nn

    from verl.agents.runner import ConversationRunner
    from verl.config.schema import PPOConfig
    from verl.rollout.base import RolloutEngine
    from verl.workers.own_loss import LossFunction


_ROWS_PER_SAMPLED = 32
_FEWEST_SAMPLED = 8
"""Of the rows without influence one in so many is computed all the same, and at least so many."""
_LATER_GAP = "rollout_gap_of_later_mini_batches"
"""In `meta_info` from `prepare_update` to `update`: only the rows of later mini-batches have old log-probs; the first
mini-batch's own forward pass gives its. The metrics of the rollout gap of the later ones."""


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
        self._kept: list[Kept] = []
        """Of the last update, besides what the ranks still have."""

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
    def profile(self, step: int, run_folder: Path) -> AbstractContextManager[dict[str, float]]:
        """Around step `step`: its traces of torch's profiler, where `trainer.profile` asks for them. What it gives
        has what they measured, once the step has ended."""

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

    def prepare_update(self, batch: DataProto, timer: Timer) -> None:
        """Add what the actor's update of a batch with advantages computes beforehand: `ROW_WEIGHT`, where rows without
        influence are left out, and the old log-probs of those rows that the policy has moved on from when their
        mini-batch comes."""
        tensors, mask = batch.batch, batch.batch["response_mask"]
        computed = mask.any(-1)
        if skips_zero_advantage(self.cfg):
            seed = np.random.SeedSequence([self.cfg.data.seed, self.policy_version]).generate_state(1)[0]
            tensors[ROW_WEIGHT] = row_weights(tensors["advantages"], mask, int(seed))
            computed &= tensors[ROW_WEIGHT] > 0
        sessions = sessions_of(batch)
        if "old_log_probs" in tensors or old_log_probs_pass(self.cfg, sessions.count) != "later":
            return
        actor = self.section(ACTOR)
        first = sessions.ids < actor.ppo_mini_batch_size * responses_per_prompt(self.cfg)
        later = (computed & ~first).nonzero().squeeze(-1)
        old, gap = torch.zeros(mask.shape), RolloutGap()
        if len(later):
            names = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", ROW_WEIGHT)
            used = [name for name in names if name in tensors]
            rows = batch.select(batch_keys=used, non_tensor_keys=[])[later]
            with timer(find_role(ACTOR).timer):
                old[later] = found = self.forward(ACTOR, rows, ("old_log_probs",)).batch["old_log_probs"]
            if "rollout_log_probs" in tensors:
                drawn, own = rows.batch["rollout_log_probs"], rows.batch["response_mask"]
                gap.add(found, drawn, own, rows.batch.get(ROW_WEIGHT))
        tensors["old_log_probs"] = old
        batch.meta_info[_LATER_GAP] = gap.metrics()

    def update(
        self, role: str, batch: DataProto, *, sync: bool = True, keep_tokens: bool = False
    ) -> dict[str, float]:
        """Train `role` on the batch; with `sync` the rollout engine then has the actor's new weights. `keep_tokens`:
        `token_outputs` will be asked for."""
        section = self.section(role)
        self._kept = []
        prepare, together = None, 1
        if role == "actor":
            loss = policy_loss(section.policy_loss.loss_mode)
            prepare = loss.prepare
            if loss.whole_groups:
                together = responses_per_prompt(self.cfg)
        size = section.ppo_mini_batch_size * responses_per_prompt(self.cfg)
        seed = self.cfg.data.seed + self.policy_version
        steps: list[dict[str, Metric]] = []
        later_gap = batch.meta_info.pop(_LATER_GAP, None) if role == ACTOR else None
        for number, mini in enumerate(
            mini_batches(batch, size, section.ppo_epochs, seed=seed, together=together, numbered=True)
        ):
            if mini.meta_info["batch_num_tokens"] == 0:
                continue
            own_old = later_gap is not None and number == 0
            if own_old:
                del mini.batch["old_log_probs"]
            if not keep_tokens and not (own_old and section.ppo_epochs > 1):
                mini.batch.pop(TOKEN_ROW, None)
            if role == ACTOR and self.cfg.algorithm.rollout_correction.normalises_updates:
                mini.meta_info[WEIGHT_MEAN] = self._mean_weight(mini)
            if role == ACTOR and self.cfg.trainer.exact and not steps:
                mini.batch[EXACT_TOKENS] = self._drawn_now(mini)
            if prepare is not None:
                self.prepare(mini, prepare, number, unchanged=not steps)
            elif together > 1 and "session" not in mini.non_tensor_batch:  # the loss itself compares them
                mini.meta_info["rows_together"] = together
            if role == ACTOR and ROW_WEIGHT in mini.batch:
                mini = computed_rows(mini)
            steps.append(self.train(role, mini))
            if own_old and section.ppo_epochs > 1:
                self._take_old_log_probs(batch, mini.batch[TOKEN_ROW])
        metrics = average_metrics([later_gap or {}, *steps])
        if later_gap is not None:
            del batch.batch["old_log_probs"]  # not those of every row
        if role == "actor":
            if ROW_WEIGHT in batch.batch:
                metrics["training/rows_skipped"] = float((batch.batch[ROW_WEIGHT] == 0).sum())
            self.policy_version += 1
            if sync:
                metrics |= self.sync_weights()
        return metrics

    def _mean_weight(self, mini: DataProto) -> float:
        """Of the importance weights of a mini-batch, by the policy of now: a pass of its own, because every
        micro-batch divides by it."""
        log_probs = self.forward(ACTOR, mini, ("old_log_probs",)).batch["old_log_probs"]
        drawn, mask = mini.batch["rollout_log_probs"], mini.batch["response_mask"]
        return mean_bypass_weight(log_probs, drawn, mask, self.cfg.algorithm.rollout_correction)

    def token_outputs(self, batch: DataProto) -> Callable[[], dict[str, torch.Tensor] | None]:
        """A call that waits for `log_probs` and `entropy` [B, T] of the actor in the first pass over each row of the
        last update, which was on `batch` and with `keep_tokens`; 0 where a token was not trained, NaN in rows that were
        left out."""
        kept, rows = [*self._kept, *self.kept_tokens()], len(batch)
        return lambda: joined_outputs([part() for part in kept], rows)

    def _drawn_now(self, mini: DataProto) -> torch.Tensor:
        """[B, T]: the tokens drawn by the weights of now, with keys and values of now; without asynchronous modes all,
        whatever version they say."""
        if self.cfg.trainer.async_training.mode == "off":
            return torch.ones_like(mini.batch["response_mask"], dtype=torch.bool)
        now = mini.batch["token_versions"] == self.policy_version
        if self.cfg.actor_rollout_ref.rollout.recompute_kv_cache:
            return now
        return now & (now | ~mini.batch["response_mask"].bool()).all(-1, keepdim=True)

    def _take_old_log_probs(self, batch: DataProto, rows: torch.Tensor) -> None:
        """Those of the first mini-batch, which later passes over its rows compare with."""
        parts = self.kept_tokens()
        self._kept += parts
        found = joined_outputs([part() for part in parts], len(batch))
        assert found is not None
        old = batch.batch["old_log_probs"].clone()
        old[rows] = found["log_probs"][rows]
        batch.batch["old_log_probs"] = old

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
    sequences = sessions_of(batch)
    for epoch in range(epochs):
        order = torch.arange(sequences.count)
        if epoch:
            blocks = order.view(-1, together)
            order = blocks[torch.randperm(len(blocks), generator=generator)].flatten()
        for chosen in order.split(size) if len(order) else ():
            index = sequences.rows_of(chosen)
            start, end = int(index[0]), int(index[-1]) + 1
            in_order = end - start == len(index) and torch.equal(index, torch.arange(start, end))
            mini = batch[start:end] if in_order else batch[index]  # views where possible
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


def old_log_probs_pass(cfg: PPOConfig, sequences: int) -> Literal["none", "later", "all"]:
    """The rows of a batch whose old log-probs need a pass of their own: the forward pass of the first optimiser step
    gives those of its own rows. `all` where something before the update asks for them."""
    actor = cfg.actor_rollout_ref.actor
    if not {"old_log_probs", "sum_pi_squared"}.isdisjoint(needed_columns(cfg)):
        return "all"
    if actor.ppo_epochs == 1 and actor.ppo_mini_batch_size * responses_per_prompt(cfg) >= sequences:
        return "none"
    reads_all = policy_loss(actor.policy_loss.loss_mode).prepare is not None or learns_from_data(cfg)
    return "all" if reads_all else "later"


def row_weights(advantages: torch.Tensor, response_mask: torch.Tensor, seed: int) -> torch.Tensor:
    """`ROW_WEIGHT` [B]: 1 for rows with an advantage on a policy token. A random sample of the others stands for all of
    them that have tokens, so that means over tokens estimate those over all rows; the rest has weight 0."""
    mask = response_mask.bool()
    tokens, counts = mask.sum(-1), ((advantages != 0) & mask).any(-1)
    without = (~counts & (tokens > 0)).nonzero().squeeze(-1)
    order = torch.randperm(len(without), generator=torch.Generator().manual_seed(seed))
    chosen = without[order[: max(len(without) // _ROWS_PER_SAMPLED, _FEWEST_SAMPLED)]]
    weights = counts.float()
    if len(chosen):
        weights[chosen] = float(tokens[without].sum()) / float(tokens[chosen].sum())
    return weights


def computed_rows(mini: DataProto) -> DataProto:
    """The rows of a mini-batch with a weight; where there is none, one row, whose gradient is zero: the optimiser steps
    as it would have."""
    rows = (mini.batch[ROW_WEIGHT] > 0).nonzero().squeeze(-1)
    if not len(rows):
        rows = mini.batch["response_mask"].any(-1).nonzero()[0]
    return mini[rows]
