"""A plug-in's section is loaded, shown, checked, saved and sent to other processes like ours."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import read_metrics, tiny_run
from verl.config import methods
from verl.config.keys import schema_keys
from verl.config.load import from_dict, import_plugins_of, load_ppo_config, to_yaml
from verl.config.schema import DPOConfig, PPOConfig
from verl.config.sources import load_yaml
from verl.errors import ConfigError

SECTION = "actor_rollout_ref.actor.policy_loss.mine"
PLUGIN = """
from dataclasses import dataclass, field

from verl.config.keys import key
from verl.config.methods import register_section


@dataclass
class Inner:
    names: list[str] = field(default_factory=list)


@dataclass
class Mine:
    '''How far mine goes.'''

    beta: float = key(0.5, "weight of the new term", gt=0)
    steps: int = 3
    path: str = key("", "a file", path=True)
    inner: Inner = field(default_factory=Inner)

    @property
    def doubled(self) -> float:
        return 2 * self.beta


register_section("actor_rollout_ref.actor.policy_loss.mine", Mine)
register_section("judge", Inner)
"""
NEEDED = ["actor_rollout_ref.model.path=org/model", "data.train_files=x"]


@pytest.fixture(autouse=True)
def no_sections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(methods, "_sections", dict(methods._sections))
    modules = set(sys.modules)
    yield
    for name in [name for name in sys.modules if name not in modules and name.startswith("verl_user_")]:
        del sys.modules[name]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "my_sections.py"
    path.write_text(PLUGIN)
    return path


def load(plugin: Path, *overrides: str) -> PPOConfig:
    return load_ppo_config([*NEEDED, f"trainer.plugins=[{plugin}]", *overrides])


def test_values_are_attributes_of_their_types(plugin: Path) -> None:
    config = load(
        plugin, f"{SECTION}.beta=1", f"{SECTION}.path=~/x", f"{SECTION}.inner.names=a", "judge.names=[b]"
    )
    mine = config.actor_rollout_ref.actor.policy_loss.mine  # type: ignore[attr-defined]
    assert (mine.beta, mine.doubled, mine.steps, mine.inner.names) == (1.0, 2.0, 3, ["a"])
    assert isinstance(mine.beta, float) and mine.path == str(Path.home() / "x")
    assert config.judge.names == ["b"]  # type: ignore[attr-defined]
    assert config.user_set >= {f"{SECTION}.beta", "judge.names"}
    assert load(plugin).actor_rollout_ref.actor.policy_loss.mine.beta == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{SECTION}.bata=1", [f"'{SECTION}.bata'", f"Did you mean '{SECTION}.beta'"]),
        (f"{SECTION}.steps=many", [f"'{SECTION}.steps' is 'many'", "a whole number"]),
        (f"{SECTION}.beta=0", [f"'{SECTION}.beta' is 0.0", "above 0", "weight of the new term"]),
        (f"{SECTION}=3", ["it must be a mapping with the keys beta, steps, path, inner"]),
    ],
)  # fmt: skip
def test_what_is_wrong_inside_is_said_as_for_our_keys(plugin: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(plugin, override)
    assert not [word for word in words if word not in str(error.value)]


def test_help_check_and_the_record_know_it(
    plugin: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        load_ppo_config(["--help", SECTION, f"trainer.plugins=[{plugin}]"])
    shown = capsys.readouterr().out
    assert f"{SECTION}: How far mine goes" in shown and "weight of the new term" in shown
    with pytest.raises(SystemExit) as ended:
        load(plugin, "--check", "trainer.device=cpu", f"{SECTION}.beta=2")
    assert ended.value.code == 0
    needed = "actor_rollout_ref.actor.policy_loss.loss_mode=mine"
    assert f"'{SECTION}.beta'=2 has no effect: it needs {needed}" in capsys.readouterr().out
    (tmp_path / "config.yaml").write_text(to_yaml(load(plugin, f"{SECTION}.beta=2")))
    again = from_dict(PPOConfig, load_yaml(tmp_path / "config.yaml"))
    assert again.actor_rollout_ref.actor.policy_loss.mine.beta == 2.0  # type: ignore[attr-defined]


def test_only_reinforcement_learning_has_it(plugin: Path) -> None:
    load(plugin)
    assert f"{SECTION}.beta" in schema_keys(PPOConfig)
    assert "judge.names" not in schema_keys(DPOConfig)


def test_a_copy_and_another_process_have_the_values(plugin: Path) -> None:
    config = load(plugin, f"{SECTION}.beta=2", f"{SECTION}.inner.names=[a]")
    assert copy.deepcopy(config).actor_rollout_ref.actor.policy_loss.mine.doubled == 4.0  # type: ignore[attr-defined]
    code = (
        "import pickle, sys; from verl.config.load import import_plugins_of\n"
        "config = pickle.load(sys.stdin.buffer); mine = config.actor_rollout_ref.actor.policy_loss.mine\n"
        "before = mine.beta; import_plugins_of(config); mine = config.actor_rollout_ref.actor.policy_loss.mine\n"
        "print(before, mine.doubled, mine.inner.names)"
    )
    sent = pickle.dumps(config)
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, env=dict(os.environ))
    assert done.stdout.decode() == "2.0 4.0 ['a']\n", done.stderr.decode()
    import_plugins_of(config)
    assert config.actor_rollout_ref.actor.policy_loss.mine.doubled == 4.0  # type: ignore[attr-defined]


def test_an_unknown_key_says_which_plug_in_could_not_be_imported(tmp_path: Path) -> None:
    values = {"trainer.plugins": [str(tmp_path / "gone.py")], f"{SECTION}.beta": 1}
    with pytest.raises(ConfigError) as error:
        from_dict(PPOConfig, values, checked=False)
    assert "gone.py does not exist" in str(error.value) and f"unknown key '{SECTION}.beta'" in str(
        error.value
    )


def test_a_field_without_a_default_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no_default.py"
    path.write_text(PLUGIN.replace("    beta:", "    required: int\n    beta:"))
    with pytest.raises(ConfigError, match=r"Mine\.required: a key of a section needs a default"):
        load(path)


ENGINES = """
from dataclasses import dataclass

