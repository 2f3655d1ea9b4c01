"""Generation on several processes without a trainer: each loads the weights and takes prompts as it gets free."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from verl.rollout.base import Request, Response, RolloutEngine
from verl.workers.generating import Generating
from verl.workers.process import prepare
from verl.workers.rank import RankSetup
from verl.workers.ray_calls import RankCalls
from verl.workers.ray_cluster import Cluster
from verl.workers.ray_group import CLOSE_S, START_S
from verl.workers.ray_rollout import GeneratingActor, SpreadRollout
from verl.workers.rpc_server import RPCServer

if TYPE_CHECKING:
    from verl.config.schema import GenerationConfig

ROLE = "generation rank"


class GenerationRank(RPCServer):
    """One engine with weights of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, ROLE)
        self.generating = Generating()
        self._engine: RolloutEngine | None = None

    def do_build(self, setup: RankSetup, path: str, adapter: Path | None) -> None:
        from verl.workers.generation import load_engine

        prepare(setup, self._address)
        self._engine = load_engine(cast("GenerationConfig", setup.cfg), path, adapter, setup.tokenizer)

    def do_generate(self, requests: list[Request], number: int) -> Iterator[list[Response]]:
        assert self._engine is not None
        return self.generating.run(self._engine, requests, number, version=0)

    def do_close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class GenerationActor(GeneratingActor):
    """A process that only generates."""

    def server(self, rank: int, world_size: int) -> RPCServer:
        return GenerationRank(rank)


@contextmanager
def spread_engine(
    cfg: GenerationConfig, path: str, adapter: Path | None, tokenizer: Any
) -> Iterator[SpreadRollout]:
    """Join or start a cluster and place the engines there, all as one."""
    cluster = Cluster(cfg)
    calls: RankCalls | None = None
    try:
        cluster.connect()
        calls = RankCalls(cluster.place(START_S, GenerationActor), cfg.trainer.watchdog_s, ROLE)
        calls.handshake(START_S)
        gpus = cluster.on_gpus()
        setup = RankSetup(
            cfg=copy.deepcopy(cfg),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            training_steps=0,
            run_folder=Path(),
            threads=None if gpus else cluster.threads(),
            one_host=len(set(calls.addresses)) == 1,
            search_path=tuple(os.path.abspath(folder) for folder in sys.path),
            folder=os.getcwd(),
        )
        setup.cfg.trainer.device = "cuda" if gpus else "cpu"
        calls.all("build", ray.put(setup), path, adapter)
        yield SpreadRollout(
            calls, cfg.rollout.max_num_seqs, hosts=range(len(calls)), shared=False, publish=_never
        )
    finally:
        if calls is not None:
            calls.shutdown(CLOSE_S)
        cluster.close()


def _never(version: int) -> None:
    raise NotImplementedError("weights do not change while a file is generated")
