"""The KV cache and the runner for a set of requests, and how large they are.

On a device captured graphs are worth keeping: a state is used again while the requests fit; otherwise a new one is
built, a quarter larger than necessary and large enough for what the last one served, so that training and validation in
turn soon find one that suits both. Where memory is what limits it, a little more of it is no reason for a new one. A
stream of requests (some arrive while others run, or continue conversations) gets a state as large as the limits and the
memory allow.

Cache and weights together stay below `gpu_memory_utilization` of the device. Without `max_num_seqs` all samples run at
once whose sequences fit into the cache at full length and whose logits take a small part of that memory (`_LOGITS`),
and no fewer than `DEFAULT_SEQUENCES`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from verl.config.sections.rollout import DEFAULT_SEQUENCES, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.memory import free_host_bytes
from verl.models.introspection import backbone_of, is_exact
from verl.models.loading import torch_dtype
from verl.models.packability import FAULTS, attention_calls, attention_fault, first_line
from verl.rollout.base import Request, RolloutStats
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.cpu_runner import CPURunner, PageCache
from verl.rollout.native.scheduler import Scheduler, graph_batch_size
from verl.rollout.sampling import Kinds
from verl.rollout.sequence import Stopper
from verl.rollout.source import cannot_generate

if TYPE_CHECKING:
    from verl.rollout.native.device_runner import DeviceRunner

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens of a block on a device, and of a hash block of a CPU page."""
_LOGITS = 16
"""Where rows follow from memory, their logits and new tokens take at most this part of what the cache may have."""
STREAM_GROWTH = 4
"""Sequences of a stream may become this many times longer than its first ones before the state has to grow, where
`max_model_len` is not set."""


@dataclass(frozen=True)
class Limits:
    """The keys of the rollout section that bound the native engine."""

    max_num_seqs: int | None = RolloutConfig.max_num_seqs
    max_num_batched_tokens: int = RolloutConfig.max_num_batched_tokens
    gpu_memory_utilization: float = RolloutConfig.gpu_memory_utilization
    enforce_eager: bool = RolloutConfig.enforce_eager
    dtype: str = RolloutConfig.dtype
    kv_cache_dtype: str = RolloutConfig.kv_cache_dtype
    max_model_len: int | None = RolloutConfig.max_model_len
    recompute_kv_cache: bool = RolloutConfig.recompute_kv_cache
    cache_tokens: int | None = None
    """Size of the KV cache in tokens; None: from memory."""

    @staticmethod
    def of(config: Any | None) -> Limits:
        """From the rollout section, or anything with some of these attributes."""
        names = Limits.__dataclass_fields__
        return Limits(**{name: getattr(config, name) for name in names if hasattr(config, name)})

    @property
    def fp8(self) -> bool:
        return self.dtype == "fp8"

    def check_dtype(self, weights: torch.dtype) -> None:
        """The engine generates from the trainer's own tensors: their dtype, or fp8 copies of them."""
        allowed = ("auto", "fp8")
        if self.dtype in allowed or torch_dtype(self.dtype, "rollout.dtype", allowed) == weights:
            return
        raise ConfigError(
            f"rollout.dtype={self.dtype}, but the weights are {str(weights).removeprefix('torch.')} and "
            "rollout.name=native uses them as they are; set rollout.dtype to auto or fp8, or "
            "actor_rollout_ref.model.dtype"
        )


@dataclass(frozen=True)
class LayerShape:
    """What one layer writes for each token. A layer without attention has no heads."""

    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheLayout:
    """The shapes of all layers, by `layer_idx`."""

    layers: tuple[LayerShape, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(layer.bytes for layer in self.layers)

    def stored_as(self, dtype: torch.dtype) -> CacheLayout:
        return CacheLayout(tuple(replace(layer, dtype=dtype) for layer in self.layers))


def cache_layout(model: Any) -> CacheLayout:
    """What the layers write, found by running a few tokens: configurations name head sizes that differ from it
    (multi-head latent attention) or from layer to layer. RolloutError where the cache cannot serve the model, which
    must use our attention."""
    try:
        calls = attention_calls(model, backbone_of(model))
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        raise cannot_generate(model, f"its layers do not take our inputs ({first_line(error)})") from error
    fault = attention_fault(calls, model.config.get_text_config())
    by_layer = {call.layer: call for call in calls}
    if fault is None and None in by_layer:
        fault = "its attention layers have no layer_idx"
    if fault is None and len(by_layer) < len(calls):
        fault = "some of its layers call their attention more than once"
    if fault is not None:
        raise cannot_generate(model, fault)
    shapes = {
        index: LayerShape(call.kv_heads, call.key_size, call.value_size, call.dtype)
        for index, call in by_layer.items()
        if index is not None
    }
    return CacheLayout(tuple(shapes.get(index, LayerShape()) for index in range(max(shapes) + 1)))


def longest(requests: list[Request]) -> int:
    return max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)


