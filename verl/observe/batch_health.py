"""Facts of one batch that the health rules judge: scores, groups, and whether responses look like language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.observe.batch_metrics import scored_rows, sequence_lengths

if TYPE_CHECKING:
    from verl.data.proto import DataProto

# A response of at least this many tokens with fewer distinct ones than the share below is going round in circles.
_LONG_ENOUGH = 32
_DISTINCT_SHARE = 0.1


@dataclass(frozen=True)
class BatchFacts:
    sequences: int
    scores_not_finite: int = 0
    outliers: int = 0
    largest_outlier: float = 0.0
    typical_score: float = 0.0
    groups: int = 0
    constant_groups: int = 0
    empty_share: float = 0.0
    repetitive_share: float = 0.0


def batch_facts(batch: DataProto) -> BatchFacts:
    tensors = batch.batch
    _, length_B = sequence_lengths(batch)
    facts: dict[str, float | int] = {"sequences": len(length_B)}
    if len(length_B):
        facts["empty_share"] = float((length_B <= 1).double().mean())
        if "responses" in tensors:
            facts["repetitive_share"] = float(_repetitive(tensors["responses"], length_B).double().mean())
    if "token_level_scores" in tensors and len(length_B):
        scores_BT = tensors["token_level_scores"]
        written_BT = torch.arange(scores_BT.shape[1])[None, :] < length_B[:, None].cpu()
        score_B = torch.where(written_BT, scores_BT.cpu().double(), 0.0).sum(-1)
        finite_B = torch.isfinite(score_B)
        facts["scores_not_finite"] = int((~finite_B).sum())
        facts |= _outlier_facts(score_B[finite_B & scored_rows(batch)])
        uids = batch.non_tensor_batch.get("uid")
        if uids is not None:
            facts |= _group_facts(score_B, list(uids))
    return BatchFacts(**facts)  # type: ignore[arg-type]


def _outlier_facts(score: torch.Tensor) -> dict[str, float | int]:
    if len(score) < 8:
        return {}
    low, middle, high = torch.quantile(score, torch.tensor([0.05, 0.5, 0.95], dtype=score.dtype)).tolist()
    # Where nearly all scores are equal the spread is 0; the usual size of a reward is then the measure.
    reach = 10 * ((high - low) or max(abs(middle), 1.0))
    far = score[(score > high + reach) | (score < low - reach)]
    if len(far) == 0:
        return {}
    return {
        "outliers": len(far),
        "largest_outlier": float(far[far.abs().argmax()]),
        "typical_score": middle,
    }


def _group_facts(score_B: torch.Tensor, uids: list[str]) -> dict[str, float | int]:
    groups: dict[str, list[float]] = {}
    for uid, score in zip(uids, score_B.tolist(), strict=True):
        groups.setdefault(uid, []).append(score)
    several = [values for values in groups.values() if len(values) > 1]
    return {"groups": len(several), "constant_groups": sum(min(v) == max(v) for v in several)}


def _repetitive(responses_BT: torch.Tensor, length_B: torch.Tensor) -> torch.Tensor:
    """[B] bool: long responses made of few distinct tokens."""
    responses_BT, length_B = responses_BT.cpu(), length_B.cpu()
    behind = torch.arange(responses_BT.shape[1])[None, :] >= length_B[:, None]
    ordered = responses_BT.masked_fill(behind, -1).sort(dim=-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    distinct_B = (first & (ordered >= 0)).sum(-1)
    return (length_B >= _LONG_ENOUGH) & (distinct_B < _DISTINCT_SHARE * length_B)
