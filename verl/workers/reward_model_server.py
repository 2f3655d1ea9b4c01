"""One process of a reward model's pool: the whole model, on a GPU (or CPU process) that nobody else uses.

Torch is loaded only when the actor is there: by then it knows how many threads it may have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.reward.base import RewardResult, RewardSample
from verl.workers.rpc_server import RPCServer

if TYPE_CHECKING:
    from verl.reward.model import RewardModel

ROLE = "reward model rank"


@dataclass(frozen=True)
class ModelSetup:
    """What every process of the pool is built from."""

    config: Any
    """The section `reward.reward_model`."""
    device: str
    search_path: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """What the other side needs to share out work."""

    hidden_size: int
    batch_size: int


class RewardModelRank(RPCServer):
    """Loads the model once and scores what it is given."""

    role = ROLE
    _model: RewardModel | None = None

    def do_gpus(self) -> list[str]:
        """The GPUs this process may use, as Ray numbers them."""
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]

    def do_build(self, setup: ModelSetup, rank: int) -> ModelFacts:
        from verl.reward.model import RewardModel

        self.rank = self.watchdog.rank = rank
        sys.path += [folder for folder in setup.search_path if folder not in sys.path]
        self._model = RewardModel.from_config(setup.config, setup.device)
        self._model.onload()
        config = self._model.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return ModelFacts(int(getattr(text, "hidden_size", 1024)), self._model.batch_size)

    def do_score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        assert self._model is not None
        return self._model.results(samples)

    def do_close(self) -> None:
        self._model = None
