"""The weights of a training engine: for rollout engines, gathered for generating, and as a Hugging Face folder."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.data.proto import DataProto
from verl.engines.sharding import Ranks, fsdp_modules, group_modules
from verl.errors import RolloutError
from verl.models.introspection import class_of
from verl.models.value_model import ValueModel
from verl.models.vmm_buffer import SleepableMemory, reserve_tensors
from verl.models.weight_source import (
    Adapter,
    NamedTensors,
    Names,
    SourceLogProbs,
    WeightSource,
    adapter_of,
    base_tensors,
    merged_tensors,
)
from verl.runtime import quiet_transformers

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine

log = logging.getLogger(__name__)


class FSDPWeights(WeightSource):
    """Shards are gathered one weight at a time; `module` gathers all of them."""

    def __init__(
        self,
        engine: TrainEngine,
        model: nn.Module,
        ranks: Ranks,
        gather: Callable[[], AbstractContextManager[nn.Module]],
    ) -> None:
        """`gather`: a context with the unsharded model, for generating."""
        self._engine, self._model, self._ranks, self._gather = engine, model, ranks, gather
        self.dtype, self.device = engine.info.dtype, engine.info.device

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._ranks.watching():
            yield from merged_tensors(self._model, self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._ranks.watching():
            yield from base_tensors(self._model, self.dtype, names)

    def adapter(self) -> Adapter | None:
        return adapter_of(self._model, self.dtype)

    def module(self) -> AbstractContextManager[nn.Module]:
        return self._gather()

    def structure(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._model)

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        ids = torch.tensor([[*prompt_ids, *response] for response in responses])
        mask = torch.ones(len(responses), len(responses[0]), dtype=torch.int64)
        batch = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        )
        log_probs = self._engine.log_probs(batch)["log_probs"]
        exact = self._engine.float32_log_probs(batch)
        return SourceLogProbs(log_probs.tolist(), None if exact is None else exact.tolist())


def copy_to_meta(model: nn.Module) -> nn.Module | None:
    """The same module with parameters on the meta device; None where it cannot be copied. Call it before sharding."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        for param in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo).eval()
    except Exception as error:  # a model's own code decides what its attributes are
        log.warning(
            "%s cannot be copied (%s: %s): generation runs through the sharded module, which is slower",
            type(model).__name__,
            type(error).__name__,
            str(error).split("\n")[0][:200],
        )
        return None


class GatheredCopy:
    """A copy of a sharded model for generating: gathered weights, the model's own classes, none of FSDP's hooks.

    `module` may be used inside `gathered` only. There its parameters are filled from the shards; afterwards their
    memory is released but their addresses stay reserved, so that captured CUDA graphs stay valid."""

    def __init__(
        self, model: nn.Module, module: nn.Module, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        """`model` is sharded; `module` is its copy by `copy_to_meta`."""
        self.module = module
        self._device, self._compute_dtype = device, compute_dtype
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._fsdp_modules = fsdp_modules(model)
        self._memory: SleepableMemory | None = None
        self._fills: list[tuple[list[torch.Tensor], list[tuple[nn.Module, str]]]] = []
        self._users = 0

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The copy with the current weights. Entering is collective; inside, no rank waits for another."""
        self._users += 1
        try:
            if self._users == 1:
                self._fill()
            yield self.module
        finally:
            self._users -= 1
            if self._users == 0 and self._memory is not None:
                self._memory.sleep()

    @torch.no_grad()
    def _fill(self) -> None:
        try:
            if self._memory is None:
                self._allocate()
            else:
                self._memory.wake_up()
        except RuntimeError as error:
            raise RolloutError(
                f"the gathered model for generating does not fit into device memory: {str(error).splitlines()[0]}; "
                "set actor.fsdp_config.optimizer_offload=true or param_offload=true"
            ) from error
        # `unshard` is an all-gather: every rank visits the FSDP modules in the same order. One of them is gathered at
        # a time, so that besides the copy itself only one layer is unsharded.
        for module, (targets, sources) in zip(self._fsdp_modules, self._fills, strict=True):
            module.unshard()
            if targets:
                torch._foreach_copy_(targets, [getattr(owner, name).detach() for owner, name in sources])
            module.reshard()
        for owner, copied in self._pairs:
            for name, buffer in owner.named_buffers(recurse=False):
                target = copied._buffers.get(name)
                if target is not None and target.shape == buffer.shape:
                    target.copy_(buffer)
                else:
                    copied._buffers[name] = buffer.to(self._device, copy=True)

    def _allocate(self) -> None:
        """One block of memory for all parameters of the copy."""
        counterpart = {id(owner): copied for owner, copied in self._pairs}
        shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}
        plan: list[tuple[list[int], list[tuple[nn.Module, str]]]] = []
        for module in self._fsdp_modules:
            keys, sources = [], []
            for owner in group_modules(module):
                for name, param in owner.named_parameters(recurse=False):
                    key = id(counterpart[id(owner)]._parameters[name])
                    if key not in shapes:  # a tied weight has several names
                        shapes[key] = (param.shape, self._gathered_dtype(param.dtype))
                        keys.append(key)
                        sources.append((owner, name))
            plan.append((keys, sources))
        memory, tensors = reserve_tensors(shapes.values(), self._device)
        views = dict(zip(shapes, tensors, strict=True))
        params = {key: nn.Parameter(view, requires_grad=False) for key, view in views.items()}
        for _, copied in self._pairs:
            for name, meta in copied._parameters.items():
                if meta is not None:
                    copied._parameters[name] = params[id(meta)]
            for name, buffer in copied._buffers.items():
                if buffer is not None:
                    copied._buffers[name] = buffer.to(self._device)
        self._fills = [([views[key] for key in keys], sources) for keys, sources in plan]
        self._memory = memory

    def _gathered_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type FSDP2 gathers a parameter in (see `shard`)."""
        half = self._compute_dtype != torch.float32 and dtype.is_floating_point
        return self._compute_dtype if half else dtype


def save_folder(model: Any, folder: Path, dtype: torch.dtype, write: bool) -> None:
    """Weights as safetensors, config and generation config. Every rank calls it, one has `write`."""
    weights = {}
    for name, value in merged_tensors(model, dtype, names="module"):
        if write:
            weights[name] = value.cpu().clone() if value.device.type == "cpu" else value.cpu()
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(weights, folder, max_shard_size="5GB")
        model.save_config(folder)
        return
    for name, target in (getattr(model, "_tied_weights_keys", None) or {}).items():
        if model.config.tie_word_embeddings and name in weights and target in weights:
            del weights[name]
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)


def save_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json (with the precision the model computes in) and generation_config.json, without touching the model."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        model.save_config(folder)
    else:
        config = copy.deepcopy(model.config)
        config._attn_implementation = None
        config.architectures = [class_of(model).__name__]
        config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    path = folder / "config.json"
    document = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
