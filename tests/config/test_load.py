"""Overrides, YAML files, interpolation, precedence, what follows what, and the questions a command line can ask."""

# ruff: noqa: E501 - one case per line reads better than short lines

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config.keys import get, schema_keys
from verl.config.load import from_dict, load_ppo_config, load_sft_config, to_dict, to_yaml
from verl.config.recipes import COMMANDS, help_text
from verl.config.schema import EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.errors import ConfigError

NEEDED = ["actor_rollout_ref.model.path=org/model", "data.train_files=train.parquet"]


def load(*overrides: str) -> PPOConfig:
    return load_ppo_config([*NEEDED, *overrides])


def test_defaults_run_with_only_a_model_and_data() -> None:
    config = load()
    assert config.actor_rollout_ref.rollout.name == "native"
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.device) == (1, 1, "auto")
    assert config.trainer.logger == ["console"]
    assert config.trainer.resume_mode == "auto"
    assert config.critic.enable is True
    assert config.critic.model.path == "org/model"
    assert config.trainer.default_local_dir == "checkpoints/verl/default"
    assert config.actor_rollout_ref.actor.use_torch_compile is False


def test_defaults_of_the_surface_page() -> None:
    keys = schema_keys(PPOConfig)
    stated = {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.prompt_key": "prompt",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.ppo_epochs": 1,
        "actor_rollout_ref.actor.clip_ratio": 0.2,
        "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.grad_clip": 1.0,
        "actor_rollout_ref.actor.entropy_coeff": 0.0,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.model.trust_remote_code": False,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 0.0,
        "critic.optim.lr": 1e-5,
        "critic.cliprange_value": 0.5,
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    }
    assert {name: keys[name].default for name in stated} == stated


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr=2e-6", "actor_rollout_ref.actor.optim.lr", 2e-6),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr", 1.0),
        ("+trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("++trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=a.parquet", "data.train_files", ["a.parquet"]),
        ("trainer.logger=[console,wandb]", "trainer.logger", ["console", "wandb"]),
        ("data.apply_chat_template_kwargs={enable_thinking: false}", "data.apply_chat_template_kwargs", {"enable_thinking": False}),
        ("data.system_prompt='Think, then answer.'", "data.system_prompt", "Think, then answer."),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("trainer.total_training_steps=None", "trainer.total_training_steps", None),
        ("trainer.total_training_steps=1e3", "trainer.total_training_steps", 1000),
        ("data.train_batch_size=1_024", "data.train_batch_size", 1024),
        ("trainer.experiment_name=7", "trainer.experiment_name", "7"),
        ("trainer.experiment_name=${algorithm.adv_estimator}-${data.seed}", "trainer.experiment_name", "gae-1"),
        ("actor_rollout_ref.rollout.dtype=bf16", "actor_rollout_ref.rollout.dtype", "bfloat16"),
        ("actor_rollout_ref.actor.kl_loss_type=k3+", "actor_rollout_ref.actor.kl_loss_type", "k3+"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_2", "algorithm.rollout_correction.rollout_is_threshold", "0.5_2"),
        ("algorithm.rollout_correction.rollout_is_threshold=3", "algorithm.rollout_correction.rollout_is_threshold", 3.0),
        ("trainer.wandb_proxy=http://proxy:80/?a=b", "trainer.wandb_proxy", "http://proxy:80/?a=b"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.a.b=1", "actor_rollout_ref.rollout.engine_kwargs.vllm", {"a": {"b": 1}}),
        ("trainer.keep_best=val-core/gsm8k/acc/mean@1", "trainer.keep_best", "val-core/gsm8k/acc/mean@1"),
        ("ray_kwargs.ray_init.runtime_env={env_vars: {A: '1'}}", "ray_kwargs.ray_init.runtime_env", {"env_vars": {"A": "1"}}),
    ],
)  # fmt: skip
def test_overrides(override: str, key: str, value: object) -> None:
    assert get(load(override), key) == value


def test_numbers_in_yaml_are_what_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6, eps: 1.e-7}, clip_ratio: .2}}\n"
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5_2}}\n"
        "trainer: {experiment_name: 2024-01-31, project_name: 1:30, total_epochs: 010}\n"
    )
    config = load_ppo_config(["-cp", str(tmp_path), "-cn", "c", *NEEDED])
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.optim.eps) == (1e-6, 1e-7)
    assert config.actor_rollout_ref.actor.clip_ratio == 0.2
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("2024-01-31", "1:30")
    assert config.trainer.total_epochs == 10


