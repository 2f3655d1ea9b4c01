"""How large the cache and the state on a device are, and whether the last ones still serve.

Captured graphs are worth keeping: a session is used again while the weights have not moved and the new requests
fit into it; otherwise everything is made anew, with some room to spare and large enough for what the last one
served, so that training and validation in turn soon find one that suits both.

Cache and weights together stay below `gpu_memory_utilization` of the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import RolloutError
from verl.rollout.base import Request
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.device_cache import DeviceCache
from verl.rollout.native.device_runner import DeviceRunner, graph_batch_size
from verl.rollout.native.device_state import DeviceState
from verl.rollout.native.fp8 import require_fp8_device
from verl.rollout.native.kv_cache import CacheLayout
from verl.rollout.native.limits import Limits
from verl.rollout.native.ops import Ops, TorchOps, TritonOps
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.requests import Stopper
from verl.rollout.sampling import Kinds

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
LOOKAHEAD = 4
"""Decode steps between two polls of the host. A row that has ended runs on for up to twice as many; the host's work for
a poll is hidden behind the steps in flight. (4 instead of 16, with the finer sizes of `graph_batch_size`: +5 % tokens
per second for a 7B model, +1 % for 135M, on one H200.)"""


@dataclass(frozen=True)
class Sizes:
    """What a set of requests needs."""

    rows: int
    width: int
    places: int
    stops: int
    blocks: int

    def fits_in(self, other: Sizes) -> bool:
        mine = (self.rows, self.width, self.places, self.stops, self.blocks)
        theirs = (other.rows, other.width, other.places, other.stops, other.blocks)
        return all(a <= b for a, b in zip(mine, theirs, strict=True))

    def grown(self, last: Sizes | None, most_blocks: int, most_places: int | None) -> Sizes:
        """With a quarter to spare, and at least the last ones, as far as memory and the longest request allow."""
        places = -(-self.places * 5 // 512) * 128
        if most_places is not None:
            places = max(min(places, most_places), self.places)
        blocks = self.blocks * 5 // 4
        if last is not None:
            places, blocks = max(places, last.places), max(blocks, last.blocks)
        return Sizes(
            rows=max(self.rows, last.rows if last else 0),
            width=max(self.width, last.width if last else 0),
            places=places,
            stops=max(self.stops, last.stops if last else 0),
            blocks=max(min(blocks, most_blocks), self.blocks),
        )

    @staticmethod
    def of(requests: list[Request], limits: Limits, stopper: Stopper, block_size: int) -> Sizes:
        def blocks(tokens: int) -> int:
            return -(-tokens // block_size)

        rows = min(sum(r.n for r in requests), limits.max_num_seqs, limits.max_num_batched_tokens)
        width = max(r.sampling.max_tokens for r in requests)
        places = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
        stops = max(len(stopper.stop_ids(r.sampling)) for r in requests)
        everything = sum(
            blocks(len(r.prompt_ids)) + r.n * (blocks(r.sampling.max_tokens) + 1) for r in requests
        )
        at_once = rows * (blocks(places) + 1)
        return Sizes(
            rows=graph_batch_size(rows, 1 << 30),
            width=-(-width // 128) * 128,
            places=-(-places // 128) * 128,
            stops=max(stops, 4),
            blocks=min(everything, at_once),
        )


def memory_tokens(layout: CacheLayout, limits: Limits, device: torch.device, held: int) -> int:
    """Tokens the cache may hold; `held` bytes belong to a cache about to be given back."""
    if limits.cache_tokens is not None:
        return limits.cache_tokens
    if device.type != "cuda":
        return 1 << 20
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    others = total - free - reserved
    room = total * limits.gpu_memory_utilization - (allocated - held) - others
    # Never more than is there: activations and graphs need some of it, too.
    room = min(room, (free + reserved - allocated + held) * 0.9)
    return max(int(room), 0) // layout.token_bytes


class DeviceSession:
    """Cache, state and runner for one shape of work on one device."""

    def __init__(
        self,
        model: Any,
        sizes: Sizes,
        limits: Limits,
        stopper: Stopper,
        kinds: Kinds,
        block_size: int,
        layout: CacheLayout,
    ) -> None:
        device = model.get_input_embeddings().weight.device
        if limits.fp8:
            require_fp8_device(device)
        self.sizes = sizes
        self.signature = weight_signature(model)
        self.cache = DeviceCache(layout, sizes.blocks, block_size, device)
        table_width = -(-sizes.places // block_size) + 1
        state = DeviceState(sizes.rows, sizes.width, table_width, sizes.stops, device)
        ops: Ops = TritonOps(device) if device.type == "cuda" else TorchOps()
        graphs = uses_graphs(device, limits)
        self.runner = DeviceRunner(
            model, self.cache, state, ops, stopper, kinds, graphs, sizes.places, limits.fp8
        )

    @property
    def bytes(self) -> int:
        return self.cache.bytes

    def release(self) -> None:
        """Free the cache, the graphs and the fp8 copies now, whoever still holds this session; it is of no more use."""
        del self.cache, self.runner

    def scheduler(self, limits: Limits) -> Scheduler:
        blocks = BlockManager(self.cache.blocks, self.cache.block_size)
        budget = limits.max_num_batched_tokens
        rows = min(limits.max_num_seqs, budget, self.sizes.rows)
        return Scheduler(blocks, rows, budget, keep_free=self.cache.blocks // 100)


def uses_graphs(device: torch.device, limits: Limits) -> bool:
    return device.type == "cuda" and not limits.enforce_eager


def weight_signature(model: Any) -> tuple[int, ...]:
    """Where the weights are: graphs captured over other addresses are worthless."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def open_session(
    last: DeviceSession | None,
    model: Any,
    requests: list[Request],
    limits: Limits,
    stopper: Stopper,
    kinds: Kinds,
    layout: CacheLayout,
    block_size: int = BLOCK_SIZE,
) -> DeviceSession:
    """The last session when it still serves, else a new one sized for these requests."""
    sizes = Sizes.of(requests, limits, stopper, block_size)
    weight = model.get_input_embeddings().weight
    held = last.bytes if last is not None else 0
    tokens = memory_tokens(layout, limits, weight.device, held)
    longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    if tokens < longest:
        raise RolloutError(
            f"the longest request may reach {longest} tokens; the KV cache has room for {tokens} "
            "(data.max_prompt_length, data.max_response_length, rollout.gpu_memory_utilization)"
        )
    blocks = min(sizes.blocks, tokens // block_size)
    needed = Sizes(sizes.rows, sizes.width, sizes.places, sizes.stops, max(blocks, -(-longest // block_size)))
    if (
        last is not None
        and needed.fits_in(last.sizes)
        and last.cache.block_size == block_size
        and last.signature == weight_signature(model)
        and last.cache.unpark()
    ):
        last.runner.reset(stopper, kinds, uses_graphs(weight.device, limits))
        return last
    grown = needed.grown(last.sizes if last is not None else None, tokens // block_size, limits.max_model_len)
    if last is not None:
        last.release()  # the sizes above count on its memory
    log.debug("new session on %s: %s for %s", weight.device, grown, needed)
    return DeviceSession(model, grown, limits, stopper, kinds, block_size, layout)
