"""`--check` of generating and scoring: what a config would do, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from verl.config.generation import engine_size, engines
from verl.config.machine import beyond_machine
from verl.config.model_shape import read_shape
from verl.config.schema import EvaluationConfig, GenerationConfig
from verl.config.unused import unused_keys

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def offline_plan(config: GenerationConfig | EvaluationConfig) -> str:
    """The plan as text, with what has no effect at its end."""
    rows = _generation(config) if isinstance(config, GenerationConfig) else _evaluation(config)
    beyond = beyond_machine(config) if isinstance(config, GenerationConfig) else []
    left = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{left}}  {value}" for name, value in rows]
    return "\n".join(
        ["what would run", *lines, *(f"warning: {line}" for line in [*beyond, *unused_keys(config)])]
    )


def _generation(config: GenerationConfig) -> list[tuple[str, str]]:
    data, rollout = config.data, config.rollout
    limit = "all rows" if data.max_samples < 0 else f"the first {data.max_samples} rows"
    greedy = "greedy" if rollout.temperature == 0 else f"temperature {rollout.temperature:g}"
    rows = [
        ("prompts", f"{limit} of {', '.join(data.path)}, column {data.prompt_key}"),
        ("responses per prompt", f"{rollout.n}, {greedy}, at most {data.max_response_length} tokens"),
        ("engine", f"{rollout.name}: {engines(config)} x {engine_size(config)} device(s)"),
        ("output", f"{data.output_path}, column {data.response_key}"),
    ]
    folder = Path(config.model.path).expanduser()
    inner = folder.is_dir() and not (folder / "config.json").is_file()  # of a run, or an adapter
    shape = None if inner else read_shape(config.model.path, config.model.override_config)
    if shape is not None:
        known = _BYTES.get(rollout.dtype)
        size = f", {shape.parameters * known / 1e9:.2f} GB in {rollout.dtype}" if known else ""
        rows.append(("model", f"{shape.parameters / 1e6:.0f}M parameters{size}"))
    return rows


def _evaluation(config: EvaluationConfig) -> list[tuple[str, str]]:
    data, reward = config.data, config.reward
    limit = "all rows" if data.max_samples < 0 else f"the first {data.max_samples} rows"
    parts = [function.path for function in reward.functions]
    if reward.custom_reward_function.path:
        parts.append(f"{reward.custom_reward_function.path}, {reward.custom_reward_function.name}")
    if reward.reward_model.enable:
        parts.append(f"reward model {reward.reward_model.model_path}")
    if reward.judge.base_url:
        parts.append(f"judge {reward.judge.model} at {reward.judge.base_url}")
    rows = [
        ("responses", f"{limit} of {', '.join(data.path)}, column {data.response_key}"),
        ("scored by", "; ".join(parts) or f"the scorer of each {data.data_source_key}"),
    ]
    return [*rows, ("scored rows", data.output_path)] if data.output_path else rows
