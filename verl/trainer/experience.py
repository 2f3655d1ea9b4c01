"""From prompts to scored responses: generate, score while generating, and where asked filter and refill.

What always holds: a response without a score (its reward function failed) has an empty response mask and a
group of its own, so it neither teaches nor shifts what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algorithms.sampling import constant_groups, dynamic_sampling_failed, group_filter_values
from verl.data.assemble import concat_rollouts
from verl.data.proto import DataProto, object_column
from verl.observe.timing import Timer
from verl.reward.base import RewardManager, RewardResult, RewardSample
from verl.reward.failures import FailureAccount
from verl.rollout.base import Response
from verl.workers.group import WorkerGroup
from verl.workers.rollout import GenerationSettings, greedy_settings, training_settings

if TYPE_CHECKING:
    from verl.config.schema import PPOConfig


class Experience:
    """Draws prompts and turns them into the scored batch of a training step."""

    def __init__(
        self,
        cfg: PPOConfig,
        workers: WorkerGroup,
        rewards: RewardManager,
        tokenizer: Any,
        final_rewards: Callable[[DataProto, Timer], None],
    ) -> None:
        self.cfg = cfg
        self.workers = workers
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.failures = FailureAccount(cfg.reward.max_failure_ratio)
        self._final_rewards = final_rewards

    def collect(
        self, prompts: Iterator[DataProto], step: int, timer: Timer
    ) -> tuple[DataProto, dict[str, float]]:
        """The batch of `step`: `train_batch_size` prompts with `n` scored responses each."""
        cfg = self.cfg
        settings = training_settings(cfg.actor_rollout_ref.rollout, cfg.data.max_response_length, step)
        self._calls()  # those of validation are not of this step
        if cfg.algorithm.filter_groups.enable:
            batch, metrics = self._until_full(prompts, settings, timer)
        else:
            batch = self._one_round(next(prompts), settings, timer)
            metrics = reward_metrics(batch)
        return batch, metrics | self._calls()

    def _calls(self) -> dict[str, float]:
        """Calls of reward functions since this was last asked; nothing where nobody counts them."""
        take = getattr(self.rewards, "take_calls", None)
        count = take() if take is not None else None
        return {} if count is None else {"reward/calls": float(count)}

    def score(self, prompts: DataProto, settings: GenerationSettings, timer: Timer) -> DataProto:
        """Generate and score one round. Rewards run while other responses are still being generated."""
        repeated = prompts.repeat(settings.n)

        def on_finish(row: int, response: Response) -> None:
            text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            self.rewards.submit(
                reward_sample(
                    repeated,
                    row,
                    text=text,
                    length=len(response.token_ids),
                    truncated=response.finish_reason == "length",
                )
            )

        with timer("gen"):
            batch = self.workers.generate(prompts, settings, on_finish)
        with timer("reward"):
            results = self.rewards.collect()
        in_order = [results[row] for row in range(len(batch))]
        self.failures.add(in_order)
        return attach_scores(batch, in_order)

    def _one_round(self, prompts: DataProto, settings: GenerationSettings, timer: Timer) -> DataProto:
        batch = self.score(prompts, settings, timer)
        if self.cfg.algorithm.adv_estimator == "remax":
            greedy = greedy_settings(self.cfg.actor_rollout_ref.rollout, self.cfg.data.max_response_length)
            attach_baselines(batch, self.score(prompts, greedy, timer), settings.n)
        return batch

    def _until_full(
        self, prompts: Iterator[DataProto], settings: GenerationSettings, timer: Timer
    ) -> tuple[DataProto, dict[str, float]]:
        """Dynamic sampling: groups that all score the same are dropped and replaced by fresh prompts."""
        rules, wanted = self.cfg.algorithm.filter_groups, self.cfg.data.train_batch_size * settings.n
        kept: list[DataProto] = []
        drawn = dropped = rounds = failed = 0
        metrics: dict[str, float] = {}
        while sum(len(part) for part in kept) < wanted:
            if rules.max_num_gen_batches and rounds >= rules.max_num_gen_batches:
                raise dynamic_sampling_failed(rounds, drawn, dropped, self.cfg.data.train_batch_size)
            batch = self._one_round(next(prompts), settings, timer)
            found = reward_metrics(batch)
            failed += int(found["reward/failed"])
            metrics = metrics or found
            if rules.metric == "seq_final_reward":
                self._final_rewards(batch, timer)
            values = group_filter_values(
                rules.metric,
                batch.batch["token_level_scores"],
                batch.batch.get("token_level_rewards"),
                batch.batch["response_mask"],
                extra_columns(batch),
            )
            # A prompt stays or goes with all its responses, those without a score too: groups stay whole.
            differs = ~constant_groups(values, batch.non_tensor_batch["uid"])
            keep = differs.view(-1, settings.n).any(-1)
            rounds, drawn, dropped = rounds + 1, drawn + len(keep), dropped + int((~keep).sum())
            if keep.any():
                kept.append(batch[keep.repeat_interleave(settings.n)])
        metrics |= {
            "reward/failed": float(failed),
            "training/num_gen_batches": rounds,
            "training/constant_groups": dropped / drawn,
        }
        return concat_rollouts(kept, self.tokenizer.pad_token_id or 0)[:wanted], metrics


def reward_sample(prompts: DataProto, row: int, *, text: str, length: int, truncated: bool) -> RewardSample:
    """What the reward of one response may ask for; `prompts` has one row per response."""
    column = {name: values[row] for name, values in prompts.non_tensor_batch.items()}
    raw = column["raw_prompt"]
    return RewardSample(
        index=row,
        prompt=column["prompt_text"],
        response=text,
        ground_truth=column.get("ground_truth"),
        data_source=column.get("data_source") or "",
        extra_info=column.get("extra_info") or {},
        columns=column.get("columns") or {},
        response_length=length,
        truncated=truncated,
        messages=list(raw) if not isinstance(raw, str) else None,
    )


def attach_scores(batch: DataProto, results: list[RewardResult]) -> DataProto:
    """Put each score on its response's last policy token; keep the rest of what the rewards said by row."""
    mask = batch.batch["response_mask"]
    failed = np.array([result.score is None for result in results])
    scores = torch.tensor([0.0 if result.score is None else result.score for result in results])
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask.bool(), positions, -1).amax(-1, keepdim=True)
    token_level = torch.where((positions == last) & (last >= 0), scores.unsqueeze(-1), 0.0)
    if failed.any():
        mask = mask.clone()
        mask[torch.from_numpy(failed)] = 0
    uids = [f"{uid}#{row}" if failed[row] else uid for row, uid in enumerate(batch.non_tensor_batch["uid"])]
    batch.batch |= {"token_level_scores": token_level, "response_mask": mask}
    batch.non_tensor_batch |= {
        "uid": object_column(uids),
        "reward_extra": object_column(result.extra for result in results),
        "reward_error": object_column(
            result.error if result.score is not None else result.error or "no reason given"
            for result in results
        ),
    }
    return batch


