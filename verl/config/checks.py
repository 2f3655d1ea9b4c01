"""Validation before anything is loaded: errors of single values, sections (their `errors`) and combinations.

All errors are reported at once; each names the value seen, what is allowed or would work, and the key to change.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config import known
from verl.config.async_checks import async_errors
from verl.config.capabilities import strategy_spec
from verl.config.keys import Key, get, schema_keys, sections
from verl.config.layout_checks import layout_errors, reference_errors
from verl.config.methods import (
    ADV_ESTIMATOR,
    POLICY_LOSS,
    PREFERENCE_LOSS,
    find_method,
    methods,
    methods_of,
)
from verl.config.parallelism import ROLLOUT, closest, divisors, sharing_errors
from verl.config.plan import RunPlan
from verl.config.recipes import recipe_names
from verl.config.schema import (
    AnyConfig,
    DPOConfig,
    EvaluationConfig,
    GenerationConfig,
    OfflineConfig,
    PPOConfig,
    RewardTrainingConfig,
)
from verl.config.sections.rollout import engine_errors
from verl.config.teacher_checks import teacher_errors
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


def check(config: AnyConfig, plan: RunPlan | None = None) -> list[str]:
    """Warnings about a config that can run; ConfigError, with every reason, for one that cannot. `plan`: of a config
    that trains."""
    errors = _value_errors(config) or _section_errors(config) + _combination_errors(config, plan)
    if errors:
        raise ConfigError("\n".join([*unavailable(config), *errors]))
    return unused_keys(config)


def rank_errors(config: PPOConfig | OfflineConfig) -> list[str]:
    """What does not fit the number of ranks: sizes that do not divide it."""
    plan = RunPlan(config)
    sharing = sharing_errors(config) if isinstance(config, PPOConfig) else []
    return layout_errors(plan) + _shard_errors(plan) + sharing


def unavailable(config: AnyConfig) -> list[str]:
    """Settings that are known but that this version cannot run: a run refuses them before it starts."""
    if not isinstance(config, PPOConfig):
        return []
    rollout = config.actor_rollout_ref.rollout
    return engine_errors(ROLLOUT, rollout.name, rollout.mode)


def _section_errors(config: AnyConfig) -> list[str]:
    found = [(name, get(config, name)) for name in sections(type(config))]
    return [line for name, each in found if hasattr(each, "errors") for line in each.errors(name)]


def _combination_errors(config: AnyConfig, plan: RunPlan | None) -> list[str]:
    if isinstance(config, EvaluationConfig):
        return []
    if isinstance(config, GenerationConfig):
        return _length_errors(config, "rollout") + sharing_errors(config)
    plan = plan or RunPlan(config)
    return _ppo_errors(config, plan) if isinstance(config, PPOConfig) else _offline_errors(config, plan)


def _value_errors(config: AnyConfig) -> list[str]:
    errors: list[str] = []
    for key in schema_keys(type(config)).values():
        value = get(config, key.name)
        if key.required and not value and not _replaced(config, key.name):
            errors.append(f"'{key.name}' is required: {key.doc}. Give it as {key.name}=...")
        for each in value if isinstance(value, list) else [value]:
            errors += _name_errors(key, each) + _bound_errors(key, each)
    return errors


def _replaced(config: AnyConfig, name: str) -> bool:
    """Required keys that another setting makes unnecessary."""
    if not isinstance(config, PPOConfig) or name != "data.train_files":
        return False
    return bool(config.own_loop or config.data.mixture or config.trainer.val_only)


def _name_errors(key: Key, value: Any) -> list[str]:
    allowed = key.metadata["known"]
    if allowed is None or value is None or value in allowed:
        return []
    names = list(dict.fromkeys([*allowed, *_registered(key)]))
    if value in names:
        return []
    hint = _meant(key, str(value).lower().replace("-", "_"), names)
    own = " Your own are registered in a module named in trainer.plugins" if key.metadata["plugin"] else ""
    return [f"'{key.name}' is '{value}', which is not known. Allowed: {', '.join(names)}.{hint}{own}"]


def _registered(key: Key) -> list[str]:
    """Names in the registry of this key: the built-in ones and the user's."""
    module, function = _REGISTRIES.get(key.metadata["plugin"], ("", ""))
    return getattr(sys.modules[module], function)() if module in sys.modules else []


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
        return f" {value} learns from preference pairs: `verl dpo algorithm.loss={value}`.{online}"
    close = difflib.get_close_matches(value, names, 1)
    other = known.OTHER_VALUES.get(value, close[0] if close else "")
    return f" Did you mean {other}?" if other.partition(" ")[0] in names else ""


def _bound_errors(key: Key, value: Any) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    ge, gt, le, lt = (key.metadata[name] for name in ("ge", "gt", "le", "lt"))
    above = (ge is None or value >= ge) and (gt is None or value > gt)
    if above and (le is None or value <= le) and (lt is None or value < lt):
        return []
    bounds = {"at least": ge, "above": gt, "at most": le, "below": lt}
    allowed = " and ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)
    return [f"'{key.name}' is {value}; it must be {allowed} ({key.doc})"]


