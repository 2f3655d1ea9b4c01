"""Bad input and the words its message must have: what was seen, what is allowed, the key to change."""

# ruff: noqa: E501 - one case per line reads better than short lines

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config.keys import schema_keys
from verl.config.load import from_dict, load_ppo_config, load_sft_config
from verl.config.schema import PPOConfig, SFTConfig
from verl.errors import ConfigError

NEEDED = ["actor_rollout_ref.model.path=org/model", "data.train_files=train.parquet"]
SPLIT = [f"rollout.multi_turn.{each}" for each in ("enable=True", "tools=tools.py", "history=split")]
PRIME = ["algorithm.adv_estimator=prime", "rollout.n=4"]

BAD = [
    # unknown keys
    (["actor_rollout_ref.actor.clip_ration=0.1"], ["actor_rollout_ref.actor.clip_ration", "0.1", "'actor_rollout_ref.actor.clip_ratio'", "Did you mean"]),
    (["+trainer.total_epoch=3"], ["trainer.total_epoch", "'trainer.total_epochs'", "Did you mean"]),
    (["rollout.temperatur=1"], ["rollout.temperatur", "'actor_rollout_ref.rollout.temperature'"]),
    (["actor_rollout_ref.actor.lr=1e-6"], ["'actor_rollout_ref.actor.optim.lr'"]),
    (["learning_rate=1e-6"], ["learning_rate", "Did you mean"]),
    (["trainer.foo.bar=1"], ["unknown key 'trainer.foo.bar' (value 1)."]),
    (["reward_model.modle.path=x"], ["reward_model.modle.path", "Did you mean"]),
    (["reward.functions=[{path: a.py, wieght: 2}]"], ["reward.functions[0].wieght", "path, name, weight"]),
    (["~data.foo"], ["~data.foo", "removes an unknown key"]),
    # wrong types
    (["data.train_batch_size=many"], ["data.train_batch_size", "'many'", "a whole number"]),
    (["data.train_batch_size=1.5"], ["data.train_batch_size", "1.5", "a whole number"]),
    (["data.train_batch_size=null"], ["data.train_batch_size", "None", "a whole number"]),
    (["data.train_batch_size=true"], ["data.train_batch_size", "True", "a whole number"]),
    (["actor_rollout_ref.actor.clip_ratio=high"], ["actor_rollout_ref.actor.clip_ratio", "'high'", "a number"]),
    (["actor_rollout_ref.actor.clip_ratio=nan"], ["actor_rollout_ref.actor.clip_ratio", "nan", "a number"]),
    (["actor_rollout_ref.actor.optim.lr=inf"], ["actor_rollout_ref.actor.optim.lr", "inf", "a number"]),
    (["data.shuffle=maybe"], ["data.shuffle", "'maybe'", "true or false"]),
    (["data.shuffle=1"], ["data.shuffle", "1", "true or false"]),
    (["trainer=3"], ["it must be a mapping with the keys", "total_epochs", "3"]),
    (["data.apply_chat_template_kwargs=3"], ["data.apply_chat_template_kwargs", "a mapping"]),
    (["rollout.stop_token_ids=[a]"], ["rollout.stop_token_ids", "a list", "a whole number"]),
    (["reward.functions=[a.py]"], ["reward.functions", "a mapping with the keys path"]),
    # unknown names
    (["algorithm.adv_estimator=gpro"], ["algorithm.adv_estimator", "'gpro'", "gae, grpo", "Did you mean grpo", "trainer.plugins"]),
    (["actor_rollout_ref.rollout.name=vlm"], ["actor_rollout_ref.rollout.name", "native, hf, vllm, sglang"]),
    (["actor_rollout_ref.actor.strategy=ddp"], ["actor_rollout_ref.actor.strategy", "fsdp, fsdp2, megatron"]),
    (["actor_rollout_ref.actor.policy_loss.loss_mode=ppo"], ["loss_mode", "vanilla, gspo"]),
    (["actor_rollout_ref.actor.loss_agg_mode=mean"], ["loss_agg_mode", "token-mean"]),
    (["actor_rollout_ref.actor.kl_loss_type=k4"], ["kl_loss_type", "low_var_kl"]),
    (["algorithm.kl_penalty=x"], ["algorithm.kl_penalty", "k1"]),
    (["algorithm.kl_ctrl.type=auto"], ["algorithm.kl_ctrl.type", "fixed, adaptive"]),
    (["actor_rollout_ref.actor.optim.lr_scheduler_type=cos"], ["lr_scheduler_type", "constant, cosine, linear", "Did you mean cosine"]),
    (["data.truncation=cut"], ["data.truncation", "error, left, right, middle"]),
    (["reward.reward_manager.name=fast"], ["reward.reward_manager.name", "naive, prime, dapo, batch"]),
    (["trainer.logger=[console,comet]"], ["trainer.logger", "'comet'", "mlflow"]),
    (["trainer.device=tpu"], ["trainer.device", "auto, cpu, cuda"]),
    (["trainer.resume_mode=always"], ["trainer.resume_mode", "auto, disable, resume_path"]),
    (["actor_rollout_ref.rollout.dtype=int3"], ["actor_rollout_ref.rollout.dtype", "fp8"]),
    (["algorithm.filter_groups.metric=len"], ["algorithm.filter_groups.metric", "acc, score"]),
    (["actor_rollout_ref.actor.checkpoint.save_contents=[weights]"], ["save_contents", "'weights'", "model, optimizer, extra, hf_model"]),
    (["trainer.plugins=[no_such_module_here]"], ["no_such_module_here", "trainer.plugins"]),
    # out of bounds
    (["data.train_batch_size=0"], ["data.train_batch_size", "0", "at least 1"]),
    (["rollout.n=0"], ["actor_rollout_ref.rollout.n", "at least 1"]),
    (["rollout.temperature=-1"], ["actor_rollout_ref.rollout.temperature", "at least 0"]),
    (["rollout.top_p=0"], ["actor_rollout_ref.rollout.top_p", "above 0 and at most 1"]),
    (["rollout.gpu_memory_utilization=1.5"], ["gpu_memory_utilization", "1.5", "at most 1"]),
    (["actor_rollout_ref.actor.clip_ratio_c=1"], ["clip_ratio_c", "above 1"]),
    (["actor_rollout_ref.actor.optim.betas=[0.9]"], ["actor_rollout_ref.actor.optim.betas", "two numbers"]),
    (["actor_rollout_ref.actor.optim.betas=[0.9,1.5]"], ["actor_rollout_ref.actor.optim.betas", "1.5"]),
    (["trainer.prometheus.port=70000"], ["trainer.prometheus.port", "at most 65535"]),
    # batches
    (["data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=64"], ["ppo_mini_batch_size", "64", "not a divisor", "100", "50", "data.train_batch_size=64"]),
    (["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=64"], ["ppo_mini_batch_size", "64", "more than data.train_batch_size=32", "16", "32", "data.train_batch_size=64"]),
    (["data.train_batch_size=64", "critic.ppo_mini_batch_size=24"], ["critic.ppo_mini_batch_size", "24", "16"]),
    (["data.train_batch_size=2", "trainer.n_gpus_per_node=4"], ["data.train_batch_size", "2 sequences for 4 ranks", "at least 4"]),
    # ranks
    (["rollout.name=vllm", "rollout.tensor_model_parallel_size=4"], ["tensor_model_parallel_size", "4", "does not divide", "Values that work: 1", "trainer.n_gpus_per_node=4"]),
    (["actor.optim.name=muon", "actor.fsdp_config.offload_policy=True"], ["'actor_rollout_ref.actor.optim.name' is muon", "fsdp_config.offload_policy"]),
    (["actor.optim.name=muon", "actor.optim.moments=int8"], ["'actor_rollout_ref.actor.optim.name' is muon", "'actor_rollout_ref.actor.optim.moments' to float32"]),
    (["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"], ["fsdp_size", "3", "-1 (all)", "1, 2, 4"]),
    (["rollout.n_gpus_per_node=2"], ["rollout.n_gpus_per_node", "rollout.nnodes", "both"]),
    # combinations
    *[
        ([f"algorithm.adv_estimator={name}", "algorithm.gdpo_reward_keys=[a]"], ["actor_rollout_ref.rollout.n", "is 1", name, "2 or more"])
        for name in ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline", "turn_rloo", "prime")
    ],
    (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.filter_groups.enable=True"], ["algorithm.filter_groups.enable", "2 or more"]),
    (["rollout.temperature=0"], ["actor_rollout_ref.rollout.temperature", "0", "1.0"]),
    (["critic.enable=False"], ["critic.enable", "gae", "grpo"]),
    (["algorithm.adv_estimator=reinforce_plus_plus", "trainer.critic_warmup=5"], ["trainer.critic_warmup", "no critic", "0"]),
    (["algorithm.adv_estimator=gdpo", "rollout.n=4"], ["algorithm.gdpo_reward_keys"]),
    ([*PRIME, "implicit_reward.beta=0"], ["'implicit_reward.beta' is 0.0", "above 0"]),
    ([*PRIME, "implicit_reward.beta=-0.05"], ["'implicit_reward.beta' is -0.05", "above 0"]),
    ([*PRIME, "implicit_reward.update=during"], ["implicit_reward.update", "'during'", "before, after"]),
    ([*PRIME, "algorithm.prime.outcome_coef=0", "algorithm.prime.process_coef=0"], ["algorithm.prime.outcome_coef", "process_coef", "both 0", "5"]),
    ([*PRIME, "data.train_batch_size=64", "implicit_reward.ppo_mini_batch_size=24"], ["implicit_reward.ppo_mini_batch_size", "24", "16"]),
    ([*PRIME, "trainer.n_gpus_per_node=4", "implicit_reward.fsdp_config.fsdp_size=3"], ["implicit_reward.fsdp_config.fsdp_size", "3", "1, 2, 4"]),
    ([*PRIME, *SPLIT], ["algorithm.adv_estimator", "prime", "history=split", "append"]),
    *[
        ([*PRIME, "algorithm.filter_groups.enable=True", f"algorithm.filter_groups.accuracy_lower_bound={lower}", "algorithm.filter_groups.accuracy_upper_bound=0.5"], ["algorithm.filter_groups.accuracy_lower_bound", f"is {lower}", "below", "accuracy_upper_bound=0.5"])
        for lower in ("0.5", "0.8")
    ],
    (["algorithm.adv_estimator=gdpo", "rollout.n=4", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"], ["gdpo_reward_weights", "1 numbers for 2 gdpo_reward_keys"]),
    (["trainer.val_only=True"], ["trainer.val_only", "data.val_files"]),
    (["trainer.resume_mode=resume_path"], ["trainer.resume_from_path"]),
    (["actor_rollout_ref.actor.optim.lr_warmup_steps=5", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"], ["lr_warmup_steps", "keep one"]),
    ([*SPLIT, "algorithm.use_pf_ppo=True"], ["algorithm.use_pf_ppo", "history=split", "False", "append"]),
    ([*SPLIT, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_final_reward", "rollout.n=2"], ["algorithm.filter_groups.metric", "history=split", "seq_reward"]),
    (["rollout.max_model_len=100"], ["max_model_len", "100", "1024"]),
    (["reward.reward_model.enable=True"], ["reward.reward_model.model_path"]),
    (["reward.judge.base_url=http://x/v1"], ["reward.judge.model"]),
    (["reward.overlong_buffer.enable=True", "reward.overlong_buffer.len=600"], ["reward.overlong_buffer.len", "600", "at most data.max_response_length=512"]),
    (["reward.custom_reward_function.path=a.py", "reward.functions=[{path: b.py}]"], ["custom_reward_function.path", "reward.functions", "both"]),
    (["reward.functions=[{name: f}]"], ["reward.functions[0].path", "required"]),
    (["data.mixture=[{weight: 2}]"], ["data.mixture[0]", "files"]),
    (["algorithm.rollout_correction.rollout_is=token", "rollout.calculate_log_probs=False"], ["calculate_log_probs=True"]),
    (["algorithm.rollout_correction.rollout_is_threshold=5_2"], ["rollout_is_threshold", "5_2", "lo_hi"]),
    (["algorithm.rollout_correction.rollout_rs=seq_k1"], ["rollout_rs", "'seq_k1'", "seq_mean_k1"]),
    (["algorithm.rollout_correction.rollout_rs=token_k1"], ["rollout_rs_threshold"]),
    (["algorithm.rollout_correction.rollout_rs='token_k1,token_k2,seq_sum_k3'", "algorithm.rollout_correction.rollout_rs_threshold='2,3'"], ["2 bounds for 3 rules"]),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100", "data.train_batch_size=512"], ["algorithm.kl_ctrl.horizon", "512 sequences", "more than 102"]),
    # the command line itself
    (["data.seed=1,2"], ["several values", "data.seed=[a,b]"]),
    (["data.train_files=[~/a]"], ["data.train_files=[~/a]", "Quote"]),
    (["verbose"], ["'verbose' is not an override", "key=value"]),
    (["--fast"], ["unknown option", "--fast"]),
    (["--config-name"], ["--config-name", "expected one argument"]),
    (["--cfg", "all"], ["--cfg", "all", "job"]),
    (["--help", "trainr"], ["trainr", "trainer"]),
    (["trainer.experiment_name=${no.such}"], ["interpolation", "no"]),
    (["data@x=1"], ["package"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_gets_a_clear_message(given: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_ppo_config([*NEEDED, *given])
    message = str(error.value)
    for word in words:
        assert word in message
    assert error.value.exit_code == 2


def test_missing_model_and_data_are_both_named() -> None:
    with pytest.raises(ConfigError) as error:
        load_ppo_config([])
    assert "'actor_rollout_ref.model.path' is required" in str(error.value)
    assert "'data.train_files' is required" in str(error.value)
    assert "critic.model.path" not in str(error.value)
    with pytest.raises(ConfigError, match=r"'model\.path' is required"):
        load_sft_config(["data.train_files=a"])


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_ppo_config([*NEEDED, "trainer.total_epoch=3", "data.shuffle=7", "data.max_prompt_length=long"])
    assert len(str(error.value).splitlines()) == 3


def test_every_misspelt_key_finds_its_neighbour() -> None:
    """Dropping one letter of any key of the schema names that key, or one spelt just as closely."""
    for kind in (PPOConfig, SFTConfig):
        for key in schema_keys(kind).values():
            if len(key.last) < 6:
                continue
            wrong = f"{key.section}.{key.last[:3]}{key.last[4:]}"
            if wrong in schema_keys(kind):
                continue
            with pytest.raises(ConfigError) as error:
                from_dict(kind, {wrong: 1}, checked=False)
            assert f"'{key.name}'" in str(error.value), wrong


SFT_BAD = [
    (["optim.lr_schedule=cosine"], ["optim.lr_schedule", "lr_scheduler_type"]),
    (["algorithm.adv_estimator=grpo"], ["unknown key 'algorithm.adv_estimator' (value 'grpo')."]),
    (["data.train_batch_size=2", "trainer.n_gpus_per_node=4"], ["data.train_batch_size", "at least 4"]),
    (
        ["data.train_batch_size=8", "data.micro_batch_size_per_gpu=16"],
        ["micro_batch_size_per_gpu", "16", "at most 8"],
    ),
    (["data.truncation=cut"], ["data.truncation", "right"]),
    (["optim.lr_warmup_steps=3", "optim.warmup_steps_proportion=0.1"], ["lr_warmup_steps", "keep one"]),
    (["model.strategy=ddp"], ["model.strategy", "fsdp2"]),
]


@pytest.mark.parametrize(("given", "words"), SFT_BAD, ids=[" ".join(case[0]) for case in SFT_BAD])
def test_bad_input_of_sft(given: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_sft_config(["model.path=m", "data.train_files=a", *given])
    for word in words:
        assert word in str(error.value)


def test_both_spellings_with_different_values_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("rollout: {n: 2}\nactor_rollout_ref: {rollout: {n: 4}}")
    with pytest.raises(ConfigError) as error:
        load_ppo_config(["-cp", str(tmp_path), "-cn", "c", *NEEDED])
    for word in ("'rollout.n'", "'actor_rollout_ref.rollout.n'", "2", "4"):
        assert word in str(error.value)
    (tmp_path / "c.yaml").write_text("rollout: {n: 4}\nactor_rollout_ref: {rollout: {n: 4}}")
    assert load_ppo_config(["-cp", str(tmp_path), "-cn", "c", *NEEDED]).actor_rollout_ref.rollout.n == 4


BILLIONS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few hundred characters whose aliases stand for 9^9 values."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: [unclosed", ["cannot read", "c.yaml"]),
        ("- a\n- b", ["c.yaml", "not a list"]),
        ("data: {seed: 1}\ndata: {seed: 2}", ["c.yaml", "duplicate"]),
        ("defaults: 3", ["'defaults'", "list"]),
        ("defaults: [nothing_here]", ["nothing_here.yaml", "YAML files in that folder: c.yaml"]),
        ("defaults: [c]", ["c.yaml", "its own defaults"]),
        ("? [a]\n: 1", ["c.yaml", "a key must be a plain text", "line 1, column 3"]),
        ("data: " + "[" * 50_000, ["c.yaml", "nested deeper than 100 levels"]),
        ("data: &a [*a]", ["c.yaml", "nested deeper than 100 levels"]),
        ("data: &a {b: *a}", ["c.yaml", "nested deeper than 100 levels"]),
        (BILLIONS, ["c.yaml", "more than 100,000 keys and values"]),
        ("data: " + "9" * 100_000, ["c.yaml", "digits"]),
        ("data: !!bool maybe", ["c.yaml", "maybe"]),
        ("data: !!timestamp x", ["c.yaml"]),
        ("5: 3", ["5", "must be a text"]),
    ],
)
def test_bad_yaml_files(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_ppo_config(["-cp", str(tmp_path), "-cn", "c"])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "9" * 5000], ids=["nested", "digits"])
def test_an_override_beyond_what_can_be_read(value: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.seed"):
        load_ppo_config([f"data.seed={value}"])


def test_a_missing_yaml_file_names_those_there(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"gppo\.yaml.*grpo\.yaml"):
        load_ppo_config(["--config-path", str(tmp_path), "--config-name", "gppo"])
    with pytest.raises(ConfigError, match="needs --config-name.*grpo"):
        load_ppo_config(["--config-path", str(tmp_path)])
    with pytest.raises(ConfigError, match="no folder"):
        load_ppo_config(["--config-path", str(tmp_path / "x"), "--config-name", "a"])
