"""What holds of a generation's config beyond single values: combinations refused, keys without effect, what follows."""

from __future__ import annotations

from pathlib import PurePath

from verl.config import known
from verl.config.pools import EXTERNAL_ENGINES
from verl.config.ranks import divisors, some_near
from verl.config.schema import GenerationConfig
from verl.config.unused_rules import Rule

OUTPUTS = (".parquet", ".jsonl", ".json")
"""Endings of the files rows are written to."""


def engine_size(config: GenerationConfig) -> int:
    """GPUs (or CPU processes' places) that share one copy of the model."""
    return config.rollout.tensor_model_parallel_size if config.rollout.name in EXTERNAL_ENGINES else 1


def engines(config: GenerationConfig) -> int:
    """Copies of the model that generate side by side."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node // engine_size(config)


def generation_errors(config: GenerationConfig) -> list[str]:
    """Why this config cannot run."""
    data, rollout = config.data, config.rollout
    errors = output_errors("data.output_path", data.output_path)
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        errors.append(
            f"'rollout.max_model_len' is {rollout.max_model_len}, less than data.max_prompt_length + "
            f"data.max_response_length = {longest}; leave it out, or set it to at least {longest}"
        )
    size, per_node = engine_size(config), config.trainer.n_gpus_per_node
    if per_node % size:
        errors.append(
            f"'rollout.tensor_model_parallel_size' is {size}, which does not divide the {per_node} GPUs of a node "
            f"(trainer.n_gpus_per_node). Values that work: {some_near(divisors(per_node), size)}; or "
            f"trainer.n_gpus_per_node={-(-per_node // size) * size}"
        )
    if rollout.name == "sglang" and rollout.mode != "server":
        errors.append(
            f"'rollout.name' is sglang, which runs as a server only, and 'rollout.mode' is {rollout.mode}; "
            "set rollout.mode=server"
        )
    if rollout.name == "hf" and rollout.dtype == "fp8":
        errors.append(
            "'rollout.dtype' is fp8, which rollout.name=hf does not have; use rollout.name=native, or another dtype"
        )
    if data.max_samples == 0:
        errors.append("'data.max_samples' is 0; set it to at least 1, or -1 for all rows")
    return errors


def output_errors(key: str, path: str) -> list[str]:
    """Why rows cannot be written there, as far as the name tells."""
    if not path or PurePath(path).suffix in OUTPUTS:
        return []
    return [f"'{key}' is '{path}'; its ending says the format and must be one of {', '.join(OUTPUTS)}"]


def generation_advice(config: GenerationConfig) -> list[str]:
    """Settings that work but rarely do what was meant."""
    rollout = config.rollout
    if rollout.n > 1 and rollout.temperature == 0:
        return [f"'rollout.n'={rollout.n} greedy responses are all the same; set rollout.temperature above 0"]
    return []


def finalize_generation(config: GenerationConfig) -> None:
    """Fill in what depends on other keys."""
    if config.rollout.max_model_len is None:
        config.rollout.max_model_len = config.data.max_prompt_length + config.data.max_response_length


def _engine_is(config: GenerationConfig, *names: str) -> bool:
    return config.rollout.name in names or config.rollout.name not in known.ROLLOUT_ENGINES


def _has_others(config: GenerationConfig) -> bool:
    """Whether processes beside this one generate: on Ray, a server, or workers that share a model."""
    rollout = config.rollout
    own = rollout.name in EXTERNAL_ENGINES and (
        rollout.mode == "server" or rollout.tensor_model_parallel_size > 1
    )
    return engines(config) > 1 or own


GENERATION_RULES: tuple[Rule, ...] = (
    Rule(
        ("data.truncation",),
        lambda c: not c.data.filter_overlong_prompts,
        "filter_overlong_prompts leaves longer prompts out",
    ),
    Rule(
        ("data.filter_overlong_prompts_workers", "data.cache_dir"),
        lambda c: c.data.filter_overlong_prompts or c.data.truncation == "error",
        "prompts are cut (data.truncation), so nobody has to measure them first",
    ),
    Rule(
        ("rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.seed"),
        lambda c: c.rollout.temperature > 0,
        "rollout.temperature is 0: the likeliest token is taken",
    ),
    Rule(
        ("rollout.raw_log_probs",),
        lambda c: c.data.save_log_probs,
        "data.save_log_probs is False",
    ),
    Rule(
        ("rollout.tensor_model_parallel_size", "rollout.mode"),
        lambda c: _engine_is(c, *EXTERNAL_ENGINES),
        "rollout.name native and hf generate in this process (or in each of several), one whole copy each",
    ),
    Rule(
        ("rollout.engine_kwargs.vllm", "rollout.per_request_seed"),
        lambda c: _engine_is(c, "vllm"),
        "rollout.name is not vllm",
    ),
    Rule(("rollout.engine_kwargs.sglang",), lambda c: _engine_is(c, "sglang"), "rollout.name is not sglang"),
    Rule(
        tuple(
            f"rollout.{name}"
            for name in ("gpu_memory_utilization", "max_num_batched_tokens", "max_model_len", "enforce_eager")
        ),
        lambda c: _engine_is(c, "native", *EXTERNAL_ENGINES),
        "rollout.name=hf has no paged cache and no CUDA graphs",
    ),
    Rule(("ray_kwargs",), lambda c: engines(c) > 1, "one process runs without Ray"),
    Rule(("trainer.watchdog_s",), _has_others, "one process has no workers that could die"),
)
"""Keys that do nothing with the other settings, and why."""
