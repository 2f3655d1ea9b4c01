"""Every key of the public verl's trainer config has its answer: it is ours, another name of ours, accepted without
effect, or refused with a reason. `tests/data/verl/keys.jsonl` lists them, with their defaults and the values of its
scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generators.verl_table import PAGE, with_table
from verl.config.aliases import Row, full_name, our_name, verl_names
from verl.config.keys import get, nearest, schema_keys
from verl.config.load import from_dict, load_config, load_ppo_config
from verl.config.schema import EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.config.sources import parse_overrides
from verl.errors import CommandAnswered, ConfigError

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "verl" / "keys.jsonl").read_text().splitlines()
]
ABSENT = "(not in the default file)"
DEFAULTS = {row["key"]: row["default"] for row in ROWS if row["default"] != ABSENT}
GIVEN = [
    "model.path=o/m",
    "data.train_files=o/d",
    "trainer.n_gpus_per_node=8",
    "rollout.n=4",
    "rollout.name=vllm",
]
# Values that need another key beside them.
WITH = {
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": ["trainer.nnodes=4"],
    "actor_rollout_ref.rollout.multi_turn.enable": ["rollout.multi_turn.tools=t.py"],
    "algorithm.rollout_correction.rollout_rs": [
        "algorithm.rollout_correction.rollout_rs_threshold='0.6_1.6,2.5'"
    ],
    "data.custom_cls.name": ["data.custom_cls.path=mine.py"],
    "data.sampler.class_name": ["data.sampler.class_path=mine.py"],
    "reward_model.enable": ["reward_model.model.path=o/r"],
}
# What a value that is refused by our own keys is answered with.
REFUSED = {
    ("actor_rollout_ref.rollout.name", "trtllm"): "Allowed: native, hf, vllm, sglang",
    ("actor_rollout_ref.actor.use_kl_loss", ""): "it must be true or false",
}
# Of its 120 scripts, how many set a key to a value that is refused whatever else they set, and whether all of these do:
# the file has the values of a key, and not which script sets which.
SETS_REFUSED = {
    "actor_rollout_ref.actor.router_replay.mode": (2, False),  # R2 and R3, both refused
    "actor_rollout_ref.actor.use_kl_loss": (118, False),  # one leaves it empty
    "actor_rollout_ref.model.exclude_modules": (1, True),  # of a vision model
    "actor_rollout_ref.model.mtp.enable": (1, True),
    "actor_rollout_ref.rollout.enable_rollout_routing_replay": (1, True),
    "actor_rollout_ref.rollout.engine_kwargs.trtllm.batch_wait_max_tokens_ratio": (2, True),
    "actor_rollout_ref.rollout.engine_kwargs.trtllm.batch_wait_timeout_iters": (2, True),
    "actor_rollout_ref.rollout.name": (119, False),  # trtllm
}


def lines_of(
    caplog: pytest.LogCaptureFixture, *overrides: str, checked: bool = True
) -> tuple[PPOConfig, list[str]]:
    caplog.clear()
    if checked:
        return load_ppo_config([*GIVEN, *overrides]), caplog.messages
    values = {each.name: each.value for each in parse_overrides(overrides)}
    return from_dict(PPOConfig, values, checked=False), caplog.messages


def row_of(key: str) -> Row | None:
    """The first row whose name covers the key."""
    for name, row in verl_names().items():
        if re.fullmatch(re.escape(name).replace(r"\*", ".*") + r"(\..+)?", key):
            return row
    return None


def is_ours(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in schema_keys(PPOConfig))


def tree_of(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return tree


def test_every_key_has_an_answer() -> None:
    unknown = [row["key"] for row in ROWS if not is_ours(row["key"]) and row_of(row["key"]) is None]
    assert len(ROWS) > 580 and unknown == []


def test_every_row_has_one_answer_and_every_alias_a_key() -> None:
    commands = (PPOConfig, SFTConfig, GenerationConfig)
    for name, row in verl_names().items():
        answers = [answer for answer in (row.alias, row.unneeded, row.refused) if answer]
        assert len(answers) == (
            0 if name in schema_keys(PPOConfig) and not (row.sft and row.unneeded) else 1
        ), name
        named = name.replace(
            "*.", "actor_rollout_ref.ref." if "log_prob" in name else "actor_rollout_ref.actor."
        )
        named = named.replace("*", "actor_rollout_ref.")
        if row.alias:
            found = {our_name(kind, typed) for kind in commands for typed in (name, named)}
            assert any(known in schema_keys(kind) or any(k.startswith(f"{known}.") for k in schema_keys(kind))
                       for kind in commands for known in found), name  # fmt: skip


@pytest.mark.parametrize("checked", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_values_of_its_scripts_are_answered_as_the_table_says(
    checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answered = {"ours": 0, "alias": 0, "unneeded": 0, "refused": 0}
    refused: dict[str, tuple[int, bool]] = {}
    for row, value in ((each, value) for each in ROWS for value in each["values"]):
        if checked or row["key"] not in schema_keys(PPOConfig) or (row["key"], value) in REFUSED:
            answer = answer_to(row["key"], value, checked, caplog)
            answered[answer] += 1
            if answer == "refused":
                refused[row["key"]] = row["scripts"], len(row["values"]) == 1
    del answered["ours"]
    assert min(answered.values()) >= 5 and sum(answered.values()) > 190
    assert refused == SETS_REFUSED


def answer_to(key: str, value: str, checked: bool, caplog: pytest.LogCaptureFixture) -> str:
    """Load a value and compare what is said with the row of its key."""
    override, row = f"{key}={value}", None if key in schema_keys(PPOConfig) else row_of(key)
    typed = value if value.startswith("'") else yaml.safe_load(value)
    refused = REFUSED.get((key, value), "")
    if row is not None and row.refused and not row.is_default(typed):
        refused = row.refused
    if refused:
        with pytest.raises(ConfigError, match=re.escape(refused)):
            lines_of(caplog, override)  # with its checks
        return "refused"
    config, lines = lines_of(caplog, override, *(WITH.get(key, []) if checked else []), checked=checked)
    about = [line for line in lines if f"'{key}" in line or f" {key}:" in line]
    if row is None:
        own = [line for line in about if "is read as" in line or "accepted" in line]
        assert own == [] or key == "actor_rollout_ref.rollout.mode", override
        return "ours"
    if row.alias:
        ours = our_name(PPOConfig, key)
        name = next(name for name in schema_keys(PPOConfig) if f"{ours}.".startswith(f"{name}."))
        plain = row.is_default(typed) or get(config, name) == schema_keys(PPOConfig)[name].default
        assert name in config.user_set or row.says_nothing(typed), override
        assert sum("is read as" in line for line in about) == (0 if plain else 1), override
        return "alias"
    said = [] if row.is_default(typed) else [f"accepted without effect: {key}: {row.unneeded}"]
    assert about == said, override
    return "unneeded"


def test_a_whole_config_of_verl_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree_of(DEFAULTS)))
    flags = ["--config-path", str(tmp_path), "--config-name", "job", "model.path=o/m", "data.train_files=o/d"]
    config = load_ppo_config([*flags, "rollout.name=vllm"])
    assert (config.actor_rollout_ref.rollout.mode, config.trainer.n_gpus_per_node) == ("server", 8)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    assert len(DEFAULTS) > 500
    mode = "'actor_rollout_ref.rollout.mode=async' is read as 'actor_rollout_ref.rollout.mode=server'"
    assert caplog.messages == [mode]


def test_another_name_wins_over_a_default_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole config of verl has every key, also those that are one here."""
    changed = {"actor_rollout_ref.actor.optim.clip_grad": 0.5, "data.trust_remote_code": True}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree_of({**DEFAULTS, **changed})))
    config = load_ppo_config([*GIVEN, "--config-path", str(tmp_path), "--config-name", "job.yaml"])
    assert (
        config.actor_rollout_ref.actor.grad_clip == 0.5 and config.actor_rollout_ref.model.trust_remote_code
    )
    assert sum(f"'{name}' is read as" in line for name in changed for line in caplog.messages) == 2


