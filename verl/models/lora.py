"""LoRA adapters through peft, injected into the model so that it stays the Hugging Face class it was.

Only adapters (and the head of a critic or reward model) are trained: with the adapters off the model is its own
reference policy. Adapters that a user's model came with (peft's `get_peft_model`, transformers' `add_adapter`) are
trained in place; what cannot be trained and saved like ours is refused by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from verl.errors import ConfigError, ModelError, missing_package
from verl.json_input import read_json
from verl.models.loading import let_others_read
from verl.models.value_model import ValueModel

ADAPTER = "default"
UNSUPPORTED = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
)
"""Entries of a `LoraConfig` whose adapters are more than one pair of matrices of one rank and scale for each layer."""
_NOT_TRAINED = (*UNSUPPORTED, "target_parameters", "trainable_token_indices", "alora_invocation_tokens")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_INSTEAD = (
    "give get_peft_model(model, LoraConfig(r=..., target_modules=[...])), or the model without adapters"
)


def given_lora(model: Any) -> Any:
    """The `LoraConfig` of the adapters the model has; None without. ConfigError for adapters of another kind."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    kinds = sorted({str(getattr(c.peft_type, "value", c.peft_type)) for c in configs.values()})
    if kinds != ["LORA"]:
        raise ConfigError(
            f"the model has an adapter of peft's kind {', '.join(kinds)}; only LORA is trained: {_INSTEAD}"
        )
    if list(configs) != [ADAPTER]:
        raise ConfigError(
            f"the model has the adapters {', '.join(configs)}; it may have one, named '{ADAPTER}': merge the others "
            "(merge_and_unload)"
        )
    config = checked_lora(configs[ADAPTER], "the model's LoraConfig")
    for name, layer in adapted_layers(model):
        if type(layer).__name__ != "Linear" or not layer.base_layer.weight.is_floating_point():
            raise ConfigError(
                f"the adapter of {name!r} is on a {type(layer.base_layer).__name__}; only those of linear layers whose "
                "weights are not quantized are trained: load the model without quantization, and leave the module out "
                "of target_modules"
            )
        if layer.merged:
            raise ConfigError("the model's adapter is merged into its weights; call unmerge_adapter() first")
    return config


def checked_lora(config: Any, name: str) -> Any:
    """A `LoraConfig`, called `name` in messages, whose adapters can be trained; ConfigError for others."""
    special = [name for name in _NOT_TRAINED if getattr(config, name, None)]
    special += ["bias"] if config.bias != "none" else []
    special += ["init_lora_weights"] if str(config.init_lora_weights).startswith(_CHANGES_BASE) else []
    if special:
        value = getattr(config, special[0])
        raise ConfigError(
            f"{name} has {special[0]}={value!r}, which is not trained here; leave it out, or merge the "
            "adapter (merge_and_unload)"
        )
    return config


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of peft that have the adapter, whatever they are around."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and ADAPTER in getattr(module, "scaling", ())
    ]


def adapter_keys(model: Any) -> dict[str, Any]:
    """The keys below `actor_rollout_ref.model` that say what adapters the model came with; empty without."""
    config = given_lora(model)
    if config is None:
        return {}
    names = sorted({name.rpartition(".")[2] for name, _ in adapted_layers(model)})
    alpha = {"lora_alpha": config.lora_alpha} if isinstance(config.lora_alpha, int) else {}
    return {"lora_rank": config.r, "target_modules": names, **alpha}


def without_adapters(model: Any) -> Any:
    """A copy of the model whose weights have the adapters' products added."""
    copied = copy.deepcopy(model)
    for name, layer in adapted_layers(copied):
        layer.merge()
        owner, _, last = name.rpartition(".")
        setattr(copied.get_submodule(owner), last, layer.base_layer)
    if getattr(copied, "peft_config", None):
        del copied.peft_config
    return copied


log = logging.getLogger(__name__)

_BASE = ".base_layer."
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise missing_package("peft", "peft", "model.lora_rank > 0") from error
    return peft


def _linear_names(model: Any) -> list[str]:
    """Last name parts of all linear layers but the output matrix and the value head."""
    skipped = {id(model.head)} if isinstance(model, ValueModel) else set()
    if hasattr(model, "get_output_embeddings"):
        skipped.add(id(model.get_output_embeddings()))
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if _is_linear(module) and id(module) not in skipped
    }
    return sorted(names)


