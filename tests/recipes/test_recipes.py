"""Every recipe is complete, its keys exist and change something, and `recipe=NAME` puts them below the user's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from verl import cli
from verl.config.build import fit_batch
from verl.config.keys import get, schema_keys
from verl.config.load import from_dict, load_config, load_ppo_config, load_sft_config
from verl.config.recipes import FOLDER, read_recipe, recipe_names
from verl.config.schema import GenerationConfig, PPOConfig
from verl.errors import CommandAnswered, ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "cispo", "dapo", "dr_grpo", "gpg", "gspo", "on_policy_distillation", "online_dpo", "opo", "pf_ppo", "prime",
    "reinforce_plus_plus", "remax", "rloo", "sapo", "self_distillation", "spin", "sppo",
]  # fmt: skip
NEEDED = ["actor_rollout_ref.model.path=model", "data.train_files=train.parquet", "trainer.device=cpu"]
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def test_all_recipes_are_there() -> None:
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = read_recipe(name)
    files = sorted(path.name for path in (FOLDER / name).iterdir() if path.name != "__pycache__")
    assert files == ["README.md", "recipe.yaml"]
    link = re.search(
        r"^Paper: .{20,}, \[arXiv:(\d{4}\.\d{5})\]\(https://arxiv.org/abs/(.*)\)$",
        recipe.readme,
        re.MULTILINE,
    )
    assert link is not None and link.group(1) == link.group(2)
    assert len(recipe.readme.splitlines()) <= 30 and recipe.about.endswith(".")
    assert f"verl train recipe={name} " in recipe.readme
    table = set(re.findall(r"^\| `([\w.]+)` \|", recipe.readme, re.MULTILINE))
    assert table == set(recipe.keys), "the table has exactly the keys of recipe.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_its_keys_exist_and_differ_from_the_defaults(name: str) -> None:
    keys = schema_keys(PPOConfig)
    for key, value in read_recipe(name).keys.items():
        assert key in keys
        assert value != keys[key].default, key
        root = key.partition(".")[0]
        assert root != "data" and not key.startswith("actor_rollout_ref.model."), "the user's choice"


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_its_readme_is_valid(name: str) -> None:
    command = re.search(rf"^verl train (recipe={name} .*)$", read_recipe(name).readme, re.MULTILINE)
    assert command is not None
    load_ppo_config([*command.group(1).split(), "trainer.device=cpu"])


@pytest.mark.parametrize("name", NAMES)
def test_keys_named_in_its_readme_exist(name: str) -> None:
    keys = schema_keys(PPOConfig)
    for key in re.findall(r"`((?:\w+\.)+\w+)(?:=[^`]*)?`", read_recipe(name).readme):
        assert any(known == key or known.endswith(f".{key}") for known in keys), key


def test_the_page_and_the_readme_list_them_all() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\(\.\./verl/recipes/\1/README\.md\) \|", page, re.MULTILINE)
    assert listed == NAMES
    assert "docs/recipes.md" in (ROOT / "README.md").read_text()


def test_the_user_wins_wherever_they_set_a_key(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {rollout: {n: 3}}\nalgorithm:\n")
    line = ["--config-path", str(tmp_path), "--config-name", "mine", *NEEDED, "recipe=dapo"]
    cfg = load_ppo_config([*line, "actor_rollout_ref.actor.clip_ratio_high=0.25"])
    assert cfg.actor_rollout_ref.rollout.n == 3, "from the YAML, although recipe= comes later"
    assert cfg.actor_rollout_ref.actor.clip_ratio_high == 0.25
    assert cfg.algorithm.adv_estimator == "grpo" and cfg.algorithm.filter_groups.enable
    assert cfg.recipe_set == {
        "algorithm.adv_estimator",
        "algorithm.filter_groups.enable",
        "reward.overlong_buffer.enable",
    }


def test_a_recipe_in_a_yaml_file_and_in_python(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: gspo\ntrainer: {experiment_name: '${recipe}-1'}\n")
    line = ["--config-path", str(tmp_path), "--config-name", "mine", *NEEDED]
    cfg = load_ppo_config(line)
    assert cfg.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert cfg.trainer.experiment_name == "gspo-1"
    other = load_ppo_config([*line, "recipe=sapo"])
    assert other.actor_rollout_ref.actor.policy_loss.loss_mode == "sapo", "the command line's recipe"
    assert other.actor_rollout_ref.actor.clip_ratio_low is None, "nothing is left of the file's"
    for line_without in ([*line, "~recipe"], [*line, "recipe=null"]):
        without = load_ppo_config([*line_without, "algorithm.adv_estimator=gae"])
        assert without.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert from_dict(PPOConfig, {"recipe": "opo"}, checked=False).algorithm.adv_estimator == "opo"


def test_a_removed_key_has_its_default_again() -> None:
    cfg = load_ppo_config([*NEEDED, "recipe=dapo", "~algorithm.filter_groups"])
    assert not cfg.algorithm.filter_groups.enable and "algorithm.filter_groups.enable" not in cfg.user_set


def test_only_the_users_own_keys_are_reported_as_unused(caplog: pytest.LogCaptureFixture) -> None:
    other = "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
    load_ppo_config([*NEEDED, "recipe=gspo", other])
    assert "has no effect" not in caplog.text, "clip ranges of the recipe, with a loss that has none"
    load_ppo_config([*NEEDED, "recipe=gspo", other, "actor_rollout_ref.actor.clip_ratio_low=0.1"])
    assert "'actor_rollout_ref.actor.clip_ratio_low'=0.1 has no effect" in caplog.text


def test_one_step_per_batch_also_where_the_data_is_small() -> None:
    cfg = load_ppo_config([*NEEDED, "recipe=opo"])
    assert get(cfg, MINI) == cfg.data.train_batch_size == 1024
    assert (
        load_ppo_config([*NEEDED, "recipe=opo", "data.train_batch_size=96"]).critic.ppo_mini_batch_size == 96
    )
    fit_batch(cfg, 100)
    assert get(cfg, MINI) == cfg.data.train_batch_size == 100


@pytest.mark.parametrize(
    ("typed", "meant"), [("dap", "dapo"), ("Dr-GRPO", "dr_grpo"), ("reinforce++", "reinforce_plus_plus")]
)
def test_an_unknown_recipe_names_the_nearest_and_all(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_dict(PPOConfig, {"recipe": typed})
    assert f"'recipe' is {typed!r}" in str(error.value) and f"Did you mean {meant}?" in str(error.value)
    assert ", ".join(NAMES) in str(error.value)


@pytest.mark.parametrize("value", [["dapo", "gspo"], {"name": "dapo"}, 3, True])
def test_what_is_no_name_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="'recipe' is"):
        from_dict(PPOConfig, {"recipe": value})


def test_the_plural_is_answered_with_the_key() -> None:
    with pytest.raises(ConfigError, match="unknown key 'recipes' .* Write recipe=NAME"):
        from_dict(PPOConfig, {"recipes": "dapo"})


def test_a_recipe_of_another_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="recipe 'dapo' is for `verl train`"):
        load_sft_config(["model.path=model", "data.train_files=train.parquet", "recipe=dapo"])
    with pytest.raises(ConfigError, match="recipe 'opo' is for `verl train`"):
        load_config(GenerationConfig, ["recipe=opo"])


def answer(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    with pytest.raises(CommandAnswered):
        load_ppo_config([*NEEDED, *line])
    return capsys.readouterr().out


def test_help_config_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "recipe=dapo", "--help", "algorithm.filter_groups")
    assert "recipe=dapo: GRPO" in shown and "arXiv:2503.14476" in shown
    assert "  actor_rollout_ref.actor.clip_ratio_high=0.28\n" in shown
    assert "recipe=NAME" in answer(capsys, "--help", "algorithm.filter_groups")
    resolved = yaml.safe_load(answer(capsys, "recipe=dapo", "--cfg", "job"))
    assert resolved["reward"]["overlong_buffer"]["enable"] is True and "recipe" not in resolved
    assert "16" in answer(capsys, "recipe=dapo", "--check")


def test_the_command_lists_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^{name} +arXiv:\d{{4}}\.\d{{5}}  \w", shown, re.MULTILINE) for name in NAMES)
    assert cli.main(["recipes", "gspo"]) == 0
    assert capsys.readouterr().out == (FOLDER / "gspo" / "README.md").read_text()
    assert cli.main(["recipes", "gsop"]) != 0
    assert "Did you mean gspo?" in capsys.readouterr().err