@pytest.mark.parametrize("folder", ["config", "./config"])
@pytest.mark.parametrize("name", ["ppo_megatron_trainer", "ppo_megatron_trainer.yaml"])
def test_the_config_names_of_verl_mean_its_strategy(folder: str, name: str) -> None:
    config = load_ppo_config([*GIVEN, f"--config-path={folder}", f"--config-name={name}"])
    roles = (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic)
    assert [role.strategy for role in roles] == ["megatron"] * 3
    assert (
        load_ppo_config([*GIVEN, "--config-path=config", "--config-name=ppo_trainer"]).critic.strategy
        == "fsdp"
    )


def test_experts_beside_a_split_matrix_load_and_parts_of_experts_say_what_to_set() -> None:
    sizes = ["actor.megatron.tensor_model_parallel_size=4", "actor.megatron.expert_model_parallel_size=8"]
    sizes += ["actor.megatron.expert_tensor_parallel_size=1"]
    load_ppo_config([*GIVEN, "model_engine=megatron", *sizes])
    with pytest.raises(ConfigError, match="set megatron.expert_model_parallel_size that many times as large"):
        load_ppo_config([*GIVEN, "model_engine=megatron", "actor.megatron.expert_tensor_parallel_size=2"])


def test_a_file_of_the_users_with_such_a_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "ppo_megatron_trainer.yaml").write_text("trainer:\n  seed: 5\n")
    config = load_ppo_config([*GIVEN, f"--config-path={tmp_path}", "--config-name=ppo_megatron_trainer"])
    assert (config.trainer.seed, config.critic.strategy) == (5, "fsdp")
    with pytest.raises(ConfigError, match="no folder 'nowhere'"):
        load_ppo_config([*GIVEN, "--config-path=nowhere", "--config-name=mine"])


