"""Names and spellings of other trainers and shells are answered with ours."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config.keys import OTHER_NAMES, nearest, schema_keys
from verl.config.load import load_ppo_config, load_sft_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.errors import ConfigError

NEEDED = ["actor_rollout_ref.model.path=o/m", "data.train_files=o/d"]


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("lr", "actor_rollout_ref.actor.optim.lr"),
        ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("model", "actor_rollout_ref.model.path"),
        ("model_name_or_path", "actor_rollout_ref.model.path"),
        ("trainer.num_epochs", "trainer.total_epochs"),
        ("trainer.output_dir", "trainer.default_local_dir"),
        ("trainer.total_step", "trainer.total_training_steps"),
        ("trainer.max_step", "trainer.total_training_steps"),
        ("rollout.num_generations", "actor_rollout_ref.rollout.n"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rollout_ref.actor.kl_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("reward_fn", "reward.custom_reward_function.path"),
        ("data.max_new_tokens", "data.max_response_length"),
    ],
)
def test_the_first_answer_is_what_was_meant(typed: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{typed}'.*Did you mean '{ours}'"):
        load_ppo_config([*NEEDED, f"{typed}=1"])


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (
            "algorithm.adv_estimator=gspo",
            "policy loss: set actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=rloo", "algorithm.adv_estimator=rloo"),
    ],
)
def test_a_loss_and_an_estimator_in_the_place_of_the_other_are_told_apart(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer) as error:
        load_ppo_config([*NEEDED, typed])
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("rollout.agent_loop=mine", "actor_rollout_ref.rollout.multi_turn"),
        ("trainer.async=one_step_off", "trainer.async_training.mode"),
    ],
)
def test_a_key_by_which_others_ask_for_a_feature_is_answered_with_its_section(
    typed: str, answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer) as error:
        load_ppo_config([*NEEDED, typed])
    assert "Did you mean" not in str(error.value)


def test_a_batch_is_not_told_to_grow_beyond_the_data() -> None:
    """How many rows there are is not known yet, so only a smaller batch is sure to work."""
    with pytest.raises(ConfigError) as error:
        load_ppo_config(
            [*NEEDED, "data.train_batch_size=500", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
        )
    assert "data.train_batch_size=496" in str(error.value) and "504" not in str(error.value)


@pytest.mark.parametrize(
    ("batch", "mini", "said"),
    [
        (500, 8, "but data.train_files have 20 rows; set it to 16, a multiple of"),
        (
            500,
            24,
            "set it to at most 20, and actor_rollout_ref.actor.ppo_mini_batch_size=24 to a divisor of it",
        ),
        (15, 4, "Values that work: 1, 3, 5, 15; or data.train_batch_size=12"),
        (16, 24, "more than data.train_batch_size=16. Values that work: 1, 2, 4, 8, 16"),
    ],
)
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_batch_is_not_told_to_be_larger_than_files_that_are_there(
    tmp_path: Path, ending: str, batch: int, mini: int, said: str
) -> None:
    file = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"prompt": ["a"] * 20}), file)
    else:
        file.write_text('{"prompt": "a"}\n' * 20)
    sizes = [f"data.train_batch_size={batch}", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"]
    with pytest.raises(ConfigError) as error:
        load_ppo_config([*NEEDED, f"data.train_files={file}", *sizes])
    assert str(error.value).endswith(said) or f"{said} actor_rollout_ref" in str(error.value)


def test_fine_tuning_is_answered_with_its_own_keys() -> None:
    for typed, ours in (
        ("learning_rate", "optim.lr"),
        ("model_path", "model.path"),
        ("lora_r", "model.lora_rank"),
    ):
        with pytest.raises(ConfigError, match=f"Did you mean '{ours}'"):
            load_sft_config(["model.path=o/m", "data.train_files=o/d", f"{typed}=1"])


def test_every_other_name_means_a_key_there_is() -> None:
    known = set(schema_keys(PPOConfig)) | set(schema_keys(SFTConfig))
    for name, meanings in OTHER_NAMES.items():
        assert set(meanings.split()) <= known, name
        assert nearest(PPOConfig, name)[0] in meanings.split(), name


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--data.train_batch_size=4"], "write data.train_batch_size=4"),
        (["--data.train-batch-size", "4"], "write data.train_batch_size=4"),
        (["--verbose"], "keys are written key=value$"),
        (["--verbose", "a=b"], "keys are written key=value$"),
        (["data.train_batch_size", "=", "4"], "without spaces: data.train_batch_size=4"),
        (["data.train_batch_size", "=4"], "without spaces: data.train_batch_size=4"),
        (["configs/mine.yaml"], "a file of keys must exist, .*--config-path DIR --config-name NAME"),
        (["train"], "write key=value"),
    ],
)
def test_a_line_written_as_elsewhere_is_answered_with_how_it_is_written_here(
    typed: list[str], answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer):
        load_ppo_config([*NEEDED, *typed])


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("algorithm.adv_estimator=ppo", "Did you mean gae"),
        ("algorithm.adv_estimator=GRPO", "Did you mean grpo"),
        (
            "algorithm.adv_estimator=dpo",
            "`verl dpo algorithm.loss=dpo`. With a reward instead of pairs: recipe=online_dpo",
        ),
        ("algorithm.adv_estimator=kto", "kto learns from judged answers: `verl dpo algorithm.loss=kto`"),
        ("algorithm.adv_estimator=dapo", "dapo is a recipe: give recipe=dapo instead"),
        ("algorithm.adv_estimator=REINFORCE++", "Did you mean reinforce_plus_plus"),
        ("actor_rollout_ref.rollout.name=VLLM", "Did you mean vllm"),
        ("actor_rollout_ref.rollout.name=transformers", "Did you mean hf"),
        ("actor_rollout_ref.rollout.mode=own", "Allowed: inprocess, server"),
        ("trainer.device=gpu", "Did you mean cuda"),
        ("trainer.device=cuda:0", "Did you mean cuda"),
    ],
)
def test_values_by_other_names_are_answered_with_ours(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        load_ppo_config([*NEEDED, typed])
