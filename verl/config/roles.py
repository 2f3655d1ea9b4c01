"""The roles of a run as a table: the columns each provides and reads, what it learns from, and where its config is.

A run has the actor and the roles that provide a column its methods need (`verl.config.methods`). All that differs
between roles is a field here or a method of the class that works on each rank (`verl.workers.roles.RoleWorker`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from verl.config.keys import get
from verl.config.methods import needed_columns, register_section
from verl.config.parallelism import Layout, layout_of, world_size
from verl.config.schema import CheckpointConfig, ModelConfig, OfflineConfig, PPOConfig
from verl.errors import ConfigError

ACTOR = "actor"
_SEQUENCE = ("sequence_num_tokens",)
W = TypeVar("W", bound=type)


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    name: str
    worker: str | type
    """The `RoleWorker` of a rank, or its "module:Class"."""
    columns: tuple[str, ...] = ()
    """What its forward pass provides; no other role provides the same."""
    inputs: tuple[str, ...] = ()
    """What its forward pass reads besides `input_ids`, `attention_mask` and `response_mask`."""
    trained: bool = False
    trains_on: tuple[str, ...] = ()
    """What its training reads besides those."""
    update: str = "last"
    """When it is trained in a step: `before` or `after` its own forward pass, or `last`, when there are advantages; or
    the key that says so."""
    section: str = ""
    """Key of its config section; default: its name."""
    model: str = ""
    """Key of its model section; default: `model` of its section, or the actor's with the `path` of its section."""
    enable: str = ""
    """Key that turns it on or off; where that is None, and by default, it is there where a column of it is needed."""
    start_of: str = ""
    """It is the frozen start of this role; below LoRA adapters that is the same model without them."""
    refresh: str = ""
    """Key of the steps after which the start is replaced by the role's present weights; 0: never."""
    source: str = ""
    """Key that says whose weights work as it: `start` and `current` are the actor's."""
    temporary: bool = False
    """Its columns are large: they are dropped at the end of the step."""
    timer: str = ""
    """`timing_s/...` of its forward pass; default: its name."""
    call: str = ""
    """What messages and phases of a rank call its forward pass."""

    def __post_init__(self) -> None:
        defaults = {"section": self.name, "timer": self.name, "call": f"forward_{self.name}"}
        for field, default in defaults.items():
            object.__setattr__(self, field, getattr(self, field) or default)

    def worker_class(self) -> Any:
        if isinstance(self.worker, type):
            return self.worker
        module, _, name = self.worker.partition(":")
        return getattr(importlib.import_module(module), name)


_BUILTIN = (
    Role(
        ACTOR,
        "verl.workers.roles:ActorRole",
        columns=("old_log_probs", "sum_pi_squared"),
        trained=True,
        trains_on=(
            "old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages", "rollout_is_weights", *_SEQUENCE,
            "token_row", "exact_tokens", "row_weight", "teacher_hidden", "teacher_tokens", "teacher_log_probs",
        ),
        section="actor_rollout_ref.actor",
        model="actor_rollout_ref.model",
        timer="old_log_prob",
        call="log_probs",
    ),
    Role(
        "ref",
        "verl.workers.roles:StartRole",
        columns=("ref_log_prob",),
        section="actor_rollout_ref.ref",
        model="actor_rollout_ref.model",
        start_of=ACTOR,
        refresh="trainer.ref_update_freq",
        call="ref_log_probs",
    ),
    Role(
        "teacher",
        "verl.workers.teacher:TeacherRole",
        columns=("teacher_hidden", "teacher_tokens", "teacher_log_probs"),
        inputs=("teacher_input_ids", "teacher_attention_mask"),
        section="actor_rollout_ref.teacher",
        source="actor_rollout_ref.teacher.source",
        temporary=True,
        call="teacher_outputs",
    ),
    Role(
        "critic",
        "verl.workers.roles:CriticRole",
        columns=("values",),
        trained=True,
        trains_on=("values", "returns", *_SEQUENCE),
        enable="critic.enable",
        timer="values",
        call="values",
    ),
    Role(
        "implicit_reward",
        "verl.workers.implicit_reward:ImplicitRewardRole",
        columns=("process_rewards",),
        inputs=("start_log_prob",),
        trained=True,
        trains_on=("start_log_prob", "outcome"),
        update="implicit_reward.update",
        call="implicit_rewards",
    ),
    Role(
        "implicit_reward_start",
        "verl.workers.roles:StartRole",
        columns=("start_log_prob",),
        section="implicit_reward",
        start_of="implicit_reward",
        timer="implicit_reward",
        call="start_log_probs",
    ),
)  # fmt: skip
_roles = {role.name: role for role in _BUILTIN}


