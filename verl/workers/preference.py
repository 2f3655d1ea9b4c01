"""Preference training: DPO and its relatives on pairs of answers, KTO on single ones.

A batch holds the rows of a pair next to each other; they stay in one micro-batch, so that a pair's loss needs no second
pass, and their common beginning is computed once. A single answer is followed by its prompt with another answer, of
which KTO's KL is estimated in a pass of its own. The reference's log-probs are those of the weights training starts
from: computed once before the first step and kept in the run folder, so that there is no second model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from verl.algorithms.preference import (
    Answers,
    implied_rewards,
    kto_kl,
    pair_terms,
    preference_loss,
    rounding_of,
    share_right,
)
from verl.config.model_path import weight_files
from verl.data.preference_dataset import PreferenceDataset
from verl.data.proto import DataProto
from verl.observe.metrics import Metric
from verl.workers.offline import OfflineRole

if TYPE_CHECKING:
    from verl.data.loader import Loader
    from verl.engines.base import ModelOutput

logger = logging.getLogger(__name__)

_COUNTS = {
    "loss": "items", "accuracy": "items", "kl": "items", "chosen_reward": "chosen", "rejected_reward": "rejected",
}  # fmt: skip
"""Of each metric, what its sum is divided by. `items` are pairs or single answers."""
CACHE_FILE = "reference_log_probs.safetensors"
_ROWS_AT_ONCE = 512


class PreferenceRole(OfflineRole):
    """The policy that learns which answers are preferred."""

    names: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "chosen_reward", "rejected_reward")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._settings = self.cfg.algorithm
        self._loss = preference_loss(self._settings.loss)

    # -- reference ----------------------------------------------------------------------------------------------

    def prepare(self, loaders: Sequence[Loader | None], folder: Path) -> None:
        if not self._loss.needs or not self.cfg.algorithm.cache_reference:
            return
        datasets: dict[str, Any] = {
            name: loader.dataset
            for name, loader in zip(("train", "val"), loaders, strict=True)
            if loader is not None
        }
        file, key = folder / CACHE_FILE, _cache_key(self.cfg, datasets)
        # The key says nothing of the weights of a model that was given as an object.
        afresh = self._given_model and self.cfg.trainer.resume_mode == "disable"
        known = None if afresh else _read_cache(file, key)
        if self.on_any_rank(known is None):
            logger.info("computing the reference's log-probs of %d items", sum(map(len, datasets.values())))
            known = {name: self._reference_of(dataset) for name, dataset in datasets.items()}
            if self.rank == 0:
                save_file(known, file, metadata={"key": key})
        assert known is not None
        for name, dataset in datasets.items():
            dataset.reference = known[name]

    def _reference_of(self, dataset: PreferenceDataset) -> np.ndarray:
        """[items, rows of each], by the weights the engine has now."""
        found = []
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            positions = range(start, min(start + _ROWS_AT_ONCE, len(dataset)))
            sums = self.log_prob_sums(dataset.batch(list(positions), [str(each) for each in positions]))
            found.append(sums.view(len(positions), -1).numpy())
        return np.concatenate(found)

    # -- training -----------------------------------------------------------------------------------------------

    def train(self, batch: DataProto) -> dict[str, float]:
        rows, counts = self._counted(batch)
        metrics = super().train(rows)
        sums = {name: metrics.pop(f"train/{name}") for name in self.names}
        return {**metrics, **_means("train", {**sums, **counts})}

    def _counted(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """The rows to learn from, with the reference's log-probs, and what sums over them are divided by; where the
        loss is of single answers with its estimate of the KL, from the rows that answer other prompts."""
        if not self._loss.needs:
            batch.batch["ref_log_prob"] = torch.zeros(len(batch), dtype=torch.float64)
        elif "ref_log_prob" not in batch.batch:
            batch.batch["ref_log_prob"] = self.log_prob_sums(batch, reference=True)
        found: dict[str, float] = {}
        if not self._loss.compares_responses:
            mismatched = batch.batch["mismatched"].numpy()
            others, batch = batch[mismatched], batch[~mismatched]
            for part in (others, batch):
                part.meta_info = {**part.meta_info, "rows_together": 1}
            batch.meta_info["kl"] = float(kto_kl(self.log_prob_sums(others) - others.batch["ref_log_prob"]))
            found["kl"] = batch.meta_info["kl"] * len(batch)
        chosen = int(batch.batch["chosen"].sum())
        items = len(batch) // batch.meta_info["rows_together"]
        batch.meta_info["items"] = items
        return batch, {"items": items, "chosen": chosen, "rejected": len(batch) - chosen, **found}

    def loss(self, out: ModelOutput, micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The mean over the pairs, or the single answers, of the whole batch; its metrics are sums."""
        assert out.log_probs is not None
        mask = micro.batch["response_mask"].bool()
        # As the reference's: sums of equal log-probs are then equal, also those of float32.
        sums = torch.where(mask, out.log_probs, 0.0).sum(-1, dtype=torch.float64)
        found = self._terms(sums, mask.sum(-1), micro)
        metrics = {name: Metric(value.detach(), "sum") for name, value in found.items()}
        return found["loss"] / micro.meta_info["items"] * micro.meta_info["dp_size"], metrics

    def _terms(self, sums: torch.Tensor, tokens: torch.Tensor, micro: DataProto) -> dict[str, torch.Tensor]:
        """The sums of `names` over a micro-batch, without its padding rows."""
        reference = micro.batch["ref_log_prob"].to(sums)
        rows = Answers(sums, reference, tokens.clamp(min=1).to(sums))
        chosen_rows = micro.batch["chosen"].bool()
        valid = tokens > 0
        if not self._loss.compares_responses:
            loss = self._loss.function(rows, chosen_rows, micro.meta_info["kl"], self._settings)
            beta = self._settings.beta
            reward, rounding = beta * rows.ratio.detach(), beta * rounding_of(rows.log_prob)
            right = share_right(torch.where(chosen_rows, reward, -reward), rounding)
            up, down = ((reward * (flags & valid)).sum() for flags in (chosen_rows, ~chosen_rows))
            return {
                "loss": torch.where(valid, loss, 0.0).sum(),
                "accuracy": (right * valid).sum(),
                "chosen_reward": up,
                "rejected_reward": down,
            }
        chosen, rejected = (
            Answers(rows.log_prob[at::2], rows.reference[at::2], rows.tokens[at::2]) for at in (0, 1)
        )
        terms, valid = pair_terms(self._loss.name, chosen, rejected, self._settings), valid[::2]
        return {name: torch.where(valid, getattr(terms, name), 0.0).sum() for name in self.names}

    # -- validation ---------------------------------------------------------------------------------------------

    def evaluate(self, batch: DataProto) -> tuple[dict[str, float], torch.Tensor]:
        """The score is the reward of an answer, as the loss of this run defines it."""
        batch, counts = self._counted(batch)
        sums, tokens = self.log_prob_sums(batch), batch.batch["response_mask"].sum(-1)
        found = {name: float(value) for name, value in self._terms(sums, tokens, batch).items()}
        answers = Answers(sums, batch.batch["ref_log_prob"].to(sums), tokens.to(sums))
        return {**found, **counts}, implied_rewards(self._loss, answers, self._settings)

    def validation_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return _means("val", sums)


