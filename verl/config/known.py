"""The names a config may use, as plain tuples, so that checking needs no torch.

Tests compare these with the registries of the other packages: a name listed here exists there.
"""

from __future__ import annotations

# When an implicit reward model is trained on a batch: before it scores the batch, or after.
REWARD_UPDATES = ("before", "after")

PAIRINGS = ("best_worst", "all")
LOSS_AGG_MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip
KL_BASE = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = KL_BASE + tuple(f"{name}+" for name in KL_BASE)
TEACHER_KL = ("reverse", "forward")
KL_CONTROLLERS = ("fixed", "adaptive")
FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
ROLLOUT_IS = ("token", "sequence")
ROLLOUT_RS = tuple(
    f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")
)
PF_PPO_METHODS = ("pow", "max_min", "max_random")

STRATEGIES = ("fsdp", "fsdp2", "megatron")
# `model_type` of the architectures that can be built from Megatron's layers.
MEGATRON_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
SCHEDULERS = ("constant", "cosine", "linear")
MOMENTS = ("float32", "int8")
PEFT_TYPES = ("lora",)
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")

ROLLOUT_ENGINES = ("native", "hf", "vllm", "sglang")
ROLLOUT_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
ROLLOUT_MODES = ("inprocess", "server")
TOOL_FORMATS = ("auto", "hermes", "qwen3_coder", "llama3_json")
TRUNCATE_SIDES = ("left", "middle", "right")
HISTORIES = ("append", "split")

CHAT_TEMPLATE_USES = ("auto", "always", "never")
TRUNCATIONS = ("error", "left", "right", "middle")
REWARD_MANAGERS = ("naive", "prime", "dapo", "batch", "none")

ASYNC_MODES = ("off", "carry_over", "one_step_off", "fully_async")
# Those in which generation has its own processes.
POOL_ASYNC_MODES = ("one_step_off", "fully_async")
DEVICES = ("auto", "cpu", "cuda")
TRACKER_SERVICES = ("wandb", "tensorboard", "mlflow", "trackio", "swanlab")
LOGGERS = ("console", "file", *TRACKER_SERVICES)
RESUME_MODES = ("auto", "disable", "resume_path")
BEST_MODES = ("max", "min")

# Names (without a plural s) for keys that no similarity of spelling finds; those of TRL are in trl_names.json.
OTHER_NAMES = {
    "lr": "actor_rollout_ref.actor.optim.lr critic.optim.lr optim.lr",
    "model": "actor_rollout_ref.model.path model.path",
    "model_path": "actor_rollout_ref.model.path model.path",
    "model_name_or_path": "actor_rollout_ref.model.path model.path",
    "total_step": "trainer.total_training_steps",
    "dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "max_new_token": "data.max_response_length",
    "reward_fn": "reward.custom_reward_function.path",
    "reward_func": "reward.custom_reward_function.path",
}
OTHER_VALUES = {
    "ppo": "gae",
    "reinforce": "reinforce_plus_plus",
    "gpu": "cuda",
    "transformers": "hf",
    "sync": "inprocess",
    "async": "server",
}
# Where to look instead, by the parts of the names with which other versions ask for it.
RELATED_KEYS = {
    "agents are set up in actor_rollout_ref.rollout.multi_turn": ("agent", "agent_loop", "interaction_config_path"),
    "generating ahead of training is set by trainer.async_training.mode": ("async", "async_mode"),
    "rows are conversations where they have the column data.messages_key": ("multiturn",),
    "a text inside another column needs a column of its own (data.prompt_key, data.response_key)": (
        "prompt_dict_keys", "response_dict_keys",
    ),
}  # fmt: skip
