"""A Hugging Face model on the meta device, with an index of where in its files each parameter is.

Buffers, which the files do not have, are real. Reading rows of a parameter reads those rows of the files and no others,
and leaves nothing mapped. Most parameters are one tensor of the files, maybe under an older name; the experts of a
mixture, which transformers joins on loading, are many. A model that transformers would load otherwise than by copying
is refused (`CannotStream`) and must be loaded completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from verl.errors import ModelError
from verl.models.loading import CannotStream, SafetensorsFiles, load_config, model_file, with_saved_head
from verl.models.value_model import ValueModel, disable_dropout
from verl.runtime import quiet_transformers


class WeightsDiffer(CannotStream):
    """The files do not have the tensors of the architecture."""


@dataclass(frozen=True)
class Location:
    """Where a parameter is: in memory (a new value head, or all of a model that was loaded completely), in a tensor of
    the files, or in many: row i (an expert) is the tensors `experts[i]`, concatenated along their first dimension."""

    tensor: torch.Tensor | None = None
    name: str = ""
    experts: tuple[tuple[str, ...], ...] = ()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        if self.tensor is not None:
            return tuple(self.tensor.shape)
        if not self.experts:
            return shapes[self.name]
        first = [shapes[name] for name in self.experts[0]]
        uniform = all([shapes[name] for name in row] == first for row in self.experts)
        if not uniform or any(shape[1:] != first[0][1:] for shape in first):
            raise CannotStream(f"the experts around {self.experts[0][0]} differ in shape")
        return (len(self.experts), sum(shape[0] for shape in first), *first[0][1:])


def locate_parameters(
    model: Any, prefix: str, files: SafetensorsFiles, conversions: Sequence[Any]
) -> dict[str, Location]:
    """For every parameter; real ones stay as they are. Names in the files may lack or have the prefix of the backbone.
    `conversions` is how transformers converts the weights on loading."""
    shapes = files.shapes
    # The names of the files' tensors, by those that transformers gives them before it joins any.
    stored = {name: name for name in files}
    for change in conversions:
        if not getattr(change, "operations", None):
            stored = {change.rename_source_key(name)[0]: own for name, own in stored.items()}
    joined = _joined(stored, conversions)
    found: dict[str, Location] = {}
    for name, param in model.named_parameters():
        if not param.is_meta:
            found[name] = Location(param)
            continue
        location = None
        for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            location = location or (Location(name=stored[key]) if key in stored else joined.get(key))
        if location is None:
            raise WeightsDiffer(f"its files lack {name}")
        if location.shape(shapes) != tuple(param.shape):
            raise WeightsDiffer(f"{name} is {location.shape(shapes)} in its files, not {tuple(param.shape)}")
        found[name] = location
    return found


def _joined(stored: Mapping[str, str], conversions: Sequence[Any]) -> dict[str, Location]:
    found: dict[str, Location] = {}
    for change in conversions:
        if not getattr(change, "operations", None):
            continue
        sources: dict[str, dict[str, list[str]]] = {}
        # Expert 10 comes after expert 9.
        numbered = {n: [(int(k), "") if k.isdigit() else (-1, k) for k in n.split(".")] for n in stored}
        for name in sorted(stored, key=numbered.__getitem__):
            target, pattern = change.rename_source_key(name)
            if pattern is None:
                continue
            if not _joins_experts(change):
                raise CannotStream(f"transformers converts its weights on loading ({name})")
            sources.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
        for target, by_pattern in sources.items():
            if set(by_pattern) != set(change.source_patterns):
                raise WeightsDiffer(f"its files lack some of {target}")
            columns = [by_pattern[pattern] for pattern in change.source_patterns]
            if len({len(column) for column in columns}) != 1:
                raise WeightsDiffer(f"its files lack some of {target}")
            found[target] = Location(experts=tuple(zip(*columns, strict=True)))
    return found


def _joins_experts(change: Any) -> bool:
    """Whether it stacks experts and, within an expert, concatenates matrices, and does nothing else."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in change.operations]
    stack, concatenate = ("MergeModulelist", 0), ("Concatenate", 1)
    wanted = [stack] if len(change.source_patterns) == 1 else [stack, concatenate]
    return steps == wanted and len(change.target_patterns) == 1