def _means(prefix: str, sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics that have something to average: a batch may have no desirable answer, or no other."""
    means = {
        name: sums[name] / sums[count] for name, count in _COUNTS.items() if name in sums and sums[count]
    }
    if {"chosen_reward", "rejected_reward"} <= means.keys():
        means["margin"] = means["chosen_reward"] - means["rejected_reward"]
    return {f"{prefix}/{name}": value for name, value in means.items()}


def _cache_key(cfg: Any, datasets: Mapping[str, PreferenceDataset]) -> str:
    """What the reference's log-probs depend on: weights, precision, and the rows."""
    digest = hashlib.sha256()
    model = cfg.model
    named: list[Any] = [model.path, model.dtype, model.override_config, cfg.trainer.device]
    folder = Path(model.path).expanduser()
    for file in weight_files(folder):
        stat = file.stat()
        named.append((file.name, stat.st_size, stat.st_mtime_ns))
    digest.update(repr(named).encode())
    for name, dataset in datasets.items():
        digest.update(name.encode())
        for item in dataset.items:
            for ids, mask in item.rows:
                digest.update(ids.tobytes() + mask.tobytes())
    return digest.hexdigest()


def _read_cache(file: Path, key: str) -> dict[str, np.ndarray] | None:
    """The numbers of the file, if they are of this key."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, "np") as handle:
            if (handle.metadata() or {}).get("key") != key:
                return None
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        logger.warning("%s cannot be read (%s): its numbers are computed again", file, error)
        return None
