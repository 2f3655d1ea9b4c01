"""From prompts to scored responses: generate, score while generating; dynamic sampling.

A response without a score (its reward function failed, or generation was ended early) has an empty response mask and a
separate group: it adds nothing to the loss and does not change the baseline of the others.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.groups import (
    constant_groups,
    dynamic_sampling_failed,
    group_filter_values,
    groups_within,
)
from verl.config.methods import needed_columns
from verl.data.assemble import concat_rollouts
from verl.data.proto import DataProto, object_column
from verl.data.tokenizer import decode_all
from verl.observe.metrics import Timer
from verl.reward.base import UNFINISHED, FailureAccount, RewardManager, RewardResult, RewardSample
from verl.rollout.base import GenerationSettings, Response
from verl.workers.group import WorkerGroup
from verl.workers.roles import greedy_settings, training_settings

if TYPE_CHECKING:
    from verl.agents.conversation import Conversation
    from verl.config.schema import PPOConfig
    from verl.data.loader import Loader

logger = logging.getLogger(__name__)

_COUNTS = ("reward/failed", "reward/calls", "rollout/aborted")
"""Metrics that add up over the rounds of dynamic sampling, like those of tools."""


class Experience(ABC):
    """The source of a step's batch: responses with scores. Has the position in the training data."""

    staleness = 0
    """Steps by which the weights that start a response may be older than those that are trained."""
    first_index = 0
    """Of the reward samples of `score`, where others are outstanding: their numbers must differ."""

    def __init__(
        self, cfg: PPOConfig, workers: WorkerGroup, rewards: RewardManager, tokenizer: Any, loader: Loader
    ) -> None:
        self.cfg = cfg
        self.workers = workers
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.loader = loader
        self.failures = FailureAccount(cfg.reward.max_failure_ratio)
        self.generate: Callable[..., DataProto] = workers.generate
        """Another function where samples are under way when prompts are scored."""

    @abstractmethod
    def collect(self, step: int, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        """`data.train_batch_size` prompts with `rollout.n` scored responses each, and metrics of their rewards."""

    def score(self, prompts: DataProto, settings: GenerationSettings, timer: Timer) -> DataProto:
        """Generate and score these prompts now, with the current policy. Rewards run while other responses are still
        being generated."""
        repeated, rewards, first = prompts.repeat(settings.n), self.rewards, self.first_index
        without_score: dict[int, RewardResult] = {}
        texts: dict[int, str] = {}

        finished: SimpleQueue[tuple[int, Response | Conversation] | None] = SimpleQueue()

        def submit() -> None:
            while rows := _waiting(finished):
                failures = submit_rewards(rewards, self.tokenizer, repeated, rows, first, texts)
                without_score.update(failures)

        def on_finish(row: int, result: Response | Conversation) -> None:
            if submitted.done():
                submitted.result()  # raises what ended it
            finished.put((row, result))

        # Decoding texts would keep the thread that launches kernels from launching them.
        with timer("gen"), ThreadPoolExecutor(1, "verl-rewards") as thread:
            submitted = thread.submit(submit)
            try:
                batch = self.generate(prompts, settings, on_finish)
            finally:
                finished.put(None)
            submitted.result()
        if len(texts) == len(batch):
            batch.non_tensor_batch["response_text"] = object_column(texts[row] for row in range(len(batch)))
        indices = range(first, first + len(batch))
        with timer("reward"):
            wanted = [index for index in indices if index not in without_score] if first else None
            results = (rewards.collect() if wanted is None else rewards.collect(wanted)) | without_score
        return self.attach_results(batch, [results[index] for index in indices])

    def weights_changed(self, step: int) -> dict[str, float]:
        """The actor was updated in `step`: the rollout engine gets its weights. Returns what the engine reports."""
        return self.workers.sync_weights()

    def trained(self, step: int) -> None:  # noqa: B027 (a source may have nothing to remember)
        """The last batch is trained."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Of the last complete step: `loader` and, with prompts ahead of training, `ahead`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    def close(self) -> None:  # noqa: B027 (a source may have nothing to end)
        """End what generates."""

    def attach_results(self, batch: DataProto, results: list[RewardResult]) -> DataProto:
        """The batch with its scores; too many missing ones end the run."""
        self.failures.add(results)
        return attach_scores(batch, results)

    def call_metrics(self) -> dict[str, float]:
        """Calls of reward functions since the last time; empty for managers that do not count."""
        count = self.rewards.take_calls()
        return {} if count is None else {"reward/calls": float(count)}


class SyncExperience(Experience):
    """Generates with the weights of the step that trains on the responses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._batches = epochs(self.loader)
        self._complete = self.loader.state_dict()

    def collect(self, step: int, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        rollout, longest = self.cfg.actor_rollout_ref.rollout, self.cfg.data.max_response_length
        self.call_metrics()  # those of validation do not belong to this step
        with timer("data"):
            drawn = next(self._batches)
        settings = training_settings(rollout, longest, step)
        batch = self.score(drawn, replace(settings, over_sample_rate=rollout.over_sample_rate), timer)
        if self.cfg.data.curriculum:
            self.loader.scored(batch)
        metrics = agent_metrics(batch)
        if "reward_baselines" in needed_columns(self.cfg):
            attach_baselines(batch, self.score(drawn, greedy_settings(rollout, longest), timer), rollout.n)
        return batch, metrics | reward_metrics(batch) | self.call_metrics()

    def trained(self, step: int) -> None:
        self._complete = self.loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._complete}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "ahead" in state or "trained" in state:
            logger.warning(
                "the checkpoint holds responses that were generated ahead of training; with "
                "trainer.async_training.mode=off their prompts are generated again, and some prompts that are "
                "trained already repeat"
            )
        self.loader.load_state_dict(state["loader"])
        self._batches, self._complete = epochs(self.loader), self.loader.state_dict()


def epochs(loader: Loader) -> Iterator[DataProto]:
    """Batches of prompts, epoch after epoch, from the loader's position when the first is asked for."""
    while True:
        yield from loader


def _waiting(
    finished: SimpleQueue[tuple[int, Response | Conversation] | None],
) -> list[tuple[int, Response | Conversation]]:
    """The responses that are there, at least one; none after the last."""
    rows = []
    while (row := finished.get()) is not None:
        rows.append(row)
        if finished.empty():
            return rows
    if rows:
        finished.put(None)
    return rows


def submit_rewards(
    rewards: RewardManager,
    tokenizer: Any,
    prompts: DataProto,
    finished: Sequence[tuple[int, Response | Conversation]],
    first: int = 0,
    texts: dict[int, str] | None = None,
) -> dict[int, RewardResult]:
    """Submit responses to rows of `prompts`, as samples from number `first` on. Returns the results of those that are
    not submitted, by number: the reasons of those that can have no score, and those that have one already.
    `texts` gets the texts of rows that are responses."""
    failures: dict[int, RewardResult] = {}
    drawn = [
        [result.token_ids] if isinstance(result, Response) else result.drawn_ids for _, result in finished
    ]
    decoded = iter(decode_all(tokenizer, [ids for turns in drawn for ids in turns]))
    for (row, result), parts in zip(finished, drawn, strict=True):
        text = "\n".join(islice(decoded, len(parts)))
        conversation = None if isinstance(result, Response) else result
        if texts is not None and conversation is None:
            texts[row] = text
        if conversation is not None and conversation.error is not None:
            failures[first + row] = RewardResult(None, error=conversation.error)
            continue
        if result.finish_reason == "abort":
            failures[first + row] = RewardResult(None, error=UNFINISHED)
            continue
        if conversation is not None and conversation.scored:
            # The reward of its agent is added.
            failures[first + row] = RewardResult(0.0, extra=dict(conversation.reward_extra))
            continue
        # What data.max_response_length bounds: all tokens, or with history=split those of the longest row.
        rows = [] if conversation is None else conversation.rows
        length = max((end - start for start, end, _ in rows), default=len(result.token_ids))
        sample = reward_sample(
            prompts,
            row,
            index=first + row,
            text=text,
            length=length,
            truncated=result.finish_reason == "length",
            conversation=conversation,
            token_ids=result.token_ids if getattr(rewards, "reads_tokens", False) else None,
        )
        rewards.submit(sample)
    return failures


class DynamicSampling:
    """Keeps the groups whose responses differ and whose mean is within bounds (`algorithm.filter_groups`) until a batch
    is full.

    A prompt stays or goes with all its responses, also those without a score, so that groups stay complete."""

    def __init__(self, cfg: PPOConfig, pad_token_id: int) -> None:
        self.cfg, self.rules = cfg, cfg.algorithm.filter_groups
        self.n, self.prompts = cfg.actor_rollout_ref.rollout.n, cfg.data.train_batch_size
        self._pad_token_id = pad_token_id
        self._kept: list[DataProto] = []
        self._metrics: dict[str, float] = {}
        self._rounds = self._drawn = self._constant = self._outside = 0

    @property
    def needs_final_rewards(self) -> bool:
        return self.rules.metric == "seq_final_reward"

    def add(self, batch: DataProto, metrics: dict[str, float]) -> bool:
        """Take one round of responses; whether the batch is full."""
        values = group_filter_values(
            self.rules.metric,
            batch.batch["token_level_scores"],
            batch.batch.get("token_level_rewards"),
            batch.batch["response_mask"],
            extra_columns(batch),
        )
        uid, rules = batch.non_tensor_batch["uid"], self.rules
        differs = ~constant_groups(values, uid)
        within = groups_within(values, uid, rules.accuracy_lower_bound, rules.accuracy_upper_bound)
        keep = (differs & within).view(-1, self.n).any(-1)
        constant = int((~differs.view(-1, self.n).any(-1)).sum())
        self._rounds += 1
        self._drawn += len(keep)
        self._constant += constant
        self._outside += int((~keep).sum()) - constant
        if keep.any():
            self._kept.append(batch[keep.repeat_interleave(self.n)])
        counts = [name for name in metrics if name in _COUNTS or name.startswith("tools/")]
        summed = {name: self._metrics.get(name, 0.0) + metrics[name] for name in counts}
        self._metrics = {**(self._metrics or metrics), **summed}
        full = sum(len(part) for part in self._kept) >= self.prompts * self.n
        if not full and self._rounds == self.rules.max_num_gen_batches:
            raise dynamic_sampling_failed(
                self._rounds, self._drawn, self._constant, self.prompts, self._outside
            )
        return full

    def result(self) -> tuple[DataProto, dict[str, float]]:
        batch = concat_rollouts(self._kept, self._pad_token_id)[: self.prompts * self.n]
        return batch, {
            **self._metrics,
            "training/num_gen_batches": self._rounds,
            "training/constant_groups": self._constant / self._drawn,
            "training/groups_out_of_bounds": self._outside / self._drawn,
        }


def agent_metrics(batch: DataProto) -> dict[str, float]:
    """Turns and tool calls, where responses are conversations."""
    conversations = batch.non_tensor_batch.get("conversation")
    if conversations is None:
        return {}
    from verl.agents.conversation import conversation_metrics

    return conversation_metrics(list(conversations))


def reward_sample(
    prompts: DataProto,
    row: int,
    *,
    index: int | None = None,
    text: str,
    length: int,
    truncated: bool,
    conversation: Conversation | None = None,
    token_ids: Sequence[int] | None = None,
) -> RewardSample:
    """The reward input of one response, as sample `index` (default: `row`); `prompts` has one row per response.
    `token_ids`: those of the response, where the manager reads them."""
    column = {name: values[row] for name, values in prompts.non_tensor_batch.items()}
    raw = column["raw_prompt"]
    told: dict[str, Any] = {"messages": list(raw) if not isinstance(raw, str) else None}
    extra_info = column.get("extra_info") or {}
    if conversation is not None:
        extra_info = {**extra_info, "num_turns": len(conversation.turns) + 1, **conversation.extra}
        told = {
            "messages": conversation.messages,
            "turns": conversation.transcript(),
            "tool_calls": [
                {name: getattr(record, name) for name in ("name", "arguments", "result", "failure")}
                for turn in conversation.turns
                for record in turn.records
            ],
        }
    return RewardSample(
        index=row if index is None else index,
        prompt=column["prompt_text"],
        response=text,
        ground_truth=column.get("ground_truth"),
        data_source=column.get("data_source") or "",
        extra_info=extra_info,
        columns=column.get("columns") or {},
        response_length=length,
        truncated=truncated,
        uid=column.get("uid", ""),
        prompt_ids=None if token_ids is None else list(column["prompt_ids"]),
        response_ids=None if token_ids is None else list(token_ids),
        **told,
    )


def attach_scores(batch: DataProto, results: list[RewardResult]) -> DataProto:
    """Put each score on the last policy token of its response; keep extras and errors by row. Rewards of an environment
    join: those of a turn on the turn's last token, that of the whole on the last one."""
    mask = batch.batch["response_mask"]
    failed = np.array([result.score is None for result in results])
    scores = torch.tensor([0.0 if result.score is None else result.score for result in results])
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask.bool(), positions, -1).amax(-1, keepdim=True)
    for row, conversation in enumerate(batch.non_tensor_batch.get("conversation", ())):
        scores[row] += conversation.environment_reward or 0.0
    token_level = torch.where((positions == last) & (last >= 0), scores.unsqueeze(-1), 0.0)
    for row, conversation in enumerate(batch.non_tensor_batch.get("conversation", ())):
        for turn in conversation.turns:
            if turn.reward is not None and not failed[row]:
                token_level[row, turn.end - 1] += turn.reward
    for row, result in enumerate(results):
        if result.token_scores is not None and result.score is not None:
            rewards = torch.tensor(result.token_scores)
            token_level[row, : len(rewards)] += rewards
            token_level[row, last[row]] -= rewards.sum()
    if failed.any():
        mask = mask.clone()
        mask[torch.from_numpy(failed)] = 0
    uids = [f"{uid}#{row}" if failed[row] else uid for row, uid in enumerate(batch.non_tensor_batch["uid"])]
    batch.batch |= {"token_level_scores": token_level, "response_mask": mask}
    batch.non_tensor_batch |= {
        "uid": object_column(uids),
        "reward_extra": object_column(result.extra for result in results),
        "reward_error": object_column(
            result.error if result.score is not None else result.error or "unknown error"
            for result in results
        ),
    }
    return batch


