"""The weights of a training engine: for rollout engines, gathered for generating, and as a Hugging Face folder."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from verl.data.proto import DataProto
from verl.engines.sharding import fsdp_modules, group_modules
from verl.errors import RolloutError
from verl.models import weight_source
from verl.models.introspection import class_of, tied_names
from verl.models.loading import let_others_read
from verl.models.value_model import ValueModel, original_config, set_in_config, write_config
from verl.models.weight_source import Adapter, NamedTensors, Names, SourceLogProbs, WeightSource

if TYPE_CHECKING:
    from verl.engines.runner_engine import RunnerEngine
    from verl.models.vmm_buffer import SleepableMemory

log = logging.getLogger(__name__)


class EngineWeights(WeightSource):
    """Of an engine in this process, whose ranks make the same calls."""

    def __init__(self, engine: RunnerEngine) -> None:
        self._engine, self._same_rows = engine, engine.same_rows
        self.dtype, self.device = engine.info.dtype, engine.info.device

    def module(self) -> AbstractContextManager[nn.Module]:
        return self._engine.gathered()

    def structure(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self._engine.hf)

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> SourceLogProbs:
        own = [[*prompt_ids, *response] for response in responses]
        every, at = [own], 0
        if self._same_rows is not None:  # each rank has rows of its own: all compute those of all
            every = [[] for _ in range(dist.get_world_size(self._same_rows))]
            dist.all_gather_object(every, own, group=self._same_rows)
            at = dist.get_rank(self._same_rows)
        ids = torch.tensor([row for rows in every for row in rows])
        mask = torch.ones(len(ids), len(responses[0]), dtype=torch.int64)
        batch = DataProto.from_dict(
            tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        )
        log_probs = self._engine.log_probs(batch)["log_probs"]
        exact = self._engine.float32_log_probs(batch)
        mine = slice(at * len(own), (at + 1) * len(own))
        return SourceLogProbs(log_probs[mine].tolist(), None if exact is None else exact[mine].tolist())


class FSDPWeights(EngineWeights):
    """Shards are gathered one weight at a time; `module` gathers all of them."""

    def named_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._engine.watching():
            yield from weight_source.merged_tensors(self._engine.hf, self.dtype, names)

    def base_tensors(self, names: Names = "hf") -> NamedTensors:
        with self._engine.watching():
            yield from weight_source.base_tensors(self._engine.hf, self.dtype, names)

    def adapter(self) -> Adapter | None:
        return weight_source.adapter_of(self._engine.hf, self.dtype)


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


def bind(
    module: nn.Module, tensors: Iterable[tuple[nn.Parameter, torch.Tensor]], device: torch.device
) -> None:
    """Replace the module's parameters by these tensors, a tied one under each of its names; buffers to the device."""
    params = {id(param): nn.Parameter(tensor, requires_grad=False) for param, tensor in tensors}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                owner._parameters[name] = params[id(param)]
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


class GatheredModule(ABC):
    """A module for generating whose weights lie on other ranks, or elsewhere on this one, while it is not used.

    `module` may be used inside `gathered` only. There its parameters are filled; afterwards their memory is released
    but their addresses stay reserved, so that captured CUDA graphs stay valid."""

    def __init__(self, module: nn.Module, device: torch.device, section: str) -> None:
        """`module`: on the meta device; `section`: of the role's config, which says what is offloaded."""
        self.module = module
        self._device, self._section = device, section
        self._memory: SleepableMemory | None = None
        self._users = 0

    @abstractmethod
    def _gather(self) -> None:
        """Copy the weights into the parameters of `module`. Collective."""

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """What a parameter of `module` is gathered in."""
        return param.dtype

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with the current weights. Entering is collective; inside, no rank waits for another."""
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
                f"set actor.{self._section}.optimizer_offload=true or param_offload=true"
            ) from error
        self._gather()

    def _allocate(self) -> None:
        """One block of memory for all parameters."""
        from verl.models.vmm_buffer import reserve_tensors

        before = list(self.module.parameters())  # a tied one once
        memory, views = reserve_tensors(((p.shape, self._dtype_of(p)) for p in before), self._device)
        bind(self.module, zip(before, views, strict=True), self._device)
        self._memory = memory


class GatheredCopy(GatheredModule):
    """A copy of a sharded model: gathered weights, the model's own classes, none of FSDP's hooks."""

    def __init__(
        self, model: nn.Module, module: nn.Module, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        """`model` is sharded; `module` is its copy by `copy_to_meta`."""
        super().__init__(module, device, "fsdp_config")
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        self._fsdp_modules = fsdp_modules(model)
        # The type FSDP2 gathers a parameter in (see `shard`).
        half = compute_dtype != torch.float32
        self._dtypes = {
            copied._parameters[name]: compute_dtype if half and param.is_floating_point() else param.dtype
            for owner, copied in self._pairs
            for name, param in owner.named_parameters(recurse=False)
        }
        self._fills: list[tuple[list[torch.Tensor], list[tuple[nn.Module, str]]]] = []

    def _dtype_of(self, param: nn.Parameter) -> torch.dtype:
        return self._dtypes[param]

    def _allocate(self) -> None:
        super()._allocate()
        self._dtypes.clear()
        counterpart = {id(owner): copied for owner, copied in self._pairs}
        seen: set[int] = set()
        for module in self._fsdp_modules:
            targets, sources = [], []
            for owner in group_modules(module):
                for name, _ in owner.named_parameters(recurse=False):
                    target = counterpart[id(owner)].get_parameter(name)
                    if id(target) not in seen:  # a tied weight has several names
                        seen.add(id(target))
                        targets.append(target.data)
                        sources.append((owner, name))
            self._fills.append((targets, sources))

    def _gather(self) -> None:
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


def save_folder(model: Any, tensors: NamedTensors, folder: Path, dtype: torch.dtype, *, write: bool) -> None:
    """Weights as safetensors, config and generation config. Every rank calls it, one has `write`. `tensors`: every
    weight under the names of the model's files, unsharded, one at a time."""
    tied = tied_names(model)
    weights = {}
    for name, value in tensors:
        if write and name not in tied:
            weights[name] = value.cpu().clone() if value.device.type == "cpu" else value.cpu()
    if not write:
        return
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, max_shard_size="5GB")
    save_config(model, folder, dtype)
    let_others_read(folder)


def save_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """config.json (with the precision the model computes in) and generation_config.json, without touching the model."""
    if isinstance(model, ValueModel):
        model.save_config(folder)
    else:
        config = original_config(model)
        config._attn_implementation = None
        config.architectures = [class_of(model).__name__]
        write_config(folder, config, model)
    set_in_config(folder, dtype=str(dtype).removeprefix("torch."))
