"""Validation before anything is loaded: errors of single values, sections (their `errors`) and combinations.

All errors are reported at once; each names the value seen, what is allowed or would work, and the key to change.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.config.capabilities import strategy_spec
from verl.config.keys import Key, get, schema_keys, sections
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    find_method,
    methods,
    methods_of,
    zero_advantage_counts,
)
from verl.config.parallelism import ROLLOUT, closest, divisors, sharing_errors
from verl.config.plan import RunPlan
from verl.config.recipes import recipe_names
from verl.config.run_checks import (
    async_errors,
    correction_errors,
    exact_errors,
    layout_errors,
    over_sampling_errors,
    reference_errors,
    teacher_errors,
)
from verl.config.schema import (
    AnyConfig,
    DataConfig,
    DPOConfig,
    GenerationConfig,
    OfflineConfig,
    PPOConfig,
    RewardTrainingConfig,
)
from verl.config.sections.rollout import engine_errors
from verl.config.unused_keys import unused_keys
from verl.errors import ConfigError

# Where user-registered names are found. A plug-in has imported its registry; one not imported holds nothing.
_REGISTRIES = {
    "adv_est": ("verl.config.methods", "adv_estimator_names"),
    "policy_loss": ("verl.config.methods", "policy_loss_names"),
    "rollout": ("verl.rollout", "known_rollouts"),
    "strategy": ("verl.engines", "known_strategies"),
    "reward_manager": ("verl.reward.managers", "known_reward_managers"),
    "tool_format": ("verl.agents.formats", "known_formats"),
    "tracker": ("verl.observe.trackers", "registered_trackers"),
}

_MANAGER_SOURCE = "reward.reward_manager.source"
_OTHER_VALUES = {
    "ppo": "gae",
    "reinforce": "reinforce_plus_plus",
    "gpu": "cuda",
    "transformers": "hf",
    "sync": "inprocess",
    "async": "server",
}


def check(config: AnyConfig, plan: RunPlan | None = None) -> list[str]:
    """Warnings about a config that can run; ConfigError, with every reason, for one that cannot. `plan`: of a config
    that trains."""
    errors = [*_value_errors(config)] or [*_section_errors(config), *_combination_errors(config, plan)]
    if errors:
        raise ConfigError("\n".join([*unavailable(config), *errors]))
    return unused_keys(config)


def errors_alone(config: AnyConfig) -> list[str]:
    """What is wrong with single values, or else within single sections."""
    return [*_value_errors(config)] or [*_section_errors(config)]


def rank_errors(config: PPOConfig | OfflineConfig) -> list[str]:
    """What does not fit the number of ranks: sizes that do not divide it."""
    plan = RunPlan(config)
    sharing = sharing_errors(config) if isinstance(config, PPOConfig) else []
    return [*layout_errors(plan), *_shard_errors(plan), *sharing]


def unavailable(config: AnyConfig) -> list[str]:
    """Settings that are known but that this version cannot run: a run refuses them before it starts."""
    if not isinstance(config, PPOConfig):
        return []
    rollout = config.actor_rollout_ref.rollout
    return [*engine_errors(ROLLOUT, rollout.name, rollout.mode, rollout.kv_cache_dtype)]


def _section_errors(config: AnyConfig) -> Iterator[str]:
    for name in sections(type(config)):
        section = get(config, name)
        if hasattr(section, "errors"):
            yield from section.errors(name)


def _combination_errors(config: AnyConfig, plan: RunPlan | None) -> Iterator[str]:
    if isinstance(config, GenerationConfig):
        yield from _length_errors(config, "rollout")
        yield from sharing_errors(config)
    elif isinstance(config, PPOConfig):
        yield from _ppo_errors(config, plan or RunPlan(config))
    elif isinstance(config, OfflineConfig):
        yield from _offline_errors(config, plan or RunPlan(config))


def _value_errors(config: AnyConfig) -> Iterator[str]:
    # Other settings make the training files unnecessary.
    no_files = isinstance(config, PPOConfig) and (
        config.own_loop or config.data.mixture or config.trainer.val_only
    )
    for key in schema_keys(type(config)).values():
        value = get(config, key.name)
        if key.required and not value and not (no_files and key.name == "data.train_files"):
            yield f"'{key.name}' is required: {key.doc}. Give it as {key.name}=..."
        if key.name == "reward.reward_manager.name" and get(config, _MANAGER_SOURCE) == "importlib":
            continue  # the name of a class
        for each in value if isinstance(value, list) else [value]:
            yield from _name_errors(key, each)
            yield from _bound_errors(key, each)


def known_names(key: Key) -> list[str]:
    """Our own names of what a key chooses, and those that are registered by now."""
    module, function = _REGISTRIES.get(key.metadata["plugin"], ("", ""))
    registered = getattr(sys.modules[module], function)() if module in sys.modules else []
    return list(dict.fromkeys([*key.metadata["known"], *registered]))


def _name_errors(key: Key, value: Any) -> Iterator[str]:
    allowed, plugin = key.metadata["known"], key.metadata["plugin"]
    if allowed is None or value is None or value in allowed:
        return
    names = known_names(key)
    if value not in names:
        hint = _meant(key, str(value).lower().replace("-", "_"), names)
        own = " Your own are registered in a module named in trainer.plugins" if plugin else ""
        yield f"'{key.name}' is '{value}', which is not known. Allowed: {', '.join(names)}.{hint}{own}"


def _meant(key: Key, value: str, names: list[str]) -> str:
    """What a wrong value was probably meant to be."""
    if key.last == "adv_estimator" and find_method(POLICY_LOSS, value):
        return f" {value} is a policy loss: set {POLICY_LOSS}={value}"
    if key.last == "loss_mode" and find_method(ADV_ESTIMATOR, value):
        return f" {value} is an advantage estimator: set {ADV_ESTIMATOR}={value}"
    if key.last in ("adv_estimator", "loss_mode") and value in recipe_names():
        return f" {value} is a recipe: give recipe={value} instead"
    if key.last in ("adv_estimator", "loss_mode") and find_method(PREFERENCE_LOSS, value):
        online = " With a reward instead of pairs: recipe=online_dpo" if value == "dpo" else ""
        return f" {value} learns from judged answers: `verl dpo algorithm.loss={value}`.{online}"
    close = difflib.get_close_matches(value, names, 1)
    other = _OTHER_VALUES.get(value, close[0] if close else "")
    return f" Did you mean {other}?" if other.partition(" ")[0] in names else ""


def _bound_errors(key: Key, value: Any) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    ge, gt, le, lt = (key.metadata[name] for name in ("ge", "gt", "le", "lt"))
    above = (ge is None or value >= ge) and (gt is None or value > gt)
    if not above or (le is not None and value > le) or (lt is not None and value >= lt):
        bounds = {"at least": ge, "above": gt, "at most": le, "below": lt}
        allowed = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
        yield f"'{key.name}' is {value}; it must be {allowed} ({key.doc})"


def _offline_errors(config: OfflineConfig, plan: RunPlan) -> Iterator[str]:
    yield from _shard_errors(plan)
    yield from layout_errors(plan)
    layout, rows, trainer = plan.roles[0].layout, config.data.train_batch_size, config.trainer
    if isinstance(config, DPOConfig):
        loss = find_method(PREFERENCE_LOSS, config.algorithm.loss)
        if loss and loss.needs and not config.algorithm.cache_reference and not config.model.lora_rank:
            free = " or ".join(method.name for method in methods(PREFERENCE_LOSS) if not method.needs)
            yield (
                f"'algorithm.cache_reference' is False, but there is no reference for {loss.setting}: without LoRA "
                "(model.lora_rank) the model cannot be its own reference while it trains; leave the key out, or use "
                f"{free}, which need none"
            )
    micro, shards, who = config.data.micro_batch_size_per_gpu, layout.dp, layout.shards
    strategy = config.model.strategy
    if isinstance(config, RewardTrainingConfig) and not strategy_spec(strategy).full_shards:
        yield f"'model.strategy' is {strategy}, which has no reward models; set it to fsdp2"
    if rows < shards:
        yield f"'data.train_batch_size' is {rows}, fewer rows than the {who}; set it to at least {shards}"
    if "data.micro_batch_size_per_gpu" in config.user_set and micro and micro * shards > rows:
        yield (
            f"'data.micro_batch_size_per_gpu' is {micro}, but each of the {who} has {rows // shards} of the "
            f"{rows} rows of data.train_batch_size; set it to at most {max(rows // shards, 1)}"
        )
    needed = {
        "data.val_files, rows to validate on": config.data.val_files,
        "trainer.test_freq, the steps between validations": trainer.test_freq >= 0,
        "trainer.keep_best, a metric of validation such as val/loss": trainer.keep_best,
    }
    missing = [name for name, given in needed.items() if not given]
    if trainer.early_stop_patience and missing:
        yield (
            f"'trainer.early_stop_patience' is {trainer.early_stop_patience}; it needs {' and '.join(missing)}"
        )


def _ppo_errors(config: PPOConfig, plan: RunPlan) -> Iterator[str]:
    trainer = config.trainer
    yield from _length_errors(config, ROLLOUT)
    yield from sharing_errors(config)
    correction = config.algorithm.rollout_correction
    wanted = [name for name in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(correction, name)]
    if wanted and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield f"'algorithm.rollout_correction.{wanted[0]}' needs {ROLLOUT}.calculate_log_probs=True"
    yield from [*teacher_errors(config)] or layout_errors(plan)
    yield from _shard_errors(plan)
    of_values = [method for method in methods_of(config) if "values" in method.needs]
    if not config.critic.enable and of_values:
        yield (
            f"'critic.enable' is False, but {of_values[0].setting} needs a critic; leave it out, or use an estimator "
            f"without one, e.g. grpo with {ROLLOUT}.n=8"
        )
    elif not config.critic.enable and trainer.critic_warmup > 0:
        yield f"'trainer.critic_warmup' is {trainer.critic_warmup}, but there is no critic; set it to 0"
    if trainer.val_only and not config.data.val_files:
        yield "'trainer.val_only' is True; it needs data.val_files"
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        yield (
            f"'reward.overlong_buffer.len' is {buffer.len}; it must be at most data.max_response_length={longest}"
        )
    if not trainer.val_only:
        yield from _training_errors(config, plan)


def _training_errors(config: PPOConfig, plan: RunPlan) -> Iterator[str]:
    """What only a run that trains needs."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    multi_turn, filtering = rollout.multi_turn, algorithm.filter_groups
    yield from exact_errors(config)
    if not config.own_loop:
        yield from _batch_errors(config, plan)
    comparing = [method for method in methods_of(config) if method.compares_responses]
    if any(not method.reads_advantages for method in methods_of(config)):
        comparing = [method for method in comparing if method.key != ADV_ESTIMATOR]
    for method in comparing if rollout.n == 1 else ():
        other = ", or use gae or reinforce_plus_plus" if method.key == ADV_ESTIMATOR else ""
        yield (
            f"'{ROLLOUT}.n' is 1, but {method.setting} compares the responses to one prompt; set {ROLLOUT}.n to 2 or "
            f"more (8 is common){other}"
        )
    if rollout.n == 1 and filtering.enable and not comparing:
        yield (
            f"'algorithm.filter_groups.enable' would drop every prompt with {ROLLOUT}.n=1; set {ROLLOUT}.n to 2 or more"
        )
    if rollout.temperature == 0:
        yield (
            f"'{ROLLOUT}.temperature' is 0: greedy responses are all equal and teach nothing; set it to 1.0"
        )
    if multi_turn.splits and filtering.enable and filtering.metric == "seq_final_reward":
        yield (
            f"'algorithm.filter_groups.metric' is seq_final_reward, but {ROLLOUT}.multi_turn.{multi_turn.splits} makes "
            "several rows of a response before the KL is known; set it to seq_reward"
        )
    yield from over_sampling_errors(config)
    yield from correction_errors(config)
    if config.trainer.async_training.mode != "off":
        yield from async_errors(config)
    for method in methods_of(config):
        yield from method.check(config) if method.check else ()
    counts = zero_advantage_counts(config)
    if config.actor_rollout_ref.actor.skip_zero_advantage and counts:
        yield f"'actor_rollout_ref.actor.skip_zero_advantage' is True, but {counts}; leave it out"
    yield from reference_errors(config, plan)
    # The adaptive weight is multiplied by as little as 1 - 0.2 * sequences / horizon, which must stay above 0.
    control, sequences = algorithm.kl_ctrl, config.data.train_batch_size * rollout.n
    if algorithm.use_kl_in_reward and control.type == "adaptive" and sequences >= 5 * control.horizon:
        yield (
            f"'algorithm.kl_ctrl.horizon' is {control.horizon}, too short for {sequences} sequences per step (the KL "
            f"weight would turn negative); set it to more than {sequences // 5}"
        )


