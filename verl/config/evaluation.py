"""What holds of an evaluation's config beyond single values: combinations refused, keys without effect."""

from __future__ import annotations

from verl.config.generation import output_errors
from verl.config.schema import EvaluationConfig
from verl.config.unused_rules import REWARD_RULES, Rule


def evaluation_errors(config: EvaluationConfig) -> list[str]:
    """Why this config cannot run."""
    reward = config.reward
    errors = output_errors("data.output_path", config.data.output_path or "")
    if config.data.max_samples == 0:
        errors.append("'data.max_samples' is 0; set it to at least 1, or -1 for all rows")
    if reward.custom_reward_function.path and reward.functions:
        errors.append(
            "'reward.custom_reward_function.path' and 'reward.functions' are both given; put the one into the list of "
            "the other: reward.functions=[{path: ..., name: ..., weight: 1.0}, ...]"
        )
    for i, function in enumerate(reward.functions):
        if not function.path:
            errors.append(f"'reward.functions[{i}].path' is required: file, pkg.module or module:function")
    if reward.reward_model.enable and not reward.reward_model.model_path:
        errors.append("'reward.reward_model.enable' is True; it needs 'reward.reward_model.model_path'")
    if reward.reward_model.n_gpus_per_node or reward.reward_model.nnodes:
        errors.append(
            "'reward.reward_model.n_gpus_per_node' and 'nnodes' give a reward model GPUs beside a trainer's; here "
            "nobody trains and it has this process's GPU. Set both to 0"
        )
    if reward.judge.base_url and not reward.judge.model:
        errors.append(
            "'reward.judge.base_url' is set; it needs 'reward.judge.model', a name the endpoint knows"
        )
    if reward.overlong_buffer.enable:
        errors.append(
            "'reward.overlong_buffer.enable' is True: the penalty teaches a policy to keep within "
            "data.max_response_length and says nothing about how good a response is; set it to False"
        )
    return errors


EVALUATION_RULES: tuple[Rule, ...] = (
    Rule(
        ("reward.max_failure_ratio",),
        lambda c: False,
        "an evaluation goes on whatever fails, and counts it",
    ),
    *REWARD_RULES,
)
"""Keys that do nothing with the other settings, and why."""
