"""What happens after an optimiser step whose gradient was not finite."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from verl.data.proto import DataProto
from verl.errors import TrainingHalted

log = logging.getLogger(__name__)


class NonFiniteGuard:
    """After a step skipped for a non-finite gradient: saves its batches for inspection, and halts the run after `limit`
    such steps in a row. Tensors are saved as safetensors and the rest as JSON: opening the files runs no code."""

    def __init__(self, name: str, limit: int, folder: Path | None, rank: int = 0) -> None:
        self.name, self.limit, self.folder, self.rank = name, limit, folder, rank
        self.in_a_row = 0
        self._batches: list[DataProto] = []

    def remember(self, batch: DataProto) -> None:
        """A batch whose gradient is in the step to come."""
        self._batches.append(batch)

    def after_step(self, skipped: bool, step: int, expected: bool = False) -> None:
        """`expected`: the skip lowered the loss scale of float16, which is normal."""
        batches, self._batches = self._batches, []
        if not skipped:
            self.in_a_row = 0
            return
        if expected:
            return
        self.in_a_row += 1
        where = "the batch was not saved"
        if self.folder and batches:
            try:
                saved = [str(self._save(batch, step, at)) for at, batch in enumerate(batches)]
                where = f"the batch is saved as {', '.join(saved)}"
            except Exception as error:  # a full disk must not stop the run
                where = f"the batch could not be saved ({error})"
        log.warning(
            "%s: non-finite gradient in optimiser step %d, update skipped; %s",
            self.name,
            step,
            where,
        )
        if self.in_a_row >= self.limit:
            raise TrainingHalted(
                f"{self.name}: {self.in_a_row} optimiser steps in a row had a non-finite gradient "
                f"(trainer.health.max_skipped_steps={self.limit}); {where}. Check it for extreme advantages or "
                "log-probs; a lower optim.lr or grad_clip often helps"
            )

    def _save(self, batch: DataProto, step: int, at: int) -> Path:
        from safetensors.torch import save_file

        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f"nonfinite_{self.name}_step{step}_rank{self.rank}_{self.in_a_row}_{at}"
        file = self.folder / f"{stem}.safetensors"
        save_file({name: value.contiguous().cpu() for name, value in batch.batch.items()}, file)
        other = {
            "meta_info": batch.meta_info,
            "rows": {name: list(values) for name, values in batch.non_tensor_batch.items()},
        }
        (self.folder / f"{stem}.json").write_text(json.dumps(other, default=_plain))
        return file


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)