def _batch_errors(config: PPOConfig, plan: RunPlan) -> Iterator[str]:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    for role in plan.roles:
        name, mini = f"{role.key}.ppo_mini_batch_size", getattr(role.section, "ppo_mini_batch_size", prompts)
        if prompts % mini == 0 or (role is not plan.roles[0] and name not in config.user_set):
            continue
        rows = _training_rows(config.data)
        if prompts > rows:
            advice = f"at most {rows}, and {name}={mini} to a divisor of it"
            if mini <= rows:
                advice = f"{rows // mini * mini}, a multiple of {name}={mini}"
            yield f"'data.train_batch_size' is {prompts}, but data.train_files have {rows} rows; set it to {advice}"
            continue
        # A larger batch may be more than the data has, unless it is the user's own number.
        why, batch = ("more than", mini) if mini > prompts else ("not a divisor of", prompts // mini * mini)
        yield (
            f"'{name}' is {mini}, {why} data.train_batch_size={prompts}. Values that work: "
            f"{closest(divisors(prompts), mini)}"
            + (f"; or data.train_batch_size={batch}" if batch <= rows else "")
        )
    layout = max((role.layout for role in plan.roles), key=lambda layout: layout.dp)
    if prompts * n < layout.dp:
        yield (
            f"'data.train_batch_size' is {prompts} with {ROLLOUT}.n={n}: {prompts * n} sequences for {layout.shards}; "
            f"set it to at least {-(-layout.dp // n)}"
        )


def _training_rows(data: DataConfig) -> int:
    """As many rows as training can have: by the footers of parquet files and the lines of jsonl files. A very large
    number where that is not known yet, or cannot be read."""
    most = data.train_max_samples if data.train_max_samples > 0 else sys.maxsize
    total = 0
    for path in (Path(name).expanduser() for name in data.train_files):
        try:
            if path.suffix == ".parquet":
                from pyarrow.parquet import read_metadata

                total += read_metadata(path).num_rows
            elif path.suffix == ".jsonl":
                with path.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip())
            else:
                return most
        except (OSError, ValueError, ImportError):  # pyarrow's errors are ValueErrors
            return most
    return most if data.mixture else min(total, most)