def ended_rows(batch: DataProto) -> DataProto:
    """The batch without what was ended early, for statistics."""
    early = batch.non_tensor_batch["reward_error"] == UNFINISHED
    return batch[torch.from_numpy(~early)] if early.any() else batch


def attach_baselines(batch: DataProto, greedy: DataProto, n: int) -> None:
    """The score of each prompt's greedy response; without one, the prompt's responses are masked."""
    tensors = batch.batch
    tensors["reward_baselines"] = greedy.batch["token_level_scores"].sum(-1).repeat_interleave(n)
    scored = torch.tensor([error is None for error in greedy.non_tensor_batch["reward_error"]])
    mask = tensors["response_mask"]
    tensors["response_mask"] = mask * scored.repeat_interleave(n).unsqueeze(-1).to(mask.dtype)


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """Failures, what was ended early, and the mean of every number the reward functions returned besides the score."""
    errors = batch.non_tensor_batch["reward_error"]
    aborted = sum(error == UNFINISHED for error in errors)
    metrics = {"reward/failed": float(sum(error is not None for error in errors) - aborted)}
    if aborted:
        metrics["rollout/aborted"] = float(aborted)
    numbers: dict[str, list[float]] = {}
    for extra in batch.non_tensor_batch["reward_extra"]:
        for name, value in extra.items():
            if isinstance(value, (int, float, bool)) and np.isfinite(value):
                numbers.setdefault(name, []).append(float(value))
    return metrics | {f"reward/{name}/mean": float(np.mean(values)) for name, values in numbers.items()}


def extra_columns(batch: DataProto) -> dict[str, list[Any]]:
    """Extra keys that every scored response has, as columns; 0 for rows without a score."""
    extras, errors = batch.non_tensor_batch["reward_extra"], batch.non_tensor_batch["reward_error"]
    scored = [extra for extra, error in zip(extras, errors, strict=True) if error is None]
    shared = set.intersection(*(set(extra) for extra in scored)) if scored else set()
    return {name: [extra.get(name, 0.0) for extra in extras] for name in sorted(shared)}
