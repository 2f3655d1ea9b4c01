"""What the Python API is given: a loaded model, which learns in place, and the keys of a session."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.aliases import full_name
from verl.config.keys import get
from verl.config.load import from_dict
from verl.config.machine import on_cpu
from verl.config.parallelism import world_size
from verl.config.schema import OfflineConfig, PPOConfig, SessionConfig
from verl.config.sections.data import PromptsConfig
from verl.data.tokenizer import load_tokenizer
from verl.errors import ConfigError
from verl.trainer.preflight import preflight

if TYPE_CHECKING:
    from torch import nn

_STEP = {"data.train_batch_size": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 1}
"""A step of the schedule is one `optim_step`."""
_READ = (
    "actor_rollout_ref.",
    *(f"data.{field.name}" for field in dataclasses.fields(PromptsConfig)),
    "trainer.device",
    "trainer.seed",
    "trainer.plugins",
    "trainer.total_training_steps",
    "trainer.watchdog_s",
    "trainer.health.max_skipped_steps",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "ray_kwargs.",
)
_UNREAD = tuple(
    f"actor_rollout_ref.{name}"
    for name in (
        "actor.ppo_mini_batch_size",
        "actor.ppo_epochs",
        "actor.checkpoint.",
        "rollout.val_kwargs.",
        "rollout.multi_turn.",
        "rollout.nnodes",
        "rollout.n_gpus_per_node",
    )
)


def session_config(
    model: Any, overrides: dict[str, Any], *, device: str, dtype: str, lora_rank: int, lr: float | None
) -> SessionConfig:
    """The config of the user's keys over those of the arguments, checked; a key that a session does not read is an
    error."""
    refuse_torchrun("Session", "overrides={'trainer.n_gpus_per_node': ...}")
    values = {
        "actor_rollout_ref.model.dtype": dtype,
        "actor_rollout_ref.model.lora_rank": lora_rank,
        "trainer.device": device,
        **({} if lr is None else {"actor_rollout_ref.actor.optim.lr": lr}),
        **model_keys(model, ({"model.lora_rank": lora_rank} if lora_rank else {}) | overrides),
    }
    cfg = from_dict(SessionConfig, {**_STEP, **values}, overrides)
    for name in sorted(cfg.user_set):
        read = name.startswith(_READ) and not name.startswith(_UNREAD)
        if not read and get(cfg, name) != _STEP.get(name):
            raise ConfigError(
                f"overrides set '{name}', which a Session does not read: it has no data files, rewards or "
                "advantages; your loop has them. It reads actor_rollout_ref.{model,actor,rollout,ref}, the keys of "
                "prompts in data, trainer.{device,seed,plugins,total_training_steps,n_gpus_per_node,nnodes}, ray_kwargs"
            )
    given = not isinstance(model, (str, Path))
    preflight(cfg, given_model=given, given_data=True)
    if given and world_size(cfg) > 1:
        raise ConfigError(
            f"a session on {world_size(cfg)} processes cannot train the object it is given in place: give the "
            "model's folder"
        )
    return cfg


def model_keys(
    model: Any, overrides: dict[str, Any], section: str = "actor_rollout_ref.model"
) -> dict[str, Any]:
    """`path` of the model section, and of a loaded model the keys of its adapters, which `overrides` may not
    contradict."""
    from torch import nn

    from verl.models.external_model import given_keys

    path = f"{section}.path"
    if isinstance(model, nn.Module):
        name = str(getattr(model, "name_or_path", "") or type(model).__name__)
        asked = overrides | {full_name(PPOConfig, key): value for key, value in overrides.items()}
        return {path: name, **given_keys(model, asked, section)}
    if isinstance(model, (str, Path)) and str(model):
        return {path: str(model)}
    raise ConfigError(f"the model is {model!r}; give a folder, a hub id, or a loaded transformers model")


def model_section(cfg: PPOConfig | OfflineConfig) -> Any:
    """The section of the model that is trained."""
    return cfg.model if isinstance(cfg, OfflineConfig) else cfg.actor_rollout_ref.model


def own_tokenizer(model: Any, cfg: PPOConfig | OfflineConfig, taker: str) -> Any:
    """The tokenizer of the folder that a model is, or came from; `taker` names the class that could be given one."""
    if not isinstance(model, (str, Path)) and not getattr(model, "name_or_path", ""):
        raise ConfigError(
            f"the model does not say which folder it came from; give {taker}(..., tokenizer=...)"
        )
    section = model_section(cfg)
    source = section.tokenizer_path or str(getattr(model, "name_or_path", section.path))
    return load_tokenizer(source, section.trust_remote_code, cfg.data.chat_template)


@contextmanager
def borrowed(model: nn.Module, cfg: PPOConfig | OfflineConfig) -> Iterator[nn.Module]:
    """The model itself, without wrappers, to be trained in place. Training puts its own attention into it; afterwards
    it has the attention and the mode it came with, and generates and trains again like any other."""
    from torch import device

    from verl.models.external_model import avoid_slow_bf16, unwrapped

    with unwrapped(model) as inner:
        attention = getattr(getattr(inner, "config", None), "_attn_implementation", None)
        switch: Callable[[str], None] | None = getattr(inner, "set_attn_implementation", None)
        training = inner.training
        try:
            if model_section(cfg).dtype == "auto":
                avoid_slow_bf16(inner, device("cpu" if on_cpu(cfg) else "cuda"))
            yield inner
        finally:
            inner.train(training)
            if attention is not None and switch is not None:
                switch(attention)


def refuse_torchrun(name: str, instead: str) -> None:
    """Every process of torchrun would run the whole loop; there are no ranks among them."""
    import torch.distributed as dist

    joined = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    count = max(joined, int(os.environ.get("WORLD_SIZE") or 1))
    if count > 1:
        raise ConfigError(
            f"{name} was started in {count} processes (torchrun, WORLD_SIZE), but it is one process that starts the "
            f"others itself: start it with python, {instead.replace('...', str(count))}"
        )
