"""Validation before anything is loaded: single values, then combinations.

What always holds: a config that passes can be run as far as its values can tell; every message names the value
seen, what is allowed or would work, and the key to change. All errors are reported at once.
"""

from __future__ import annotations

import sys
from typing import Any

from verl.config.available import unavailable
from verl.config.evaluation import evaluation_errors
from verl.config.generation import generation_errors
from verl.config.keys import Key, get, schema_keys
from verl.config.known import CRITIC_ESTIMATORS, GROUP_ESTIMATORS, ROLLOUT_RS
from verl.config.pools import sharing_errors
from verl.config.ranks import divisors, dp_size, some_near, world_size
from verl.config.schema import AnyConfig, GenerationConfig, OptimConfig, PPOConfig, SFTConfig
from verl.config.synonyms import other_kind, value_meant
from verl.config.unused import unused_keys
from verl.errors import ConfigError

_REGISTRIES = {
    "adv_est": ("verl.algorithms.registry", "adv_estimator_names"),
    "policy_loss": ("verl.algorithms.registry", "policy_loss_names"),
    "rollout": ("verl.rollout", "known_rollouts"),
    "reward_manager": ("verl.reward.managers", "known_reward_managers"),
    "tracker": ("verl.observe.trackers", "registered_trackers"),
}
"""Where user-registered names are found. A plug-in has imported its registry; one not imported holds nothing."""


def check(config: AnyConfig) -> list[str]:
    """Warnings about a config that can run; ConfigError, with every reason, for one that cannot."""
    errors = _values(config) or _combinations(config)
    if errors:
        raise ConfigError("\n".join([*unavailable(config), *errors]))
    return unused_keys(config)


def _combinations(config: AnyConfig) -> list[str]:
    if isinstance(config, PPOConfig):
        return _ppo(config)
    if isinstance(config, SFTConfig):
        return _sft(config)
    return generation_errors(config) if isinstance(config, GenerationConfig) else evaluation_errors(config)


def _values(config: AnyConfig) -> list[str]:
    errors: list[str] = []
    for key in schema_keys(type(config)).values():
        value = get(config, key.name)
        if key.metadata["required"] and not value and not _excused(config, key.name):
            errors.append(f"'{key.name}' is required: {key.doc}. Give it as {key.name}=...")
        for each in value if isinstance(value, list) else [value]:
            errors += _allowed(key, each) + _bounds(key, each)
    for name in (key.name for key in schema_keys(type(config)).values() if key.last == "betas"):
        errors += _betas(name, get(config, name))
    return errors


def _excused(config: AnyConfig, name: str) -> bool:
    """Required keys that another setting makes unnecessary."""
    if not isinstance(config, PPOConfig):
        return False
    if name == "critic.model.path":
        return True  # it follows the actor's, whose absence is reported
    return name == "data.train_files" and bool(config.data.mixture or config.trainer.val_only)


def _allowed(key: Key, value: Any) -> list[str]:
    known = key.metadata["known"]
    if known is None or value is None or value in known:
        return []
    names = [*known, *(name for name in _registered(key.metadata["plugin"]) if name not in known)]
    if value in names:
        return []
    other = other_kind(key.name, str(value))
    if other:
        return [f"'{key.name}' is '{value}': {value} {other}. Allowed: {', '.join(names)}"]
    close = value_meant(key.name, str(value), names)
    hint = f" Did you mean {close}?" if close else ""
    own = " Your own are registered in a module named in trainer.plugins" if key.metadata["plugin"] else ""
    return [f"'{key.name}' is '{value}', which is not known. Allowed: {', '.join(names)}.{hint}{own}"]


def _registered(plugin: str | None) -> list[str]:
    if plugin is None:
        return []
    module, function = _REGISTRIES[plugin]
    return list(getattr(sys.modules[module], function)()) if module in sys.modules else []


