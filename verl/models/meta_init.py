"""A Hugging Face model on the meta device, with an index of where in its files each parameter is.

Buffers, which the files do not have, are real. A model that transformers would load otherwise than by copying is
refused (`CannotStream`) and must be loaded whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from verl.models.loading import disable_dropout, load_config, with_saved_head
from verl.models.tensor_index import (
    CannotStream,
    ParameterIndex,
    SafetensorsFiles,
    WeightsDiffer,
    locate_parameters,
    model_file,
)
from verl.models.value_model import ValueModel
from verl.runtime import quiet_transformers


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device and their buffers for real."""

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _empty_model(auto_class: Any, path: str, config: Any, dtype: torch.dtype, remote_code: bool) -> Any:
    """As `from_pretrained` makes it, without weights and without drawing random numbers."""
    if getattr(config, "quantization_config", None) is not None:
        raise CannotStream("its weights are quantized")
    if remote_code and getattr(config, "auto_map", None):
        raise CannotStream("it has remote code")
    if getattr(config, "transformers_weights", None) or model_file(path, "adapter_config.json"):
        raise CannotStream("its weights are not in the usual files")
    with quiet_transformers(), torch.random.fork_rng(devices=[]), parameters_on_meta():
        model = auto_class.from_config(config, dtype=dtype)
    model.config.name_or_path = path
    model.eval()
    if model.can_generate():
        _read_generation_config(model, path)
    return model


def _read_generation_config(model: Any, path: str) -> None:
    from transformers import GenerationConfig

    file = model_file(path, "generation_config.json")
    if file is not None:
        model.generation_config = GenerationConfig.from_pretrained(str(file.parent))


def _conversions(model: Any) -> list[Any]:
    """How transformers converts this model's weights on loading."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        raise CannotStream("this version of transformers has no conversion mapping") from None
    return list(get_model_conversion_mapping(model, add_legacy=False))


def _check(model: Any, files: SafetensorsFiles, dtype: torch.dtype) -> None:
    """Refuse what `from_pretrained` would treat otherwise than by copying."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name in model.state_dict():
        if name in buffers:
            raise CannotStream(f"it saves buffers with its weights ({name})")
        if name not in parameters and name in files:
            raise CannotStream(f"its files have {name}, which is tied to another weight")
    kept = any(getattr(model, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict"))
    if any(param.dtype != dtype for param in parameters.values()) or (kept and dtype != torch.float32):
        raise CannotStream("some of its weights have another precision")


def open_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, ParameterIndex]:
    """Like `load_causal_lm`, with the weights still in the files."""
    from transformers import AutoModelForCausalLM

    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    files = SafetensorsFiles.of(path)
    model = _empty_model(AutoModelForCausalLM, path, config, dtype, trust_remote_code)
    _check(model, files, dtype)
    locations = locate_parameters(model, model.base_model_prefix, files, _conversions(model))
    disable_dropout(model)
    return model, ParameterIndex(files, locations, dtype)


def open_value_model(
    path: str,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> tuple[ValueModel, ParameterIndex]:
    """Like `load_value_model`, with the backbone's weights still in the files; the head is loaded."""
    from transformers import AutoModel

    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    files = SafetensorsFiles.of(path)
    backbone = _empty_model(AutoModel, path, config, dtype, trust_remote_code)
    _check(backbone, files, dtype)
    model = with_saved_head(ValueModel(backbone), path, dtype)
    locations = locate_parameters(model, model.prefix, files, _conversions(backbone))
    disable_dropout(model)
    return model, ParameterIndex(files, locations, dtype)


__all__ = [
    "CannotStream",
    "ParameterIndex",
    "WeightsDiffer",
    "open_causal_lm",
    "open_value_model",
    "parameters_on_meta",
]
