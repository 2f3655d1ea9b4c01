"""One rank of fine-tuning on several processes: its calls, beside those of every rank (meet, build, save, resume)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from verl.workers.rank import RankSetup, RankWorker
from verl.workers.sft.role import SFTRole
from verl.workers.shard_batch import Arrays, from_arrays

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig

PlainMetric = tuple[float, str, float]
"""Value, reduction and weight of a `Metric`."""

_OF_THE_STEP = ("train/grad_norm", "train/lr", "train/skipped_updates")


class SFTRankWorker(RankWorker):
    """Answers are plain values and arrays, so that they travel by any means."""

    def build_group(self, setup: RankSetup) -> SFTRole:
        return SFTRole(
            cast("SFTConfig", setup.cfg),
            training_steps=setup.training_steps,
            bad_batch_dir=setup.run_folder / "bad_batches",
        )

    @property
    def learner(self) -> SFTRole:
        return cast(SFTRole, self._group)

    def do_hidden_size(self) -> int:
        return self.learner.hidden_size()

    def do_train(self, part: Arrays, meta: Mapping[str, Any]) -> dict[str, PlainMetric]:
        metrics = self.learner.train(from_arrays(part, meta))
        if self.rank > 0:
            # One step was taken, not one on each rank.
            metrics = {name: metric for name, metric in metrics.items() if name not in _OF_THE_STEP}
        return {name: (float(m.value), m.reduce, float(m.weight)) for name, m in metrics.items()}

    def do_validate(self, part: Arrays) -> float:
        return self.learner.response_log_prob(from_arrays(part))
