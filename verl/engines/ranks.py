"""This process among the ranks that train together: counting, agreeing, and noticing that one has died.

With one process nothing here touches torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl import distributed
from verl.errors import ConfigError
from verl.watchdog import Heartbeat


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
        with nullcontext() if self._heartbeat is None else self._heartbeat.naming_dead_peers():
            yield