def _bounds(key: Key, value: Any) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    ge, gt, le = (key.metadata[name] for name in ("ge", "gt", "le"))
    if (ge is None or value >= ge) and (gt is None or value > gt) and (le is None or value <= le):
        return []
    words = [f"at least {ge:g}" if ge is not None else "", f"above {gt:g}" if gt is not None else ""]
    words.append(f"at most {le:g}" if le is not None else "")
    return [f"'{key.name}' is {value}; it must be {' and '.join(word for word in words if word)} ({key.doc})"]


def _betas(name: str, betas: list[float]) -> list[str]:
    if len(betas) == 2 and all(beta < 1 for beta in betas):
        return []
    return [
        f"'{name}' is {betas}; it must be two numbers from 0 up to but not including 1, e.g. [0.9, 0.999]"
    ]


def _sft(config: SFTConfig) -> list[str]:
    errors = _run(config)
    world = world_size(config)
    rows, micro = config.data.train_batch_size, config.data.micro_batch_size_per_gpu
    if rows < world:
        errors.append(
            f"'data.train_batch_size' is {rows}, fewer rows than the {world} ranks (trainer.n_gpus_per_node x "
            f"trainer.nnodes); set it to at least {world}"
        )
    if "data.micro_batch_size_per_gpu" in config.user_set and micro and micro * world > rows:
        errors.append(
            f"'data.micro_batch_size_per_gpu' is {micro}, but each of the {world} ranks has only {rows // world} of "
            f"the {rows} rows of data.train_batch_size; set it to at most {max(rows // world, 1)}"
        )
    errors += _parallel("model", config.model, world) + _warmup("optim", config.optim)
    return errors