def memory_tokens(layout: CacheLayout, limits: Limits, device: torch.device, reusable: int = 0) -> int:
    """Tokens that fit in the cache; `reusable` bytes belong to a cache about to be freed."""
    if limits.cache_tokens is not None:
        return limits.cache_tokens
    if device.type != "cuda":
        return int(free_host_bytes() * limits.gpu_memory_utilization) // layout.token_bytes
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    others = total - free - reserved
    available = total * limits.gpu_memory_utilization - (allocated - reusable) - others
    # Never more than is there: activations and graphs need some of it, too.
    available = min(available, (free + reserved - allocated + reusable) * 0.9)
    return max(int(available), 0) // layout.token_bytes


@dataclass(frozen=True)
class Workload:
    """What a state is built for. `stream`: further requests arrive while these run."""

    model: Any
    layout: CacheLayout
    requests: list[Request]
    limits: Limits
    stopper: Stopper
    stream: bool


class EngineState:
    """A KV cache and the runner over it, for requests of some sizes."""

    runner: CPURunner | DeviceRunner

    def __init__(self, work: Workload, needed: int) -> None:
        self.limits, self.layout = work.limits, work.layout
        self.device = work.model.get_input_embeddings().weight.device
        self.signature = weight_signature(work.model)
        self.tokens = memory_tokens(self.layout, self.limits, self.device)
        if self.tokens < needed:
            raise RolloutError(
                f"a request may reach {needed} tokens; the KV cache has {self.tokens} (data.max_prompt_length, "
                "data.max_response_length, rollout.gpu_memory_utilization)"
            )

    def serves(self, model: Any, requests: list[Request], busy: bool) -> bool:
        """Whether these requests fit. While rows run (`busy`), memory that became free is no reason to start again."""
        raise NotImplementedError

    def scheduler(self, stats: RolloutStats) -> Scheduler:
        """An empty one over an empty cache."""
        raise NotImplementedError

    def sleep(self) -> bool:
        """Release the cache's memory; False where it cannot be restored at its address."""
        return False


