"""A key that has no effect with the other settings is named, with the reason; one that has is not."""

# ruff: noqa: E501 - one case per line reads better than short lines

from __future__ import annotations

from typing import Any

import pytest

from verl.config import machine, unused_keys
from verl.config.checks import check
from verl.config.keys import schema_keys
from verl.config.load import from_dict, load_ppo_config, to_dict
from verl.config.methods import register_adv_est, register_policy_loss
from verl.config.schema import EvaluationConfig, GenerationConfig, PPOConfig, SFTConfig
from verl.config.unused_keys import TERMS

# On a GPU, whatever the tests run on: what a CPU makes of the keys has its own cases.
BASE = {"actor_rollout_ref.model.path": "m", "data.train_files": "a", "trainer.device": "cuda"}
GRPO = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
VAL = {"data.val_files": "v"}
POOL = {
    "reward.reward_model.enable": True,
    "reward.reward_model.model_path": "m",
    "reward.reward_model.n_gpus_per_node": 1,
    "reward.reward_model.nnodes": 1,
}

# (what is set, the key named, words of the reason, what makes it matter)
CASES: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    ({"algorithm.kl_ctrl.kl_coef": 0.05}, "algorithm.kl_ctrl.kl_coef", "use_kl_in_reward", {"algorithm.use_kl_in_reward": True}),
    ({"algorithm.kl_ctrl.target_kl": 0.5, "algorithm.use_kl_in_reward": True}, "algorithm.kl_ctrl.target_kl", "adaptive", {"algorithm.kl_ctrl.type": "adaptive"}),
    ({"actor_rollout_ref.actor.kl_loss_coef": 0.5}, "actor_rollout_ref.actor.kl_loss_coef", "use_kl_loss", {"actor_rollout_ref.actor.use_kl_loss": True}),
    ({"actor_rollout_ref.ref.fsdp_config.param_offload": True}, "actor_rollout_ref.ref.fsdp_config.param_offload", "use_kl_loss is False and algorithm.use_kl_in_reward is False", {"actor_rollout_ref.actor.use_kl_loss": True}),
    ({**GRPO, "implicit_reward.beta": 0.1}, "implicit_reward.beta", "algorithm.adv_estimator=prime", {"algorithm.adv_estimator": "prime"}),
    ({**GRPO, "algorithm.prime.process_coef": 1.0}, "algorithm.prime.process_coef", "algorithm.adv_estimator=prime", {"algorithm.adv_estimator": "prime"}),
    ({"algorithm.filter_groups.accuracy_lower_bound": 0.2}, "algorithm.filter_groups.accuracy_lower_bound", "enable is False", {"algorithm.filter_groups.enable": True, "actor_rollout_ref.rollout.n": 4}),
    ({**GRPO, "critic.optim.lr": 1e-4}, "critic.optim.lr", "critic.enable is False", {"algorithm.adv_estimator": "gae"}),
    ({**GRPO, "algorithm.lam": 0.9}, "algorithm.lam", "gae", {"algorithm.adv_estimator": "gae"}),
    ({**GRPO, "algorithm.gamma": 0.9}, "algorithm.gamma", "adv_estimator=gae or reinforce_plus_plus", {"algorithm.adv_estimator": "reinforce_plus_plus"}),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, "algorithm.norm_adv_by_std_in_grpo", "grpo", GRPO),
    ({"actor_rollout_ref.actor.policy_loss.tau_pos": 2.0}, "actor_rollout_ref.actor.policy_loss.tau_pos", "sapo", {"actor_rollout_ref.actor.policy_loss.loss_mode": "sapo"}),
    ({"actor_rollout_ref.actor.policy_loss.loss_mode": "dro", "actor_rollout_ref.actor.clip_ratio": 0.1}, "actor_rollout_ref.actor.clip_ratio", "loss_mode=vanilla or gspo", {"actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla"}),
    ({"actor_rollout_ref.actor.clip_ratio": 0.1, "actor_rollout_ref.actor.clip_ratio_low": 0.2, "actor_rollout_ref.actor.clip_ratio_high": 0.3}, "actor_rollout_ref.actor.clip_ratio", "clip_ratio_low=None", {"actor_rollout_ref.actor.clip_ratio_high": None}),
    ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo", "actor_rollout_ref.actor.loss_agg_mode": "token-sum"}, "actor_rollout_ref.actor.loss_agg_mode", "loss_mode is gspo", {"actor_rollout_ref.actor.use_kl_loss": True}),
    ({"actor_rollout_ref.actor.loss_scale_factor": 7}, "actor_rollout_ref.actor.loss_scale_factor", "token-sum-norm", {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    ({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096}, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "use_dynamic_bsz", {"actor_rollout_ref.actor.use_dynamic_bsz": True}),
    ({"actor_rollout_ref.actor.use_dynamic_bsz": True, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4}, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "use_dynamic_bsz is True", {"actor_rollout_ref.actor.use_dynamic_bsz": False}),
    ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2}, "actor_rollout_ref.rollout.tensor_model_parallel_size", "name=vllm or sglang", {"actor_rollout_ref.rollout.name": "vllm"}),
    ({"actor_rollout_ref.rollout.engine_kwargs.vllm": {"a": 1}}, "actor_rollout_ref.rollout.engine_kwargs.vllm", "name=vllm", {"actor_rollout_ref.rollout.name": "vllm"}),
    ({"actor_rollout_ref.rollout.name": "hf", "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3}, "actor_rollout_ref.rollout.gpu_memory_utilization", "name is hf", {"actor_rollout_ref.rollout.name": "native"}),
    ({"actor_rollout_ref.rollout.multi_turn.max_turns": 3}, "actor_rollout_ref.rollout.multi_turn.max_turns", "enable is False", {"actor_rollout_ref.rollout.multi_turn.enable": True, "actor_rollout_ref.rollout.multi_turn.tool_server": "http://x"}),
    ({**VAL, "actor_rollout_ref.rollout.val_kwargs.top_p": 0.9}, "actor_rollout_ref.rollout.val_kwargs.top_p", "do_sample is False", {"actor_rollout_ref.rollout.val_kwargs.do_sample": True}),
    ({"actor_rollout_ref.rollout.val_kwargs.n": 4, "actor_rollout_ref.rollout.val_kwargs.do_sample": True}, "actor_rollout_ref.rollout.val_kwargs.n", "data.val_files", VAL),
    ({"actor_rollout_ref.model.lora_alpha": 32}, "actor_rollout_ref.model.lora_alpha", "lora_rank", {"actor_rollout_ref.model.lora_rank": 8}),
    ({"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.freeze_embeddings": True}, "actor_rollout_ref.model.freeze_embeddings", "lora_rank is 8", {"actor_rollout_ref.model.lora_rank": 0}),
    ({"actor_rollout_ref.actor.megatron.context_parallel_size": 1, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 2}, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "strategy=megatron", {"actor_rollout_ref.actor.strategy": "megatron"}),
    ({"actor_rollout_ref.actor.fsdp_config.offload_policy": True, "actor_rollout_ref.actor.fsdp_config.param_offload": True}, "actor_rollout_ref.actor.fsdp_config.param_offload", "offload_policy is True", {"actor_rollout_ref.actor.fsdp_config.offload_policy": False}),
    ({"actor_rollout_ref.actor.optim.min_lr_ratio": 0.1}, "actor_rollout_ref.actor.optim.min_lr_ratio", "constant", {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine"}),
    ({"algorithm.filter_groups.max_num_gen_batches": 3}, "algorithm.filter_groups.max_num_gen_batches", "enable is False", {"algorithm.filter_groups.enable": True, "actor_rollout_ref.rollout.n": 4}),
    ({"algorithm.pf_ppo.weight_pow": 3.0}, "algorithm.pf_ppo.weight_pow", "use_pf_ppo", {"algorithm.use_pf_ppo": True}),
    ({"algorithm.rollout_correction.rollout_is_threshold": 5.0}, "algorithm.rollout_correction.rollout_is_threshold", "rollout_is is not set", {"algorithm.rollout_correction.rollout_is": "token"}),
    ({"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.bypass_mode": True}, "algorithm.rollout_correction.rollout_is", "bypass_mode is True", {"algorithm.rollout_correction.bypass_mode": False}),
    ({"algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.bypass_mode": True}, "algorithm.rollout_correction.rollout_is", "needs algorithm.rollout_correction.loss_type=reinforce", {"algorithm.rollout_correction.loss_type": "reinforce"}),
    ({"algorithm.rollout_correction.loss_type": "reinforce"}, "algorithm.rollout_correction.loss_type", "bypass_mode is False", {"algorithm.rollout_correction.bypass_mode": True}),
    ({"reward.custom_reward_function.name": "f"}, "reward.custom_reward_function.name", "path is not set", {"reward.custom_reward_function.path": "a.py"}),
    ({"reward.overlong_buffer.len": 64}, "reward.overlong_buffer.len", "enable is False", {"reward.overlong_buffer.enable": True}),
    ({"reward.reward_model.model_path": "m"}, "reward.reward_model.model_path", "enable is False", {"reward.reward_model.enable": True}),
    ({**POOL, "reward.reward_model.param_offload": False}, "reward.reward_model.param_offload", "n_gpus_per_node is 1", {"reward.reward_model.n_gpus_per_node": 0, "reward.reward_model.nnodes": 0}),
    ({"trainer.watchdog_s": 60.0}, "trainer.watchdog_s", "no other processes", POOL),
    ({"trainer.max_restarts": 1}, "trainer.max_restarts", "no other processes", {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.mode": "server"}),
    ({"ray_kwargs.ray_init.num_cpus": 2}, "ray_kwargs.ray_init.num_cpus", "without Ray", POOL),
    ({"reward.judge.model": "m"}, "reward.judge.model", "base_url", {"reward.judge.base_url": "http://x/v1"}),
    ({"reward.in_process": True, "reward.num_workers": 3}, "reward.num_workers", "in_process", {"reward.in_process": False}),
    ({"data.truncation": "left", "data.filter_overlong_prompts": True}, "data.truncation", "filter_overlong_prompts is True", {"data.filter_overlong_prompts": False}),
    ({"trainer.test_freq": 5}, "trainer.test_freq", "data.val_files", VAL),
    ({"trainer.prometheus.port": 1234}, "trainer.prometheus.port", "enable is False", {"trainer.prometheus.enable": True}),
    ({"trainer.wandb_proxy": "http://x"}, "trainer.wandb_proxy", "wandb", {"trainer.logger": ["wandb"]}),
    ({"trainer.keep_best_mode": "min"}, "trainer.keep_best_mode", "keep_best", {"trainer.keep_best": "val"}),
    ({"ray_kwargs.ray_init.num_cpus": 4}, "ray_kwargs.ray_init.num_cpus", "one process", {"trainer.nnodes": 2}),
    ({"actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False}, "actor_rollout_ref.actor.fsdp_config.reshard_after_forward", "one process", {"trainer.n_gpus_per_node": 2}),
    ({"data.seed": 7, "data.shuffle": False}, "data.seed", "data.shuffle is False and data.mixture is not set", {"data.shuffle": True}),
    ({"trainer.val_before_train": False}, "trainer.val_before_train", "data.val_files", VAL),
]  # fmt: skip


@pytest.mark.parametrize(("given", "key", "reason", "remedy"), CASES, ids=[case[1] for case in CASES])
def test_a_key_without_effect_is_named_and_one_with_effect_is_not(
    given: dict[str, Any], key: str, reason: str, remedy: dict[str, Any]
) -> None:
    lines = [
        line for line in check(from_dict(PPOConfig, {**BASE, **given}, checked=False)) if f"'{key}'=" in line
    ]
    assert len(lines) == 1 and reason in lines[0], lines
    better = check(from_dict(PPOConfig, {**BASE, **given, **remedy}, checked=False))
    assert not [line for line in better if f"'{key}'=" in line]


def test_plain_defaults_have_no_warnings() -> None:
    assert check(from_dict(PPOConfig, BASE, checked=False)) == []
    assert check(from_dict(SFTConfig, {"model.path": "m", "data.train_files": "a"}, checked=False)) == []


def test_a_resolved_config_given_back_has_no_new_warnings() -> None:
    """Values equal to their defaults change nothing and are not worth a line."""
    config = from_dict(PPOConfig, {**BASE, **GRPO})
    assert check(from_dict(PPOConfig, to_dict(config), checked=False)) == []


# Keys of training, each with a value that does nothing on a CPU and something on a GPU.
CPU_CASES: list[tuple[type, str, Any, dict[str, Any]]] = [
    (PPOConfig, "actor_rollout_ref.rollout.enforce_eager", True, {}),
    (PPOConfig, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.3, {"actor_rollout_ref.rollout.name": "vllm"}),
    (PPOConfig, "actor_rollout_ref.rollout.free_cache_engine", False, {}),
    (PPOConfig, "actor_rollout_ref.actor.fsdp_config.param_offload", True, {}),
    (PPOConfig, "actor_rollout_ref.actor.fsdp_config.optimizer_offload", True, {}),
    (PPOConfig, "actor_rollout_ref.actor.fsdp_config.offload_policy", True, {}),
    (PPOConfig, "actor_rollout_ref.ref.fsdp_config.param_offload", True, {"actor_rollout_ref.actor.use_kl_loss": True}),
    (PPOConfig, "critic.fsdp_config.param_offload", True, {}),
    (PPOConfig, "actor_rollout_ref.model.enable_activation_offload", True, {}),
    (PPOConfig, "actor_rollout_ref.actor.optim.stochastic_rounding", True, {}),
    (PPOConfig, "reward.reward_model.param_offload", False, {"reward.reward_model.enable": True, "reward.reward_model.model_path": "m"}),
    (SFTConfig, "model.fsdp_config.optimizer_offload", True, {}),
    (SFTConfig, "model.enable_activation_offload", True, {}),
    (GenerationConfig, "rollout.enforce_eager", True, {}),
    (GenerationConfig, "rollout.gpu_memory_utilization", 0.3, {"rollout.name": "vllm"}),
]  # fmt: skip
LEAST: dict[type, dict[str, Any]] = {
    PPOConfig: {"actor_rollout_ref.model.path": "m", "data.train_files": "a"},
    SFTConfig: {"model.path": "m", "data.train_files": "a"},
    GenerationConfig: {"model.path": "m", "data.path": "a.jsonl", "data.output_path": "b.jsonl"},
}


@pytest.mark.parametrize(("kind", "key", "value", "more"), CPU_CASES, ids=[case[1] for case in CPU_CASES])
def test_a_key_without_effect_on_a_cpu_is_named(
    kind: Any, key: str, value: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(where: str) -> list[str]:
        config = from_dict(kind, {**LEAST[kind], **more, key: value, "trainer.device": where}, checked=False)
        return [line for line in check(config) if f"'{key}'=" in line]

    assert "has no effect" in named("cpu")[0] and not named("cuda")
    monkeypatch.setattr(machine, "_gpus", lambda: [("H200", 2**37)])
    assert not named("auto")
    monkeypatch.setattr(machine, "_gpus", list)
    assert named("auto") == named("cpu")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (PPOConfig, "actor_rollout_ref.model.dtype"),
        (PPOConfig, "critic.model.dtype"),
        (SFTConfig, "model.dtype"),
        (GenerationConfig, "rollout.dtype"),
    ],
)
def test_bf16_on_a_cpu_without_its_instructions_is_warned_about(
    kind: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(dtype: str, where: str) -> list[str]:
        config = from_dict(kind, {**LEAST[kind], key: dtype, "trainer.device": where}, checked=False)
        return [line for line in check(config) if f"'{key}'=" in line]

    monkeypatch.setattr(unused_keys, "cpu_has_bf16", lambda: False)
    (line,) = lines("bf16", "cpu")
    assert "no bf16 instructions" in line and f"{key}=float32" in line
    assert not lines("float32", "cpu") and not lines("bf16", "cuda")
    monkeypatch.setattr(unused_keys, "cpu_has_bf16", lambda: True)
    assert not lines("bf16", "cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu sse avx2 avx512f\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd fphp asimdhp\n", False),
        ("processor\t: 0\n", True),
    ],
)
def test_bf16_instructions_are_read_from_the_flags_of_the_cpu(cpuinfo: str, has: bool) -> None:
    assert machine.bf16_in(cpuinfo) is has


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, GenerationConfig, EvaluationConfig])
def test_every_condition_names_keys_and_values_that_exist(kind: Any) -> None:
    keys = schema_keys(kind)
    for key in keys.values():
        for term in (term for condition in key.used_if for term in condition.split(" or ")):
            if term.startswith("@"):
                assert term == "@never" or term in TERMS or term.startswith("@needs:"), key.name
                continue
            name, _, values = term.removeprefix("!").partition("=")
            other = keys[name.removesuffix("!")]
            if values and other.metadata["known"]:
                assert set(values.split("|")) <= set(other.metadata["known"]), key.name


ADVICE = [
    ({**VAL, "actor_rollout_ref.rollout.val_kwargs.n": 4}, "greedy responses are all the same"),
    ({"actor_rollout_ref.rollout.temperature": 1.8}, "degenerate"),
    ({"actor_rollout_ref.actor.use_kl_loss": True, "algorithm.use_kl_in_reward": True}, "counts twice"),
    ({**GRPO, "critic.enable": True}, "uses no critic"),
    ({**GRPO, "algorithm.adv_estimator": "turn_rloo"}, "the same as rloo"),
    ({"data.return_raw_input_ids": True}, "always kept"),
]


@pytest.mark.parametrize(("given", "words"), ADVICE, ids=[case[1] for case in ADVICE])
def test_advice(given: dict[str, Any], words: str) -> None:
    assert any(words in line for line in check(from_dict(PPOConfig, {**BASE, **given}, checked=False)))


def test_warnings_are_logged_when_loading(caplog: pytest.LogCaptureFixture) -> None:
    load_ppo_config([*(f"{name}={value}" for name, value in BASE.items()), "trainer.test_freq=5"])
    assert [
        record.levelname for record in caplog.records if "'trainer.test_freq'=5" in record.getMessage()
    ] == ["WARNING"]


@pytest.mark.usefixtures("own_methods")
def test_a_users_own_loss_may_read_any_key() -> None:
    register_policy_loss("mine_for_unused")(lambda **kwargs: None)
    given = {"actor_rollout_ref.actor.policy_loss.loss_mode": "mine_for_unused"}
    given["actor_rollout_ref.actor.policy_loss.tau_pos"] = 2.0  # type: ignore[assignment]
    assert check(from_dict(PPOConfig, {**BASE, **given}, checked=False)) == []


@pytest.mark.usefixtures("own_methods")
@pytest.mark.parametrize(
    ("column", "key"),
    [
        ("ref_log_prob", "actor_rollout_ref.ref.fsdp_config.param_offload"),
        ("teacher_log_probs", "actor_rollout_ref.teacher.fsdp_config.param_offload"),
        ("values", "critic.fsdp_config.param_offload"),
        ("process_rewards", "implicit_reward.fsdp_config.param_offload"),
    ],
)
def test_the_section_of_a_role_is_used_where_a_users_own_method_needs_its_column(
    column: str, key: str
) -> None:
    register_adv_est("est_for_unused", needs=(column,))(lambda **kwargs: None)
    register_adv_est("est_without_needs", needs=())(lambda **kwargs: None)
    register_policy_loss("loss_for_unused", needs=(column,))(lambda **kwargs: None)
    register_policy_loss("loss_without_needs")(lambda **kwargs: None)
    for estimator, loss, used in (
        ("est_for_unused", "vanilla", True),
        ("grpo", "loss_for_unused", True),
        ("est_without_needs", "loss_without_needs", False),
    ):
        chosen = {"algorithm.adv_estimator": estimator, "actor_rollout_ref.actor.policy_loss.loss_mode": loss}
        config = from_dict(PPOConfig, {**BASE, **GRPO, **chosen, key: True}, checked=False)
        assert any(f"'{key}'" in line for line in unused_keys.unused_keys(config)) is not used, (
            estimator,
            loss,
        )