def _taken_for_experts(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Which of the names peft takes for the experts of a mixture, which are parameters in transformers 5, though linear
    layers of the model have them too."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a peft that does not
        return []

    def taken(name: str) -> bool:
        config = _peft().LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # it would be a part of a parameter
            return True
        return name not in config.target_modules

    return [name for name in names if taken(name)]


def _name_others(model: nn.Module, adapted: Sequence[str]) -> None:
    """Say which weights `all-linear` leaves out: the experts of a mixture are one parameter for all, for example."""
    others = {
        f"{owner.rpartition('.')[2]}.{name}"
        for owner, module in model.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if param.ndim > 2
    }
    if others:
        log.warning(
            "model.target_modules=[all-linear]: %s get adapters; %s are no linear layers and stay as they are",
            ", ".join(adapted),
            ", ".join(sorted(others)),
        )


def _is_linear(module: nn.Module) -> bool:
    """Llama-4's router, for example, is derived from a linear layer and computes something else."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as inputs x outputs, as GPT-2's do."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def transposed_weights(model: nn.Module) -> set[str]:
    """Names of the weights of such layers."""
    return {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}


def add_lora(
    model: Any, *, rank: int, alpha: int, target_modules: Sequence[str], base_path: str = ""
) -> None:
    """Put an adapter on every target module and freeze the rest. A user's model may have its adapters already."""
    config = given_lora(model)
    if config is None:
        config = _new_adapters(model, rank, alpha, target_modules, base_path)
    elif config.r != rank:
        raise ConfigError(
            f"the model has LoRA adapters of rank {config.r}, but model.lora_rank={rank}; leave the key out"
        )
    model.requires_grad_(False)
    for _, module in adapted_layers(model):
        for part in (module.lora_A, module.lora_B):
            part[ADAPTER].requires_grad_(True)
        module.forward = MethodType(_forward, module)
    if isinstance(model, ValueModel):
        model.head.requires_grad_(True)
    model.verl_lora_config = config


def _new_adapters(model: Any, rank: int, alpha: int, target_modules: Sequence[str], base_path: str) -> Any:
    peft = _peft()
    wanted = list(target_modules)
    if "all-linear" in wanted:
        wanted = _linear_names(model)
        experts = _taken_for_experts(model, wanted)
        wanted = [name for name in wanted if name not in experts]
        _name_others(model, wanted)
    present = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
    unknown = [name for name in wanted if name.rpartition(".")[2] not in present]
    if unknown or not wanted:
        raise ConfigError(
            f"model.target_modules has {', '.join(unknown) or 'no entry'}, which is no linear layer of "
            f"{type(model).__name__}; its linear layers are: {', '.join(_linear_names(model))} (or 'all-linear')"
        )
    experts = _taken_for_experts(model, wanted)
    if experts:
        raise ConfigError(
            f"model.target_modules has {', '.join(experts)}, which peft takes for the experts of "
            f"{type(model).__name__}; adapters of experts cannot be merged here: leave these names out"
        )
    task = "CAUSAL_LM"  # what peft opens the adapter as
    if isinstance(model, ValueModel):
        task = "SEQ_CLS" if model.reward else "TOKEN_CLS"
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=wanted,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=bool(transposed_weights(model)),
        task_type=task,
        base_model_name_or_path=base_path or None,
    )
    with _placeholder_weights(model):
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return config


@contextmanager
def _placeholder_weights(model: nn.Module) -> Iterator[None]:
    """Real weights in place of those on the meta device: peft puts an adapter on the device of its weight, and there it
    would be lost. A placeholder is one number expanded to the weight's shape: it takes no memory."""
    on_meta = [
        (owner, name, param)
        for owner in model.modules()
        for name, param in owner.named_parameters(recurse=False)
        if param.is_meta
    ]
    for owner, name, param in on_meta:
        placeholder = torch.zeros((), dtype=param.dtype).expand(param.shape)
        setattr(owner, name, nn.Parameter(placeholder, requires_grad=False))
    try:
        yield
    finally:
        for owner, name, param in on_meta:
            setattr(owner, name, param)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """An adapted linear layer; scaling and sum happen inside the second product, not as separate passes."""
    result: torch.Tensor = module.base_layer(x)
    if module.disable_adapters or module.merged:
        return result
    low = module.lora_A[ADAPTER](x.to(module.lora_A[ADAPTER].weight.dtype)).to(result.dtype)
    up = module.lora_B[ADAPTER].weight.to(result.dtype)
    flat = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), up.t(), alpha=module.scaling[ADAPTER])
    return flat.view(result.shape)


