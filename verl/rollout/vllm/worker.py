"""The part that runs inside vLLM's workers (`worker_extension_cls`): loads weights and reports what it loaded.

A report names every tensor received with its fingerprint, every parameter that no tensor reached, every tensor that
was loaded otherwise than it arrived, and every parameter that moved away from where captured graphs read it.

vLLM fuses tensors (query, key and value; gate and up), pads the vocabulary and keeps this worker's shard. A shard is
compared bit for bit. What vLLM keeps in another form (packed for a CPU's kernels, quantised, experts) cannot be: its
loader reports that it was loaded, and log-probs show that it is used.

vLLM's processes notice that their parent asked them to stop, not that it was killed. Each worker therefore watches the
process named in its environment, and kills the processes in between (the engine core, a hung server) when it is gone.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from verl.models.weight_source import NamedTensors
from verl.processes import ancestors_up_to, wait_gone
from verl.rollout.vllm.settings import HOST
from verl.rollout.weight_sync.fingerprint import WeightManifest, fingerprint, same_values
from verl.rollout.weight_sync.shared_memory import receive_tensors

EXACT, REORDERED, OTHER = "exact", "reordered", "other"
"""Forms in which a tensor is loaded: as it came, with its values in another order, in vLLM's internal form."""


def end_with_host() -> None:
    """In a worker: end when the host has ended. Nothing in the host itself."""
    named = os.environ.get(HOST, "")
    if not named or not hasattr(os, "pidfd_open") or named.startswith(f"{os.getpid()}:"):
        return
    host, started = map(int, named.split(":"))
    threading.Thread(target=_watch, args=(host, started, ancestors_up_to(host)), daemon=True).start()


def _watch(host: int, started: int, between: list[psutil.Process]) -> None:
    wait_gone(host, started)
    for process in reversed(between):
        with suppress(psutil.Error):
            process.kill()
    os._exit(1)


# vLLM imports this file in each of its workers before it calls anything of ours.
end_with_host()


class WeightReceiver:
    """Methods vLLM adds to its worker class; called through `collective_rpc`."""

    rank: int
    distributed_init_method: str
    vllm_config: Any
    model_runner: Any
    reload_weights: Any

    def verl_processes(self) -> list[int]:
        """This worker and its parent: with one worker the engine core and its host."""
        return [os.getpid(), os.getppid()]

    def verl_store_file(self) -> str:
        """The file by which the workers met (vLLM does not remove it); empty where they met otherwise."""
        _, file, path = self.distributed_init_method.partition("file://")
        return path if file else ""

    def verl_receive(self, tensors: NamedTensors) -> str:
        """Weights of the same process, by reference."""
        return self._verl_load(tensors)

    def verl_receive_shared(self, address: str, timeout_s: str) -> str:
        """Weights of another process, through shared memory (arguments are text: they may come over HTTP)."""
        return self._verl_load(receive_tensors(address, float(timeout_s)))

    def _verl_load(self, tensors: NamedTensors) -> str:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        model = self.model_runner.get_model()
        check: LoadCheck = self.__dict__.setdefault("verl_load_check", LoadCheck())
        first, config = not check.forms, self.vllm_config
        graphs = config.device_config.device_type == "cuda" and not config.model_config.enforce_eager
        with without_lora_layers(model):
            weights = ShardIndex(
                model, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            )
            received = ReceivedTensors(tensors, weights)
            check.remember_addresses(model)
            with _watched_loading(model) as (expected, loaded):
                self.reload_weights(weights_iterator=iter(received))
            report = {
                "received": received.fingerprints,
                # A loader that does not return what it loaded is checked by log-probs only.
                "missing": sorted(expected - loaded) if loaded else [],
                "wrong": check.wrong(received),
                "moved": check.moved(model) if graphs else [],
                "first": first,
                "inexact": {name: form for name, form in check.forms.items() if form != EXACT},
            }
        return json.dumps(report)


@contextmanager
def _watched_loading(model: Any) -> Iterator[tuple[set[str], set[str]]]:
    """Parameters by name: those to be loaded, and those the model's own loader says it loaded."""
    expected, loaded = {name for name, _ in model.named_parameters()}, set[str]()
    original = model.load_weights

    def load_weights(weights: Any) -> Any:
        # While it loads, the model has the parameters of its files: the scales of quantised ones are not among them.
        expected.intersection_update(name for name, _ in model.named_parameters())
        result = original(weights)
        loaded.update(result or ())
        return result

    model.load_weights = load_weights
    try:
        yield expected, loaded
    finally:
        del model.load_weights