def _ppo(config: PPOConfig) -> list[str]:
    errors = _run(config) + _batches(config) + _sampling(config) + _devices(config) + _rewards(config)
    errors += _correction(config) + _kl_control(config)
    algorithm, trainer = config.algorithm, config.trainer
    estimator = algorithm.adv_estimator
    for name in ("actor_rollout_ref.actor.optim", "critic.optim"):
        errors += _warmup(name, get(config, name))
    if estimator in CRITIC_ESTIMATORS and config.critic.enable is False:
        errors.append(
            f"'critic.enable' is False, but algorithm.adv_estimator={estimator} learns from a critic's values; "
            "leave it out, or choose an estimator without critic, e.g. grpo with actor_rollout_ref.rollout.n=8"
        )
    if trainer.critic_warmup > 0 and not config.critic.enable:
        errors.append(
            f"'trainer.critic_warmup' is {trainer.critic_warmup}, but algorithm.adv_estimator={estimator} has no "
            "critic, so nothing would learn in these steps; set it to 0"
        )
    if estimator == "gdpo" and not algorithm.gdpo_reward_keys:
        errors.append(
            "algorithm.adv_estimator=gdpo needs 'algorithm.gdpo_reward_keys', the keys of the reward function's dict, "
            "e.g. algorithm.gdpo_reward_keys=[accuracy,format]"
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        errors.append(
            f"'algorithm.gdpo_reward_weights' has {len(weights)} numbers for the {len(keys)} keys of "
            "algorithm.gdpo_reward_keys; give one each, or none"
        )
    if trainer.val_only and not config.data.val_files:
        errors.append("'trainer.val_only' is True, but there is nothing to validate on; set data.val_files")
    return errors


def _run(config: PPOConfig | SFTConfig) -> list[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        return [
            "'trainer.resume_mode' is resume_path; it needs 'trainer.resume_from_path', a global_step_N folder"
        ]
    return []


def _warmup(name: str, optim: OptimConfig) -> list[str]:
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        return [
            f"'{name}.lr_warmup_steps' is {optim.lr_warmup_steps} and '{name}.lr_warmup_steps_ratio' is "
            f"{optim.lr_warmup_steps_ratio:g}: both say how long to warm up; keep one of them"
        ]
    return []


def _batches(config: PPOConfig) -> list[str]:
    if config.trainer.val_only:
        return []
    errors: list[str] = []
    prompts = config.data.train_batch_size
    for role, enabled in (("actor_rollout_ref.actor", True), ("critic", bool(config.critic.enable))):
        name = f"{role}.ppo_mini_batch_size"
        mini = get(config, name)
        if not enabled or (role == "critic" and name not in config.user_set):
            continue
        works = some_near(divisors(prompts), mini)
        if mini > prompts:
            errors.append(
                f"'{name}' is {mini}, more than the {prompts} prompts of a step (data.train_batch_size). Values that "
                f"work: {works}; or data.train_batch_size={mini}, if the data has as many rows"
            )
        elif prompts % mini:
            fewer = prompts // mini * mini  # more might be more than the data has
            errors.append(
                f"'{name}' is {mini}, which does not divide the {prompts} prompts of a step (data.train_batch_size). "
                f"Values that work: {works}; or data.train_batch_size={fewer}"
            )
    ranks, n = dp_size(config), config.actor_rollout_ref.rollout.n
    sequences = prompts * n
    if sequences < ranks:
        errors.append(
            f"'data.train_batch_size' is {prompts} with actor_rollout_ref.rollout.n={n}: {sequences} sequences for "
            f"{ranks} ranks; set it to at least {-(-ranks // n)}"
        )
    return errors


def _sampling(config: PPOConfig) -> list[str]:
    errors: list[str] = []
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    longest = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        errors.append(
            f"'actor_rollout_ref.rollout.max_model_len' is {rollout.max_model_len}, less than data.max_prompt_length + "
            f"data.max_response_length = {longest}; leave it out, or set it to at least {longest}"
        )
    if config.trainer.val_only:
        return errors
    if estimator in GROUP_ESTIMATORS and rollout.n == 1:
        errors.append(
            f"'actor_rollout_ref.rollout.n' is 1, but algorithm.adv_estimator={estimator} compares the responses of "
            "one prompt with each other; set actor_rollout_ref.rollout.n to 2 or more (8 is common), or use "
            "algorithm.adv_estimator=gae or reinforce_plus_plus"
        )
    elif config.algorithm.filter_groups.enable and rollout.n == 1:
        errors.append(
            "'algorithm.filter_groups.enable' drops prompts whose responses all score the same, which is every prompt "
            "with actor_rollout_ref.rollout.n=1; set actor_rollout_ref.rollout.n to 2 or more"
        )
    if rollout.temperature == 0:
        errors.append(
            "'actor_rollout_ref.rollout.temperature' is 0: greedy training responses are all alike and teach nothing; "
            "set it to 1.0 (validation is greedy by actor_rollout_ref.rollout.val_kwargs.temperature=0)"
        )
    return errors


def _parallel(name: str, role: Any, world: int) -> list[str]:
    """Sizes of what is not available (megatron, sequence parallelism) need not fit: a run refuses those anyway."""
    ranks = f"the {world} ranks (trainer.n_gpus_per_node x trainer.nnodes)"
    shards = role.fsdp_config.fsdp_size
    if role.strategy != "megatron" and shards != -1 and (shards == 0 or world % shards):
        return [
            f"'{name}.fsdp_config.fsdp_size' is {shards}, which does not divide {ranks}. Values that work: -1 (all), "
            f"{some_near(divisors(world), shards)}"
        ]
    return []


def _devices(config: PPOConfig) -> list[str]:
    world, policy = world_size(config), config.actor_rollout_ref
    errors = _parallel("actor_rollout_ref.actor", policy.actor, world)
    if config.critic.enable:
        errors += _parallel("critic", config.critic, world)
    rollout, own = policy.rollout, config.reward.reward_model
    for name, section in (("actor_rollout_ref.rollout", rollout), ("reward.reward_model", own)):
        if (section.n_gpus_per_node == 0) != (section.nnodes == 0):
            errors.append(
                f"'{name}.n_gpus_per_node' is {section.n_gpus_per_node} and '{name}.nnodes' is {section.nnodes}: set "
                "both for GPUs of its own, or neither to share the trainer's"
            )
    return errors + sharing_errors(config)


def _rewards(config: PPOConfig) -> list[str]:
    errors: list[str] = []
    reward, longest = config.reward, config.data.max_response_length
    if reward.custom_reward_function.path and reward.functions:
        errors.append(
            "'reward.custom_reward_function.path' and 'reward.functions' are both given; put the one into the list of "
            "the other: reward.functions=[{path: ..., name: ..., weight: 1.0}, ...]"
        )
    for i, function in enumerate(reward.functions):
        if not function.path:
            errors.append(f"'reward.functions[{i}].path' is required: file, pkg.module or module:function")
    for i, part in enumerate(config.data.mixture):
        if not part.files or part.weight <= 0:
            errors.append(
                f"'data.mixture[{i}]' needs files and a weight above 0; it has {part.files} and {part.weight}"
            )
    if reward.reward_model.enable and not reward.reward_model.model_path:
        errors.append("'reward.reward_model.enable' is True; it needs 'reward.reward_model.model_path'")
    if reward.judge.base_url and not reward.judge.model:
        errors.append(
            "'reward.judge.base_url' is set; it needs 'reward.judge.model', a name the endpoint knows"
        )
    if reward.overlong_buffer.enable and reward.overlong_buffer.len > longest:
        errors.append(
            f"'reward.overlong_buffer.len' is {reward.overlong_buffer.len}, wider than "
            f"data.max_response_length={longest}; set it to at most {longest}"
        )
    return errors


def _kl_control(config: PPOConfig) -> list[str]:
    """The adaptive weight is multiplied by as little as 1 - 0.2 * sequences / horizon, which must stay above 0."""
    control = config.algorithm.kl_ctrl
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if not config.algorithm.use_kl_in_reward or control.type != "adaptive" or sequences < 5 * control.horizon:
        return []
    return [
        f"'algorithm.kl_ctrl.horizon' is {control.horizon}, too short for the {sequences} sequences of a step: the "
        f"weight of the KL would turn negative and reward it; set it to more than {sequences // 5}, e.g. {sequences}"
    ]


def _correction(config: PPOConfig) -> list[str]:
    section = "algorithm.rollout_correction"
    correction, errors = config.algorithm.rollout_correction, []
    wanted = [name for name in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(correction, name)]
    if wanted and not config.actor_rollout_ref.rollout.calculate_log_probs:
        errors.append(
            f"'{section}.{wanted[0]}' needs the rollout engine's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if not _is_bound(correction.rollout_is_threshold):
        errors.append(_bad_bound(f"{section}.rollout_is_threshold", correction.rollout_is_threshold))
    rules = [rule.strip() for rule in (correction.rollout_rs or "").split(",") if rule.strip()]
    for rule in rules:
        if rule not in ROLLOUT_RS:
            errors.append(
                f"'{section}.rollout_rs' names '{rule}'. Allowed, comma separated: {', '.join(ROLLOUT_RS)}"
            )
    if not rules:
        return errors
    if correction.rollout_rs_threshold is None:
        return [*errors, f"'{section}.rollout_rs' needs '{section}.rollout_rs_threshold', e.g. 0.5_2.0"]
    bounds = str(correction.rollout_rs_threshold).split(",")
    errors += [
        _bad_bound(f"{section}.rollout_rs_threshold", bound) for bound in bounds if not _is_bound(bound)
    ]
    if len(bounds) not in (1, len(rules)):
        errors.append(
            f"'{section}.rollout_rs_threshold' has {len(bounds)} bounds for the {len(rules)} rules of rollout_rs; give "
            "one, or one each, comma separated"
        )
    return errors


def _is_bound(value: float | str) -> bool:
    """A number above 0, or two as lo_hi."""
    try:
        parts = [float(part) for part in str(value).strip().split("_")]
    except ValueError:
        return False
    return (len(parts) == 1 and parts[0] > 0) or (len(parts) == 2 and 0 <= parts[0] < parts[1])


def _bad_bound(name: str, value: float | str) -> str:
    return f"'{name}' is '{value}'; it must be a number above 0, or two as lo_hi with 0 <= lo < hi, e.g. 2.0 or 0.5_2.0"
