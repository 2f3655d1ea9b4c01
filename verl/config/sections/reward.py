"""What a response is worth: functions, managers, reward models, judges, sandboxes."""

# ruff: noqa: RUF009 - `key` and `section` return dataclasses.field

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.keys import key, section
from verl.config.sections.actor import MODEL_DTYPES
from verl.config.sections.rollout import dedicated_gpu_errors

REWARD_MANAGERS = ("naive", "prime", "dapo", "batch", "none")


@dataclass
class RewardFunctionConfig:
    """The user's reward function."""

    path: str | None = key(None, "file, pkg.module or module:function; default: by data_source", path=True)
    name: str = key("compute_score", "the function's name in that file", used_if=".path")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function")


@dataclass
class WeightedRewardConfig:
    """One of several reward functions."""

    path: str = key("", "file, pkg.module or module:function", required=True, path=True)
    name: str = key("compute_score", "the function's name in that file")
    weight: float = key(1.0, "factor of its score in the sum")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function")


@dataclass
class RewardManagerModuleConfig:
    """Where the class of a reward manager is."""

    path: str | None = key(None, "file, pkg.module or pkg://pkg.module", path=True)


@dataclass
class RewardManagerConfig:
    """How scores are computed."""

    name: str = key("naive", "reward manager, or a class", known=REWARD_MANAGERS, plugin="reward_manager")
    source: str = key(
        "register", "importlib: name is a class in module.path", known=("register", "importlib")
    )
    module: RewardManagerModuleConfig = section(
        RewardManagerModuleConfig, "file of the class", used_if=".source=importlib"
    )
    reward_kwargs: dict[str, Any] = key({}, "further arguments of a manager's class")


@dataclass
class RewardModelConfig:
    """A sequence-classification model as reward."""

    enable: bool = key(False, "score with a reward model")
    model_path: str | None = key(None, "its Hugging Face folder or id", path=True)
    weight: float = key(1.0, "factor of its score in the sum of rewards")
    micro_batch_size_per_gpu: int | None = key(None, "responses per forward pass; default: 8", ge=1)
    max_length: int | None = key(None, "longest conversation, in its tokens; default: its limit", ge=1)
    dtype: str = key("auto", "of its parameters", known=MODEL_DTYPES)
    param_offload: bool = key(
        True, "keep it in host memory while others work", used_if=("!.n_gpus_per_node", "@gpu")
    )
    trust_remote_code: bool = key(False, "run Python code that comes with it; only for models you trust")
    n_gpus_per_node: int = key(0, "GPUs per node for it alone; 0: on the trainer's GPUs", ge=0)
    nnodes: int = key(0, "nodes for it alone; 0: on the trainer's nodes", ge=0)

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        yield from dedicated_gpu_errors(name, self.n_gpus_per_node, self.nnodes)
        if self.enable and not self.model_path:
            yield f"'{name}.enable' is True; it needs '{name}.model_path'"


@dataclass
class JudgeConfig:
    """A language model behind an OpenAI-compatible endpoint as judge; used when base_url is set."""

    base_url: str | None = key(None, "address of the endpoint, up to and including /v1")
    model: str | None = key(None, "model name the endpoint knows")
    prompt: str | None = key(None, "text or file; {prompt}, {response}, {ground_truth} are filled in")
    system_prompt: str | None = key(None, "system message of the request")
    api_key_env: str = key("OPENAI_API_KEY", "environment variable that holds the key; may be unset")
    score_pattern: str = key(r"(-?\d+(?:\.\d+)?)", "regex; group 1 of its last match is the score")
    max_score: float = key(1.0, "the score is divided by this", gt=0)
    weight: float = key(1.0, "factor of its score in the sum of rewards")
    temperature: float = key(0.0, "sampling temperature", ge=0)
    max_tokens: int = key(512, "longest answer", ge=1)
    max_concurrency: int = key(16, "requests at the same time", ge=1)
    requests_per_minute: float | None = key(None, "rate limit; default: none", gt=0)
    retries: int = key(3, "further attempts after a failed request", ge=0)
    timeout_s: float = key(60.0, "seconds one request may take", gt=0)


@dataclass
class SandboxFusionConfig:
    """A remote service that runs code."""

    url: str | None = key(None, "its address; default: code runs in the local sandbox")
    max_concurrent: int = key(64, "requests at the same time", ge=1)


@dataclass
class SandboxConfig:
    """Limits for model-written code, per program."""

    timeout_s: float = key(10.0, "seconds of wall time", gt=0)
    memory_limit_mb: int = key(1024, "memory", ge=16)
    max_processes: int = key(64, "processes and threads", ge=1)
    max_file_mb: int = key(16, "largest file it may write", ge=1)
    all_or_nothing: bool = key(False, "1 only when every test passes; False: the share of tests passed")
    allow_unisolated: bool = key(False, "run code without isolation; never for untrusted models")


@dataclass
class OverlongBufferConfig:
    """The soft penalty for long responses (DAPO)."""

    enable: bool = key(False, "lower the reward of responses near the longest length")
    len: int = key(128, "tokens before data.max_response_length", ge=1, used_if=".enable")
    penalty_factor: float = key(1.0, "penalty at the very end of the zone", ge=0, used_if=".enable")
    log: bool = key(False, "report the penalty as metrics", used_if=".enable")


@dataclass
class RewardConfig:
    """What a response is worth."""

    custom_reward_function: RewardFunctionConfig = section(RewardFunctionConfig, "your reward function")
    functions: list[WeightedRewardConfig] = key([], "several, summed: a list of {path, name, weight}")
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "how scores are computed")
    num_workers: int | None = key(
        None, "processes; default: one per core, at most 8", ge=1, used_if="!.in_process"
    )
    timeout_s: float = key(30.0, "seconds one call may take before its process is killed", gt=0)
    max_failure_ratio: float = key(0.2, "share of a batch without score that stops the run", ge=0, le=1)
    in_process: bool = key(False, "call the function in the trainer's process")
    max_concurrency: int = key(64, "calls of an async function at the same time", ge=1)
    memory_limit_mb: int | None = key(
        None, "of one process; default: half of the machine's", ge=16, used_if="!.in_process"
    )
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "a reward model", used_if=".reward_model.enable"
    )
    judge: JudgeConfig = section(JudgeConfig, "a language model as judge", used_if=".judge.base_url")
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, "remote service that runs code")
    sandbox: SandboxConfig = section(SandboxConfig, "limits for model-written code")
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig, "soft penalty for long responses")

    def errors(self, name: str) -> Iterator[str]:
        """What is wrong within the section called `name`."""
        if self.custom_reward_function.path and self.functions:
            yield (
                f"'{name}.custom_reward_function.path' and '{name}.functions' are both given; put all of them into "
                f"{name}.functions=[{{path: ..., name: ..., weight: 1.0}}, ...]"
            )
        for i, function in enumerate(self.functions):
            if not function.path:
                yield f"'{name}.functions[{i}].path' is required: file, pkg.module or module:function"
        manager = self.reward_manager
        if manager.source == "importlib" and not manager.module.path:
            yield f"'{name}.reward_manager.source' is importlib; it needs '{name}.reward_manager.module.path'"
        if self.judge.base_url and not self.judge.model:
            yield f"'{name}.judge.base_url' is set; it needs '{name}.judge.model'"