@contextmanager
def without_lora_layers(model: nn.Module) -> Iterator[None]:
    """The model with the layers themselves instead of the wrappers that LoRA puts around them.

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
class Shard:
    """Rows of a parameter, and which part of the trainer's tensor they hold."""

    module: nn.Module
    leaf: str
    shape: tuple[int, ...]
    """Of the parameter, as long as it is stored in the same form."""
    dtype: torch.dtype
    row: int
    rows: int
    cuts: tuple[tuple[int, int, int], ...]
    """Dimension, start and length of each cut through the tensor."""

    def loaded(self) -> torch.Tensor | None:
        parameter = self.module._parameters.get(self.leaf)
        if parameter is None or tuple(parameter.shape) != self.shape or parameter.dtype != self.dtype:
            return None
        return parameter.detach().narrow(0, self.row, self.rows)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension, start, length in self.cuts:
            tensor = tensor.narrow(dimension, start, length)
        return tensor.to(self.dtype)


class ShardIndex:
    """One worker's parameters before a load, under the names the trainer's tensors come with."""

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        from vllm.model_executor.utils import get_packed_modules_mapping

        self._rank, self._size = rank, size
        self._modules = dict(model.named_modules())
        # While vLLM loads, other tensors replace the parameters.
        self._kinds = {
            (id(module), leaf): (tuple(parameter.shape), parameter.dtype)
            for module in self._modules.values()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not _keeps_packed_copy(module)
        }
        try:
            joined = get_packed_modules_mapping(model)
        except ValueError:  # parts of the model join other tensors under the same name
            joined = {}
        self._joined = {part: (name, at) for name, parts in joined.items() for at, part in enumerate(parts)}

    def find(self, name: str, tensor: torch.Tensor) -> Shard | None:
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
        return Shard(module, leaf, shape, dtype, row, rows, tuple(cuts))

    def _cuts(
        self, here: tuple[int, ...], full: tuple[int, ...], first: int = 0
    ) -> list[tuple[int, int, int]] | None:
        """This worker's part along each dimension that is spread over several."""
        cuts = []
        for dimension in range(first, len(full)):
            if here[dimension] == full[dimension]:
                continue
            # Heads of keys and values are kept several times where there are fewer of them than workers.
            copies, rest = divmod(here[dimension] * self._size, full[dimension])
            if rest or here[dimension] > full[dimension]:
                return None
            cuts.append((dimension, self._rank // copies * here[dimension], here[dimension]))
        return cuts


def _keeps_packed_copy(module: nn.Module) -> bool:
    """Whether the layer computes with a packed copy of its weight and keeps the weight too (on CPUs)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")


class ReceivedTensors:
    """Tensors on their way into vLLM's loader, fingerprinted in full and as this worker's shards."""

    def __init__(self, tensors: NamedTensors, weights: ShardIndex) -> None:
        self._tensors, self._weights = tensors, weights
        self.fingerprints = WeightManifest()
        self.shards: dict[str, tuple[Shard, str] | None] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.fingerprints.watch(self._tensors):
            shard = self._weights.find(name, tensor)
            part = tensor if shard is None else shard.cut(tensor)
            part_fingerprint = self.fingerprints[name] if part is tensor else fingerprint(part)
            self.shards[name] = None if shard is None else (shard, part_fingerprint)
            yield name, tensor


class LoadCheck:
    """Compares what arrived with what is loaded afterwards, over all loads of one worker.

    The first load shows in which form vLLM holds a tensor; from then on it must be that form of what arrived."""

    def __init__(self) -> None:
        self.forms: dict[str, str] = {}
        self._addresses: dict[str, int] = {}

    def wrong(self, arrived: ReceivedTensors) -> dict[str, list[str]]:
        """Tensors loaded otherwise than they arrived, with the fingerprints of what arrived and of what is loaded."""
        found = {}
        for name, expected in arrived.shards.items():
            loaded = None if expected is None else expected[0].loaded()
            now = "nothing" if loaded is None else fingerprint(loaded)
            form = OTHER
            if expected is not None and loaded is not None and same_values(now, expected[1]):
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
