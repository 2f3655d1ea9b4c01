"""Every estimator, loss and option of the loop trains, with finite metrics of the documented names."""

from __future__ import annotations

import math
import sys

import pytest

from tests.tiny_run import own_methods
from verl import engines
from verl.config.methods import ADV_ESTIMATOR, POLICY_LOSS, builtin_names

ESTIMATORS, POLICY_LOSSES = builtin_names(ADV_ESTIMATOR), builtin_names(POLICY_LOSS)

ALWAYS = {
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/mean",
    "reward/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "timing_s/gen",
    "timing_s/reward",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/step",
    "perf/throughput",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "training/global_step",
    "training/epoch",
    "training/rollout_probs_diff_mean",
}


def check(row: dict, *names: str) -> None:
    missing = (ALWAYS | set(names)) - set(row)
    assert not missing, f"missing metrics: {sorted(missing)}"
    odd = {name: value for name, value in row.items() if name != "findings" and not math.isfinite(value)}
    assert not odd
    assert row["actor/grad_norm"] > 0, "nothing was learned"


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if not name.endswith("_vectorized")])
def test_every_estimator_trains(train, estimator, digits_data):
    extra = ["trainer.total_training_steps=2", f"algorithm.adv_estimator={estimator}"]
    names = []
    if estimator == "gae":
        names = [
            "critic/vf_loss",
            "critic/vf_clipfrac",
            "critic/vf_explained_var",
            "critic/grad_norm",
            "critic/lr",
        ]
        names += ["critic/values/mean", "timing_s/values", "timing_s/update_critic"]
    if estimator == "prime":
        numbers = ("loss", "accuracy", "positive", "grad_norm", "lr", "process_rewards/mean")
        names = [f"implicit_reward/{name}" for name in numbers]
        names += ["timing_s/implicit_reward", "timing_s/update_implicit_reward"]
    if estimator == "gdpo":
        reward = digits_data / "two_rewards.py"
        reward.write_text(
            "def compute_score(solution_str, ground_truth):\n"
            "    words = solution_str.split()\n"
            "    right = float(ground_truth in words)\n"
            "    return {'score': right, 'right': right, 'short': 1.0 / (1 + len(words))}\n"
        )
        extra += [
            f"reward.custom_reward_function.path={reward}",
            "algorithm.gdpo_reward_keys=[right,short]",
            "algorithm.gdpo_reward_weights=[1.0,0.5]",
        ]
        names = ["reward/right/mean", "reward/short/mean"]
    if estimator == "optimal_token_baseline":
        names = ["timing_s/old_log_prob"]
    rows = train(*extra)
    check(rows[-1], *names)


@pytest.mark.slow(seconds=3)
# spin needs answers in the data (test_group_losses.py), distillation a teacher.
@pytest.mark.parametrize("loss", [name for name in POLICY_LOSSES if name not in ("spin", "distillation")])
def test_every_policy_loss_trains(train, loss):
    rows = train(
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}",
    )
    check(rows[-1], "timing_s/old_log_prob")