@pytest.mark.parametrize(
    ("engine", "mode", "ours"),
    [("vllm", "async", "server"), ("sglang", "async", "server"), ("native", "async", "inprocess"),
     ("vllm", "sync", "inprocess")],
)  # fmt: skip
def test_modes_of_the_engine(engine: str, mode: str, ours: str, caplog: pytest.LogCaptureFixture) -> None:
    config, lines = lines_of(caplog, f"rollout.name={engine}", f"rollout.mode={mode}")
    assert config.actor_rollout_ref.rollout.mode == ours
    assert sum(f"mode={mode}' is read as" in line and f"mode={ours}'" in line for line in lines) == 1


def test_keys_without_effect_share_a_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    _, lines = lines_of(caplog, "model.use_shm=True", "data.use_shm=True", "rollout.load_format=auto")
    reasons = {
        name: verl_names()[name].unneeded for name in ("*.use_shm", "actor_rollout_ref.rollout.load_format")
    }
    assert lines == [
        f"accepted without effect: model.use_shm, data.use_shm: {reasons['*.use_shm']}",
        f"accepted without effect: rollout.load_format: {reasons['actor_rollout_ref.rollout.load_format']}",
    ]


def test_settings_of_hydra_itself_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    line = "accepted without effect: hydra.run.dir: the run folder is trainer.default_local_dir"
    assert lines_of(caplog, "hydra.run.dir=x")[1] == [line]
    caplog.clear()
    load_config(SFTConfig, ["hydra.run.dir=x"], checked=False)
    assert caplog.messages == [line]


