"""An engine that only generates, without a trainer: in this process, or one in each of several on Ray.
The tokens do not depend on how many there are, because every draw is keyed by its request.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.capabilities import engine_spec
from verl.config.parallelism import engines
from verl.config.schema import RolloutConfig
from verl.models.loading import load_causal_lm, parameter_dtype
from verl.models.lora import merge_adapter
from verl.rollout import build_rollout
from verl.workers.local import choose_device
from verl.workers.placement import require_ray
from verl.workers.rank import RankSetup, prepare_process
from verl.workers.rollout_rank import RolloutServer

if TYPE_CHECKING:
    from verl.config.schema import GenerationConfig, GenerationModelConfig, ModelConfig
    from verl.config.sections.trainer import PlacementConfig
    from verl.rollout.base import RolloutEngine

logger = logging.getLogger(__name__)


def rollout_section(cfg: GenerationConfig) -> RolloutConfig:
    """The rollout section as engines know it; without training, the KV cache keeps its memory."""
    own = {field.name: getattr(cfg.rollout, field.name) for field in fields(cfg.rollout)}
    return RolloutConfig(**own, free_cache_engine=False)


@contextmanager
def open_engine(
    cfg: GenerationConfig, path: str, adapter: Path | None, tokenizer: Any
) -> Iterator[RolloutEngine]:
    """The engine the config asks for, with the weights of `path`; closed at the end of the block. Those of several
    processes are as one; each loads the weights and takes requests as it gets free."""
    if engines(cfg) == 1:
        with closing(_load_engine(cfg, path, adapter, tokenizer)) as engine:
            yield engine
        return
    require_ray(cfg)
    from verl.workers.ray_calls import RankCalls
    from verl.workers.ray_cluster import Cluster
    from verl.workers.ray_group import CLOSE_S, START_S, build_ranks
    from verl.workers.ray_rollout import RayRollout

    with ExitStack() as stack:
        cluster = Cluster(cfg)
        stack.callback(cluster.close)
        cluster.connect()
        actors = cluster.start_actors(START_S, "verl.workers.generation:GenerationRank")
        calls = RankCalls(actors, cfg.trainer.watchdog_s, "generation rank")
        stack.callback(calls.shutdown, CLOSE_S)
        setup = RankSetup(cfg=copy.deepcopy(cfg), tokenizer=tokenizer, training_steps=0, run_folder=Path())
        build_ranks(cluster, calls, GenerationRank.do_build, setup, path, adapter, joined=False)
        yield RayRollout(calls, cfg.rollout.most_sequences, hosts=range(len(calls)), colocated=False)


def load_engine(
    rollout: RolloutConfig,
    section: GenerationModelConfig | ModelConfig,
    trainer: PlacementConfig,
    path: str,
    adapter: Path | None,
    tokenizer: Any,
) -> RolloutEngine:
    """An engine of this process, with the weights of `path`."""
    device = choose_device(trainer.device)
    model = load_causal_lm(
        path,
        dtype=parameter_dtype("auto" if rollout.dtype == "fp8" else rollout.dtype, device),
        device=device,
        trust_remote_code=section.trust_remote_code,
        override_config=section.override_config,
    )
    if adapter is not None:
        logger.info("adapter %s: %d weights changed", adapter, merge_adapter(model, adapter))
    model.requires_grad_(False)
    engine: Any = build_rollout(rollout.name, model, tokenizer, rollout, watchdog_s=trainer.watchdog_s)
    if engine_spec(rollout.name).owns_weights:
        engine.source = None  # it has taken and proven its copy; ours would only hold memory
    return engine  # type: ignore[no-any-return]


def _load_engine(cfg: GenerationConfig, path: str, adapter: Path | None, tokenizer: Any) -> RolloutEngine:
    return load_engine(rollout_section(cfg), cfg.model, cfg.trainer, path, adapter, tokenizer)


class GenerationRank(RolloutServer):
    """One engine with its own copy of the weights."""

    role = "generation rank"

    def do_build(self, setup: RankSetup[GenerationConfig], path: str, adapter: Path | None) -> None:
        prepare_process(setup, self.address)
        self.host(_load_engine(setup.cfg, path, adapter, setup.tokenizer))