def attach_baselines(batch: DataProto, greedy: DataProto, n: int) -> None:
    """ReMax: the score of each prompt's greedy response. Without one, the prompt's responses leave the loss."""
    tensors = batch.batch
    tensors["reward_baselines"] = greedy.batch["token_level_scores"].sum(-1).repeat_interleave(n)
    scored = torch.tensor([error is None for error in greedy.non_tensor_batch["reward_error"]])
    mask = tensors["response_mask"]
    tensors["response_mask"] = mask * scored.repeat_interleave(n).unsqueeze(-1).to(mask.dtype)


def reward_metrics(batch: DataProto) -> dict[str, float]:
    """Failures, and the mean of every number the reward functions gave beside the score."""
    errors = batch.non_tensor_batch["reward_error"]
    metrics = {"reward/failed": float(sum(error is not None for error in errors))}
    numbers: dict[str, list[float]] = {}
    for extra in batch.non_tensor_batch["reward_extra"]:
        for name, value in extra.items():
            if isinstance(value, (int, float, bool)) and np.isfinite(value):
                numbers.setdefault(name, []).append(float(value))
    return metrics | {f"reward/{name}/mean": float(np.mean(values)) for name, values in numbers.items()}


def extra_columns(batch: DataProto) -> dict[str, list[Any]]:
    """The keys every scored response has beside its score, as columns; rows without a score hold 0."""
    extras, errors = batch.non_tensor_batch["reward_extra"], batch.non_tensor_batch["reward_error"]
    scored = [extra for extra, error in zip(extras, errors, strict=True) if error is None]
    shared = set.intersection(*(set(extra) for extra in scored)) if scored else set()
    return {name: [extra.get(name, 0.0) for extra in extras] for name in sorted(shared)}