class ParameterIndex:
    """Reads the parameters of a model on the meta device."""

    def __init__(
        self, files: SafetensorsFiles, locations: Mapping[str, Location], dtype: torch.dtype
    ) -> None:
        self.files, self.locations, self.dtype = files, locations, dtype

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> ParameterIndex:
        """Of a model that is in memory."""
        locations = {name: Location(param) for name, param in model.named_parameters()}
        return cls(SafetensorsFiles({}), locations, dtype)

    def read_rows(
        self, name: str, start: int, stop: int, into: torch.Tensor, columns: slice | None = None
    ) -> None:
        """Rows of the parameter `name` (as it is called without adapters), or columns of them, into `into`."""
        place = self.locations[name]
        if place.tensor is not None:
            rows = place.tensor.detach()[start:stop]
            into.copy_((rows if columns is None else rows[:, columns]).to(self.dtype))
        elif not place.experts:
            self.files.read_rows(place.name, start, stop, into, self.dtype, columns)
        elif columns is not None:
            raise ValueError("the experts of a mixture are read whole")
        else:
            for row, target in zip(place.experts[start:stop], into, strict=True):
                at = 0
                for part in row:
                    length = self.files.shapes[part][0]
                    self.files.read_rows(part, 0, length, target[at : at + length], self.dtype)
                    at += length


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
    # `from_config` of transformers 5.10 leaves that of the folder, which saves and merges would take.
    config.dtype = dtype
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]), parameters_on_meta():
            model = auto_class.from_config(config, dtype=dtype)
    except Exception as error:  # transformers checks configs in many places, each with its own exceptions
        problem = str(error).partition("\n")[0]
        raise ModelError(f"no model can be built from {path!r}: {problem} (model.path)") from error
    model.config.name_or_path = path
    model.eval()
    file = model_file(path, "generation_config.json") if model.can_generate() else None
    if file is not None:
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(str(file.parent))
        except Exception as error:  # it may hold anything
            raise ModelError(
                f"{str(file)!r} cannot be used: {error}. Repair or remove it (model.path)"
            ) from error
    return model


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


def open_causal_lm(path: str, *, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, ParameterIndex]:
    """Like `load_causal_lm`, with the weights still in the files."""
    from transformers import AutoModelForCausalLM

    model, files = _opened(AutoModelForCausalLM, path, dtype, **options)
    return model, _index(model, model, model.base_model_prefix, files, dtype)


def open_value_model(
    path: str, *, dtype: torch.dtype, reward: bool = False, **options: Any
) -> tuple[ValueModel, ParameterIndex]:
    """Like `load_value_model`, with the backbone's weights still in the files; the head is loaded."""
    from transformers import AutoModel

    backbone, files = _opened(AutoModel, path, dtype, **options)
    model = with_saved_head(ValueModel(backbone, reward=reward), path, dtype)
    return model, _index(model, backbone, model.prefix, files, dtype)


def _opened(
    auto_class: Any,
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
) -> tuple[Any, SafetensorsFiles]:
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    files = SafetensorsFiles.of(path)
    model = _empty_model(auto_class, path, config, dtype, trust_remote_code)
    _check(model, files, dtype)
    return model, files


def _index(
    model: Any, backbone: Any, prefix: str, files: SafetensorsFiles, dtype: torch.dtype
) -> ParameterIndex:
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = get_model_conversion_mapping(backbone, add_legacy=False)
    locations = locate_parameters(model, prefix, files, conversions)
    disable_dropout(model)
    return ParameterIndex(files, locations, dtype)
