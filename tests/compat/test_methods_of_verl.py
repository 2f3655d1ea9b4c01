"""Estimators and losses in the forms that verl's registries take."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_run import read_metrics, tiny_run
from verl.config.methods import adv_estimator
from verl.errors import ConfigError
from verl.trainer.main_ppo import main
from verl.trainer.ppo import core_algos

REGISTRIES = [
    (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.register_adv_est, core_algos.get_adv_estimator_fn),
    (core_algos.POLICY_LOSS_REGISTRY, core_algos.register_policy_loss, core_algos.get_policy_loss_fn),
]
KINDS = pytest.mark.parametrize(("registry", "register", "get"), REGISTRIES, ids=["estimators", "losses"])


@KINDS
@pytest.mark.usefixtures("own_methods")
def test_a_registry_is_a_dict_of_functions(registry: Any, register: Any, get: Any) -> None:
    before = registry.copy()
    assert len(before) == len(registry) > 10 and set(before) == set(registry)

    def mine(token_level_rewards: Any, log_prob: Any = None) -> None: ...

    register("mine")(mine)
    assert registry["mine"] is mine is get("mine") and "mine" in registry and "other" not in registry
    registry["second"] = mine
    assert get("second") is mine
    del registry["mine"], registry["second"]
    assert dict(registry) == before
    with pytest.raises(KeyError):
        registry["mine"]


@pytest.mark.usefixtures("own_methods")
def test_what_is_cleared_and_put_back_keeps_what_it_needs() -> None:
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    before, gae = registry.copy(), adv_estimator("gae")
    registry.clear()
    assert not registry
    with pytest.raises(ValueError, match="unknown"):
        core_algos.get_adv_estimator_fn("gae")
    registry.update(before)
    assert adv_estimator("gae") is gae and gae.needs == ("values",)


@KINDS
@pytest.mark.usefixtures("own_methods")
def test_a_second_function_of_one_name_and_an_unknown_name_are_value_errors(
    registry: Any, register: Any, get: Any
) -> None:
    def first() -> None: ...

    def second() -> None: ...

    register("mine")(first)
    register("mine")(first)
    with pytest.raises(ValueError, match="registered already"):
        register("mine")(second)
    with pytest.raises(ValueError, match="is unknown"):
        get("nobody")
    assert registry["mine"] is first


@pytest.mark.usefixtures("own_methods")
def test_members_of_an_enum_are_names() -> None:
    class Mine(str, Enum):  # noqa: UP042 - verl's own form
        HALF = "half"

    @core_algos.register_adv_est(Mine.HALF)
    def half(token_level_rewards: Any, response_mask: Any) -> None: ...

    assert core_algos.get_adv_estimator_fn("half") is half is core_algos.get_adv_estimator_fn(Mine.HALF)
    assert type(adv_estimator("half").name) is str
    assert core_algos.AdvantageEstimator.REINFORCE_PLUS_PLUS == "reinforce_plus_plus"
    assert core_algos.AdvantageEstimator.GRPO in core_algos.ADV_ESTIMATOR_REGISTRY


@pytest.mark.usefixtures("own_methods")
def test_an_estimator_gets_the_columns_it_has_parameters_for_without_defaults() -> None:
    @core_algos.register_adv_est("asks")
    def asks(
        token_level_rewards: Any, values: Any, reward_baselines: Any, ref_log_prob: Any = None
    ) -> None: ...

    assert adv_estimator("asks").needs == ("old_log_probs", "values", "reward_baselines")


METHODS = """
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss, register_adv_est, register_policy_loss

assert AdvantageEstimator.GAE in core_algos.ADV_ESTIMATOR_REGISTRY


@register_adv_est("above_value")
def above_value(token_level_rewards, response_mask, values, index, config=None, **kwargs):
    assert len(index) == len(values) and config.gamma == config.get("gamma") and config.get("no_such_key", 3) == 3
    with torch.no_grad():
        returns = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return (returns - values) * response_mask, returns


@register_policy_loss("clipped")
def clipped(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
            rollout_is_weights=None):
    ratio = torch.exp(log_prob - old_log_prob)
    high = config.clip_ratio_high if config.clip_ratio_high is not None else config.get("clip_ratio")
    assert config.policy_loss.get("loss_mode") == config.policy_loss.loss_mode == "clipped"
    bounded = torch.clamp(ratio, 1 - config.clip_ratio, 1 + high)
    loss = agg_loss(torch.maximum(-advantages * ratio, -advantages * bounded), response_mask, loss_agg_mode)
    RESULT
"""
TWO = 'return loss, {"actor/ppo_kl": (old_log_prob - log_prob).mean().item()}'
FOUR = "return loss, (bounded != ratio).float().mean(), (old_log_prob - log_prob).mean(), torch.tensor(0.25)"
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""


def _train(model: Path, data: Path, folder: Path, *keys: str) -> list[dict[str, Any]]:
    run = tiny_run(
        model,
        data,
        "algorithm.adv_estimator=above_value",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clipped",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        *keys,
        folder=folder,
    )
    assert main(run) == 0
    return read_metrics(folder)


@pytest.mark.slow(seconds=8)
@pytest.mark.usefixtures("own_methods")
def test_methods_train_from_a_plugin_and_from_the_file_of_the_reward(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "plugin.py").write_text(METHODS.replace("RESULT", TWO))
    (tmp_path / "score.py").write_text(SCORE)
    given = (tiny_model_dir, digits_data)
    score = f"reward.custom_reward_function.path={tmp_path}/score.py"
    rows = _train(*given, tmp_path / "a", f"trainer.plugins=[{tmp_path}/plugin.py]", score)
    assert rows[-1]["training/global_step"] == 2 and "critic/vf_loss" in rows[-1]
    for registry in (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
        for name in {"above_value", "clipped"} & set(registry):
            del registry[name]
    # The older form returns three numbers instead of the metrics: the same loss, so the same run.
    (tmp_path / "both.py").write_text(METHODS.replace("RESULT", FOUR) + SCORE)
    both = f"reward.custom_reward_function.path={tmp_path}/both.py"
    older = _train(*given, tmp_path / "b", both)
    assert older[-1]["actor/pg_clipfrac_lower"] == pytest.approx(0.25)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/vf_loss"):
        assert older[-1][name] == rows[-1][name]


def test_a_reward_file_that_registers_nothing_is_not_imported_by_the_trainer(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    from verl.config.load import load_ppo_config

    (tmp_path / "score.py").write_text("raise SystemExit('imported')")
    keys = tiny_run(
        tiny_model_dir, digits_data, f"reward.custom_reward_function.path={tmp_path}/score.py:compute_score"
    )
    load_ppo_config(keys)
    with pytest.raises(ConfigError, match="Importing .*score.py .*imported"):
        load_ppo_config([*keys, "algorithm.adv_estimator=of_the_reward_file"])


def test_kl_and_aggregation_have_verls_signatures() -> None:
    new, old, mask = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.0]])
    kl = core_algos.kl_penalty(logprob=old, ref_logprob=new, kl_penalty="kl")
    assert core_algos.agg_loss(loss_mat=kl, loss_mask=mask, loss_agg_mode="token-mean").item() == 1.0
