"""What the fine-tuning loop sees of its model: batches in, numbers out, wherever the model is.

What always holds: the numbers are those of one process up to rounding; every rank has about the same work, and the
masked rows that fill up a batch count for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.algorithms.aggregation import batch_counts
from verl.checkpoint import CheckpointManager
from verl.config.ranks import world_size
from verl.observe.metrics import Metric, average_metrics, reduce_metrics
from verl.workers.placement import require_ray
from verl.workers.ray_checkpoints import RayCheckpoints
from verl.workers.sft.role import SFTRole
from verl.workers.shard_batch import Arrays, deal, pad_rows, to_arrays

if TYPE_CHECKING:
    from verl.config.schema import SFTConfig
    from verl.data.proto import DataProto
    from verl.workers.sft.channel import Job

_INPUTS = ("input_ids", "attention_mask", "response_mask")


class Calls(Protocol):
    """How calls reach the ranks of a run; after an error nothing more is sent but the end."""

    def __len__(self) -> int: ...

    def all(self, call: str, *args: Any) -> list[Any]:
        """The same call to every rank; their values by rank."""

    def each(self, call: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One call to every rank, with arguments of its own."""


class SFTGroup(ABC):
    """The model of one run."""

    checkpoints: Any
    """Saves and resumes like a `CheckpointManager`."""

    @abstractmethod
    def train(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one batch; `train/{loss,grad_norm,lr,skipped_updates}`."""

    @abstractmethod
    def response_log_prob(self, batch: DataProto) -> float:
        """The sum over the response tokens of a batch, without learning from it."""

    @abstractmethod
    def checkpoint_parts(self) -> dict[str, Any]:
        """The engines whose state a checkpoint holds, by name."""

    @abstractmethod
    def close(self) -> None:
        """Release devices and processes."""


class LocalSFT(SFTGroup):
    """In this process, on one device."""

    def __init__(self, cfg: SFTConfig, *, training_steps: int, run_folder: Path) -> None:
        self.role = SFTRole(cfg, training_steps=training_steps, bad_batch_dir=run_folder / "bad_batches")
        self.checkpoints = CheckpointManager.from_config(cfg, run_folder)

    def train(self, batch: DataProto) -> dict[str, float]:
        return average_metrics([self.role.train(batch)])

    def response_log_prob(self, batch: DataProto) -> float:
        return self.role.response_log_prob(batch)

    def checkpoint_parts(self) -> dict[str, Any]:
        return self.role.checkpoint_parts()

    def close(self) -> None:
        self.role.close()


class SpreadSFT(SFTGroup):
    """Over ranks that have been built (`SFTRankWorker`), by whatever carries calls to them."""

    def __init__(self, calls: Calls, close: Callable[[], None]) -> None:
        self.calls = calls
        self.checkpoints = RayCheckpoints(calls)  # type: ignore[arg-type]
        self._close = close
        self._hidden_size = calls.all("hidden_size")[0]

    def train(self, batch: DataProto) -> dict[str, float]:
        meta = {**batch_counts(batch.batch["response_mask"]), "dp_size": len(self.calls)}
        found = self.calls.each("train", [(part, meta) for part in self._deal(batch)])
        ranks = [{name: Metric(*plain) for name, plain in metrics.items()} for metrics in found]
        return average_metrics([reduce_metrics(ranks)])

    def response_log_prob(self, batch: DataProto) -> float:
        return float(sum(self.calls.each("validate", [(part,) for part in self._deal(batch)])))

    def checkpoint_parts(self) -> dict[str, Any]:
        """Names only: the engines are on the ranks, and so is their saving."""
        return {"actor": None}

    def close(self) -> None:
        self._close()

    def _deal(self, batch: DataProto) -> list[Arrays]:
        padded = pad_rows({name: batch.batch[name] for name in _INPUTS}, len(self.calls))
        mask = padded["attention_mask"]
        rows = deal(mask, len(self.calls), balance=True, hidden_size=self._hidden_size)
        return [to_arrays(padded, share) for share in rows]


def build_sft_group(
    cfg: SFTConfig, tokenizer: Any, *, training_steps: int, run_folder: Path, job: Job | None = None
) -> SFTGroup:
    """In this process; on the processes of `job`; or, where the config asks for several, on Ray."""
    if job is not None:
        from verl.workers.sft.torchrun import torchrun_sft

        return torchrun_sft(cfg, job, tokenizer, training_steps=training_steps, run_folder=run_folder)
    if world_size(cfg) == 1:
        return LocalSFT(cfg, training_steps=training_steps, run_folder=run_folder)
    require_ray(cfg)
    from verl.workers.sft.ray import ray_sft

    return ray_sft(cfg, tokenizer, training_steps=training_steps, run_folder=run_folder)