def has_lora(model: Any) -> bool:
    return getattr(model, "verl_lora_config", None) is not None


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was loaded, while the context lasts."""
    modules = [module for _, module in adapted_layers(model)]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in modules:
            module._disable_adapters = False


def plain_name(name: str) -> str | None:
    """The name a weight had before adapters were added; None for an adapter's own weight."""
    if ".lora_A." in name or ".lora_B." in name:
        return None
    return name.replace(_BASE, ".")


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """A weight gathered from its shards (a collective)."""
    tensor = value.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def merge_lora(
    weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float, *, transpose: bool = False
) -> torch.Tensor:
    """`weight + scale * lora_b @ lora_a`, in float32, rounded once to the weight's dtype. `transpose`: the weight is
    that of a layer for which `is_transposed`."""
    delta = scale * (lora_b.float() @ lora_a.float())
    return (weight.float() + (delta.t() if transpose else delta).to(weight.device)).to(weight.dtype)


def lora_scale(settings: Mapping[str, Any]) -> float:
    """What an adapter's product is multiplied by, from its `adapter_config.json`."""
    rank = int(settings["r"])
    return float(settings["lora_alpha"]) / (rank**0.5 if settings.get("use_rslora") else rank)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight, unsharded, under the name it had before adapters, with the adapter's product added."""
    deltas = {f"{name}.base_layer.weight": module for name, module in adapted_layers(model)}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if plain is None:
            continue
        weight = full_tensor(value)
        if name in deltas:
            module = deltas[name]
            a, b = (full_tensor(part[ADAPTER].weight) for part in (module.lora_A, module.lora_B))
            transpose = is_transposed(module.base_layer)
            weight = merge_lora(weight, a, b, module.scaling[ADAPTER], transpose=transpose)
        yield plain, weight


def name_in_file(name: str) -> str:
    """Of an adapter's weight in the files that peft and vLLM open."""
    return f"{_PREFIX}{name.replace(f'.{ADAPTER}.', '.')}"


def save_adapter(model: Any, folder: Path, write: bool = True) -> None:
    """adapter_config.json and adapter_model.safetensors, as `peft.PeftModel.from_pretrained` opens them.

    Every rank calls it (shards are gathered); only one has `write`."""
    from safetensors.torch import save_file

    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        trained_head = isinstance(model, ValueModel) and name.startswith(f"{model.head_name}.")
        if plain_name(name) is None or trained_head:
            weights[name_in_file(name)] = full_tensor(value).cpu().contiguous()
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        let_others_read(folder)
        model.verl_lora_config.save_pretrained(folder)


def merge_adapter(model: nn.Module, folder: Path) -> int:
    """Add the adapter's products to the model's weights, in place; how many weights were changed. Refused unless every
    tensor of the adapter can be used."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        settings: dict[str, Any] = read_json(folder / "adapter_config.json")
        rank = int(settings["r"])
        scale = lora_scale(settings) if rank > 0 else 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'adapter_config.json'} cannot be understood: {error!r}") from error
    special = [name for name in UNSUPPORTED if settings.get(name)]
    if rank < 1 or special:
        raise ModelError(
            f"the adapter {folder} uses {special[0] if special else f'r={rank}'}, which cannot be merged here; merge "
            "it with peft (merge_and_unload) and set model.path to the result"
        )
    path = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"no adapter can be read from {path}: {error}") from error
    names = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    unused = [name for name in tensors if not name.endswith((_A, _B)) or name[: -len(_A)] not in names]
    if unused:
        raise ModelError(f"the adapter {folder} holds {unused[0]!r}, which is no LoRA pair of a linear layer")
    weights = dict(model.named_parameters())
    transposed = transposed_weights(model)
    for name in sorted(names):
        plain = name.removeprefix(_PREFIX)
        weight, lora_a, lora_b = weights.get(f"{plain}.weight"), tensors[name + _A], tensors.get(name + _B)
        if weight is None or lora_b is None:
            raise ModelError(
                f"the adapter {folder} changes {plain!r}, which {type(model).__name__} does not have; was it trained "
                "on another model?"
            )
        shape, transpose = (lora_b.shape[0], lora_a.shape[1]), f"{plain}.weight" in transposed
        if tuple(weight.shape) != (shape[::-1] if transpose else shape):
            raise ModelError(
                f"the adapter {folder} has shape {shape} for {plain!r}, the model {tuple(weight.shape)}; was it "
                "trained on another model?"
            )
        with torch.no_grad():
            weight.copy_(merge_lora(weight, lora_a, lora_b, scale, transpose=transpose))
    return len(names)
