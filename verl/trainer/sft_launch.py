"""Fine-tuning started by `torchrun`: what its environment means for the config, and how its processes end.

What always holds: however the command ends on rank 0, the other ranks are told.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from verl.config.ranks import world_size
from verl.config.sources import parse_command_line, read_yaml
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.workers.sft.channel import Job

logger = logging.getLogger(__name__)

_NODES = ("nnodes", "nnode")


@contextmanager
def launched() -> Iterator[Job | None]:
    """The job this process is a part of; None where it is alone. At the end of rank 0 the others are let go."""
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield None
        return
    from verl.workers.sft.channel import Channel, Job

    job = Job.from_environment()
    if job is None or job.rank > 0:
        yield job
        return
    channel = Channel(job)
    try:
        yield job
    finally:
        with suppress(RuntimeError):  # the store is gone, and the others have seen it
            channel.end()


def with_sizes(arguments: list[str], job: Job | None) -> list[str]:
    """The command line with the number of processes torchrun started, where the user gave none."""
    if job is None:
        return arguments
    line = parse_command_line(arguments)
    given = read_yaml(line.config_path, line.config_name).get("trainer") or {}
    sizes = []
    if "n_gpus_per_node" not in given:
        sizes.append(f"trainer.n_gpus_per_node={job.local_world_size}")
    if not any(name in given for name in _NODES):
        sizes.append(f"trainer.nnodes={job.world_size // job.local_world_size}")
    return [*sizes, *arguments]


def refuse_conflicts(cfg: SFTConfig, job: Job | None) -> None:
    """What the config asks for and what torchrun does are one thing."""
    if job is None:
        return
    trainer = cfg.trainer
    if world_size(cfg) != job.world_size:
        raise ConfigError(
            f"torchrun started WORLD_SIZE={job.world_size} processes, but trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node} x trainer.nnodes={trainer.nnodes} asks for {world_size(cfg)}; leave both keys "
            f"out, or give torchrun --nnodes={trainer.nnodes} --nproc_per_node={trainer.n_gpus_per_node}"
        )
    if trainer.max_restarts > 0:
        raise ConfigError(
            f"trainer.max_restarts={trainer.max_restarts}, but this run was started by torchrun, which restarts its "
            f"processes itself; leave the key out and give torchrun --max-restarts={trainer.max_restarts}"
        )
    for name in sorted(key for key in cfg.user_set if key.startswith("ray_kwargs.")):
        logger.warning("'%s' has no effect: a run started by torchrun does without Ray", name)


def leave(code: int, rank: int) -> None:
    """End at once where the ordinary way out would not do: on rank 0 while its own part of the work still waits for a
    rank that will never answer; on the others, whose threads may be inside the store, which Python cannot end."""
    from verl.workers.sft.torchrun import OWN_THREAD

    if rank > 0 or any(thread.name == OWN_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