def _offline_errors(config: OfflineConfig, plan: RunPlan) -> list[str]:
    errors = _shard_errors(plan) + layout_errors(plan)
    layout, rows = plan.roles[0].layout, config.data.train_batch_size
    if isinstance(config, DPOConfig):
        errors += _reference_errors(config)
    micro, shards, who = config.data.micro_batch_size_per_gpu, layout.dp, layout.shards
    strategy = config.model.strategy
    if isinstance(config, RewardTrainingConfig) and not strategy_spec(strategy).full_shards:
        errors.append(f"'model.strategy' is {strategy}, which has no reward models; set it to fsdp2")
    if rows < shards:
        errors.append(
            f"'data.train_batch_size' is {rows}, fewer rows than the {who}; set it to at least {shards}"
        )
    if "data.micro_batch_size_per_gpu" in config.user_set and micro and micro * shards > rows:
        errors.append(
            f"'data.micro_batch_size_per_gpu' is {micro}, but each of the {who} has {rows // shards} of the "
            f"{rows} rows of data.train_batch_size; set it to at most {max(rows // shards, 1)}"
        )
    trainer = config.trainer
    needed = {
        "data.val_files, rows to validate on": config.data.val_files,
        "trainer.test_freq, the steps between validations": trainer.test_freq > 0,
        "trainer.keep_best, a metric of validation such as val/loss": trainer.keep_best,
    }
    missing = [name for name, given in needed.items() if not given]
    if trainer.early_stop_patience and missing:
        errors.append(
            f"'trainer.early_stop_patience' is {trainer.early_stop_patience}; it needs {' and '.join(missing)}"
        )
    return errors


def _reference_errors(config: DPOConfig) -> list[str]:
    loss = config.algorithm.loss
    method = find_method(PREFERENCE_LOSS, loss)
    if method is None or not method.needs or config.algorithm.cache_reference or config.model.lora_rank:
        return []
    free = " or ".join(method.name for method in methods(PREFERENCE_LOSS) if not method.needs)
    return [
        f"'algorithm.cache_reference' is False, but there is no reference for algorithm.loss={loss}: without LoRA "
        f"(model.lora_rank) the model cannot be its own reference while it trains; leave the key out, or use {free}, "
        "which need none"
    ]


def _ppo_errors(config: PPOConfig, plan: RunPlan) -> list[str]:
    trainer = config.trainer
    errors = _length_errors(config, ROLLOUT) + sharing_errors(config) + _correction_errors(config)
    of_values = [method for method in methods_of(config) if "values" in method.needs]
    errors += teacher_errors(config) or layout_errors(plan)
    errors += _shard_errors(plan)
    if not config.critic.enable and of_values:
        errors.append(
            f"'critic.enable' is False, but {of_values[0].setting} needs a critic; leave it out, or use an estimator "
            f"without one, e.g. grpo with {ROLLOUT}.n=8"
        )
    elif not config.critic.enable and trainer.critic_warmup > 0:
        errors.append(
            f"'trainer.critic_warmup' is {trainer.critic_warmup}, but there is no critic; set it to 0"
        )
    if trainer.val_only and not config.data.val_files:
        errors.append("'trainer.val_only' is True; it needs data.val_files")
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        errors.append(
            f"'reward.overlong_buffer.len' is {buffer.len}; it must be at most data.max_response_length={longest}"
        )
    return errors if trainer.val_only else errors + _training_errors(config, plan)


def _training_errors(config: PPOConfig, plan: RunPlan) -> list[str]:
    """What only a run that trains needs."""
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    errors = [] if config.own_loop else _batch_errors(config, plan)
    comparing = [method for method in methods_of(config) if method.compares_responses]
    if any(not method.reads_advantages for method in methods_of(config)):
        comparing = [method for method in comparing if method.key != ADV_ESTIMATOR]
    for method in comparing if rollout.n == 1 else ():
        other = ", or use gae or reinforce_plus_plus" if method.key == ADV_ESTIMATOR else ""
        errors.append(
            f"'{ROLLOUT}.n' is 1, but {method.setting} compares the responses to one prompt; set {ROLLOUT}.n to 2 or "
            f"more (8 is common){other}"
        )
    if rollout.n == 1 and algorithm.filter_groups.enable and not comparing:
        errors.append(
            f"'algorithm.filter_groups.enable' would drop every prompt with {ROLLOUT}.n=1; set {ROLLOUT}.n to 2 or more"
        )
    if rollout.temperature == 0:
        errors.append(
            f"'{ROLLOUT}.temperature' is 0: greedy responses are all equal and teach nothing; set it to 1.0"
        )
    if rollout.multi_turn.enable and rollout.ignore_eos:
        errors.append(
            f"'{ROLLOUT}.ignore_eos' is True, but turns must end ({ROLLOUT}.multi_turn); set it to False"
        )
    errors += _split_errors(config) + async_errors(config)
    errors += [line for method in methods_of(config) if method.check for line in method.check(config)]
    errors += reference_errors(plan)
    # The adaptive weight is multiplied by as little as 1 - 0.2 * sequences / horizon, which must stay above 0.
    control, sequences = algorithm.kl_ctrl, config.data.train_batch_size * rollout.n
    if algorithm.use_kl_in_reward and control.type == "adaptive" and sequences >= 5 * control.horizon:
        errors.append(
            f"'algorithm.kl_ctrl.horizon' is {control.horizon}, too short for {sequences} sequences per step (the KL "
            f"weight would turn negative); set it to more than {sequences // 5}"
        )
    return errors


