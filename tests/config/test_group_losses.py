"""What online_dpo, spin, sppo and trainer.ref_update_freq refuse, in one line each and before a model is loaded."""

# ruff: noqa: E501 - one case per line reads better than short lines

from __future__ import annotations

import pytest

from verl.config.checks import check
from verl.config.load import load_ppo_config
from verl.config.methods import needed_columns
from verl.config.roles import model_roles
from verl.errors import ConfigError

LOSS = "actor_rollout_ref.actor.policy_loss"
NEEDED = [
    "actor_rollout_ref.model.path=org/model",
    "data.train_files=train.parquet",
    "algorithm.adv_estimator=grpo",
    "rollout.n=4",
]
DPO, SPIN, SPPO = (f"{LOSS}.loss_mode={name}" for name in ("online_dpo", "spin", "sppo"))
REFRESHED = [DPO, "trainer.ref_update_freq=2"]
SPLIT = [f"rollout.multi_turn.{each}" for each in ("enable=True", "tools=tools.py", "history=split")]


def load(*extra: str):
    return load_ppo_config([*NEEDED, *extra])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([DPO, "rollout.n=1"], ["'actor_rollout_ref.rollout.n' is 1", "online_dpo", "2 or more"]),
        ([SPPO, "rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"], ["'actor_rollout_ref.rollout.n' is 1", "sppo", "2 or more"]),
        ([DPO, f"{LOSS}.beta=0"], [f"'{LOSS}.beta' is 0", "above 0"]),
        ([SPIN, f"{LOSS}.beta=-1"], [f"'{LOSS}.beta' is -1", "above 0"]),
        ([DPO, f"{LOSS}.label_smoothing=0.5"], [f"'{LOSS}.label_smoothing' is 0.5", "at least 0 and below 0.5"]),
        ([DPO, f"{LOSS}.pair_loss=simpo"], [f"'{LOSS}.pair_loss' is 'simpo'", "dpo, ipo, hinge, robust"]),
        ([DPO, f"{LOSS}.pairs=first"], [f"'{LOSS}.pairs' is 'first'", "best_worst, all"]),
        ([SPPO, f"{LOSS}.sppo_eta=0"], [f"'{LOSS}.sppo_eta' is 0", "above 0"]),
        ([DPO, "algorithm.use_pf_ppo=True"], ["'algorithm.use_pf_ppo' is True", "online_dpo"]),
        ([DPO, "algorithm.rollout_correction.rollout_is=token"], ["'algorithm.rollout_correction.rollout_is' is token", "online_dpo"]),
        ([SPPO, *SPLIT], ["actor_rollout_ref.rollout.multi_turn.history=split", "sppo", "append"]),
        ([SPIN, *SPLIT[:2]], ["'actor_rollout_ref.rollout.multi_turn.enable' is True", "spin"]),
        ([SPIN, "actor_rollout_ref.actor.use_kl_loss=True"], ["'actor_rollout_ref.actor.use_kl_loss' is True", "spin"]),
        ([SPIN, "algorithm.use_kl_in_reward=True"], ["'algorithm.use_kl_in_reward' is True", "spin"]),
        ([SPIN, "algorithm.filter_groups.enable=True"], ["'algorithm.filter_groups.enable' is True", "spin"]),
        ([SPIN, "algorithm.rollout_correction.bypass_mode=True"], ["'algorithm.rollout_correction.bypass_mode' is True", "spin"]),
        ([SPIN, "algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2"], ["'algorithm.rollout_correction.rollout_rs' is token_k1", "spin"]),
        (["trainer.ref_update_freq=2"], ["'trainer.ref_update_freq' is 2", "no reference policy", "use_kl_loss=True"]),
        ([SPPO, "trainer.ref_update_freq=2"], ["'trainer.ref_update_freq' is 2", "no reference policy"]),
        (["trainer.ref_update_freq=-2"], ["'trainer.ref_update_freq' is -2", "at least -1"]),
        ([*REFRESHED, "trainer.n_gpus_per_node=4", "actor_rollout_ref.ref.fsdp_config.fsdp_size=2"], ["'trainer.ref_update_freq' is 2", "split alike", "ref.fsdp_config.fsdp_size"]),
        ([*REFRESHED, "trainer.n_gpus_per_node=2", "actor_rollout_ref.ref.strategy=megatron"], ["'trainer.ref_update_freq' is 2", "split alike", "ref.strategy"]),
        ([*REFRESHED, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"], ["'trainer.ref_update_freq' is 2", "split alike", "ref.megatron"]),
    ],
)  # fmt: skip
def test_refused_in_one_line(extra, words):
    with pytest.raises(ConfigError) as caught:
        load(*extra)
    (line,) = [line for line in str(caught.value).splitlines() if words[0] in line]
    for word in words[1:]:
        assert word in line, line


@pytest.mark.parametrize(
    "extra",
    [
        [DPO],
        [SPIN, "rollout.n=1"],
        [SPPO],
        [DPO, *SPLIT],
        REFRESHED,
        [*REFRESHED, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=megatron"],
        ["actor_rollout_ref.actor.use_kl_loss=True", "trainer.ref_update_freq=1"],
        [*REFRESHED, "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.ref.fsdp_config.fsdp_size=1"],
    ],
)
def test_accepted(extra):
    load(*extra)


def test_pair_losses_have_a_reference_and_sppo_has_none():
    assert ["ref_log_prob" in needed_columns(load(loss)) for loss in (DPO, SPIN, SPPO)] == [True, True, False]
    assert [role.name for role in model_roles(load(DPO))] == ["actor", "ref"]
    assert [role.name for role in model_roles(load(DPO, "actor_rollout_ref.model.lora_rank=8"))] == ["actor"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([f"{LOSS}.pairs=all"], [f"'{LOSS}.pairs'=all has no effect", "online_dpo"]),
        ([SPIN, f"{LOSS}.pairs=all"], [f"'{LOSS}.pairs'=all has no effect", "online_dpo"]),
        ([DPO, f"{LOSS}.pair_loss=ipo", f"{LOSS}.label_smoothing=0.1"], [f"'{LOSS}.label_smoothing'=0.1 has no effect", "dpo or robust"]),
        ([DPO, "actor_rollout_ref.actor.loss_agg_mode=token-sum"], ["loss_agg_mode'=token-sum has no effect"]),
        ([DPO, "data.response_key=answer"], ["'data.response_key'=answer has no effect", "spin"]),
        ([DPO, "algorithm.adv_estimator=gae"], ["'algorithm.adv_estimator'=gae trains a critic", "grpo"]),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(extra, words):
    (line,) = [line for line in check(load(*extra)) if words[0] in line]
    for word in words[1:]:
        assert word in line, line


def test_keys_of_the_reference_have_an_effect_with_pair_losses():
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"
    assert any(key.partition("=")[0] in line for line in check(load(key)))
    assert not any(key.partition("=")[0] in line for line in check(load(DPO, key)))
