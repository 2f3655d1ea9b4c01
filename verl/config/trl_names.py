"""TRL's names (of GRPOConfig, DPOConfig, SFTConfig and RewardConfig, inherited ones included) and what they are here.

The one table of them: error messages name the key for what was typed, and `python -m verl.config.trl_names FILE` writes
the table of docs/from-trl.md from it. A name has keys, or a note that says why there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"


def _both(rl: str, offline: str) -> str:
    """The key of RL training, then that of training on given answers."""
    return f"{rl} {offline}"


# Name -> keys, RL training first. Each command takes those it has.
TRL_KEYS: dict[str, str] = {
    "adam_beta1": _both(f"{_ACTOR}.optim.betas", "optim.betas"),
    "adam_beta2": _both(f"{_ACTOR}.optim.betas", "optim.betas"),
    "adam_epsilon": _both(f"{_ACTOR}.optim.eps", "optim.eps"),
    "activation_offloading": _both(f"{_MODEL}.enable_activation_offload", "model.enable_activation_offload"),
    "beta": _both(f"{_ACTOR}.kl_loss_coef", "algorithm.beta"),
    "bf16": _both(f"{_MODEL}.dtype", "model.dtype"),
    "fp16": _both(f"{_MODEL}.dtype", "model.dtype"),
    "center_rewards_coefficient": "algorithm.center_rewards_coefficient",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "chat_template_path": "data.chat_template",
    "data_seed": "data.seed",
    "dataloader_num_workers": "data.dataloader_num_workers",
    "ddp_timeout": "trainer.watchdog_s",
    "delta": f"{_ACTOR}.clip_ratio_c",
    "entropy_coef": f"{_ACTOR}.entropy_coeff",
    "epsilon": f"{_ACTOR}.clip_ratio {_ACTOR}.clip_ratio_low",
    "epsilon_high": f"{_ACTOR}.clip_ratio_high",
    "eval_on_start": "trainer.val_before_train",
    "eval_steps": "trainer.test_freq",
    "fsdp": _both(f"{_ACTOR}.strategy", "model.strategy"),
    "fsdp_config": _both(f"{_ACTOR}.fsdp_config.param_offload", "model.fsdp_config.param_offload"),
    "generation_batch_size": "data.train_batch_size",
    "gradient_checkpointing": _both(
        f"{_MODEL}.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"
    ),
    "greater_is_better": "trainer.keep_best_mode",
    "importance_sampling_level": f"{_LOSS}.loss_mode",
    "label_smoothing": "algorithm.label_smoothing",
    "learning_rate": _both(f"{_ACTOR}.optim.lr", "optim.lr"),
    "log_completions": "trainer.log_val_generations",
    "loss_type": f"{_ACTOR}.loss_agg_mode {_LOSS}.loss_mode algorithm.loss",
    "lr_scheduler_type": _both(f"{_ACTOR}.optim.lr_scheduler_type", "optim.lr_scheduler_type"),
    "lr_scheduler_kwargs": _both(f"{_ACTOR}.optim.min_lr_ratio", "optim.min_lr_ratio"),
    "mask_truncated_completions": "algorithm.filter_overlong_responses",
    "max_completion_length": "data.max_response_length",
    "max_grad_norm": _both(f"{_ACTOR}.grad_clip", "optim.grad_clip"),
    "max_length": "data.max_length",
    "max_prompt_length": "data.max_prompt_length",
    "max_steps": "trainer.total_training_steps",
    "max_tool_calling_iterations": f"{_ROLLOUT}.multi_turn.max_turns",
    "metric_for_best_model": "trainer.keep_best",
    "min_p": f"{_ROLLOUT}.min_p",
    "model_init_kwargs": _both(f"{_MODEL}.override_config", "model.override_config"),
    "multi_objective_aggregation": "algorithm.adv_estimator algorithm.gdpo_reward_keys",
    "num_completions_to_print": "trainer.log_val_generations",
    "num_generations": f"{_ROLLOUT}.n",
    "num_generations_eval": f"{_ROLLOUT}.val_kwargs.n",
    "num_iterations": f"{_ACTOR}.ppo_epochs",
    "num_train_epochs": "trainer.total_epochs",
    "optim": _both(f"{_ACTOR}.optim.moments", "optim.moments"),
    "output_dir": "trainer.default_local_dir",
    "per_device_train_batch_size": _both(
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu"
    ),
    "precompute_ref_log_probs": "algorithm.cache_reference",
    "project": "trainer.project_name",
    "ref_model_sync_steps": "trainer.ref_update_freq",
    "repetition_penalty": f"{_ROLLOUT}.repetition_penalty",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "trainer.resume_from_path",
    "reward_weights": "reward.functions",
    "run_name": "trainer.experiment_name",
    "sapo_temperature_neg": f"{_LOSS}.tau_neg",
    "sapo_temperature_pos": f"{_LOSS}.tau_pos",
    "save_only_model": _both(f"{_ACTOR}.checkpoint.save_contents", "checkpoint.save_contents"),
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "seed": "trainer.seed",
    "shuffle_dataset": "data.shuffle",
    "steps_per_generation": f"{_ACTOR}.ppo_mini_batch_size",
    "sync_ref_model": "trainer.ref_update_freq",
    "temperature": f"{_ROLLOUT}.temperature",
    "top_k": f"{_ROLLOUT}.top_k",
    "top_p": f"{_ROLLOUT}.top_p",
    "torch_compile": _both(f"{_ACTOR}.use_torch_compile", "model.use_torch_compile"),
    "truncation_mode": "data.truncation",
    "trust_remote_code": _both(f"{_MODEL}.trust_remote_code", "model.trust_remote_code"),
    "use_cpu": "trainer.device",
    "use_vllm": f"{_ROLLOUT}.name",
    "vllm_enable_sleep_mode": f"{_ROLLOUT}.free_cache_engine",
    "vllm_gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "vllm_importance_sampling_cap": f"{_CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_clip_max": f"{_CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_clip_min": f"{_CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_correction": f"{_CORRECTION}.rollout_is",
    "vllm_importance_sampling_mode": f"{_CORRECTION}.rollout_is",
    "vllm_max_model_length": f"{_ROLLOUT}.max_model_len",
    "vllm_mode": f"{_ROLLOUT}.mode",
    "vllm_model_impl": f"{_ROLLOUT}.engine_kwargs.vllm",
    "vllm_tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "warmup_steps": _both(f"{_ACTOR}.optim.lr_warmup_steps", "optim.lr_warmup_steps"),
    "warmup_ratio": _both(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    "weight_decay": _both(f"{_ACTOR}.optim.weight_decay", "optim.weight_decay"),
}

_ALWAYS = "always done"
_NEVER = "not available"
_NOT_NEEDED = "not needed"
_BATCHES = "set data.train_batch_size and the size of micro-batches; passes are accumulated as needed"
_EACH_STEP = "every step is logged"
_HUB = f"{_NEVER}: `verl merge` writes a folder that `huggingface-cli upload` takes"
_SERVER = f"{_NEVER}: vLLM runs on the trainer's GPUs or in a pool of its own (docs/vllm-and-sglang.md)"
_DDP = f"{_NOT_NEEDED}: parameters are sharded with FSDP2"
_LOG = f"{_NOT_NEEDED}: one process prints"

# Name -> why it has no key.
TRL_NOTES: dict[str, str] = {
    "accelerator_config": f"{_NOT_NEEDED}: Accelerate is not used",
    "assistant_only_loss": f"{_ALWAYS}: loss is on the assistant's messages",
    "auto_find_batch_size": f"{_ALWAYS}: the size of micro-batches is measured where it is not given",
    "average_tokens_across_devices": f"{_ALWAYS}: a loss has the token count of the whole mini-batch",
    "batch_eval_metrics": _NOT_NEEDED,
    "bf16_full_eval": f"{_NOT_NEEDED}: validation uses the training dtype",
    "cache_implementation": f"{_NOT_NEEDED}: every rollout engine has its own KV cache",
    "cast_lm_head_to_fp32": f"{_ALWAYS}: log-probabilities are computed in float32",
    "completion_only_loss": f"{_ALWAYS}: loss is on the response",
    "dataloader_drop_last": "done in `verl train` alone; fine-tuning trains the last, smaller batch of an epoch too",
    "dataloader_in_order": f"{_ALWAYS}: rows come in the order of the seed",
    "dataloader_multiprocessing_context": f"{_NOT_NEEDED}: rows are tokenised in threads",
    "dataloader_persistent_workers": f"{_NOT_NEEDED}: rows are tokenised in threads",
    "dataloader_pin_memory": _NOT_NEEDED,
    "dataloader_prefetch_factor": _NOT_NEEDED,
    "dataset_kwargs": _NOT_NEEDED,
    "dataset_num_proc": _NOT_NEEDED,
    "dataset_text_field": f"{_NEVER}: rows are prompt and response or messages (data.prompt_key, data.messages_key)",
    "ddp_backend": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_find_unused_parameters": _DDP,
    "ddp_static_graph": _DDP,
    "debug": f"{_NEVER}: see trainer.profile.steps and `verl trace`",
    "deepspeed": f"{_NEVER}: strategies are fsdp, fsdp2 and megatron",
    "disable_dropout": f"{_ALWAYS}: models train without dropout",
    "disable_tqdm": f"{_NOT_NEEDED}: there is no progress bar in pipes and files",
    "discopop_tau": f"{_NEVER}: losses are dpo, ipo, hinge, robust, simpo, orpo and kto",
    "do_eval": f"{_NOT_NEEDED}: set data.val_files; trainer.val_only=True validates and stops",
    "do_predict": f"{_NEVER}: use `verl generate`",
    "do_train": f"{_NOT_NEEDED}: the command says what is done",
    "ds3_gather_for_generation": f"{_NEVER}: there is no DeepSpeed",
    "enable_jit_checkpoint": "always done: SIGTERM saves a checkpoint after the current step and ends the run",
    "entropy_coef_delta": f"{_NEVER}: the entropy coefficient is constant",
    "entropy_coef_max": f"{_NEVER}: the entropy coefficient is constant",
    "entropy_coef_min": f"{_NEVER}: the entropy coefficient is constant",
    "entropy_target": f"{_NEVER}: the entropy coefficient is constant",
    "eos_token": f"{_NOT_NEEDED}: the tokenizer's; rollout.stop_token_ids adds others",
    "eval_accumulation_steps": _NOT_NEEDED,
    "eval_delay": _NEVER,
    "eval_do_concat_batches": _NOT_NEEDED,
    "eval_packing": f"{_ALWAYS}: rows are packed without padding",
    "eval_strategy": f"{_NOT_NEEDED}: trainer.test_freq is in steps; -1 validates at the end",
    "eval_use_gather_object": _NOT_NEEDED,
    "f_alpha_divergence_coef": f"{_NEVER}: the divergence is the reverse KL",
    "f_divergence_type": f"{_NEVER}: the divergence is the reverse KL",
    "fp16_full_eval": f"{_NOT_NEEDED}: validation uses the training dtype",
    "full_determinism": f"{_ALWAYS}: two runs of one config on one machine give the same numbers",
    "generation_kwargs": f"{_NEVER}: each setting is a key of {_ROLLOUT}",
    "gradient_accumulation_steps": _BATCHES,
    "gradient_checkpointing_kwargs": _NEVER,
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "ignore_data_skip": f"{_NEVER}: a resumed run continues with the next rows",
    "include_for_metrics": _NEVER,
    "include_num_input_tokens_seen": f"{_ALWAYS}: perf/total_num_tokens",
    "label_names": _NOT_NEEDED,
    "label_smoothing_factor": f"{_NEVER} in fine-tuning",
    "ld_alpha": _NEVER,
    "length_column_name": _NOT_NEEDED,
    "liger_kernel_config": f"{_NOT_NEEDED}: fused kernels are built in",
    "load_best_model_at_end": f"{_NEVER}: trainer.keep_best keeps the best checkpoint on disk",
    "local_rank": _NOT_NEEDED,
    "log_completions_hub_repo": _HUB,
    "log_level": f"{_NEVER}: messages are logged at INFO",
    "log_level_replica": _LOG,
    "log_multimodal": f"{_NEVER}: models are text only",
    "log_on_each_node": _LOG,
    "log_unique_prompts": f"{_NEVER}: `verl view` shows responses by prompt",
    "logging_first_step": f"{_ALWAYS}: {_EACH_STEP}",
    "logging_nan_inf_filter": f"{_NEVER}: non-finite values are reported",
    "logging_steps": _EACH_STEP,
    "logging_strategy": _EACH_STEP,
    "loss_weights": f"{_NEVER}: one preference loss at a time (algorithm.loss)",
    "neftune_noise_alpha": _NEVER,
    "off_policy_mask_threshold": f"{_NEVER} under this name: see {_CORRECTION}.rollout_rs",
    "optim_args": f"{_NEVER}: each setting is a key of optim",
    "optim_target_modules": f"{_NEVER}: GaLore and similar optimisers are not implemented",
    "packing": f"{_ALWAYS}: rows are packed without padding, and do not see each other",
    "packing_strategy": f"{_NOT_NEEDED}: rows are packed whole",
    "pad_to_multiple_of": f"{_NOT_NEEDED}: rows are packed without padding",
    "pad_token": f"{_NOT_NEEDED}: rows are packed without padding",
    "padding_free": f"{_ALWAYS}: use_remove_padding=True",
    "parallelism_config": f"{_NEVER} as one object: see docs/scaling.md",
    "per_device_eval_batch_size": f"{_NOT_NEEDED}: validation rows are scheduled by memory",
    "precompute_ref_batch_size": _NOT_NEEDED,
    "prediction_loss_only": _NOT_NEEDED,
    "push_to_hub": _HUB,
    "ref_model_mixup_alpha": f"{_NEVER}: the reference is replaced (trainer.ref_update_freq), not mixed",
    "remove_unused_columns": f"{_NOT_NEEDED}: reward functions get every column",
    "restore_callback_states_from_checkpoint": f"{_NEVER}: there are no callbacks",
    "router_aux_loss_coef": _NEVER,
    "save_on_each_node": f"{_NOT_NEEDED}: every rank writes its shards to one folder",
    "save_strategy": f"{_NOT_NEEDED}: trainer.save_freq is in steps; -1 saves at the end",
    "skip_memory_metrics": f"{_ALWAYS}: perf/max_memory_allocated_gb is logged",
    "tf32": f"{_NEVER}: set it with torch",
    "top_entropy_quantile": _NEVER,
    "torch_compile_backend": _NEVER,
    "torch_compile_mode": _NEVER,
    "torch_empty_cache_steps": _NOT_NEEDED,
    "trackio_bucket_id": f"{_NEVER}: trainer.logger=[trackio] logs locally",
    "trackio_space_id": f"{_NEVER}: trainer.logger=[trackio] logs locally",
    "trackio_static_space_id": f"{_NEVER}: trainer.logger=[trackio] logs locally",
    "train_sampling_strategy": f"{_NEVER}: see data.shuffle and data.curriculum_key",
    "transformers_continuous_batching_config": f"{_NOT_NEEDED}: the native engine batches continuously",
    "use_adaptive_entropy": f"{_NEVER}: the entropy coefficient is constant",
    "use_bias_correction_kl": f"{_NEVER}: estimators of the KL are in {_ACTOR}.kl_loss_type",
    "use_cache": _NOT_NEEDED,
    "use_liger_kernel": f"{_NOT_NEEDED}: fused kernels are built in",
    "use_transformers_continuous_batching": f"{_NOT_NEEDED}: the native engine batches continuously",
    "use_transformers_paged": f"{_NOT_NEEDED}: the native engine has a paged KV cache",
    "use_weighting": _NEVER,
    "vespo_k_neg": f"{_NEVER}: policy losses are in docs/algorithms.md",
    "vespo_k_pos": f"{_NEVER}: policy losses are in docs/algorithms.md",
    "vespo_lambda_neg": f"{_NEVER}: policy losses are in docs/algorithms.md",
    "vespo_lambda_pos": f"{_NEVER}: policy losses are in docs/algorithms.md",
    "vllm_group_port": _SERVER,
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_structured_outputs_regex": _NEVER,
}

BEGIN, END = "<!-- table of verl.config.trl_names -->", "<!-- end of the table -->"


def table() -> str:
    """The table as Markdown."""
    lines = ["| TRL | here |", "|---|---|"]
    for name in sorted(TRL_KEYS | TRL_NOTES):
        keys = ", ".join(f"`{key}`" for key in TRL_KEYS.get(name, "").split())
        lines.append(f"| `{name}` | {keys or TRL_NOTES[name]} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table replaced by the current one."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
