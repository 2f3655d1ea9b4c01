"""Weights to processes on other nodes: one sender broadcasts buckets to all receivers.

The process group is separate from the default one, over gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.errors import TrainingHalted
from verl.models.weight_source import NamedTensors
from verl.rollout.weight_sync.buckets import (
    BUCKET_BYTES,
    Header,
    bucket_header,
    pack,
    packed_bytes,
    split_buckets,
    unpack,
)
from verl.rollout.weight_sync.fingerprint import Manifest

SENDER = 0
_PREFIX = "verl/weight_sync"


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

    def send(self, tensors: NamedTensors, limit: int = BUCKET_BYTES) -> Manifest:
        """All tensors to every receiver; their fingerprints."""
        sent = Manifest()
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