def register_role(
    name: str,
    *,
    columns: tuple[str, ...],
    frozen: bool = True,
    inputs: tuple[str, ...] = (),
    trains_on: tuple[str, ...] = (),
    update: str = "last",
    temporary: bool = False,
    config: type | None = None,
) -> Callable[[W], W]:
    """Decorator over a subclass of `verl.workers.roles.RoleWorker`: add a role with a model of its own.

    A run has it where its loss or estimator needs one of its columns. It is built, sharded, offloaded and, if trained,
    saved like ours, in one process and on Ray. The module that calls this is named in `trainer.plugins`.

    Args:
        name: Of the role, and of its config section.
        columns: What `forward` provides: tensors with one row for each row of the batch.
        frozen: False: `loss` is minimised in every step.
        inputs: Columns that `forward` reads besides `input_ids`, `attention_mask` and `response_mask`.
        trains_on: Columns that `loss` reads besides those.
        update: When it is trained: `before` or `after` its forward pass, or `last`, with `advantages` and `returns`.
        temporary: The columns are dropped at the end of the step, as they are large.
        config: Its section, a subclass of `FrozenRoleConfig` or `TrainedRoleConfig` of `verl.config.schema`.
    """

    def decorate(worker: W) -> W:
        role = Role(name, worker, columns, inputs, not frozen, trains_on, update, temporary=temporary)
        if frozen and trains_on:
            raise ConfigError(f"role {name!r} is frozen and trains on {trains_on[0]!r}; give frozen=False")
        for other in _roles.values():
            shared = sorted(set(columns) & set(other.columns))
            if other.name == name and getattr(other.worker, "__qualname__", "") == worker.__qualname__:
                continue  # its module was imported under another name
            if other.name == name or shared:
                what = f"is registered already, by {other.worker}" if other.name == name else (
                    f"provides {shared[0]!r}, as does the role {other.name!r}"
                )  # fmt: skip
                raise ConfigError(
                    f"role {name!r} {what}; rename that of {worker.__module__}.{worker.__qualname__}"
                )
        _roles[name] = role
        if config is not None:
            register_section(name, config)
        return worker

    return decorate


def find_role(name: str) -> Role:
    """The role of that name."""
    return _roles[name]


def roles_of(config: PPOConfig) -> list[Role]:
    """The roles of a run, the actor first: those that provide a column its methods or another role of it need."""
    needed = set(needed_columns(config))
    chosen = {ACTOR}

    def wanted(role: Role) -> bool:
        enabled = get(config, role.enable) if role.enable else None
        return bool(needed.intersection(role.columns)) if enabled is None else bool(enabled)

    while True:
        more = [role for role in _roles.values() if role.name not in chosen and wanted(role)]
        if not more:
            return [role for role in _roles.values() if role.name in chosen]
        chosen |= {role.name for role in more}
        needed |= {column for role in more for column in (*role.inputs, *role.trains_on)}


def update_time(config: PPOConfig, role: Role) -> str:
    """When a trained role is trained in a step: before, after (its forward pass) or last."""
    return str(get(config, role.update)) if "." in role.update else role.update


def engine_role(config: PPOConfig, role: Role) -> Role:
    """The role whose engine works as `role`: the start of one with LoRA adapters has none of its own."""
    source = get(config, role.source) if role.source else ""
    if source == "current":
        return _roles[ACTOR]
    if role.start_of or source == "start":
        other = _roles[role.start_of or ACTOR]
        if model_of(config, other)[1].lora_rank > 0:
            return other
    return role


def section_of(config: PPOConfig, role: Role) -> Any:
    """The section with the strategy, sizes and offloading of the engine that works as `role`."""
    return get(config, engine_role(config, role).section)


def model_of(config: PPOConfig, role: Role) -> tuple[str, ModelConfig]:
    """The key of a role's model section, and the section."""
    section, policy = get(config, role.section), config.actor_rollout_ref.model
    if role.model:
        return role.model, get(config, role.model)
    if hasattr(section, "model"):
        own = section.model if section.model.path else replace(section.model, path=policy.path)
        return f"{role.section}.model", own
    if not section.path:
        return role.section, replace(policy, lora_rank=0)
    own = replace(policy, path=section.path, tokenizer_path=None, lora_rank=0, override_config={})
    return role.section, own


def refreshed(config: PPOConfig, role: Role) -> int:
    """After how many steps the start that `role` is becomes the present weights; 0: never."""
    return int(get(config, role.refresh)) if role.refresh else 0


def saved_roles(config: PPOConfig) -> list[str]:
    """The roles of a run that its checkpoints hold: those with an engine of their own whose weights change."""
    return [
        role.name
        for role in roles_of(config)
        if engine_role(config, role) is role and (role.trained or refreshed(config, role) > 0)
    ]


def checkpoint_sections(config: PPOConfig) -> dict[str, CheckpointConfig]:
    """What a checkpoint holds of each role that may be in it; of a start that is replaced, the model."""
    sections = {}
    for role in _roles.values():
        if role.trained and hasattr(config, role.section.partition(".")[0]):
            sections[role.name] = get(config, role.section).checkpoint
        elif role.refresh:
            saved = get(config, _roles[role.start_of].section).checkpoint
            sections[role.name] = replace(saved, save_contents=["model"], load_contents=["model"])
    return sections


class ModelRole(NamedTuple):
    """A role whose model is split over the ranks that train."""

    key: str  # of the section with the strategy and the sizes
    section: Any
    model_key: str
    model: Any
    layout: Layout

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


def model_roles(config: PPOConfig | OfflineConfig) -> list[ModelRole]:
    """Those a run has; the trained policy, or the fine-tuned model, is the first."""
    if isinstance(config, OfflineConfig):
        sections: dict[str, tuple[Any, str, Any]] = {"model": (config.model, "model", config.model)}
    else:
        own = [role for role in roles_of(config) if engine_role(config, role) is role]
        sections = {}
        for role in own:  # the start of another role than the actor has that role's section
            sections.setdefault(role.section, (get(config, role.section), *model_of(config, role)))
    return [
        ModelRole(key, section, model_key, model, layout_of(section, world_size(config)))
        for key, (section, model_key, model) in sections.items()
    ]
