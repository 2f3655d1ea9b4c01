from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import verl.algorithms as algorithms
from verl.algorithms import LOSS_AGG_MODES, adv_estimator_names, policy_loss_names
from verl.config.load import load_ppo_config
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    builtin_names,
    call_with_known,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    get_policy_loss_prepare,
    needed_columns,
    plugin_sections,
    policy_loss,
    register_adv_est,
    register_policy_loss,
)
from verl.config.roles import model_roles
from verl.config.sections.algorithm import FILTER_METRICS, KL_BASE, PF_PPO_METHODS, ROLLOUT_RS
from verl.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_docs_have_every_name():
    text = DOCS.read_text()
    for name in (
        *adv_estimator_names(),
        *policy_loss_names(),
        *LOSS_AGG_MODES,
        *KL_BASE,
        *FILTER_METRICS,
        *ROLLOUT_RS,
        "token",
        "sequence",
        *PF_PPO_METHODS,
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


@pytest.mark.usefixtures("own_methods")
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


@pytest.mark.usefixtures("own_methods")
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


def test_registering_and_looking_up_load_no_torch():
    code = (
        "import sys; from verl import register_adv_est; from verl.config.methods import *; policy_loss_names();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- what a method declares ---------------------------------------------------------------------------------------

BASE = ["actor_rollout_ref.model.path=org/model", "data.train_files=train.parquet", "rollout.n=4"]


def load(*extra: str):
    return load_ppo_config([*BASE, *extra])


def test_columns_of_the_estimator_the_loss_and_the_corrections_are_needed():
    assert needed_columns(load("algorithm.adv_estimator=grpo")) == ()
    assert needed_columns(load("algorithm.adv_estimator=gae")) == ("values",)
    spin = load("algorithm.adv_estimator=grpo", f"{POLICY_LOSS}=spin")
    assert {"ref_log_prob", "from_data"} < {*needed_columns(spin)}
    corrected = load("algorithm.adv_estimator=rloo", "algorithm.rollout_correction.rollout_is=token")
    assert needed_columns(corrected) == ("old_log_probs", "rollout_log_probs")
    assert "ref_log_prob" in needed_columns(load("algorithm.use_kl_in_reward=True"))


@pytest.mark.usefixtures("own_methods")
def test_a_plug_in_has_the_roles_groups_section_and_checks_it_asks_for():
    @dataclass
    class Margin:
        margin: float = 1.0

    def check(config):
        return ["'trainer.seed' is 13, which mine refuses"] if config.trainer.seed == 13 else []

    @register_policy_loss(
        "mine",
        needs=("ref_log_prob", "old_log_prob"),
        whole_groups=True,
        compares_responses=True,
        config=Margin,
        check=check,
    )
    def mine(log_prob, ref_log_prob):
        return (log_prob - ref_log_prob).sum(), {}

    register_adv_est("with_values", needs=("values",))(lambda token_level_rewards, values: (values, values))
    chosen = [f"{POLICY_LOSS}=mine", "algorithm.adv_estimator=with_values"]
    config = load(*chosen)
    assert needed_columns(config) == ("values", "ref_log_prob", "old_log_probs")
    assert config.critic.enable is True
    assert [role.name for role in model_roles(config)] == ["actor", "ref", "critic"]
    assert plugin_sections() == {"actor_rollout_ref.actor.policy_loss.mine": Margin}
    for wrong, words in (
        ("trainer.seed=13", "which mine refuses"),
        ("rollout.n=1", "mine compares the responses to one prompt"),
        ("algorithm.use_pf_ppo=True", "mine compares whole groups"),
        ("critic.enable=False", "with_values needs a critic"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(*chosen, wrong)
    loss, _ = policy_loss("mine")(log_prob=torch.ones(2), ref_log_prob=torch.zeros(2), advantages=None)
    assert loss == 2
    with pytest.raises(ConfigError, match="loss_mode=mine needs the argument 'ref_log_prob'"):
        policy_loss("mine")(log_prob=torch.ones(2))


# -- names are compared nowhere else ------------------------------------------------------------------------------

PACKAGE = Path(algorithms.__file__).parents[1]
# Where a name is not that of a method: the reward manager prime; and verl's own list of estimators.
ELSEWHERE = {
    "config/sections/reward.py": {"prime"},  # a reward manager
    "trainer/ppo/core_algos.py": {*builtin_names(ADV_ESTIMATOR)},
}


def compared_names(tree: ast.AST) -> set[str]:
    """Texts that are compared, or members of a tuple, list or set; also those of a condition `key=a|b`."""
    texts: set[str] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [*node.elts]
        elif isinstance(node, ast.keyword) and node.arg == "used_if":
            parts = [*ast.walk(node.value)]
        found = [part.value for part in parts if isinstance(part, ast.Constant)]
        texts |= {text for text in found if isinstance(text, str)}
        if isinstance(node, ast.keyword):
            texts |= {word for text in found for word in re.split(r"[=|]", str(text))}
    return texts


def test_no_module_but_its_own_compares_the_name_of_a_method():
    names = {*builtin_names(ADV_ESTIMATOR), *builtin_names(POLICY_LOSS)}
    quoted = re.compile(rf"""["'=|]({"|".join(names)})["'|]""")
    for file in sorted(PACKAGE.rglob("*.py")):
        where, text = file.relative_to(PACKAGE).as_posix(), file.read_text()
        if not where.startswith("algorithms/") and quoted.search(text):
            found = compared_names(ast.parse(text)) & names
            assert found <= ELSEWHERE.get(where, set()), f"verl/{where} compares {found}"
