"""Generation on several processes without a trainer: each loads the weights and takes requests as it gets free."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.workers.rank import RankSetup
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_group import CLOSE_S, START_S, build_ranks
from verl.workers.ray_rollout import RayRollout

if TYPE_CHECKING:
    from verl.config.schema import GenerationConfig


@contextmanager
def ray_engine(
    cfg: GenerationConfig, path: str, adapter: Path | None, tokenizer: Any
) -> Iterator[RayRollout]:
    """Join or start a cluster and place the engines there, all as one."""
    cluster = Cluster(cfg)
    calls: RankCalls | None = None
    try:
        cluster.connect()
        actors = cluster.place(START_S, "verl.workers.generation:GenerationRank")
        calls = RankCalls(actors, cfg.trainer.watchdog_s, "generation rank")
        setup = RankSetup(cfg=copy.deepcopy(cfg), tokenizer=tokenizer, training_steps=0, run_folder=Path())
        build_ranks(cluster, calls, setup, path, adapter, joined=False)
        yield RayRollout(calls, cfg.rollout.max_num_seqs, hosts=range(len(calls)), colocated=False)
    finally:
        if calls is not None:
            calls.shutdown(CLOSE_S)
        cluster.close()
