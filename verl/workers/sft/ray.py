"""Fine-tuning on several ranks, one Ray actor each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.workers.rank import RankSetup
from verl.workers.ray_actor import RankProcess
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_group import CLOSE_S, START_S, build_ranks
from verl.workers.sft.group import SpreadSFT

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.workers.rpc_server import RPCServer


class SFTRankActor(RankProcess):
    """A rank of fine-tuning."""

    def server(self, rank: int, world_size: int) -> RPCServer:
        from verl.workers.sft.rank import SFTRankWorker

        return SFTRankWorker(rank, world_size)


def ray_sft(cfg: SFTConfig, tokenizer: Any, *, training_steps: int, run_folder: Path) -> SpreadSFT:
    """Join or start a cluster, place the ranks there, load the model on them."""
    cluster = Cluster(cfg)
    try:
        cluster.connect()
        calls = RankCalls(cluster.place(START_S, SFTRankActor), cfg.trainer.watchdog_s)
        setup = RankSetup(
            cfg=copy.deepcopy(cfg),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            training_steps=training_steps,
            run_folder=run_folder.absolute(),
        )
        build_ranks(cluster, calls, setup)

        def close() -> None:
            calls.shutdown(CLOSE_S)
            cluster.close()

        return SpreadSFT(calls, close)
    except BaseException:
        cluster.close()
        raise
