"""A user's model: unwrapped from peft, FSDP, DDP or torch.compile for training, with the weights copied back at the
end."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl.config.machine import cpu_has_bf16
from verl.errors import ConfigError
from verl.models.loading import cast_parameters
from verl.models.lora import adapted_layers, adapter_keys
from verl.models.meta_init import parameters_on_meta

log = logging.getLogger(__name__)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP1 or FSDP2 is around the model or parts of it."""
    return any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules())


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself, or a plain one with the weights of a sharded one; the sharded one gets the weights at the end.

    The training engine shards in its own way, copies the model and calls parts of it, none of which FSDP's wrappers
    allow."""
    if not is_sharded(model):
        base = _inner(model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base  # a model of peft
        own = adapted_layers(base)
        try:
            yield base
        finally:
            for _, layer in own:  # peft's own forward, instead of the one for training
                vars(layer).pop("forward", None)
        return
    plain = _plain(model)
    log.info(
        "the model is wrapped in FSDP: a plain copy is trained, and its weights are copied back at the end"
    )
    try:
        yield plain
    finally:
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))


def _inner(model: Any) -> Any:
    """The model inside DDP or torch.compile."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model


def given_keys(
    model: Any, overrides: Mapping[str, Any], section: str = "actor_rollout_ref.model"
) -> dict[str, Any]:
    """The keys of `section` for the LoRA adapters a user's model came with. ConfigError for adapters that cannot be
    trained, and where `overrides` ask for others."""
    keys = {f"{section}.{name}": value for name, value in adapter_keys(_inner(model)).items()}
    other = [n for n, value in keys.items() if not n.endswith("modules") and overrides.get(n, value) != value]
    if other:
        raise ConfigError(
            f"the model has LoRA adapters with {other[0].rpartition('.')[2]}={keys[other[0]]}, but {other[0]}="
            f"{overrides[other[0]]} is set; leave the key out, or give the model without adapters"
        )
    return keys


def _plain(model: nn.Module) -> nn.Module:
    inner: Any = model.module if isinstance(model, FullyShardedDataParallel) else model
    kind = type(inner)
    if issubclass(kind, FSDPModule):
        kind = kind.__bases__[1]  # fully_shard puts its own class between the module and its class
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    try:
        with parameters_on_meta():
            plain = kind(copy.deepcopy(inner.config))
        plain.load_state_dict(weights, strict=False, assign=True)
        plain.tie_weights()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"the {kind.__name__} cannot be unwrapped from FSDP ({error}); pass the model without FSDP: training "
            "shards it itself"
        ) from error
    left = [name for name, param in plain.named_parameters() if param.is_meta]
    if left:
        raise ConfigError(
            f"FSDP does not return the weights of {', '.join(left[:3])}; pass the model without FSDP: training shards "
            "it itself"
        )
    if getattr(inner, "generation_config", None) is not None:
        plain.generation_config = copy.deepcopy(inner.generation_config)
    return plain.train(model.training)


def avoid_slow_bf16(model: nn.Module, device: torch.device) -> None:
    """On a CPU without bf16 instructions a bf16 model becomes float32, in place."""
    slow = any(param.dtype == torch.bfloat16 for param in model.parameters())
    if device.type != "cpu" or not slow or cpu_has_bf16():
        return
    cast_parameters(model, torch.float32)
    log.warning(
        "the model is bfloat16 and this CPU has no bf16 instructions: it is converted to float32, and so are "
        "checkpoints. overrides={'actor_rollout_ref.model.dtype': 'bfloat16'} keeps bfloat16, many times slower"
    )
