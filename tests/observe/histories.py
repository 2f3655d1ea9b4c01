"""For every rule that judges a run: histories that it reports, and histories that are like them and right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.config.load import from_dict
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.data.proto import DataProto
from verl.observe.diagnoses import Finding
from verl.observe.health import HealthMonitor

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VAL = "val-core/digits/reward/mean@1"
NAN, INF = float("nan"), float("inf")
DISTILLED = {f"{ACTOR}.policy_loss.loss_mode": "distillation"}
TAUGHT_TOO = {"actor_rollout_ref.teacher.coef": 1.0}
WELL = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "actor/pg_loss": -0.01,
    "actor/grad_norm": 0.3,
    "actor/entropy": 1.0,
    "actor/kl": 0.01,
    "actor/ppo_kl": 0.001,
    "response_length/clip_ratio": 0.1,
    "training/rollout_probs_diff_mean": 0.001,
    "reward/failed": 0.0,
    "reward/calls": 8.0,
}
OFFLINE_WELL = {"train/loss": 1.0, "train/grad_norm": 0.5}

Step = tuple[Mapping[str, float], DataProto | None]


@dataclass
class Case:
    """A history. `seen` and `key` are parts of what is reported about it; empty where nothing is."""

    steps: Sequence[Step]
    seen: str = ""
    key: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: type = PPOConfig

    def reported(self) -> list[Finding]:
        """By all rules, not only its own."""
        base = WELL if self.kind is PPOConfig else OFFLINE_WELL
        health = HealthMonitor(from_dict(self.kind, dict(self.settings), checked=False))
        found = health.at_start()
        for number, (metrics, batch) in enumerate(self.steps, start=1):
            found += health.check(number, {**base, **metrics}, batch)
        return found


def batch_of(
    scores: list[float], responses: list[list[int]] | None = None, uids: list[str] | None = None
) -> DataProto:
    responses = responses or [[5, 6, 7, 8]] * len(scores)
    width = max(len(r) for r in responses)
    response = torch.zeros(len(scores), width, dtype=torch.long)
    mask = torch.zeros(len(scores), width, dtype=torch.long)
    score = torch.zeros(len(scores), width)
    for row, tokens in enumerate(responses):
        response[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        score[row, len(tokens) - 1] = scores[row]
    return DataProto.from_dict(
        tensors={
            "responses": response,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(scores), 2, dtype=torch.long), mask], dim=1),
            "token_level_scores": score,
        },
        non_tensors={"uid": np.array(uids, dtype=object)} if uids else {},
    )


def once(batch: DataProto | None = None, **metrics: float) -> list[Step]:
    return [({name.replace("__", "/"): value for name, value in metrics.items()}, batch)]


def series(**columns: Sequence[float | None]) -> list[Step]:
    """Steps whose metrics are columns; None: not measured in that step."""
    rows = zip(*columns.values(), strict=True)
    names = [VAL if name == "val" else name.replace("__", "/") for name in columns]
    return [({n: v for n, v in zip(names, row, strict=True) if v is not None}, None) for row in rows]


def every(interval: int, values: Sequence[float]) -> list[float | None]:
    found: list[float | None] = []
    for value in values:
        found += [*[None] * (interval - 1), value]
    return found


def groups(constant: int, count: int) -> DataProto:
    """Two responses for each of `count` prompts, of which `constant` have equal rewards."""
    scores = [s for n in range(count) for s in ((n % 2, n % 2) if n < constant else (0, 1))]
    return batch_of(list(map(float, scores)), uids=[str(n // 2) for n in range(2 * count)])


def long_answers(different: bool, length: int = 8, apart: int = 4) -> DataProto:
    """Four responses for each of four prompts; `apart` of them equal, or all different."""
    answers = [[10 + (n if different else n // apart) + i for i in range(length)] for n in range(16)]
    return batch_of([0.0, 1.0] * 8, answers, [str(n // 4) for n in range(16)])


CIRCLE, PROSE = [7, 8] * 40, list(range(100, 180))
RISING = [n / 40 for n in range(1, 41)]
ZIGZAG = [(-1) ** n * 0.01 * (1 + n) ** 1.5 for n in range(25)]

SICK: dict[str, list[Case]] = {
    "reward_not_finite": [
        Case(once(batch_of([0.0, NAN, INF, 1.0])), "2 of 4 rewards", "reward.custom_reward_function.path"),
        Case(once(reward__mean=NAN), "mean reward is nan", "reward.custom_reward_function.path"),
    ],
    "reward_outliers": [
        Case(
            once(batch_of([0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.2] * 5 + [900.0])), "1 of 36 rewards", "max(-1.0"
        ),
        Case(once(batch_of([0.0] * 30 + [0.5, -50.0])), "largest -50", "max(-1.0"),
    ],
    "rewards_all_equal": [
        Case(once(reward__min=1.0, reward__max=1.0), "all rewards of this batch are 1", "harder prompts"),
        Case(once(reward__min=0.0, reward__max=0.0), "all rewards of this batch are 0", "`verl sft` first"),
        Case(series(reward__min=[0.0, 0.0], reward__max=[1.0, 0.0]), "are 0", "easier prompts"),
    ],
    "groups_without_signal": [
        Case(
            once(groups(19, 20)), "95% of the prompts", f"{ROLLOUT}.n=8 (now 2)", settings={f"{ROLLOUT}.n": 2}
        )
    ],
    "reward_never_called": [
        Case(once(reward__calls=0.0), "was not called", "reward.custom_reward_function.path")
    ],
    "rewards_failed": [
        Case(
            once(reward__failed=3.0),
            "3 responses got no score",
            "reward.timeout_s=20",
            {"reward.timeout_s": 10.0},
        )
    ],
    "reward_up_validation_down": [
        Case(
            series(reward__mean=RISING, val=every(10, [0.6, 0.5, 0.4, 0.3])),
            "since step 10",
            "kl_coef=0.01",
            {"algorithm.use_kl_in_reward": True},
        )
    ],
    "validation_always_zero": [
        Case(series(val=every(10, [0.0, 0.0])), "validation was 0 in all of 2", "data.val_files"),
        Case(
            series(
                val=every(5, [0.0] * 3),
                reward__mean=[0.0] * 15,
                reward__min=[-1.0] * 15,
                reward__max=[0.5] * 15,
            ),
            "and so are the training rewards",
            "data.val_files",
        ),
    ],
    "not_finite": [
        Case(
            once(actor__grad_norm=INF),
            "actor/grad_norm is inf",
            "optim.lr=2e-06",
            {f"{ACTOR}.optim.lr": 4e-6},
        ),
        Case(
            once(actor__skipped_updates=1.0),
            "not finite",
            "optim.lr=2e-06",
            {f"{ACTOR}.optim.lr": 4e-6},
        ),
        Case(once(critic__vf_loss=NAN), "critic/vf_loss is nan", "optim.lr"),
        Case(once(train__loss=NAN), "train/loss is nan", "optim.lr=0.001", {"optim.lr": 2e-3}, SFTConfig),
        Case(once(train__grad_norm=INF), "train/grad_norm is inf", "optim.lr=", kind=DPOConfig),
        Case(once(train__skipped_updates=1.0), "not finite", "optim.lr=", kind=RewardTrainingConfig),
    ],
    "kl_too_large": [
        Case(
            once(actor__kl=1.5),
            "actor/kl is 1.5",
            "algorithm.kl_ctrl.kl_coef=0.01",
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.001},
        ),
        Case(
            once(actor__kl_loss=1.5),
            "actor/kl_loss is 1.5",
            "kl_loss_coef=0.02",
            {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.002},
        ),
        Case(once(actor__kl=0.3), "above 0.2", "use_kl_loss=True", {"trainer.health.kl_bound": 0.2}),
    ],
    "update_too_large": [
        Case(
            once(actor__ppo_kl=-0.3),
            "ppo_kl is -0.3",
            "optim.lr=1e-05 (now 2e-05)",
            {f"{ACTOR}.optim.lr": 2e-5},
        ),
        Case(
            once(actor__ppo_kl=0.3, training__age__max=2.0, training__age__mean=1.0),
            "in the 3 steps since",
            "trainer.async_training.staleness",
            {"trainer.async_training.staleness": 3},
        ),
    ],
    "rollout_probs_differ": [
        Case(
            once(training__rollout_probs_diff_mean=0.02),
            "0.0200, above 0.01",
            "algorithm.rollout_correction.rollout_is=token",
        ),
        Case(
            once(training__rollout_probs_diff_mean=0.02),
            "0.0200",
            f"+{ROLLOUT}.engine_kwargs.vllm.disable_cascade_attn=True",
            {f"{ROLLOUT}.name": "vllm"},
        ),
        Case(
            once(training__rollout_probs_diff_mean=0.02, training__age__max=0.0),
            "0.0200",
            "disable_cascade_attn=True",
            {f"{ROLLOUT}.name": "vllm"},
        ),
    ],
    "gradient_norm_growing": [
        Case(
            series(actor__grad_norm=[0.1 * 1.15**n for n in range(20)]),
            "in 20 steps",
            "calculate_log_probs=True",
            {f"{ROLLOUT}.calculate_log_probs": False},
        )
    ],
    "loss_oscillating": [
        Case(series(actor__pg_loss=ZIGZAG), "actor/pg_loss goes up and down", f"{ACTOR}.clip_ratio=0.1"),
        Case(
            series(train__loss=[1 + x for x in ZIGZAG]),
            "train/loss goes up and down",
            "data.train_batch_size",
            kind=SFTConfig,
        ),
    ],
    "policy_not_moving": [
        Case(
            series(actor__kl_loss=[1e-9] * 10),
            "actor/kl_loss is still 1.0e-09 after 10 steps",
            "optim.lr=1e-07 (now 1e-08)",
            {f"{ACTOR}.optim.lr": 1e-8},
        )
    ],
    "entropy_collapsed": [
        Case(
            series(actor__entropy=[2.0 * 0.3**n for n in range(8)]),
            "actor/entropy fell from 2",
            "clip_ratio_high",
        )
    ],
    "overfitting": [
        Case(
            series(train__loss=[1 - n / 20 for n in range(16)], val__loss=every(4, [0.9, 0.8, 0.95, 1.2])),
            "val/loss rose from 0.8 (step 8) to 1.2",
            "trainer.early_stop_patience=2",
            kind=SFTConfig,
        )
    ],
    "temperature_extreme": [
        Case([], "temperature is 0 in training", "temperature=1.0", {f"{ROLLOUT}.temperature": 0.0}),
        Case([], "temperature is 2 in training", "temperature=1.0", {f"{ROLLOUT}.temperature": 2.0}),
    ],
    "responses_empty": [
        Case(
            once(batch_of([0.0, 1.0, 1.0], [[2], [2], [4, 5, 6]])), "67% of the responses", "data.apply_chat"
        )
    ],
    "responses_repetitive": [
        Case(once(batch_of([0.0, 1.0], [CIRCLE, PROSE])), "50% of the responses repeat", "optim.lr")
    ],
    "responses_cut": [
        Case(
            once(response_length__clip_ratio=0.8),
            "80%",
            "data.max_response_length=128",
            {"data.max_response_length": 64},
        )
    ],
    "responses_duplicate": [
        Case(
            once(long_answers(different=False)),
            "100% of the prompts got the same response",
            f"{ROLLOUT}.temperature=1.0 (now 0.3)",
            {f"{ROLLOUT}.temperature": 0.3},
        )
    ],
    "length_drift": [
        Case(
            series(response_length__mean=[20.0 + 4 * n for n in range(25)]),
            "response_length/mean grew from 28 to 88",
            "loss_agg_mode=seq-mean-token-sum-norm",
        ),
        Case(
            series(response_length__mean=[116.0 - 5 * n for n in range(22)]),
            "shrank from 106 to 31",
            "loss_agg_mode",
        ),
    ],
    "samples_stale": [
        Case(
            once(training__age__mean=3.5, training__age__max=4.0),
            "3.5 updates old on average and 4 at most",
            "trainer.async_training.staleness=2 (now 4)",
            {"trainer.async_training.staleness": 4},
        ),
        Case(
            once(training__age__mean=0.2, training__age__max=1.0),
            "1 at most (staleness 0)",
            "rollout_is=token",
        ),
    ],
    "loader_starving": [
        Case(
            series(timing_s__data=[0.5] * 3, timing_s__step=[1.0] * 3),
            "50% of the last 3 steps",
            "data.dataloader_num_workers=4",
        ),
        Case(
            series(timing_s__data=[1.0] * 3, timing_s__step=[1.0] * 3),
            "50% of the last 3 steps",
            "data.dataloader_num_workers=8 (now 4)",
            {"data.dataloader_num_workers": 4},
            SFTConfig,
        ),
    ],
    "rollout_slow": [
        Case(
            series(timing_s__gen=[95.0] * 3, timing_s__step=[100.0] * 3),
            "generating takes 95% of a step (95 s)",
            "gpu_memory_utilization=0.7 (now 0.5)",
        )
    ],
    "tools_failing": [
        Case(
            once(tools__calls__all=10.0, tools__failed__all=3.0, tools__timeout__all=1.0),
            "of 10 tool calls 3 failed and 1 timed out",
            "multi_turn.tool_timeout_s=",
        )
    ],
}

RIGHT: dict[str, list[Case]] = {
    "reward_not_finite": [Case(once(batch_of([0.0, -5.0, 1e6, 1.0])))],
    "reward_outliers": [
        Case(once(batch_of([0.0] * 99 + [1.0]))),  # a rare success
        Case(once(batch_of([0.0] * 76 + [1.0] * 4))),
        Case(once(batch_of([0.0] * 76 + [0.1] * 3 + [1.0]))),
        Case(once(batch_of([0.0] * 76 + [100.0] * 4))),  # two values
        Case(once(batch_of([n / 10 for n in range(40)]))),
    ],
    "rewards_all_equal": [
        Case(once(batch_of([1.0]), reward__min=1.0, reward__max=1.0)),  # one response
        Case(series(reward__min=[0.0, 1.0], reward__max=[1.0, 1.0])),  # it learned the task
        Case(series(reward__min=[-1.0, 0.0], reward__max=[0.0, 0.0])),
        Case(once(reward__min=0.0, reward__max=0.0), settings=DISTILLED),
        Case(once(reward__min=0.0, reward__max=0.0), settings=TAUGHT_TOO),
    ],
    "groups_without_signal": [
        Case(once(groups(17, 20))),
        Case(once(groups(19, 20), reward__mean=0.95)),  # solved
        Case(once(groups(19, 20)), settings=TAUGHT_TOO),
    ],
    "reward_never_called": [
        Case(once(reward__calls=1.0)),
        Case(once(reward__calls=0.0), settings={f"{ROLLOUT}.agent.default_agent_loop": "mine"}),
    ],
    "rewards_failed": [Case(once(reward__failed=0.0))],
    "reward_up_validation_down": [
        Case(series(reward__mean=RISING, val=every(10, [0.2, 0.4, 0.6, 0.8]))),
        Case(series(reward__mean=RISING, val=every(10, [0.6, 0.5, 0.59, 0.595]))),
        Case(series(reward__mean=[0.5] * 40, val=every(10, [0.6, 0.5, 0.4, 0.3]))),
    ],
    "validation_always_zero": [
        Case(series(val=every(10, [0.0]))),
        Case(series(val=every(10, [0.0, 0.0, 0.1, 0.0])[10:])),
    ],
    "not_finite": [
        Case(once(actor__grad_norm=1e6, actor__skipped_updates=0.0)),
        Case(once(train__loss=50.0), kind=SFTConfig),
    ],
    "kl_too_large": [
        Case(once(actor__kl=0.9)),
        Case(once(actor__kl=1.5), settings={"trainer.health.kl_bound": 2.0}),
    ],
    "update_too_large": [Case(once(actor__ppo_kl=0.09)), Case(once(actor__ppo_kl=-0.09))],
    "rollout_probs_differ": [
        Case(once(training__rollout_probs_diff_mean=0.009)),
        Case(  # older weights drew the tokens
            once(training__rollout_probs_diff_mean=0.02, training__age__max=1.0, training__age__mean=0.5),
            settings={"trainer.async_training.staleness": 1},
        ),
    ],
    "gradient_norm_growing": [
        Case(series(actor__grad_norm=[0.1 * 1.15**n for n in range(19)])),  # too short
        Case(series(actor__grad_norm=[0.1 * 1.03**n for n in range(40)])),
        Case(series(actor__grad_norm=[3.0 if n % 10 == 9 else 0.3 for n in range(60)])),
    ],
    "loss_oscillating": [
        Case(series(actor__pg_loss=[(-1) ** n * 0.1 for n in range(60)])),  # noise of a constant size
        Case(series(actor__pg_loss=ZIGZAG, reward__mean=[0.2 + n / 50 for n in range(25)])),
        Case(series(train__loss=[3 * 0.9**n for n in range(60)]), kind=SFTConfig),
    ],
    "policy_not_moving": [
        Case(series(actor__kl_loss=[1e-4] * 30)),
        Case(series(actor__kl_loss=[1e-9] * 9)),
        Case(series(actor__kl_loss=[1e-9] * 30, reward__mean=[0.95] * 30)),  # solved
    ],
    "entropy_collapsed": [
        Case(series(actor__entropy=[2.0 * 0.3**n for n in range(8)], reward__mean=[0.95] * 8)),  # solved
        Case(series(actor__entropy=[0.015] * 30)),  # low from the start
        Case(series(actor__entropy=[2.0 * 0.9**n for n in range(40)])),
    ],
    "overfitting": [
        Case(
            series(train__loss=[1 - n / 20 for n in range(16)], val__loss=every(4, [0.9, 0.8, 0.7, 0.71])),
            kind=SFTConfig,
        ),
        Case(  # both rise
            series(train__loss=[1 + n / 20 for n in range(16)], val__loss=every(4, [0.9, 0.8, 0.95, 1.2])),
            kind=SFTConfig,
        ),
    ],
    "temperature_extreme": [
        Case([], settings={f"{ROLLOUT}.temperature": 1.5}),
        Case([], settings={f"{ROLLOUT}.temperature": 0.1}),
        Case([], kind=SFTConfig),
    ],
    "responses_empty": [Case(once(batch_of([0.0, 1.0] * 5, [[2], *[[4, 5, 6]] * 9])))],
    "responses_repetitive": [
        Case(once(batch_of([0.0, 1.0], [PROSE, PROSE]))),
        Case(once(batch_of([0.0, 1.0], [[7, 8] * 15, PROSE]))),  # short
    ],
    "responses_cut": [Case(once(response_length__clip_ratio=0.5))],
    "responses_duplicate": [
        Case(once(long_answers(different=True))),
        Case(once(long_answers(different=False, apart=2))),  # two of four are equal
        Case(once(long_answers(different=False), reward__mean=0.95)),  # solved
        Case(once(long_answers(different=False, length=7))),  # short answers are rightly equal
    ],
    "length_drift": [
        Case(series(response_length__mean=[20.0 + 4 * n for n in range(25)], reward__mean=RISING[:25])),
        Case(series(response_length__mean=[100.0 + 4 * n for n in range(40)])),
        Case(series(response_length__mean=[2.0 + n / 2 for n in range(25)])),  # short responses
    ],
    "samples_stale": [
        Case(
            once(training__age__mean=1.0, training__age__max=4.0),
            settings={"trainer.async_training.staleness": 4},
        ),
        Case(
            once(training__age__mean=1.0, training__age__max=1.0),
            settings={"trainer.async_training.staleness": 1},
        ),
        Case(once(training__age__mean=0.0, training__age__max=0.0)),
    ],
    "loader_starving": [
        Case(series(timing_s__data=[0.1] * 9, timing_s__step=[1.0] * 9)),
        Case(series(timing_s__data=[0.05] * 9, timing_s__step=[0.1] * 9)),  # a run of milliseconds
        Case(series(timing_s__data=[5.0, 0.0, 0.0, 0.0], timing_s__step=[10.0] * 4), kind=DPOConfig),
    ],
    "rollout_slow": [
        Case(series(timing_s__gen=[80.0] * 3, timing_s__step=[100.0] * 3)),
        Case(series(timing_s__gen=[9.5] * 3, timing_s__step=[10.0] * 3)),
        Case(
            series(timing_s__gen=[95.0] * 3, timing_s__step=[100.0] * 3),
            settings={"trainer.async_training.mode": "one_step_off"},
        ),
    ],
    "tools_failing": [
        Case(once(tools__calls__all=10.0, tools__failed__all=3.0, tools__timeout__all=0.0)),
        Case(once(tools__calls__all=3.0, tools__failed__all=3.0)),
    ],
}
