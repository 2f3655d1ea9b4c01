"""Where vLLM keeps each of the trainer's tensors, and whether it holds there what arrived.

vLLM fuses tensors (query, key and value; gate and up), pads the vocabulary and keeps this worker's shard. A shard is
compared bit for bit. What vLLM keeps in another form (packed for a CPU's kernels, quantised, experts) cannot be: its
loader reports that it was loaded, and log-probs show that it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl.models.weight_source import NamedTensors
from verl.rollout.weight_sync.fingerprint import Manifest, fingerprint, same_values

EXACT, REORDERED, OTHER = "exact", "reordered", "other"
"""Forms in which a tensor is held: as it came, with its values in another order, in a form of vLLM's own."""


@contextmanager
def without_lora_layers(model: nn.Module) -> Iterator[None]:
    """The model with the layers themselves in the places of the wrappers that LoRA puts around them.

    Loaders look parameters up under the names of the model's files; not every version of vLLM sees through the
    wrappers."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


@dataclass(frozen=True)
class Place:
    """Rows of a parameter, and which part of the trainer's tensor they hold."""

    module: nn.Module
    leaf: str
    shape: tuple[int, ...]
    """Of the parameter, as long as it is held in the same form."""
    dtype: torch.dtype
    row: int
    rows: int
    cuts: tuple[tuple[int, int, int], ...]
    """Dimension, start and length of each cut through the tensor."""

    def held(self) -> torch.Tensor | None:
        parameter = self.module._parameters.get(self.leaf)
        if parameter is None or tuple(parameter.shape) != self.shape or parameter.dtype != self.dtype:
            return None
        return parameter.detach().narrow(0, self.row, self.rows)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, start, length in self.cuts:
            tensor = tensor.narrow(dimension, start, length)
        return tensor.to(self.dtype)


class HeldPlaces:
    """One worker's parameters before a load, under the names the trainer's tensors come with."""

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        from vllm.model_executor.utils import get_packed_modules_mapping

        self._rank, self._size = rank, size
        self._modules = dict(model.named_modules())
        # While vLLM loads, other tensors stand in the parameters' places.
        self._kinds = {
            (id(module), leaf): (tuple(parameter.shape), parameter.dtype)
            for module in self._modules.values()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not _packed_beside(module)
        }
        try:
            joined = get_packed_modules_mapping(model)
        except ValueError:  # parts of the model join other tensors under the same name
            joined = {}
        self._joined = {part: (name, at) for name, parts in joined.items() for at, part in enumerate(parts)}

    def find(self, name: str, tensor: torch.Tensor) -> Place | None:
        """Where this tensor is kept as it came, or this worker's part of it; None for any other form."""
        module_name, _, leaf = name.rpartition(".")
        parent, _, last = module_name.rpartition(".")
        module: Any = self._modules.get(module_name)
        row, rows = 0, None
        if module is None and last in self._joined:
            joined, number = self._joined[last]
            module = self._modules.get(f"{parent}.{joined}" if parent else joined)
            sizes = list(getattr(module, "output_partition_sizes", ()))
            if number >= len(sizes):
                return None
            row, rows = sum(sizes[:number]), sizes[number]
        elif self._size > 1 and len(getattr(module, "output_partition_sizes", ())) > 1:
            return None  # joined in the model's files: every worker has a part of each of the parts
        shape, dtype = self._kinds.get((id(module), leaf), ((), torch.uint8))
        if len(shape) != tensor.dim() or not shape or not dtype.is_floating_point or dtype.itemsize < 2:
            return None
        vocabulary = getattr(module, "shard_indices", None)
        if vocabulary is not None:
            start, rows = vocabulary.org_vocab_start_index, vocabulary.num_org_elements
            cuts = self._cuts(shape, (vocabulary.org_vocab_end_index, *tensor.shape[1:]), first=1)
            if cuts is not None and rows < tensor.shape[0]:
                cuts = [(0, start, rows), *cuts]
        else:
            rows = shape[0] if rows is None else rows
            cuts = self._cuts((rows, *shape[1:]), tuple(tensor.shape))
        if cuts is None or row + rows > shape[0] or any(s + n > tensor.shape[d] for d, s, n in cuts):
            return None
        return Place(module, leaf, shape, dtype, row, rows, tuple(cuts))

    def _cuts(
        self, here: tuple[int, ...], whole: tuple[int, ...], first: int = 0
    ) -> list[tuple[int, int, int]] | None:
        """This worker's part along each dimension that is spread over several."""
        cuts = []
        for dimension in range(first, len(whole)):
            if here[dimension] == whole[dimension]:
                continue
            # Heads of keys and values are kept several times where there are fewer of them than workers.
            copies, rest = divmod(here[dimension] * self._size, whole[dimension])
            if rest or here[dimension] > whole[dimension]:
                return None
            cuts.append((dimension, self._rank // copies * here[dimension], here[dimension]))
        return cuts


def _packed_beside(module: nn.Module) -> bool:
    """Whether the layer computes with a packed copy of its weight and keeps the weight beside it (on CPUs)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")


class Arriving:
    """Tensors on their way into vLLM's loader, fingerprinted whole and as this worker should hold them."""

    def __init__(self, tensors: NamedTensors, weights: HeldPlaces) -> None:
        self._tensors, self._weights = tensors, weights
        self.received = Manifest()
        self.places: dict[str, tuple[Place, str] | None] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.received.watch(self._tensors):
            place = self._weights.find(name, tensor)
            part = tensor if place is None else place.part_of(tensor)
            print_of_part = self.received[name] if part is tensor else fingerprint(part)
            self.places[name] = None if place is None else (place, print_of_part)
            yield name, tensor


class HeldCheck:
    """What arrived beside what is held afterwards, over all loads of one worker.

    The first load shows in which form vLLM holds a tensor; from then on it must be that form of what arrived."""

    def __init__(self) -> None:
        self.forms: dict[str, str] = {}
        self._addresses: dict[str, int] = {}

    def wrong(self, arrived: Arriving) -> dict[str, list[str]]:
        """Tensors held otherwise than they arrived, with the fingerprints of what arrived and of what is held."""
        found = {}
        for name, expected in arrived.places.items():
            held = None if expected is None else expected[0].held()
            now = "nothing" if held is None else fingerprint(held)
            form = OTHER
            if expected is not None and held is not None and same_values(now, expected[1]):
                form = EXACT if now == expected[1] else REORDERED
            first = self.forms.setdefault(name, form)
            if expected is not None and form != first != OTHER and form != EXACT:
                found[name] = [expected[1], now]
        return found

    def remember_addresses(self, model: nn.Module) -> None:
        """Before the first load, which is after CUDA graphs were captured."""
        self._addresses = self._addresses or _addresses(model)

    def moved(self, model: nn.Module) -> list[str]:
        """Parameters at another address than before the first load: captured graphs read the old one."""
        before = self._addresses
        return [name for name, now in _addresses(model).items() if before.get(name, now) != now]


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