from verl.config.capabilities import EngineSpec, StrategySpec
from verl.config.methods import register_section
from verl.engines import register_strategy
from verl.rollout import register_rollout


@dataclass
class Sizes:
    stages: int = 1
    param_offload: bool = False
    optimizer_offload: bool = False


register_section("actor_rollout_ref.actor.staged", Sizes)
register_strategy(
    "staged", "staged:build",
    StrategySpec(
        section="staged", layout=lambda role: {"pp": role.staged.stages}, sizes={"pp": ("staged.stages",)},
        fits=lambda role, model: (), full_shards=False, package="no-such-package", module="no_such_package",
    ),
)
register_rollout("remote", EngineSpec(owns_weights=True, server=True, tensor_parallel=True))(lambda *given: None)
"""


def test_engines_and_strategies_of_plug_ins_are_judged_by_what_they_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.config import capabilities
    from verl.config.machine import missing_packages
    from verl.config.parallelism import engine_size
    from verl.config.plan import RunPlan

    for name in ("_engines", "_strategies"):
        monkeypatch.setattr(capabilities, name, dict(getattr(capabilities, name)))
    monkeypatch.setattr("verl.rollout._registry", {})
    monkeypatch.setattr("verl.engines._strategies", {})
    path = tmp_path / "my_engines.py"
    path.write_text(ENGINES)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    given = [
        f"{actor}.strategy=staged",
        f"{rollout}.name=remote",
        "trainer.n_gpus_per_node=4",
        "trainer.device=cpu",
    ]
    given += ["algorithm.adv_estimator=grpo", f"{rollout}.n=4", f"{rollout}.tensor_model_parallel_size=2"]
    config = load(path, *given, f"{actor}.staged.stages=2")
    layout = RunPlan(config).roles[0].layout
    assert (layout.pp, layout.dp, engine_size(config)) == (2, 2, 2)
    assert any(
        "strategy=staged needs the package 'no-such-package'" in line for line in missing_packages(config)
    )
    with pytest.raises(ConfigError, match=r"staged\.stages 3 = 3 ranks for one copy"):
        load(path, *given, f"{actor}.staged.stages=3")


LOSS = """
from verl.algorithms import agg_loss
from verl.config.methods import register_policy_loss


@register_policy_loss("mine")
def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
    loss = agg_loss(-log_prob * advantages, response_mask, loss_agg_mode, **config.global_batch_info)
    return config.policy_loss.mine.beta * loss, {"actor/doubled": config.policy_loss.mine.doubled}
"""


@pytest.mark.slow(seconds=4)
def test_a_run_gets_the_value_and_writes_it_to_its_record(
    tiny_model_dir: Path, digits_data: Path, plugin: Path, tmp_path: Path, fork_server: Any
) -> None:
    plugin.write_text(PLUGIN + LOSS)
    chosen = [f"trainer.plugins=[{plugin.name}]", "actor_rollout_ref.actor.policy_loss.loss_mode=mine"]
    words = tiny_run(
        tiny_model_dir, digits_data, *chosen, f"{SECTION}.beta=2", "trainer.total_training_steps=1"
    )
    words.append("trainer.default_local_dir=run")
    process = fork_server.start("verl.trainer.main_ppo", words, output=tmp_path / "printed", folder=tmp_path)
    assert process.wait() == 0, (tmp_path / "printed").read_text()[-2000:]
    assert read_metrics(tmp_path / "run")[-1]["actor/doubled"] == 4.0
    assert (
        load_yaml(tmp_path / "run" / "config.yaml")["actor_rollout_ref"]["actor"]["policy_loss"]["mine"][
            "beta"
        ]
        == 2
    )