class CPUState(EngineState):
    """Pages and runner on the CPU."""

    def __init__(self, work: Workload) -> None:
        exact = is_exact(work.model)
        unit = BLOCK_SIZE
        if exact:
            from verl.models.exact import KEYS as unit
        page_size = -(-longest(work.requests) // unit) * unit
        super().__init__(work, page_size)
        sequences = self._sequences(work.requests)
        if work.stream:
            most = min(self.limits.max_model_len or STREAM_GROWTH * page_size, self.tokens // sequences)
            page_size = max(page_size, -(-most // unit) * unit)
            sequences = self._most + 1
        self.page_size, self.most_pages = page_size, self.tokens // page_size
        self.pages = min(sequences, self.most_pages)
        cache = PageCache(self.pages, page_size, heads_first=exact)
        self.runner: CPURunner = CPURunner(work.model, cache, work.stopper)

    def _sequences(self, requests: list[Request]) -> int:
        return min(sum(r.n for r in requests), self._most) + 1

    @property
    def _most(self) -> int:
        return self.limits.max_num_seqs or DEFAULT_SEQUENCES

    def serves(self, model: Any, requests: list[Request], busy: bool) -> bool:
        pages = min(self._sequences(requests), self.most_pages)
        return longest(requests) <= self.page_size and pages <= self.pages

    def scheduler(self, stats: RolloutStats) -> Scheduler:
        budget = self.limits.max_num_batched_tokens
        rows = min(self._most, budget)
        blocks = BlockManager(self.pages, self.page_size, BLOCK_SIZE)
        return Scheduler(blocks, rows, budget, prefix_in_same_step=False, stats=stats)


@dataclass(frozen=True)
class Sizes:
    """What requests need on a device: rows, tokens of a response and of a sequence, stop tokens, blocks."""

    rows: int
    width: int
    length: int
    stops: int
    blocks: int

    def fits_in(self, other: Sizes) -> bool:
        return all(getattr(self, name) <= getattr(other, name) for name in self.__dataclass_fields__)

    def grown(
        self, last: Sizes | None, most_blocks: int, max_length: int | None, stream_rows: int = 0
    ) -> Sizes:
        """With a quarter to spare, or for a stream of `stream_rows` rows as long as allowed; at least the last ones, as
        far as memory and the longest request allow."""
        rows, blocks = self.rows, self.blocks * 5 // 4
        length = -(-self.length * 5 // 512) * 128
        if stream_rows:
            rows = max(rows, stream_rows)
            length = max_length or STREAM_GROWTH * self.length
            blocks = rows * (-(-length // BLOCK_SIZE) + 1)
        if max_length is not None:
            length = max(min(length, max_length), self.length)
        if last is not None:
            length, blocks = max(length, last.length), max(blocks, last.blocks)
        return Sizes(
            rows=max(rows, last.rows if last else 0),
            width=max(self.width, last.width if last else 0),
            length=length,
            stops=max(self.stops, last.stops if last else 0),
            blocks=max(min(blocks, most_blocks), self.blocks),
        )

    @staticmethod
    def of(
        requests: list[Request],
        limits: Limits,
        stopper: Stopper,
        most_blocks: int = 1 << 60,
        most_rows: int = 1 << 60,
    ) -> Sizes:
        """Within `limits` and what memory allows: `most_blocks`, `most_rows`."""

        def blocks(tokens: int) -> int:
            return -(-tokens // BLOCK_SIZE)

        width = max(r.sampling.max_tokens for r in requests)
        length = longest(requests)
        stops = max(len(stopper.stop_ids(r.sampling)) for r in requests)
        prompts = sum(blocks(len(r.prompt_ids)) for r in requests)
        all_requests = prompts + sum(r.n * (blocks(r.sampling.max_tokens) + 1) for r in requests)
        samples = sum(r.n for r in requests)
        fitting = min(samples * most_blocks // all_requests, most_rows)
        most = limits.max_num_seqs or max(fitting, DEFAULT_SEQUENCES)
        rows = min(samples, most, limits.max_num_batched_tokens)
        at_once = prompts + rows * (blocks(length) + 1)
        return Sizes(
            rows=graph_batch_size(rows, 1 << 30),
            width=-(-width // 128) * 128,
            length=-(-length // 128) * 128,
            stops=max(stops, 4),
            blocks=max(min(all_requests, at_once, most_blocks), blocks(length)),
        )


class GPUState(EngineState):
    """Cache, rows and runner on a device. Its modules are loaded where one is built."""

    def __init__(self, work: Workload, last: Sizes | None = None) -> None:
        from verl.rollout.native.device_runner import DeviceRunner
        from verl.rollout.native.device_state import DeviceCache, DeviceState

        limits, requests = work.limits, work.requests
        super().__init__(work, longest(requests))
        self.most_blocks = self.tokens // BLOCK_SIZE
        row_bytes = 4 * int(work.model.get_input_embeddings().num_embeddings)
        row_bytes += 8 * max(r.sampling.max_tokens for r in requests)
        self.most_rows = self.tokens * work.layout.token_bytes // (_LOGITS * row_bytes)
        needed = Sizes.of(requests, limits, work.stopper, self.most_blocks, self.most_rows)
        stream_rows = 0
        if work.stream:
            most = limits.max_num_seqs or max(min(2 * needed.rows, self.most_rows), DEFAULT_SEQUENCES)
            stream_rows = graph_batch_size(min(most, limits.max_num_batched_tokens), 1 << 30)
        self.sizes = needed.grown(last, self.most_blocks, limits.max_model_len, stream_rows)
        log.debug("new state on %s: %s for %s", self.device, self.sizes, needed)
        self.cache = DeviceCache(work.layout, self.sizes.blocks, BLOCK_SIZE, self.device)
        table_width = -(-self.sizes.length // BLOCK_SIZE) + 1
        state = DeviceState(self.sizes.rows, self.sizes.width, table_width, self.sizes.stops, self.device)
        kinds = Kinds.of([request.sampling for request in requests])
        self.runner: DeviceRunner = DeviceRunner(
            work.model, self.cache, state, work.stopper, kinds, self.sizes.length, limits.fp8
        )

    def serves(self, model: Any, requests: list[Request], busy: bool) -> bool:
        most = self.most_blocks
        if not busy:
            now = memory_tokens(self.layout, self.limits, self.device, self.cache.bytes) // BLOCK_SIZE
            most = now if 4 * now > 5 * most else min(now, most)
        needed = Sizes.of(requests, self.limits, self.runner.stopper, most, self.most_rows)
        if self.limits.max_num_seqs is None and 4 * needed.rows <= 5 * self.sizes.rows:
            # Samples that find no row wait for one: a few more are no reason to lose the graphs.
            needed = replace(needed, rows=min(needed.rows, self.sizes.rows))
        return (
            needed.fits_in(self.sizes) and self.signature == weight_signature(model) and self.cache.wake_up()
        )

    def release(self) -> None:
        """Free the cache, the graphs and the fp8 copies now, even while references to this state are left."""
        del self.cache, self.runner

    def scheduler(self, stats: RolloutStats) -> Scheduler:
        blocks = BlockManager(self.cache.blocks, self.cache.block_size)
        budget = self.limits.max_num_batched_tokens
        rows = min(self.limits.max_num_seqs or self.sizes.rows, budget, self.sizes.rows)
        keep_free = self.cache.blocks // 100
        return Scheduler(blocks, rows, budget, keep_free, prompts_apart=True, stats=stats)

    def sleep(self) -> bool:
        return self.cache.sleep()


def uses_graphs(device: torch.device, limits: Limits) -> bool:
    return device.type == "cuda" and not limits.enforce_eager


def weight_signature(model: Any) -> tuple[int, ...]:
    """Where the weights are: graphs captured over other addresses are worthless."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())
