"""What `trainer.exact` promises of a step: tokens have the log-probs with which they were drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from verl.data.proto import DataProto
from verl.errors import TrainingHalted

if TYPE_CHECKING:
    from verl.engines.base import TrainEngine

EXACT_FILE = "exact_row.json"
"""In `bad_batches` of the run folder: the row that ended the run."""


class ExactGap:
    """The first row whose log-probs are not those with which its tokens were drawn."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None

    def add(self, log_prob: torch.Tensor, micro: DataProto, mask: torch.Tensor) -> None:
        """`mask`: the tokens that the weights of now have drawn."""
        tensors = micro.batch
        differs = mask & (log_prob != tensors["rollout_log_probs"])
        if self._found is not None or not bool(differs.any()):
            return
        row, column = differs.nonzero()[0].tolist()
        attended = tensors["attention_mask"][row].bool()
        before = attended[: len(attended) - mask.shape[1]]
        self._found = {
            "tokens": tensors["input_ids"][row][attended].tolist(),
            "prompt": int(before.sum()),
            "temperature": float(micro.meta_info["temperature"]),
            "token": column,
            "trainer": float(log_prob[row, column]),
            "rollout": float(tensors["rollout_log_probs"][row, column]),
            "differing": int(differs.sum()),
        }

    def check(self, engine: TrainEngine) -> None:
        """TrainingHalted with the place where the difference arises."""
        row = self._found
        if row is None:
            return
        folder = engine.bad_batch_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / EXACT_FILE).write_text(json.dumps(row))
        if engine.info.layout.world_size > 1:  # the other ranks cannot be asked to compute with this one
            place = "`verl doctor --exact RUN` looks for the operation"
        else:
            from verl.rollout.native.exact_check import first_difference

            with engine.weights().module() as module:
                place = first_difference(module, row["tokens"], row["prompt"], row["temperature"]) or (
                    "computed again its passes agree: the weights that drew it are not those that train"
                )
        raise TrainingHalted(
            f"trainer.exact=True: token {row['token']} of a response has the log-prob {row['trainer']!r}, and had "
            f"{row['rollout']!r} when it was drawn ({row['differing']} tokens of its micro-batch differ). {place}"
        )
