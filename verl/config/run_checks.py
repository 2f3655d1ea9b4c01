"""What the models and processes of a run need of each other: models split over ranks, a teacher and its student,
generating ahead of training. Every refusal names the values that work. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.config.capabilities import engine_spec, strategy_spec
from verl.config.keys import get
from verl.config.methods import POLICY_LOSS, builtin_names, find_method, methods_of, needed_columns
from verl.config.model_path import cached_config, text_config
from verl.config.parallelism import (
    ROLLOUT,
    TEACHER,
    closest,
    counted,
    divisors,
    layout_of,
    needs_teacher,
    rollout_pool,
)
from verl.config.plan import RunPlan
from verl.config.roles import ModelRole
from verl.config.schema import PPOConfig
from verl.config.sections.algorithm import REINFORCE_LOSS
from verl.config.sections.trainer import POOL_ASYNC_MODES
from verl.json_input import read_json

_ULYSSES = "ulysses_sequence_parallel_size"


def layout_errors(plan: RunPlan) -> list[str]:
    """What is wrong whatever the model is."""
    lines: list[str] = []
    for role in plan.roles:
        spec = strategy_spec(role.section.strategy)
        if role in _split_apart(plan):
            lines += _world_errors(role, plan)
        if (role.layout.cp > 1 or not spec.full_shards) and not role.model.use_remove_padding:
            why = _ULYSSES if spec.full_shards else f"strategy={role.section.strategy}"
            lines.append(
                f"'{role.model_key}.use_remove_padding' is False, but {why} works on packed sequences; leave it out"
            )
        lines += spec.checks(plan.config, role)
    return list(dict.fromkeys(lines))  # the roles of one model would repeat what is said of it


def _split_apart(plan: RunPlan) -> list[ModelRole]:
    """The first role, and the others that do not split the same model in the same way: for those that do, the errors
    would be the same with other keys."""

    def split(role: ModelRole) -> tuple[Any, ...]:
        section, model = role.section, role.model
        return section.strategy, layout_of(section, 1), model.path, model.override_config

    first, *others = plan.roles
    return [first, *(role for role in others if split(role) != split(first))]


def size_keys(role: ModelRole, *degrees: str) -> list[str]:
    """The keys of a role's degrees of parallelism, below its section."""
    sizes = strategy_spec(role.section.strategy).sizes
    return [key for degree in degrees for key in sizes.get(degree, ())]


def _world_errors(role: ModelRole, plan: RunPlan) -> Iterator[str]:
    layout, world, trainer = role.layout, plan.world_size, plan.config.trainer
    if world % layout.model_ranks:
        given = [(key, get(role.section, key)) for key in size_keys(role, "tp", "pp", "cp")]
        product = " x ".join(f"{key} {size}" for key, size in given if size > 1)
        yield (
            f"'{role.key}': {product} = {layout.model_ranks} ranks for one copy of the model, which does not divide "
            f"the {world} of trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}. "
            f"Products that work: {closest(divisors(world), layout.model_ranks)}; or {layout.model_ranks} ranks, or a "
            "multiple of that"
        )
    elif layout.stage_ranks % layout.ep:
        yield (
            f"'{role.key}.{size_keys(role, 'ep')[0]}' is {layout.ep}, which does not divide the {layout.stage_ranks} "
            f"ranks of a pipeline stage ({world} ranks / PP {layout.pp}). Values that work: "
            f"{closest(divisors(layout.stage_ranks), layout.ep)}"
        )


def model_layout_errors(plan: RunPlan) -> list[str]:
    """What does not fit the models of the config, as far as their config.json is here."""
    lines: list[str] = []
    for role in _split_apart(plan):
        model = text_config(role.model.path, role.model.override_config)
        if model and plan.world_size % role.layout.model_ranks == 0:
            fits = strategy_spec(role.section.strategy).fits or _ulysses_errors
            lines += fits(role, model)
    return list(dict.fromkeys(lines))