def _length_errors(config: PPOConfig | GenerationConfig, name: str) -> Iterator[str]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = get(config, f"{name}.max_model_len")
    if limit is not None and limit < longest:
        yield (
            f"'{name}.max_model_len' is {limit}, less than data.max_prompt_length + data.max_response_length = "
            f"{longest}; leave it out, or set it to at least {longest}"
        )


def _shard_errors(plan: RunPlan) -> Iterator[str]:
    world = plan.world_size
    for role in plan.roles:
        shards = role.section.fsdp_config.fsdp_size
        sharded = strategy_spec(role.section.strategy).section == "fsdp_config"
        section, name = (
            (plan.config, "optim")
            if isinstance(plan.config, OfflineConfig)
            else (role.section, f"{role.key}.optim")
        )
        offloaded = sharded and role.section.fsdp_config.offload_policy
        if offloaded and hasattr(section, "optim") and section.optim.name == "muon":
            yield (
                f"'{name}.name' is muon, which computes with whole matrices on the GPU, but "
                f"'{role.key}.fsdp_config.offload_policy' keeps them in host memory; set one of them to its default"
            )
        if sharded and shards != -1 and (not shards or world % shards):
            yield (
                f"'{role.key}.fsdp_config.fsdp_size' is {shards}, which does not divide the {world} ranks. Values that "
                f"work: -1 (all), {closest(divisors(world), shards)}"
            )
