from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verl.algorithms as algorithms
from verl.algorithms import KL_ESTIMATORS, LOSS_AGG_MODES, adv_estimator_names, policy_loss_names
from verl.algorithms.registry import (
    _adv_estimators,
    _policy_losses,
    call_with_known,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    register_adv_est,
    register_policy_loss,
)
from verl.config import known
from verl.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_config_allows_exactly_what_is_registered():
    assert set(known.ESTIMATORS) == set(adv_estimator_names())
    assert set(known.POLICY_LOSSES) == set(policy_loss_names())
    assert set(known.LOSS_AGG_MODES) == set(LOSS_AGG_MODES)
    assert set(known.KL_TYPES) == set(KL_ESTIMATORS)


def test_the_docs_have_every_name():
    text = DOCS.read_text()
    for name in (
        *adv_estimator_names(),
        *policy_loss_names(),
        *LOSS_AGG_MODES,
        *known.KL_BASE,
        *known.FILTER_METRICS,
        *known.ROLLOUT_RS,
        *known.ROLLOUT_IS,
        *known.PF_PPO_METHODS,
    ):
        assert f"`{name}`" in text, f"docs/algorithms.md does not mention `{name}`"


def test_second_names_are_the_same_function():
    assert get_adv_estimator_fn("grpo_vectorized") is get_adv_estimator_fn("grpo")
    assert get_adv_estimator_fn("rloo_vectorized") is get_adv_estimator_fn("rloo")


@pytest.mark.parametrize(
    ("get", "names"),
    [(get_adv_estimator_fn, adv_estimator_names), (get_policy_loss_fn, policy_loss_names)],
)
def test_an_unknown_name_lists_the_known_ones(get, names):
    with pytest.raises(ConfigError) as caught:
        get("gpgg")
    assert all(name in str(caught.value) for name in names()) and "Did you mean 'gpg'?" in str(caught.value)


@pytest.fixture
def clean_registry():
    before = dict(_adv_estimators), dict(_policy_losses)
    yield
    for table, content in zip((_adv_estimators, _policy_losses), before, strict=True):
        table.clear()
        table.update(content)


@pytest.mark.usefixtures("clean_registry")
def test_a_user_adds_an_estimator_and_a_loss_by_either_path():
    from verl.trainer.ppo import core_algos

    @core_algos.register_adv_est("flat")
    def flat(token_level_rewards, response_mask, index):
        return token_level_rewards * response_mask, token_level_rewards

    @algorithms.register_policy_loss("plain", prepare=lambda **_: {"x": torch.ones(1, 1)})
    def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        loss = core_algos.agg_loss(-log_prob * advantages, response_mask, loss_agg_mode)
        return loss, {}

    assert algorithms.get_adv_estimator_fn("flat") is flat
    assert core_algos.get_policy_loss_fn("plain") is plain
    assert get_policy_loss_prepare("plain")() == {"x": torch.ones(1, 1)}
    assert get_policy_loss_prepare("vanilla") is None


@pytest.mark.usefixtures("clean_registry")
def test_a_name_is_not_taken_twice():
    with pytest.raises(
        ConfigError, match=r"'grpo' is registered already, by verl\.algorithms\.advantages\.grpo"
    ):
        register_adv_est("grpo")(lambda **_: None)
    with pytest.raises(ConfigError, match="'vanilla' is registered already"):
        register_policy_loss("vanilla")(lambda **_: None)
    register_adv_est("grpo")(get_adv_estimator_fn("grpo"))  # the same function again, as a reload does


def test_a_function_gets_what_it_asks_for_and_no_more():
    def asks(a, b=2):
        return a, b

    assert call_with_known(asks, {"a": 1, "c": 3}, "it") == (1, 2)
    assert call_with_known(lambda **all_: all_, {"a": 1, "c": 3}, "it") == {"a": 1, "c": 3}
    with pytest.raises(ConfigError, match="it needs the argument 'a'; available: c"):
        call_with_known(asks, {"c": 3}, "it")


def test_core_algos_has_what_plug_ins_import_from_it():
    from verl.trainer.ppo import core_algos

    for name in (
        "register_adv_est",
        "get_adv_estimator_fn",
        "register_policy_loss",
        "get_policy_loss_fn",
        "agg_loss",
        "kl_penalty",
        "compute_value_loss",
        "get_kl_controller",
        "compute_rollout_correction",
    ):
        assert callable(getattr(core_algos, name))


def test_every_public_name_can_be_had():
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'agg_los'"):
        _ = algorithms.agg_los


def test_registering_loads_no_torch():
    code = "import sys; from verl.algorithms import register_adv_est; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
