"""Each rule speaks when it should, is silent when it should be, and names a key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from verl.config.load import from_dict
from verl.config.schema import PPOConfig
from verl.data.proto import DataProto
from verl.observe.batch_metrics import batch_facts
from verl.observe.health import STEP_RULES, HealthMonitor
from verl.observe.run_folder import is_out_of_memory, likely_fix

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


KEYS = {
    "temperature": "actor_rollout_ref.rollout.temperature",
    "n": "actor_rollout_ref.rollout.n",
    "actor_lr": "actor_rollout_ref.actor.optim.lr",
    "use_kl_in_reward": "algorithm.use_kl_in_reward",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "use_kl_loss": "actor_rollout_ref.actor.use_kl_loss",
    "kl_loss_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "max_response_length": "data.max_response_length",
    "kl_bound": "trainer.health.kl_bound",
}


def config(**values: Any) -> PPOConfig:
    return from_dict(
        PPOConfig, {KEYS.get(name, name): value for name, value in values.items()}, checked=False
    )


def lines(metrics: Mapping[str, float], batch: DataProto | None = None, **settings: Any) -> list[str]:
    return list(HealthMonitor(config(**settings)).check(1, WELL | dict(metrics), batch).values())


def test_a_healthy_run_hears_nothing() -> None:
    health = HealthMonitor(config())
    assert health.at_start() == []
    for step in range(1, 60):
        validation = {"val-core/x/acc/mean@1": 0.1 + step / 100} if step % 10 == 0 else {}
        batch = batch_of([0.0, 1.0, 0.0, 1.0], uids=["a", "a", "b", "b"])
        assert health.check(step, WELL | validation, batch) == {}


@pytest.mark.parametrize(
    ("metrics", "settings", "seen", "key"),
    [
        ({"reward/min": 1.0, "reward/max": 1.0}, {}, "all rewards of this batch are 1", "data.train_files"),
        ({"reward/mean": float("nan")}, {}, "mean reward is nan", "custom_reward_function.path"),
        ({"reward/calls": 0.0}, {}, "was not called", "custom_reward_function.path"),
        ({"reward/failed": 3.0}, {}, "3 responses got no score", "reward.timeout_s"),
        ({"actor/grad_norm": float("inf")}, {"actor_lr": 4e-6}, "grad_norm is inf", "optim.lr=2e-06"),
        ({"actor/skipped_updates": 1.0}, {"actor_lr": 4e-6}, "not finite", "optim.lr=2e-06"),
        ({"critic/vf_loss": float("nan")}, {}, "vf_loss is nan", "optim.lr"),
        ({"actor/kl": 1.5}, {"use_kl_in_reward": True, "kl_coef": 0.001}, "actor/kl is 1.5", "kl_coef=0.01"),
        ({"actor/kl": 1.5}, {"use_kl_loss": True, "kl_loss_coef": 0.002}, "1.5", "kl_loss_coef=0.02"),
        ({"actor/kl": 0.3}, {"kl_bound": 0.2}, "above 0.2", "use_kl_loss=True"),
        ({"actor/ppo_kl": -0.3}, {"actor_lr": 2e-5}, "ppo_kl is -0.3", "optim.lr=1e-05"),
        ({"training/rollout_probs_diff_mean": 0.02}, {}, "0.0200", "rollout_correction"),
        ({"response_length/clip_ratio": 0.8}, {"max_response_length": 64}, "80%", "max_response_length=128"),
    ],
)
def test_one_line_with_what_was_seen_and_the_key(
    metrics: dict[str, float], settings: dict[str, Any], seen: str, key: str
) -> None:
    found = lines(metrics, **settings)
    assert len(found) == 1, found
    assert seen in found[0]
    assert key in found[0]
    assert "\n" not in found[0]


def test_older_weights_explain_a_difference_between_rollout_and_trainer() -> None:
    differ = {"training/rollout_probs_diff_mean": 0.02}
    assert len(lines({**differ, "training/age/max": 0.0})) == 1
    assert lines({**differ, "training/age/max": 1.0}) == []
    (line,) = lines({"actor/ppo_kl": 0.3, "training/age/max": 2.0})
    assert "in the 3 steps since" in line and "trainer.async_training.staleness" in line


def test_bad_scores_are_counted_from_the_batch() -> None:
    found = lines({}, batch_of([0.0, float("nan"), float("inf"), 1.0]))
    assert len(found) == 1 and found[0].startswith("2 of 4 rewards are NaN or infinite")


def test_outliers_are_named_and_rare_successes_are_not_outliers() -> None:
    found = lines({}, batch_of([0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.2] * 5 + [900.0]))
    assert len(found) == 1 and "1 of 36 rewards" in found[0] and "900" in found[0]
    assert lines({}, batch_of([0.0] * 99 + [1.0])) == []


def test_groups_that_teach_nothing_are_reported() -> None:
    uids = [str(i // 2) for i in range(40)]
    found = lines({}, batch_of([float(i // 2 % 2) for i in range(38)] + [0.0, 1.0], uids=uids), n=2)
    assert len(found) == 1 and found[0].startswith("95% of the prompts") and "filter_groups" in found[0]


def test_empty_and_circular_responses_are_seen() -> None:
    found = lines({}, batch_of([0.0, 1.0, 1.0], [[2], [2], [4, 5, 6]]))
    assert len(found) == 1 and found[0].startswith("67% of the responses are empty")
    circle, prose = [7, 8] * 40, list(range(100, 180))
    found = lines({}, batch_of([0.0, 1.0], [circle, prose]))
    assert len(found) == 1 and found[0].startswith("50% of the responses repeat")
    assert batch_facts(batch_of([0.0, 1.0], [prose, prose])).repetitive_share == 0


def test_temperature_zero_in_training_is_noticed_at_start() -> None:
    assert "temperature=1.0" in HealthMonitor(config(temperature=0)).at_start()[0]
    assert "noise" in HealthMonitor(config(temperature=2.0)).at_start()[0]


def test_reward_up_and_validation_down_is_noticed_and_the_better_step_named() -> None:
    health, heard = HealthMonitor(config(use_kl_in_reward=True)), []
    for step in range(1, 41):
        metrics = WELL | {"reward/mean": step / 40}
        if step % 10 == 0:
            metrics["val-core/x/acc/mean@1"] = {10: 0.6, 20: 0.5, 30: 0.4, 40: 0.3}[step]
        heard += health.check(step, metrics).values()
    assert len(heard) == 1
    assert "since step 10" in heard[0] and "kl_coef=0.01" in heard[0]


def test_reward_and_validation_rising_together_is_fine() -> None:
    health = HealthMonitor(config())
    for step in range(1, 41):
        extra = {"val-core/x/acc/mean@1": step / 50} if step % 10 == 0 else {}
        assert health.check(step, WELL | {"reward/mean": step / 40} | extra) == {}


def test_validation_that_never_leaves_zero_is_noticed() -> None:
    health, heard = HealthMonitor(config()), []
    for step in range(1, 31):
        extra = {"val-core/x/acc/mean@1": 0.0} if step % 10 == 0 else {}
        heard.append(list(health.check(step, WELL | extra).values()))
    assert (
        heard[9] == [] and "validation was 0 in all of 2" in heard[19][0] and "data.val_files" in heard[19][0]
    )


def test_growing_gradients_and_lost_entropy_are_noticed() -> None:
    growing, collapsing, solved = (HealthMonitor(config()) for _ in range(3))
    heard_growing, heard_collapsing, heard_solved = [], [], []
    for step in range(1, 41):
        heard_growing += growing.check(step, WELL | {"actor/grad_norm": 0.1 * 1.15**step}).values()
        entropy = {"actor/entropy": 2.0 * 0.7**step}
        heard_collapsing += collapsing.check(step, WELL | entropy).values()
        heard_solved += solved.check(step, WELL | entropy | {"reward/mean": 0.95}).values()
    assert "calculate_log_probs" in heard_growing[0]
    assert "entropy_coeff" in heard_collapsing[0]
    assert heard_solved == []


def test_a_rule_is_quiet_for_a_while_after_speaking() -> None:
    health = HealthMonitor(config(), quiet_steps=5)
    spoke = [step for step in range(1, 13) if health.check(step, WELL | {"reward/failed": 1.0})]
    assert spoke == [1, 6, 11]


def test_every_rule_is_silent_without_measurements() -> None:
    assert HealthMonitor(config()).check(1, {}) == {}
    assert len({rule.__name__ for rule in STEP_RULES}) == len(STEP_RULES)


def test_out_of_memory_is_answered_with_keys_and_amounts() -> None:
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    )
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(ValueError("out of memory"))
    actor = "actor_rollout_ref.actor"
    text = likely_fix(MemoryError(), config(**{f"{actor}.ppo_micro_batch_size_per_gpu": 4}))
    assert "ppo_micro_batch_size_per_gpu=2" in text and "enable_gradient_checkpointing=True" in text
    assert "gpu_memory_utilization=0.3" in text and "max_response_length=256" in text
    keys = {f"{actor}.ppo_max_token_len_per_gpu": 16384, f"{actor}.use_dynamic_bsz": True}
    keys["actor_rollout_ref.model.enable_gradient_checkpointing"] = True
    text = likely_fix(MemoryError(), config(**keys))
    assert "ppo_max_token_len_per_gpu=8192" in text and "gradient_checkpointing" not in text


def test_a_full_disk_is_answered() -> None:
    assert "max_actor_ckpt_to_keep" in likely_fix(OSError(28, "No space left on device"))


def test_a_resumed_monitor_judges_as_if_never_interrupted() -> None:
    whole, first = HealthMonitor(config()), HealthMonitor(config())
    grown = [WELL | {"actor/grad_norm": 0.1 * 1.15**step, "unwatched": 1.0} for step in range(1, 41)]
    expected = [whole.check(step, metrics) for step, metrics in enumerate(grown, start=1)]
    heard = [first.check(step, metrics) for step, metrics in enumerate(grown[:19], start=1)]
    second = HealthMonitor(config())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    heard += [second.check(step, metrics) for step, metrics in enumerate(grown[19:], start=20)]
    assert heard == expected and any(expected)