def test_evaluation_takes_what_serves_a_reward_model_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    load_config(EvaluationConfig, ["reward.reward_model.rollout.name=vllm"], checked=False)
    assert caplog.messages == [
        "accepted without effect: reward.reward_model.rollout.name: a reward model is scored by transformers"
    ]
    with pytest.raises(ConfigError, match="unknown key 'reward"):
        load_config(SFTConfig, ["reward.reward_model.rollout.name=vllm"], checked=False)


def test_refusals_come_together_with_other_problems(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as error:
        lines_of(caplog, "data.image_key=pictures", "model.mtp.enable=True", "trainer.nonsense=1")
    assert [line.split("'")[1] for line in str(error.value).splitlines()] == [
        "data.image_key", "model.mtp.enable", "trainer.nonsense"
    ]  # fmt: skip


def test_a_later_value_or_a_removal_takes_a_refusal_back(caplog: pytest.LogCaptureFixture) -> None:
    for taken_back in ("model.mtp.enable=False", "~model.mtp.enable", "~actor_rollout_ref.model.mtp"):
        assert lines_of(caplog, "model.mtp.enable=True", taken_back)[1] == []
    _, lines = lines_of(caplog, "rollout.load_format=auto", "actor_rollout_ref.rollout.load_format=dummy")
    assert lines == []


def test_a_default_takes_an_earlier_value_back(caplog: pytest.LogCaptureFixture) -> None:
    clip = "actor_rollout_ref.actor.optim.clip_grad"
    assert lines_of(caplog, f"{clip}=0.5", f"{clip}=1.0")[0].actor_rollout_ref.actor.grad_clip == 1.0
    style = "actor_rollout_ref.actor.optim.warmup_style"
    config, _ = lines_of(caplog, f"{style}=cosine", f"{style}=null")
    assert config.actor_rollout_ref.actor.optim.lr_scheduler_type == "constant"


def test_a_default_in_a_file_gives_way_to_the_key_itself(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("actor: {grad_clip: 0.3, optim: {clip_grad: 1.0}}")
    config = load_ppo_config([*GIVEN, f"--config-path={tmp_path}", "--config-name=job"])
    assert config.actor_rollout_ref.actor.grad_clip == 0.3


def test_sizes_over_all_gpus_become_sizes_of_one(caplog: pytest.LogCaptureFixture) -> None:
    config, lines = lines_of(
        caplog,
        "actor.ppo_micro_batch_size=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size=4",
        "trainer.nnodes=2",
        "actor.ulysses_sequence_parallel_size=2",
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8
    assert config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 1
    ours = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"
    assert f"'actor.ppo_micro_batch_size=64' is read as '{ours}'" in lines
    with pytest.raises(ConfigError, match="both are given: 8 and 3"):
        lines_of(caplog, "actor.ppo_micro_batch_size=64", "actor.ppo_micro_batch_size_per_gpu=3")


@pytest.mark.parametrize(
    ("typed", "ours", "value"),
    [
        ("actor.fsdp_config.model_dtype=bf16", "actor_rollout_ref.model.dtype", "bfloat16"),
        ("actor.fsdp_config.model_dtype=fp32", "actor_rollout_ref.model.dtype", "auto"),
        ("rollout.quantization=fp8", "actor_rollout_ref.rollout.dtype", "fp8"),
        ("actor.optim.warmup_style=cosine", "actor_rollout_ref.actor.optim.lr_scheduler_type", "cosine"),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            True,
        ),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len=64", "reward.overlong_buffer.len", 64),
        ("reward_model.rollout.prompt_length=9", "data.max_prompt_length", 512),
        ("model_engine=megatron", "critic.strategy", "megatron"),
        ("model_engine=dp", "critic.strategy", "fsdp"),
        ("actor.use_gpg_loss=True", "actor_rollout_ref.actor.policy_loss.loss_mode", "gpg"),
        ("actor.use_gpg_loss=False", "actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"),
        ("rollout.name=sglang_async", "actor_rollout_ref.rollout.name", "sglang"),
        ("reward.reward_manager.name=gdpo", "reward.reward_manager.name", "naive"),
        ("reward_model.model_path=o/r", "reward.reward_model.model_path", "o/r"),
        ("+reward.reward_kwargs.overlong_buffer_cfg.len=64", "reward.overlong_buffer.len", 64),
        ("reward_model.sandbox_fusion_url=http://a/run", "reward.sandbox_fusion.url", "http://a/run"),
    ],
)
def test_values_become_ours(typed: str, ours: str, value: Any) -> None:
    assert get(load_ppo_config([*GIVEN, typed]), ours) == value
    with pytest.raises(ConfigError, match="selective.*Known: full"):
        load_ppo_config(
            [*GIVEN, "actor.megatron.override_transformer_config.recompute_granularity=selective"]
        )


# ---- short keys


@pytest.mark.parametrize("section", ["model", "actor", "rollout", "ref", "teacher"])
def test_every_key_of_the_policy_has_a_short_name(section: str) -> None:
    names = [name for name in schema_keys(PPOConfig) if name.startswith(f"actor_rollout_ref.{section}.")]
    assert names
    for name in names:
        short = name.removeprefix("actor_rollout_ref.")
        assert full_name(PPOConfig, short) == our_name(PPOConfig, short) == name
        assert our_name(SFTConfig, "model.path") == "model.path"


def test_a_short_key_says_nothing_where_verl_has_another_default(caplog: pytest.LogCaptureFixture) -> None:
    assert verl_names()["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"].default
    _, lines = lines_of(caplog, "actor.ppo_max_token_len_per_gpu=9000", "actor.use_dynamic_bsz=True")
    assert lines == []


def test_short_keys_are_read_everywhere_without_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model: {path: o/m, override_config: {a.b: 1}}\nactor: {optim: {lr: 0.5}}\nref: {strategy: fsdp}\n"
    (tmp_path / "mine.yaml").write_text(text + "rollout: {n: 4}\ndata: {train_files: o/d}\ncritic:\n")
    flags = [f"--config-path={tmp_path}", "--config-name=mine"]
    config = load_ppo_config(
        [*flags, "actor_rollout_ref.rollout.n=5", "rollout.n=6", "actor.use_kl_loss=true"]
    )
    policy = config.actor_rollout_ref
    assert (policy.model.path, policy.actor.optim.lr, policy.rollout.n, policy.ref.strategy) == (
        "o/m", 0.5, 6, "fsdp"
    )  # fmt: skip
    assert policy.model.override_config == {"a.b": 1}
    assert load_ppo_config([*flags, "~actor.optim.lr"]).actor_rollout_ref.actor.optim.lr == 1e-6
    assert caplog.messages == []
    with pytest.raises(CommandAnswered):
        load_config(PPOConfig, ["--help", "rollout.val_kwargs"])
    assert "actor_rollout_ref.rollout.val_kwargs:" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="'rollout.n' is 'x'; it must be a whole number"):
        load_ppo_config([*flags, "rollout.n=x"])
    with pytest.raises(ConfigError, match="both are given"):
        from_dict(PPOConfig, {"rollout.n": 2, "actor_rollout_ref.rollout.n": 3})


# ---- guesses


@pytest.mark.parametrize(
    "name",
    ["actor_rollout_ref.model.use_fused_kernel", "data.return_raw_chat", "actor_rollout_ref.rollout.load_format",
     "actor_rollout_ref.nccl_timeout", "trainer.callbacks", "callbacks"],
)  # fmt: skip
def test_nothing_is_guessed_where_nothing_is_close(name: str) -> None:
    assert nearest(PPOConfig, name) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainer.epochs", "trainer.total_epochs"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainr", "trainer"),
    ],
)
def test_what_is_close_is_asked(name: str, meant: str) -> None:
    assert nearest(PPOConfig, name)[0] == meant


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "python -m docs.generators.verl_table"