def test_home_folders_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(
        "actor_rollout_ref.model.path=~/models/a",
        "data.val_files=['~/v.parquet']",
        "reward.judge.prompt=~x",
        "reward.functions=[{path: '~/r.py'}]",
        "data.mixture=[{files: '~/m.parquet'}]",
    )
    assert config.actor_rollout_ref.model.path == "/home/someone/models/a"
    assert config.data.val_files == ["/home/someone/v.parquet"]
    assert config.reward.judge.prompt == "~x"  # a text, not a path
    assert config.reward.functions[0].path == "/home/someone/r.py"
    assert config.data.mixture[0].files == ["/home/someone/m.parquet"]


def test_lists_of_sections() -> None:
    config = load("reward.functions=[{path: a.py, weight: 0.5},{path: b.py, name: f}]")
    assert [(f.path, f.name, f.weight) for f in config.reward.functions] == [
        ("a.py", "compute_score", 0.5),
        ("b.py", "f", 1.0),
    ]


def test_environment_variables_in_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "12")
    assert load("trainer.total_training_steps=${oc.env:STEPS}").trainer.total_training_steps == 12


def test_a_later_override_wins_however_it_is_spelt(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("actor_rollout_ref: {rollout: {n: 2, top_p: 0.9}}")
    flags = ["--config-path", str(tmp_path), "--config-name", "c", *NEEDED]
    assert load_ppo_config([*flags, "rollout.n=8"]).actor_rollout_ref.rollout.n == 8
    assert (
        load_ppo_config([*flags, "rollout.n=8", "actor_rollout_ref.rollout.n=4"]).actor_rollout_ref.rollout.n
        == 4
    )
    assert load_ppo_config([*flags, "rollout.n=8"]).actor_rollout_ref.rollout.top_p == 0.9


@pytest.mark.parametrize(("typed", "ours"), [("True", "never"), ("false", "auto")])
def test_raw_prompts_is_read_as_a_use_of_the_chat_template(
    typed: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(f"data.raw_prompts={typed}").data.apply_chat_template == ours
    (line,) = [record.message for record in caplog.records if "raw_prompts" in record.message]
    assert line == f"'data.raw_prompts={typed.title()}' is read as 'data.apply_chat_template={ours}'"
    with pytest.raises(ConfigError, match="'data.raw_prompts' is 'perhaps'; it must be true or false"):
        load("data.raw_prompts=perhaps")
    with pytest.raises(ConfigError, match=r"apply_chat_template.*sometimes.*auto, always, never"):
        load("data.apply_chat_template=sometimes")


def test_a_fine_tuning_command_of_verl_is_taken_with_a_notice_for_each_older_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = {
        "model.partial_pretrain": "org/m",
        "use_remove_padding": "true",
        "ulysses_sequence_parallel_size": 1,
        "data.multiturn": {"messages_key": "chat", "tools_key": "functions"},
    }
    config = from_dict(SFTConfig, {"data.train_files": "x.parquet", **values})
    assert (config.model.path, config.data.messages_key, config.data.tools_key) == (
        "org/m",
        "chat",
        "functions",
    )
    for old, new in (
        ("model.partial_pretrain", "model.path"),
        ("use_remove_padding", "model.use_remove_padding"),
        ("data.multiturn.messages_key", "data.messages_key"),
    ):
        assert f"'{old}' is read as '{new}'" in caplog.text


def test_the_engine_keys_of_verls_fine_tuning_are_ours(caplog: pytest.LogCaptureFixture) -> None:
    given = [
        "model=hf_model", "model.path=org/m", "data.train_files=x.parquet", "data.pad_mode=no_padding",
        "data.multiturn.enable=true", "engine=megatron", "optim=megatron", "optim.lr=1e-5", "optim.min_lr=1e-6",
        "optim.lr_decay_style=cosine", "optim.lr_warmup_init=0", "engine.tensor_model_parallel_size=2",
        "engine.context_parallel_size=1", "engine.use_mbridge=True", "trainer.n_gpus_per_node=2",
        "engine.override_transformer_config.recompute_granularity=full",
        "engine.override_transformer_config.recompute_method=uniform", "data.micro_batch_size=8",
        "trainer.test_freq=after_each_epoch",
    ]  # fmt: skip
    config = load_sft_config(given)
    assert (config.model.strategy, config.model.megatron.tensor_model_parallel_size) == ("megatron", 2)
    assert (config.model.enable_gradient_checkpointing, config.data.micro_batch_size_per_gpu) == (True, 4)
    assert config.optim.min_lr_ratio == pytest.approx(0.1) and config.optim.lr_scheduler_type == "cosine"
    assert "accepted without effect: data.multiturn.enable" in caplog.text
    assert config.trainer.test_freq == 0
    for wrong, says in (
        ("engine=veomni", "Known: fsdp"),
        ("engine.param_offload=True", "set model.fsdp_config.param_offload or"),
        ("engine.nothing=1", "unknown key 'engine.nothing'"),
        ("optim.nothing=1", "unknown key 'optim.nothing'"),
        ("optim.lr_warmup_init=1e-6", "the rate rises from 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_sft_config([*given, wrong])


def test_removing_a_key_goes_back_to_its_default(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("rollout: {n: 2}\ntrainer: {total_epochs: 9}")
    flags = ["-cp", str(tmp_path), "-cn", "c", *NEEDED]
    assert load_ppo_config([*flags, "~trainer.total_epochs"]).trainer.total_epochs == 1
    assert load_ppo_config([*flags, "~rollout.n"]).actor_rollout_ref.rollout.n == 1
    assert load_ppo_config([*flags, "~trainer"]).trainer.total_epochs == 1


def test_defaults_lists_are_followed(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "grpo.yaml").write_text("adv_estimator: grpo\ngamma: 0.9")
    (tmp_path / "base.yaml").write_text("actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {total_epochs: 2}")
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - base\n  - algorithm: grpo\n  - _self_\n"
        "trainer: {total_epochs: 5}\nhydra: {run: {dir: x}}\n"
    )
    config = load_ppo_config(["--config-path", str(tmp_path), "--config-name", "mine", *NEEDED])
    assert (config.algorithm.adv_estimator, config.algorithm.gamma) == ("grpo", 0.9)
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.trainer.total_epochs == 5


def test_a_resolved_config_loads_again_as_the_same(tmp_path: Path) -> None:
    config = load(
        "data.train_batch_size=48", "rollout.n=4", "algorithm.adv_estimator=rloo", "critic.optim.lr=3e-5"
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_ppo_config(["--config-path", str(tmp_path), "--config-name", "config"])
    assert to_dict(again) == to_dict(config)
    sft = load_sft_config(["model.path=m", "data.train_files=a"])
    assert to_dict(from_dict(SFTConfig, to_dict(sft))) == to_dict(sft)


def test_what_follows_another_key() -> None:
    config = load(
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "critic.ppo_max_token_len_per_gpu=8192",
        "trainer.seed=11",
        "data.seed=5",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "data.max_response_length=300",
    )
    assert config.critic.ppo_epochs == 3
    assert config.critic.use_dynamic_bsz and config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 4096
    assert config.critic.ppo_max_token_len_per_gpu == 8192
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (5, 11)
    assert config.critic.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    assert config.actor_rollout_ref.actor.loss_scale_factor == 300
    assert config.actor_rollout_ref.rollout.max_model_len == 812


@pytest.mark.parametrize(("prompts", "mini"), [(1024, 256), (64, 64), (300, 150), (257, 1), (256, 256)])
def test_a_mini_batch_not_chosen_fits_the_batch(
    prompts: int, mini: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = load(f"data.train_batch_size={prompts}")
    assert (f"ppo_mini_batch_size={mini} (the default 256" in caplog.text) == (mini != 256)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == mini
    assert config.critic.ppo_mini_batch_size == mini


def test_a_critic_with_its_own_model_keeps_its_own_settings() -> None:
    shared = load("actor_rollout_ref.model.trust_remote_code=True")
    assert shared.critic.model.trust_remote_code is True
    own = load("actor_rollout_ref.model.trust_remote_code=True", "critic.model.path=org/other")
    assert own.critic.model.trust_remote_code is False
    assert own.implicit_reward.model.trust_remote_code is True
    assert own.implicit_reward.model.path == "org/model"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], (False, 0.0)),
        (["rollout.val_kwargs.temperature=0.6"], (True, 0.6)),
        (["rollout.val_kwargs.do_sample=True"], (True, 1.0)),
        (["rollout.val_kwargs.do_sample=False", "rollout.val_kwargs.temperature=0.6"], (False, 0.6)),
    ],
)
def test_validation_sampling_follows_what_was_given(given: list[str], expected: tuple[bool, float]) -> None:
    val = load(*given).actor_rollout_ref.rollout.val_kwargs
    assert (val.do_sample, val.temperature) == expected


def test_a_resume_path_alone_means_to_resume_from_it() -> None:
    assert load("trainer.resume_from_path=x/global_step_3").trainer.resume_mode == "resume_path"


@pytest.mark.usefixtures("own_methods")
def test_plugins_are_imported_and_their_names_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugin_for_config.py").write_text(
        "from verl.config.methods import register_adv_est\n"
        "@register_adv_est('mine_for_config')\ndef mine(**kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="mine_for_config"):
        load("algorithm.adv_estimator=mine_for_config")
    for key in ("trainer.plugins", "actor_rollout_ref.model.external_lib", "critic.model.external_lib"):
        config = load("algorithm.adv_estimator=mine_for_config", f"{key}=[my_plugin_for_config]")
        assert config.critic.enable is False


def test_dotted_and_nested_dicts_are_the_same() -> None:
    nested = from_dict(PPOConfig, {"trainer": {"seed": 3}, "rollout": {"n": 2}}, checked=False)
    dotted = from_dict(PPOConfig, {"trainer.seed": 3, "rollout.n": 2}, checked=False)
    assert to_dict(nested) == to_dict(dotted)


def test_a_given_dict_is_left_alone() -> None:
    given = {"rollout": {"n": 2, "engine_kwargs": {"vllm": {"a": [1]}}}}
    before = json.dumps(given)
    from_dict(PPOConfig, given, checked=False).actor_rollout_ref.rollout.engine_kwargs.vllm["a"].append(2)
    assert json.dumps(given) == before


def test_cfg_job_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    with pytest.raises(SystemExit):
        load_ppo_config(["--cfg", "job", *NEEDED, "rollout.n=3"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor_rollout_ref"]["rollout"]["n"] == 3
    assert shown["critic"]["model"]["path"] == "org/model"
    assert "user_set" not in shown
    with pytest.raises(SystemExit):  # the defaults alone can be shown
        load_ppo_config(["--cfg", "job"])
    assert yaml.safe_load(capsys.readouterr().out)["actor_rollout_ref"]["model"]["path"] == ""


def test_help_about_all_lists_every_key_with_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_ppo_config(["--help", "all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for key in schema_keys(PPOConfig).values():
        assert f"  {key.last} " in text
        assert key.doc.split()[0] in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_is_short_and_says_where_the_other_keys_are() -> None:
    for kind, command in {
        **COMMANDS,
        GenerationConfig: "verl generate",
        EvaluationConfig: "verl eval",
    }.items():
        text = help_text(kind, [])
        lines = text.splitlines()
        assert lines[0] == f"{command} [options] key=value ..." and f"\n  {command} " in text
        assert len(lines) < 80 and max(map(len, lines)) <= 120
        assert f"{command} --help SECTION lists their keys, --help all every one" in text
        for name in {key.partition(".")[0] for key in schema_keys(kind)}:
            count = sum(key.startswith(f"{name}.") for key in schema_keys(kind))
            assert f"  {name:<33} {count} key" in text
        for key in schema_keys(kind).values():
            assert not key.required or f"  {key.last:<33} (required)" in text


def test_help_about_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_ppo_config(["--help", "algorithm.kl_ctrl"])
    text = capsys.readouterr().out
    assert "target_kl" in text and "train_files  " not in text


def test_every_key_is_documented_in_one_line() -> None:
    for kind in (PPOConfig, SFTConfig):
        for key in schema_keys(kind).values():
            assert key.doc and "\n" not in key.doc, key.name
            follows = key.metadata["follows"]
            assert follows is None or follows in schema_keys(kind), key.name


@pytest.mark.parametrize("module", ["verl.config.schema", "verl.config.load", "verl.config.plan"])
def test_importing_the_config_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy', 'omegaconf', 'hydra'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_loading_loads_no_torch() -> None:
    code = (
        "import sys; from verl.config.load import load_ppo_config; "
        "load_ppo_config(['actor_rollout_ref.model.path=m', 'data.train_files=a']); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_comma_list_is_one_value_for_the_keys_that_take_one():
    from verl.config.load import load_ppo_config

    rules = "algorithm.rollout_correction"
    config = load_ppo_config(
        [
            "actor_rollout_ref.model.path=x",
            "data.train_files=y",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            f"{rules}.rollout_rs=seq_mean_k1,token_k2",
            f"{rules}.rollout_rs_threshold=0.5_2.0,0.1",
        ]
    )
    assert config.algorithm.rollout_correction.rollout_rs == "seq_mean_k1,token_k2"
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.5_2.0,0.1"
