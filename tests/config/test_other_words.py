"""Habits from other trainers and shells are answered with how it is written here."""

from __future__ import annotations

import pytest

from verl.config.keys import nearest, schema_keys
from verl.config.load import load_ppo_config, load_sft_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.synonyms import words
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
        ("rollout.num_generations", "actor_rollout_ref.rollout.n"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rollout_ref.actor.kl_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("reward_fn", "reward.custom_reward_function.path"),
        ("data.max_new_tokens", "data.max_response_length"),
    ],
)
def test_the_first_answer_is_what_was_meant(typed: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{typed}'.*Nearest known key: '{ours}'"):
        load_ppo_config([*NEEDED, f"{typed}=1"])


def test_fine_tuning_is_answered_with_its_own_keys() -> None:
    for typed, ours in (
        ("learning_rate", "optim.lr"),
        ("model_path", "model.path"),
        ("lora_r", "model.lora_rank"),
    ):
        with pytest.raises(ConfigError, match=f"Nearest known key: '{ours}'"):
            load_sft_config(["model.path=o/m", "data.train_files=o/d", f"{typed}=1"])


def test_every_word_means_a_key_there_is() -> None:
    """A key that is renamed must be renamed here too; and no word is itself a key somewhere at the top."""
    known = set(schema_keys(PPOConfig)) | set(schema_keys(SFTConfig))
    for word, meanings in words().items():
        assert set(meanings) <= known, word
        assert any(key in schema_keys(PPOConfig) for key in meanings), word
        assert nearest(PPOConfig, word)[0] in meanings, word


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--data.train_batch_size=4"], "write data.train_batch_size=4"),
        (["--data.train-batch-size", "4"], "write data.train_batch_size=4"),
        (["--verbose"], "keys are given as key=value$"),
        (["--verbose", "a=b"], "keys are given as key=value$"),
        (["data.train_batch_size", "=", "4"], "without spaces: data.train_batch_size=4"),
        (["data.train_batch_size", "=4"], "without spaces: data.train_batch_size=4"),
        (["configs/mine.yaml"], "--config-path configs --config-name mine"),
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
        ("algorithm.adv_estimator=ppo", "Did you mean 'gae'"),
        ("algorithm.adv_estimator=GRPO", "Did you mean 'grpo'"),
        ("algorithm.adv_estimator=dapo", "Did you mean 'grpo' with .*clip_ratio_high=0.28"),
        ("algorithm.adv_estimator=REINFORCE++", "Did you mean 'reinforce_plus_plus'"),
        ("actor_rollout_ref.rollout.name=VLLM", "Did you mean 'vllm'"),
        ("actor_rollout_ref.rollout.name=transformers", "Did you mean 'hf'"),
        ("trainer.device=gpu", "Did you mean 'cuda'"),
        ("trainer.device=cuda:0", "CUDA_VISIBLE_DEVICES"),
        ("hydra.run.dir=x", "trainer.default_local_dir"),
    ],
)
def test_values_by_other_names_are_answered_with_ours(typed: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        load_ppo_config([*NEEDED, typed])
