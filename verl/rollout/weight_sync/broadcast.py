"""Weights by collective: from one sender to processes anywhere, in buckets that are broadcast to all of them at once.

The group is one of its own beside the process's default one (which trains, or which an engine made), over gloo between
CPUs and NCCL between GPUs. A bucket travels as a header (names, types, shapes as JSON) and one run of bytes.

What always holds: both sides hold one bucket at a time and never a second copy of the model; everybody receives the
same pairs in the same order; a process that is gone ends the hand-over on the other side with an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import TrainingHalted
from verl.rollout.weight_sync.buckets import BUCKET_BYTES, cut
from verl.rollout.weight_sync.fingerprint import Manifest
from verl.rollout.weight_sync.weights import Pairs

SENDER = 0
_PREFIX = "verl/handover"
_ALIGNED = 16
"""Every tensor of a bucket begins at a multiple of it, so that any type can be read in place."""


class Link:
    """One place in the group of a sender (place 0) and its receivers."""

    def __init__(self, store: Any, place: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.device = device
        named = dist.PrefixStore(_PREFIX, store)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            # As torch names the groups it makes itself: in its own log and dumps this one is told from the others.
            options.group_name, options.global_ranks_in_group = _PREFIX, list(range(size))
            self._group: Any = dist.ProcessGroupNCCL(named, place, size, options)
        else:
            self._group = dist.ProcessGroupGloo(named, place, size, timeout)

    def send(self, pairs: Pairs, limit: int = BUCKET_BYTES) -> Manifest:
        """All pairs to every receiver; their fingerprints."""
        sent = Manifest()
        for bucket in cut(sent.watch(pairs), limit):
            header = [
                (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                for name, tensor in bucket.items()
            ]
            self._send_header(header)
            self._broadcast(self._packed(bucket))
        self._send_header([])
        return sent

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All pairs of one `send`. A tensor is valid until the next bucket is asked for."""
        while header := self._receive_header():
            kinds = [(name, getattr(torch, dtype), shape) for name, dtype, shape in header]
            places = _places([_bytes(dtype, shape) for _, dtype, shape in kinds])
            packed = torch.empty(places[-1], dtype=torch.uint8, device=self.device)
            self._broadcast(packed)
            for (name, dtype, shape), start in zip(kinds, places, strict=False):
                yield name, packed[start : start + _bytes(dtype, shape)].view(dtype).view(shape)

    def _packed(self, bucket: dict[str, torch.Tensor]) -> torch.Tensor:
        places = _places([tensor.numel() * tensor.element_size() for tensor in bucket.values()])
        packed = torch.zeros(places[-1], dtype=torch.uint8, device=self.device)
        for tensor, start in zip(bucket.values(), places, strict=False):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            packed[start : start + flat.numel()].copy_(flat)
        return packed

    def _send_header(self, header: list[Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([text.numel()], device=self.device))
        self._broadcast(text)

    def _receive_header(self) -> list[Any]:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(text)
        header: list[Any] = json.loads(bytes(text.tolist()).decode())
        return header

    def _broadcast(self, tensor: torch.Tensor) -> None:
        try:
            self._group.broadcast(tensor, SENDER).wait()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            cause = str(error).strip().split("\n")[0][:200]
            raise TrainingHalted(
                "the hand-over of weights broke off because another process of it died or stopped answering; look at "
                "its log for the reason, then resume from the last checkpoint (trainer.resume_mode=auto). First "
                f"sign: {cause}"
            ) from error


def _bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _places(sizes: list[int]) -> list[int]:
    """Where each run of bytes begins, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return places
