"""Weights to processes on other nodes: one sender broadcasts buckets; receivers load them into an engine or a module.

The process group is separate from the default one, over gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.config.sections.rollout import RolloutConfig
from verl.errors import RolloutError, TrainingHalted
from verl.models.weight_source import Adapter, NamedTensors, Names, WeightSource
from verl.rollout.base import Request, Response, RolloutEngine
from verl.rollout.source import ModelInfo
from verl.rollout.weight_sync.buckets import (
    BUCKET_BYTES,
    Header,
    bucket_header,
    pack,
    packed_bytes,
    split_buckets,
    unpack,
)
from verl.rollout.weight_sync.fingerprint import WeightManifest, fingerprint
from verl.rollout.weight_sync.probe import probe_request

PROBE_S = 30.0
"""How long a sync waits for log-probs of an engine that runs other samples too: they may use all of its memory."""
POLL_S = 0.5
SENDER = 0
_PREFIX = "verl/weight_sync"
_SAME_MODEL = "Both are built from actor_rollout_ref.model: is its folder the same on every node?"


class Broadcast:
    """One rank in the group of a sender (rank 0) and its receivers."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.device = device
        named = dist.PrefixStore(_PREFIX, store)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # As torch does for groups it creates itself: names this one in NCCL's log and dumps.
            options.group_name, options.global_ranks_in_group = _PREFIX, list(range(size))
            self._group: Any = dist.ProcessGroupNCCL(named, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(named, rank, size, timeout)

    def send(self, tensors: NamedTensors, limit: int = BUCKET_BYTES) -> WeightManifest:
        """All tensors to every receiver; their fingerprints."""
        sent = WeightManifest()
        for bucket in split_buckets(sent.watch(tensors), limit):
            header = bucket_header(bucket)
            self._send_header(header)
            packed = torch.empty(packed_bytes(header), dtype=torch.uint8, device=self.device)
            pack(bucket, packed)
            self._broadcast(packed)
        self._send_header([])
        return sent

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of one `send`."""
        while header := self._receive_header():
            packed = torch.empty(packed_bytes(header), dtype=torch.uint8, device=self.device)
            self._broadcast(packed)
            yield from unpack(header, packed)

    def _send_header(self, header: Header) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([text.numel()], device=self.device))
        self._broadcast(text)

    def _receive_header(self) -> Header:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(text)
        header: Header = json.loads(bytes(text.tolist()).decode())
        return header

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            self._group.broadcast(tensor, SENDER).wait()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            cause = str(error).strip().split("\n")[0][:200]
            raise TrainingHalted(
                "the weight sync broke off because another of its processes died or stopped answering; see its log, "
                f"then resume from the last checkpoint (trainer.resume_mode=auto). First error: {cause}"
            ) from error


class ReceivedWeights(WeightSource):
    """A source for engines that keep a copy. Each method that gives tensors takes one `Broadcast.send`."""

    remote = True

    def __init__(self, model_info: ModelInfo, lora_config: Any = None) -> None:
        self.model_info, self._lora_config = model_info, lora_config
        self.dtype, self.device = getattr(torch, model_info.dtype), torch.device(model_info.device)
        self.broadcast: Broadcast | None = None
        self.received = WeightManifest()
        """Of the current version."""

    def expect(self, version: int) -> None:
        """What arrives from now on is policy `version`."""
        self.version, self.received = version, WeightManifest()

    def named_tensors(self, names: Names = "hf") -> Iterator[tuple[str, torch.Tensor]]:
        assert self.broadcast is not None
        return self.received.watch(self.broadcast.receive())

    def base_tensors(self, names: Names = "hf") -> Iterator[tuple[str, torch.Tensor]]:
        return self.named_tensors()

    def adapter(self) -> Adapter | None:
        return None if self._lora_config is None else Adapter(self._lora_config, self.named_tensors())

    def module(self) -> AbstractContextManager[nn.Module]:
        raise RolloutError("the module is in the trainer's process")

    structure = module

    def log_probs(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """The trainer computes them in its own process."""


def load_into(
    module: nn.Module, tensors: Any, wanted: Callable[[str], bool] = lambda name: True
) -> WeightManifest:
    """Copy the tensors into the module's own and fingerprint what is there afterwards.

    They must be exactly those tensors of the module whose name is `wanted`. Where dtypes differ, the fingerprint is of
    what arrived: nothing else could equal the sender's."""
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if wanted(name)}
    manifest = WeightManifest()
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                found = tuple(own[name].shape) if name in own else "nothing"
                raise TrainingHalted(
                    f"the trainer sent {name} of shape {tuple(tensor.shape)}; the model that generates has {found} of "
                    f"that name. {_SAME_MODEL}"
                )
            own[name].copy_(tensor)
            manifest[name] = fingerprint(own[name] if own[name].dtype == tensor.dtype else tensor)
    missing = [name for name in own if name not in manifest]
    if missing:
        raise TrainingHalted(
            f"the trainer did not send {len(missing)} weights of the model that generates, e.g. "
            f"{', '.join(missing[:3])}. {_SAME_MODEL}"
        )
    return manifest


@dataclass(frozen=True)
class SyncReport:
    """A receiver's answer to a weight sync: fingerprints, and a few log-probs to compare with the trainer's."""

    received: dict[str, str]
    prompt: tuple[int, ...]
    """Empty, like the rest, where an engine ran too many samples to answer the probe beside them."""
    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]
    precision: str


def report(
    engine: RolloutEngine,
    received: WeightManifest,
    info: ModelInfo,
    config: RolloutConfig,
    keep: Callable[[list[Response]], None],
) -> SyncReport:
    """With tokens the engine draws after a fixed prompt. Other samples may be running, at most `max_num_seqs` at once;
    `keep` gets those of them that finish meanwhile."""
    request = probe_request(info.vocab_size, config.max_model_len)
    others = _outstanding(engine)
    responses: list[Response] = []
    if not others:
        responses = list(engine.generate([request]))
    elif others + request.n <= config.most_sequences:
        responses = _generate_beside(engine, request, keep)
    prompt = tuple(request.prompt_ids) if responses else ()
    tokens = tuple(tuple(response.token_ids) for response in responses)
    log_probs = tuple(tuple(response.log_probs) for response in responses)
    precision = info.dtype if config.dtype == "auto" else config.dtype
    precision = "fp8" if config.kv_cache_dtype == "fp8" else precision
    return SyncReport(dict(received), prompt, tokens, log_probs, precision)


def _outstanding(engine: RolloutEngine) -> int:
    stats = engine.stats()
    return stats.running + stats.waiting


def _generate_beside(
    engine: RolloutEngine, request: Request, keep: Callable[[list[Response]], None]
) -> list[Response]:
    """The responses to this request; none where the engine does not come to it for `PROBE_S`."""
    deadline = time.monotonic() + PROBE_S
    engine.submit([request])
    found: list[Response] = []
    while len(found) < request.n:
        responses = engine.poll(POLL_S)
        found += [response for response in responses if response.request_id == request.request_id]
        keep([response for response in responses if response.request_id != request.request_id])
        if not responses and not _outstanding(engine):
            raise RolloutError(f"{type(engine).__name__} left {request.n - len(found)} samples unanswered")
        if time.monotonic() > deadline:
            deadline = float("inf")
            with suppress(NotImplementedError):  # then it runs to its end
                engine.abort([request.request_id])
    return [] if any(response.finish_reason == "abort" for response in found) else found