# One mode for each denominator that the config and the workers provide: tokens, sequences, loss_scale_factor.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_aggregated_loss_does_not_depend_on_micro_batches(train, mode):
    one, several = (
        train(
            "trainer.total_training_steps=1",
            f"actor_rollout_ref.actor.loss_agg_mode={mode}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
            folder=f"run_{size}",
        )[-1]
        for size in (64, 5)
    )
    check(one)
    assert several["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    assert several["actor/pg_loss"] == pytest.approx(one["actor/pg_loss"], abs=1e-5)


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("kind", ["low_var_kl", "k1+"])
def test_kl_loss_against_the_reference(train, kind):
    row = train(
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"actor_rollout_ref.actor.kl_loss_type={kind}",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
    )[-1]
    check(row, "actor/kl_loss", "actor/kl", "timing_s/ref")
    assert row["actor/kl_loss"] != 0, "after one update the policy has left the reference"


def test_adaptive_kl_in_reward_moves_its_coefficient(train):
    rows = train(
        "trainer.total_training_steps=3",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.kl_ctrl.kl_coef=0.1",
    )
    coefficients = [row["actor/kl_coef"] for row in rows if "actor/kl_coef" in row]
    assert coefficients[0] == pytest.approx(0.1) and coefficients[1] != coefficients[0]
    assert rows[-1]["critic/rewards/mean"] != rows[-1]["critic/score/mean"]


def test_entropy_bonus_changes_the_gradient(train):
    plain = train("trainer.total_training_steps=1", folder="plain")[-1]
    bonus = train(
        "trainer.total_training_steps=1", "actor_rollout_ref.actor.entropy_coeff=0.5", folder="bonus"
    )[-1]
    assert plain["actor/pg_loss"] == pytest.approx(bonus["actor/pg_loss"], rel=1e-5)
    assert plain["actor/grad_norm"] != bonus["actor/grad_norm"]


def test_dynamic_sampling_keeps_only_groups_that_differ(train):
    row = train("trainer.total_training_steps=1", "algorithm.filter_groups.enable=True")[-1]
    check(row, "training/num_gen_batches", "training/constant_groups")
    assert row["training/groups"] == 16 and row["training/groups_constant"] == 0
    assert row["training/num_gen_batches"] >= 2


def test_dynamic_sampling_stops_with_the_share_of_constant_groups(train, digits_data):
    from verl.errors import TrainingHalted

    reward = digits_data / "constant_reward.py"
    reward.write_text("def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    with pytest.raises(TrainingHalted, match=r"32 of 32 groups \(100%\)"):
        train(
            "trainer.total_training_steps=1",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.max_num_gen_batches=2",
            f"reward.custom_reward_function.path={reward}",
        )


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("metric", ["score", "seq_reward", "seq_final_reward"])
def test_dynamic_sampling_by_every_metric(train, metric):
    row = train(
        "trainer.total_training_steps=1",
        "algorithm.filter_groups.enable=True",
        f"algorithm.filter_groups.metric={metric}",
        "algorithm.use_kl_in_reward=True",
    )[-1]
    check(row)


def test_overlong_filtering_masks_truncated_responses(train):
    row = train("trainer.total_training_steps=1", "algorithm.filter_overlong_responses=True")[-1]
    assert row["training/masked_responses"] == pytest.approx(row["response_length/clip_ratio"] * 64)


def test_overlong_penalty_lowers_the_reward(train):
    plain = train("trainer.total_training_steps=1", folder="plain")[-1]
    penal = train(
        "trainer.total_training_steps=1",
        "reward.reward_manager.name=dapo",
        "reward.overlong_buffer.enable=True",
        "reward.overlong_buffer.len=2",
        folder="penal",
    )[-1]
    assert penal["reward/mean"] < plain["reward/mean"] - 0.3


def test_pf_ppo_learns_from_drawn_responses(train):
    plain = train("trainer.total_training_steps=1", folder="plain")[-1]
    drawn = train("trainer.total_training_steps=1", "algorithm.use_pf_ppo=True", folder="drawn")[-1]
    check(drawn)
    assert drawn["reward/mean"] > plain["reward/mean"], "high scores are drawn more often"


def test_rollout_correction_with_three_policies(train):
    row = train(
        "trainer.total_training_steps=1",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    )[-1]
    check(row, "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/ppl_ratio", "timing_s/old_log_prob")
    assert row["rollout_corr/rejected_tokens"] == 0


def test_rollout_correction_bypass_saves_a_pass(train):
    row = train(
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.rollout_correction.bypass_mode=True",
    )[-1]
    assert "timing_s/old_log_prob" not in row
    assert math.isfinite(row["actor/ppo_kl"]) and row["actor/grad_norm"] > 0


def test_several_rewards_are_summed_by_weight(train, digits_data):
    short = digits_data / "short_reward.py"
    short.write_text("def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    row = train(
        "trainer.total_training_steps=1",
        "~reward.custom_reward_function.path",
        f"reward.functions=[{{path:{digits_data}/digits_reward.py,weight:1.0}},{{path:{short},weight:0.5}}]",
    )[-1]
    check(row)
    assert row["reward/min"] == pytest.approx(0.5)


# -- the user's own -------------------------------------------------------------------------------------------


def test_a_registered_training_engine_is_selected_by_strategy(train, tmp_path, monkeypatch):
    (tmp_path / "my_strategy.py").write_text(
        "from verl.engines import register_strategy\n"
        "built = []\n"
        "def build(kind, *sections, **options):\n"
        "    from verl.engines.build import build_fsdp\n"
        "    built.append(kind)\n"
        "    return build_fsdp(kind, *sections, **options)\n"
        "register_strategy('mine', build)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engines, "_strategies", dict(engines._strategies))  # forgets the name afterwards
    rows = train(
        "trainer.plugins=[my_strategy]",
        "actor_rollout_ref.actor.strategy=mine",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.total_training_steps=1",
    )
    check(rows[-1], "actor/kl_loss")
    assert sys.modules["my_strategy"].built == ["actor", "ref"]


@pytest.mark.usefixtures("own_methods")
def test_a_plug_ins_methods_get_the_roles_and_columns_they_need(train, digits_data, tmp_path):
    """Without a key that turns on a reference, a critic or a greedy response."""
    keys = [*own_methods(digits_data, tmp_path), "trainer.total_training_steps=2"]
    rows = train(*keys)
    check(rows[-1], "actor/distance", "timing_s/ref", "critic/vf_loss", "timing_s/values")
    assert rows[-1]["actor/distance"] > 0, "the policy has left the reference"