def _ulysses_errors(role: ModelRole, model: Mapping[str, Any]) -> Iterator[str]:
    heads, cp = model.get("num_attention_heads"), role.layout.cp
    if isinstance(heads, int) and heads % cp:
        yield indivisible(f"{role.key}.{_ULYSSES}", cp, heads, "attention heads")


def indivisible(key: str, size: int, count: int, what: str, work: list[int] | None = None) -> str:
    return (
        f"'{key}' is {size}, which does not divide the model's {count} {what}. Values that work: "
        f"{closest(work or divisors(count), size)}"
    )


def reference_errors(config: PPOConfig, plan: RunPlan) -> Iterator[str]:
    """Of trainer.ref_update_freq."""
    every, policy, key = config.trainer.ref_update_freq, config.actor_rollout_ref, "trainer.ref_update_freq"
    if every < 1:
        return
    if "ref_log_prob" not in needed_columns(config):
        losses = " or ".join(builtin_names(POLICY_LOSS, lambda method: "ref_log_prob" in method.needs))
        yield (
            f"'{key}' is {every}, but the run has no reference policy; set it to -1, or use one: "
            f"{POLICY_LOSS}={losses}, actor_rollout_ref.actor.use_kl_loss=True, algorithm.use_kl_in_reward=True"
        )
        return
    actor, ref = policy.actor, policy.ref
    spec = strategy_spec(actor.strategy)
    shards = ["fsdp_config.fsdp_size", "fsdp_config.offload_policy"] if spec.full_shards else []
    alike = all(get(actor, name) == get(ref, name) for name in ("strategy", *shards))
    if not spec.full_shards:
        alike = alike and layout_of(actor, plan.world_size) == layout_of(ref, plan.world_size)
    if not alike and not policy.model.lora_rank:  # adapters are copied within one engine
        keys = ", ".join(
            f"actor_rollout_ref.ref.{name}" for name in ("strategy", *(shards or [spec.section]))
        )
        yield (
            f"'{key}' is {every}: the reference takes over the policy's shards, so both must be split alike; set "
            f"{keys} to what actor_rollout_ref.actor has"
        )


def teacher_errors(config: PPOConfig) -> Iterator[str]:
    """What is wrong whatever the models are."""
    asking = [
        method for method in methods_of(config) if any(name.startswith("teacher_") for name in method.needs)
    ]
    if not asking:
        return
    policy, setting = config.actor_rollout_ref, asking[0].setting
    teacher = policy.teacher
    if teacher.source == "path" and not teacher.path:
        yield (
            f"'{TEACHER}.path' is required with {setting}; give the teacher's folder, or set {TEACHER}.source=start or "
            "current to distil the policy from itself"
        )
    if teacher.source != "path" and teacher.path:
        yield f"'{TEACHER}.path' is given, but {TEACHER}.source={teacher.source} is the policy itself; set one of them"
    if teacher.source == "current" and teacher.top_k is None:
        yield (
            f"'{TEACHER}.top_k' is not set, but the output matrix of {TEACHER}.source=current changes while the step "
            "is trained; set it to the tokens to compare, such as 64"
        )
    if teacher.source == "current" and teacher.prompt_template is None:
        yield (
            f"'{TEACHER}.prompt_template' is not set: with {TEACHER}.source=current teacher and student would be one "
            "model that reads one prompt; set it to what the teacher knows besides, such as {prompt} {ground_truth}"
        )
    loss = find_method(POLICY_LOSS, policy.actor.policy_loss.loss_mode)
    if teacher.coef and loss in asking:
        assert loss is not None
        yield (
            f"'{TEACHER}.coef' is {teacher.coef:g}, but with {loss.setting} the KL is the loss already; set it to 0, "
            "or another loss_mode"
        )
    turns = policy.rollout.multi_turn
    if teacher.prompt_template is not None and turns.splits:
        yield (
            f"'{TEACHER}.prompt_template' replaces the last message of the data's prompt, but with "
            f"{ROLLOUT}.multi_turn.{turns.splits} rows begin with what was before; use {turns.one_row} or no template"
        )
    for name, role in (("actor_rollout_ref.actor", policy.actor), (TEACHER, policy.teacher)):
        size = role.ulysses_sequence_parallel_size
        if not strategy_spec(role.strategy).full_shards:
            yield f"'{name}.strategy' is {role.strategy}, which {setting} does not have; set it to fsdp"
        if size > 1:
            yield f"'{name}.{_ULYSSES}' is {size}, but {setting} takes whole sequences; set it to 1"