def _split_errors(config: PPOConfig) -> list[str]:
    """What takes a batch row by row, before joining the turns of a conversation."""
    multi_turn, filtering = config.actor_rollout_ref.rollout.multi_turn, config.algorithm.filter_groups
    split = multi_turn.enable and multi_turn.history == "split"
    if not split or not filtering.enable or filtering.metric != "seq_final_reward":
        return []
    return [
        f"'algorithm.filter_groups.metric' is seq_final_reward, but {ROLLOUT}.multi_turn.history=split makes several "
        "rows of a response before the KL is known; set it to seq_reward"
    ]


def _batch_errors(config: PPOConfig, plan: RunPlan) -> list[str]:
    errors: list[str] = []
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    for role in plan.roles:
        name, mini = f"{role.key}.ppo_mini_batch_size", getattr(role.section, "ppo_mini_batch_size", prompts)
        if prompts % mini == 0 or (role is not plan.roles[0] and name not in config.user_set):
            continue
        # A larger batch may be more than the data has, unless it is the user's own number.
        why, batch = ("more than", mini) if mini > prompts else ("not a divisor of", prompts // mini * mini)
        rows = _training_rows(config)
        if prompts > rows:
            advice = (
                f"{rows // mini * mini}, a multiple of {name}={mini}"
                if mini <= rows
                else f"at most {rows}, and {name}={mini} to a divisor of it"
            )
            errors.append(
                f"'data.train_batch_size' is {prompts}, but data.train_files have {rows} rows; set it to {advice}"
            )
            continue
        errors.append(
            f"'{name}' is {mini}, {why} data.train_batch_size={prompts}. Values that work: "
            f"{closest(divisors(prompts), mini)}"
            + (f"; or data.train_batch_size={batch}" if batch <= rows else "")
        )
    layout = max((role.layout for role in plan.roles), key=lambda layout: layout.dp)
    if prompts * n < layout.dp:
        errors.append(
            f"'data.train_batch_size' is {prompts} with {ROLLOUT}.n={n}: {prompts * n} sequences for {layout.shards}; "
            f"set it to at least {-(-layout.dp // n)}"
        )
    return errors


def _training_rows(config: PPOConfig) -> int:
    """As many rows as training can have; a very large number where that is not known yet."""
    data = config.data
    rows = None if data.mixture else _rows_in(data.train_files)
    limits = [
        rows if rows is not None else sys.maxsize,
        *([data.train_max_samples] if data.train_max_samples > 0 else []),
    ]
    return min(limits)


def _rows_in(files: Sequence[str]) -> int | None:
    """Rows of parquet files (from their footers) and of jsonl files; None for anything else, or what cannot be read."""
    total = 0
    for name in files:
        path = Path(name).expanduser()
        try:
            if path.suffix == ".parquet":
                from pyarrow.parquet import read_metadata

                total += read_metadata(path).num_rows
            elif path.suffix == ".jsonl":
                with path.open("rb") as lines:
                    total += sum(1 for line in lines if line.strip())
            else:
                return None
        except (OSError, ValueError, ImportError):  # pyarrow's errors are ValueErrors
            return None
    return total


def _length_errors(config: PPOConfig | GenerationConfig, name: str) -> list[str]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    limit = get(config, f"{name}.max_model_len")
    if limit is None or limit >= longest:
        return []
    return [
        f"'{name}.max_model_len' is {limit}, less than data.max_prompt_length + data.max_response_length = {longest}; "
        f"leave it out, or set it to at least {longest}"
    ]


def _shard_errors(plan: RunPlan) -> list[str]:
    lines, world = [], plan.world_size
    for role in plan.roles:
        shards = role.section.fsdp_config.fsdp_size
        sharded = strategy_spec(role.section.strategy).section == "fsdp_config"
        if sharded and shards != -1 and (not shards or world % shards):
            lines.append(
                f"'{role.key}.fsdp_config.fsdp_size' is {shards}, which does not divide the {world} ranks. Values that "
                f"work: -1 (all), {closest(divisors(world), shards)}"
            )
    return lines


def _correction_errors(config: PPOConfig) -> list[str]:
    correction = config.algorithm.rollout_correction
    wanted = [name for name in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(correction, name)]
    if not wanted or config.actor_rollout_ref.rollout.calculate_log_probs:
        return []
    return [f"'algorithm.rollout_correction.{wanted[0]}' needs {ROLLOUT}.calculate_log_probs=True"]
