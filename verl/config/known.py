"""The names a config may use, as plain tuples, so that checking needs no torch.

The registries of the other rooms are compared with these in their tests: a name listed here exists there.
"""

from __future__ import annotations

ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gpg",
    "gdpo",
    "optimal_token_baseline",
)
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
)
"""Estimators that compare the responses of one prompt: with `rollout.n=1` they can only give 0."""
CRITIC_ESTIMATORS = ("gae",)

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
CLIPPING_LOSSES = ("vanilla", "gspo", "cispo", "clip_cov", "geo_mean", "dppo_tv", "dppo_kl")
"""Losses that read clip_ratio, clip_ratio_low and clip_ratio_high."""
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
KL_BASE = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_TYPES = KL_BASE + tuple(f"{name}+" for name in KL_BASE)
KL_CONTROLLERS = ("fixed", "adaptive")
FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
ROLLOUT_IS = ("token", "sequence")
ROLLOUT_RS = tuple(
    f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")
)
PF_PPO_METHODS = ("pow", "max_min", "max_random")

STRATEGIES = ("fsdp", "fsdp2", "megatron")
SCHEDULERS = ("constant", "cosine", "linear")
MOMENTS = ("float32", "int8")
PEFT_TYPES = ("lora",)
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")
SAVE_CONTENTS = ("model", "optimizer", "extra", "hf_model")

ROLLOUT_ENGINES = ("native", "hf", "vllm", "sglang")
ROLLOUT_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
ROLLOUT_MODES = ("inprocess", "server")
TOOL_FORMATS = ("hermes",)

TRUNCATIONS = ("error", "left", "right", "middle")
REWARD_MANAGERS = ("naive", "prime", "dapo", "batch")

DEVICES = ("auto", "cpu", "cuda")
LOGGERS = ("console", "file", "wandb", "tensorboard")
RESUME_MODES = ("auto", "disable", "resume_path")
BEST_MODES = ("max", "min")