def teacher_model_errors(config: PPOConfig, *, given_model: bool = False) -> list[str]:
    """What does not fit the two models, as far as their files are here. `given_model`: the student is an object, whose
    size is compared when it is built."""
    if not needs_teacher(config):
        return []
    policy = config.actor_rollout_ref
    path, model = policy.teacher.path or policy.model.path, policy.model
    theirs = text_config(path).get("vocab_size")
    top_k = policy.teacher.top_k
    if top_k and isinstance(theirs, int) and top_k > theirs:
        return [
            f"'{TEACHER}.top_k' is {top_k}, but the teacher has {theirs} tokens; set it to at most {theirs}"
        ]
    if given_model:
        return []
    own = text_config(model.path, model.override_config).get("vocab_size")
    tokens, other = _tokens(model.tokenizer_path or model.path), _tokens(path)
    known = tokens is not None and other is not None
    if known and tokens != other:
        assert tokens is not None and other is not None
        differ = sum(tokens.get(token) != number for token, number in other.items())
        detail = (
            f"{len(other)} tokens, of which {differ} are not the same tokens of the student ({len(tokens)})"
        )
    elif not known and isinstance(own, int) and isinstance(theirs, int) and own != theirs:
        detail = f"{theirs} tokens, the student {own}, and no tokenizer.json says that they are the same"
    else:
        return []
    return [
        f"'{TEACHER}.path': the model '{path}' has {detail}; distillation compares token by token: give a teacher "
        f"with the tokenizer of actor_rollout_ref.model.path={model.path}"
    ]


