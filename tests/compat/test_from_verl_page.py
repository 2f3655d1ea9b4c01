"""docs/from-verl.md answers every command and key that verl's pages tell users to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.config.aliases import our_name
from verl.config.keys import schema_keys
from verl.config.schema import PPOConfig, SFTConfig

PAGE = (Path(__file__).parents[2] / "docs" / "from-verl.md").read_text(encoding="utf-8")
TYPED = set(re.findall(r"`([^`\n]+)`", PAGE))

KEYS = [
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.lora_rank",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.peft.lora_alpha",
    "actor_rollout_ref.actor.peft.lora_rank",
    "actor_rollout_ref.actor.peft.peft_type",
    "actor_rollout_ref.actor.peft.target_modules",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.top_p",
    "algorithm.adv_estimator",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "critic.model.path",
    "critic.optim.lr",
    "critic.ppo_micro_batch_size_per_gpu",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.micro_batch_size_per_gpu",
    "data.multiturn.messages_key",
    "data.multiturn.tools_key",
    "data.prompt_key",
    "data.response_key",
    "data.return_raw_input_ids",
    "data.train_batch_size",
    "data.train_files",
    "data.val_files",
    "model.partial_pretrain",
    "model.path",
    "optim.lr",
    "optim.lr_scheduler",
    "optim.warmup_steps_proportion",
    "optim.weight_decay",
    "ray_init.num_cpus",
    "ray_init.timeline_file",
    "ray_kwargs.ray_init.num_cpus",
    "ray_kwargs.timeline_json_file",
    "reward.custom_reward_function.path",
    "reward.custom_reward_function.name",
    "reward.num_workers",
    "reward.reward_manager.name",
    "reward.reward_model.enable",
    "reward.reward_model.model_path",
    "reward_model.enable",
    "reward_model.micro_batch_size_per_gpu",
    "reward_model.model.path",
    "reward_model.reward_fn.name",
    "reward_model.reward_fn.path",
    "rollout.dtype",
    "rollout.enforce_eager",
    "rollout.gpu_memory_utilization",
    "rollout.multi_turn.enable",
    "rollout.multi_turn.max_turns",
    "rollout.multi_turn.tool_server",
    "rollout.n",
    "rollout.name",
    "rollout.temperature",
    "rollout.tensor_model_parallel_size",
    "rollout.top_p",
    "rollout.val_kwargs.temperature",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.nnode",
    "trainer.nnodes",
    "trainer.project_name",
    "trainer.prometheus.enable",
    "trainer.prometheus.port",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
    "trainer.wandb_proxy",
    "ulysses_sequence_parallel_size",
    "use_remove_padding",
]
COMMANDS = (
    "python -m verl.trainer.main_ppo", "python -m verl.trainer.fsdp_sft_trainer", "python -m verl.trainer.sft_trainer",
    "python -m verl.trainer.main_generation", "python -m verl.trainer.main_eval", "python -m verl.model_merger merge",
    "ray start --head --port=6379", "ray start --address=", "ray status", "sbatch", "docker pull", "apptainer pull",
    "pip install torch==2.4.0", "pip install vllm==0.5.4 ray==2.10", "pip install flash-attn", "pip install -e .",
    "pip install tensordict==0.6.2", "pip uninstall tensordict", "Transformer Engine", "Apex", "Megatron-LM",
    "--tie-word-embedding", "--use_cpu_initialization", "from verl import PPOTrainer, GRPOTrainer",
    "from verl.workers import RolloutWorker, TrainerWorker",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_on_the_page_and_is_taken(key: str) -> None:
    assert key in TYPED
    found = [
        name
        for kind in (PPOConfig, SFTConfig)
        for name in schema_keys(kind)
        if our_name(kind, key) == name or our_name(kind, key).startswith(f"{name}.")
    ]
    assert found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_on_the_page(command: str) -> None:
    assert command in PAGE


def test_every_import_of_the_page_works() -> None:
    found = re.findall(r"`(from verl[^`]+)`", PAGE)
    assert len(found) >= 6
    for line in found:
        exec(line, {})


def test_the_defaults_of_the_page_are_the_schemas() -> None:
    keys = schema_keys(PPOConfig)
    table = PAGE.partition("## Defaults that differ")[2].partition("##")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|", table, re.MULTILINE)
    assert len(rows) >= 7
    for name, shown in rows:
        default = keys[name].default
        default = default[0] if isinstance(default, list) else default
        assert shown.strip() == ("measured" if default is None else str(default)), name
