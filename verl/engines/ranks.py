"""This process among the ranks that train together: counting, agreeing, and noticing that one has died.

What always holds: with one process nothing here touches torch.distributed; a rank that waits for a dead one stops
with a message that names the dead one, a few seconds after its connection breaks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl import distributed
from verl.engines.watchdog import Heartbeat
from verl.errors import ConfigError, TrainingHalted

log = logging.getLogger(__name__)

_TRANSPORT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|socket|timed out|timeout|recv|store",
    re.IGNORECASE,
)


class Ranks(distributed.Ranks):
    """The ranks that train together, their mesh, and the heartbeat by which a dead one is noticed."""

    def __init__(self, device: torch.device, fsdp_size: int = -1) -> None:
        super().__init__(device)
        self.mesh: DeviceMesh | None = None
        self._heartbeat: Heartbeat | None = None
        if self.world_size > 1:
            self.mesh = self._make_mesh(fsdp_size)
            self._heartbeat = Heartbeat.start()

    def _make_mesh(self, fsdp_size: int) -> DeviceMesh:
        world = self.world_size
        shards = world if fsdp_size in (-1, 0) or fsdp_size >= world else fsdp_size
        if world % shards:
            allowed = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ConfigError(
                f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks; allowed: -1 (all), {allowed}"
            )
        if shards == world:
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        return init_device_mesh(
            self.device.type, (world // shards, shards), mesh_dim_names=("replicate", "shard")
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a broken connection to a dead rank into a message that names it."""
        if self._heartbeat is None:
            yield
            return
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _TRANSPORT.search(str(error)):
                raise
            raise TrainingHalted(self._who_is_missing(self._heartbeat, error)) from error

    def _who_is_missing(self, heartbeat: Heartbeat, error: RuntimeError) -> str:
        cause = str(error).strip().split("\n")[0][:200]
        try:
            missing = heartbeat.missing()
        except (RuntimeError, OSError):
            missing = [0]  # the store lives with rank 0 and does not answer
        if not missing:
            return f"rank {self.rank}: communication failed although every rank still answers: {cause}"
        names = ", ".join(heartbeat.describe(rank) for rank in missing)
        return (
            f"rank {self.rank} stops because {names} died or stopped answering; look at its log for the reason, "
            f"then resume from the last checkpoint (trainer.resume_mode=auto). First sign: {cause}"
        )