def _tokens(path: str) -> dict[str, int] | None:
    """Each token and its number, from tokenizer.json; None where that is not here or has another form."""
    cached = None if Path(path).expanduser().is_dir() else cached_config(path)
    folder = Path(path).expanduser() if cached is None else cached.parent
    try:
        found: Any = read_json(folder / "tokenizer.json")
        tokens = found["model"]["vocab"]
        if isinstance(tokens, list):  # of a unigram model: pairs of token and score
            tokens = {token: number for number, (token, _) in enumerate(tokens)}
        return {**tokens, **{each["content"]: each["id"] for each in found["added_tokens"]}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


SECTION = "trainer.async_training"
CORRECTION = "algorithm.rollout_correction"
POOL = f"{ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node=1"


def over_sampling_errors(config: PPOConfig) -> Iterator[str]:
    """Why a run that trains cannot leave out its last responses."""
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.async_training.mode
    rate = rollout.over_sample_rate
    name, batch = f"{ROLLOUT}.over_sample_rate", config.data.train_batch_size
    if not rate:
        return
    if mode != "off":
        yield (
            f"'{name}' is {rate:g}, but {SECTION}.mode={mode} does not wait for the last responses of a batch, and "
            f"trains them later; set {name}=0, or {SECTION}.mode=off"
        )
    if not engine_spec(rollout.name).streams:
        yield (
            f"'{name}' is {rate:g}, but {ROLLOUT}.name={rollout.name} generates one batch of requests to its end; set "
            f"{name}=0, or {ROLLOUT}.name=native"
        )
    if config.own_loop:
        yield f"'{name}' is {rate:g}, but Session.sample() waits for all responses; leave it out"
    total = batch * rollout.n
    if rate * total < 1 and not config.own_loop:
        yield (
            f"'{name}' is {rate:g}, less than one of the {total} responses of a step ({ROLLOUT}.n x "
            f"data.train_batch_size); set it to {1 / total:.3g} or more, or to 0"
        )


def correction_errors(config: PPOConfig) -> Iterator[str]:
    """Why a run that trains cannot correct for its rollout engine as configured."""
    own, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if own.reinforces and loss != REINFORCE_LOSS:
        yield (
            f"'{CORRECTION}.loss_type' is reinforce, which is {POLICY_LOSS}={REINFORCE_LOSS} with importance weights, "
            f"but {POLICY_LOSS} is {loss}; leave one of them out"
        )
    splits = rollout.multi_turn.splits
    if own.weighs_updates and own.weighs_sequences and splits:
        yield (
            f"'{CORRECTION}.bypass_mode' is True, so that sequences are weighed during the update, where the rows of "
            f"one conversation are apart ({ROLLOUT}.multi_turn.{splits}); use {CORRECTION}.rollout_is=token and "
            f"rules of tokens, e.g. {CORRECTION}.rollout_rs=token_k1, or {CORRECTION}.bypass_mode=False"
        )


def exact_errors(config: PPOConfig) -> Iterator[str]:
    """What trainer.exact does not go with."""
    if not config.trainer.exact:
        return
    policy, correction = config.actor_rollout_ref, config.algorithm.rollout_correction
    actor, rollout, model = policy.actor, policy.rollout, policy.model
    spec = strategy_spec(actor.strategy)
    sizes = {f"actor_rollout_ref.actor.{_ULYSSES}": actor.ulysses_sequence_parallel_size}
    refused: list[tuple[str, Any, Any, bool]] = [
        (f"{ROLLOUT}.name", rollout.name, "native", not engine_spec(rollout.name).exact),
        (f"{ROLLOUT}.n_gpus_per_node", rollout.n_gpus_per_node, 0, bool(rollout_pool(config))),
        (f"{ROLLOUT}.dtype", rollout.dtype, "auto", rollout.dtype == "fp8"),
        (f"{ROLLOUT}.kv_cache_dtype", rollout.kv_cache_dtype, "auto", rollout.kv_cache_dtype == "fp8"),
        (f"{ROLLOUT}.calculate_log_probs", False, True, not rollout.calculate_log_probs),
        ("actor_rollout_ref.actor.strategy", actor.strategy, "fsdp", not spec.exact),
        ("actor_rollout_ref.actor.use_torch_compile", True, False, actor.use_torch_compile),
        ("actor_rollout_ref.model.use_remove_padding", False, True, not model.use_remove_padding),
        *((key, size, 1, size > 1) for key, size in sizes.items()),
        (f"{CORRECTION}.rollout_is", correction.rollout_is, None, bool(correction.rollout_is)),
        (f"{CORRECTION}.rollout_rs", correction.rollout_rs, None, bool(correction.rollout_rs)),
    ]
    for key, value, works, wrong in refused:
        if wrong:
            yield f"'{key}' is {value}, which trainer.exact=True does not go with; set {key}={works}"
    for method in methods_of(config):
        if any(name.startswith("teacher_") for name in method.needs):
            yield f"'{method.key}' is {method.name}, whose passes are not exact; set trainer.exact=False"
        if "from_data" in method.needs:
            yield (
                f"'{method.key}' is {method.name}, which trains on answers that no policy drew; set trainer.exact=False"
            )


def async_errors(config: PPOConfig) -> Iterator[str]:
    """Why a run that trains cannot generate ahead as configured."""
    own, rollout, chosen = (
        config.trainer.async_training,
        config.actor_rollout_ref.rollout,
        config.algorithm.rollout_correction,
    )
    mode, staleness, name = own.mode, own.staleness or 0, f"{SECTION}.staleness"
    if mode == "one_step_off" and staleness > 1:
        yield (
            f"'{name}' is {staleness}, but {SECTION}.mode=one_step_off is never more than one step behind; set "
            f"{name}=1 (or 0: no overlap), or {SECTION}.mode=fully_async"
        )
    elif mode == "carry_over" and staleness < 1:
        yield (
            f"'{name}' is {staleness}, but with {SECTION}.mode=carry_over unfinished responses continue in the next "
            f"step; set {name}=1 or more, or {SECTION}.mode=off"
        )
    elif mode == "fully_async" and staleness < own.sync_every - 1:
        yield (
            f"'{SECTION}.sync_every' is {own.sync_every}: the weights that generate are up to {own.sync_every - 1} "
            f"steps old before they are replaced, but {name}={staleness}; set {name}={own.sync_every - 1} or more, or "
            f"{SECTION}.sync_every={staleness + 1}"
        )
    elif mode == "carry_over" and own.over_sampling > staleness:
        yield (
            f"'{SECTION}.over_sampling' is {own.over_sampling:g} with {name}={staleness}: the prompts beyond a batch "
            f"would be more than {counted(staleness, 'step')} can train, so some would become too old; set "
            f"{SECTION}.over_sampling={staleness} or less, or {name}={math.ceil(own.over_sampling)}"
        )
    if mode in POOL_ASYNC_MODES and not rollout_pool(config):
        yield (
            f"'{SECTION}.mode' is {mode}, but {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node} and "
            f"{ROLLOUT}.nnodes={rollout.nnodes}: generating and training share one set of weights here, so they cannot "
            f"overlap. Give generation its own GPUs (with trainer.device=cpu: its own processes), e.g. {POOL}, or stay "
            f"on these with {SECTION}.mode=carry_over"
        )
    elif mode == "carry_over" and rollout.n_gpus_per_node:
        yield (
            f"'{SECTION}.mode' is carry_over, but {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}: the GPUs of "
            f"generation would idle while the trainer trains. Set {SECTION}.mode=one_step_off or "
            f"{SECTION}.mode=fully_async, or share the trainer's GPUs: {ROLLOUT}.nnodes=0 {ROLLOUT}.n_gpus_per_node=0"
        )
    elif mode in ("carry_over", "fully_async") and not engine_spec(rollout.name).streams:
        yield (
            f"'{ROLLOUT}.name' is {rollout.name}, which generates one batch of requests to its end; {SECTION}.mode="
            f"{mode} adds requests and weights meanwhile. Set {ROLLOUT}.name=native, or {SECTION}.mode=off"
        )
    if staleness and chosen.reinforces and not (chosen.rollout_is or chosen.rollout_rs):
        yield (
            f"'{name}' is {staleness}: responses are drawn by weights up to {counted(staleness, 'step')} older than "
            f"those trained, which {CORRECTION}.loss_type=reinforce corrects by {CORRECTION}.rollout_is; set "
            f"{CORRECTION}.rollout_is=token, or {CORRECTION}.loss_type=ppo_clip"
        )
    elif staleness and not (
        chosen.bypass_mode or chosen.rollout_is or chosen.rollout_rs or config.trainer.exact
    ):
        yield (
            f"'{name}' is {staleness}: responses are drawn by weights up to {counted(staleness, 'step')} older than "
            "those trained, which needs a correction. Choose one: "
            f"{CORRECTION}.bypass_mode=True (the clipped ratio of the loss is taken to the weights that drew each "
            f"token; saves a pass); {CORRECTION}.rollout_is=token (the ratio to the weights before the update, and a "
            f"truncated importance weight for the rest); {CORRECTION}.rollout_rs=seq_mean_k1 "
            f"{CORRECTION}.rollout_rs_threshold=0.5_2.0 (leaves out responses that the weights before the update would "
            f"hardly give); or {SECTION}.mode=off"
        )
    for method in methods_of(config):
        if "reward_baselines" in method.needs:
            yield (
                f"'{method.key}' is {method.name}, which needs a greedy response by the weights that drew the samples; "
                f"{SECTION}.mode={mode} does not keep them; set "
                f"algorithm.adv_estimator=rloo (with {ROLLOUT}.n=2 or more), or {SECTION}.mode=off"
            )
    if config.data.curriculum:
        yield (
            f"'data.curriculum' is {config.data.curriculum}, which chooses prompts by the scores of those before, but "
            f"{SECTION}.mode={mode} starts them before those are known; leave data.curriculum out, or set "
            f"{SECTION}.mode=off"
        )
    if config.algorithm.filter_groups.enable:
        yield (
            f"'algorithm.filter_groups.enable' is True, which draws more prompts in the middle of a step, but "
            f"{SECTION}.mode={mode} starts them before the step; set algorithm.filter_groups.enable=False, or "
            f"{SECTION}.mode=off"
        )
