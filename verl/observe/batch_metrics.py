"""The metrics of a finished batch and of the step that made it.

Pure: tensors and seconds in, numbers out. A tensor that is not in the batch (no critic, no reward yet) leaves
its metrics out; nothing is filled in with zeros. Statistics of scores and rewards are over the sequences that were
scored, those of advantages, returns and values over the tokens the policy produced. Rows that are turns of one
conversation (column `session`) count as one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from verl.data.proto import DataProto

# Spans whose cost grows with the tokens of prompts and responses; `gen` is divided by produced tokens alone.
_PER_TOKEN = (
    "reward", "old_log_prob", "ref", "teacher", "values", "implicit_reward", "adv", "update_critic",
    "update_implicit_reward", "update_actor",
)  # fmt: skip

# Dense 16-bit peak of one device in FLOP/s, by a part of the name the driver gives. First match counts.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("GB200", 2250e12),
    ("H200", 990e12),
    ("GH200", 990e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 990e12),
    ("H800", 990e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L20", 119.5e12),
    ("A10", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("MI300X", 1307e12),
)


# A response of at least this many tokens with fewer distinct ones than the share below is going round in circles.
_LONG_ENOUGH = 32
_DISTINCT_SHARE = 0.1
_WORTH_COMPARING = 8


@dataclass(frozen=True)
class ModelSize:
    """What the work of a token depends on."""

    parameters: int
    """Those that take part in matrix products for each token (for mixtures: the active ones)."""
    layers: int = 0
    hidden: int = 0
    frozen: int = 0
    """Those of `parameters` that get no gradient (under LoRA, the model's own)."""

    def training_flops(self, lengths: torch.Tensor) -> float:
        """Model FLOPs of a forward and backward over sequences of these lengths, as `benchmarks/train.py` counts:
        6 per weight and token, 4 where the weight is frozen; causal attention counts half its square; what gradient
        checkpointing computes again does not count."""
        lengths = lengths.double()
        products = (6.0 * self.parameters - 2.0 * self.frozen) * lengths.sum()
        return float(products + 6.0 * self.layers * self.hidden * (lengths**2).sum())


def peak_flops(device_name: str) -> float | None:
    """The device's dense 16-bit peak, or None when it is not known (a CPU, a device not in the table)."""
    return next((peak for name, peak in _PEAK_FLOPS if name in device_name), None)


def batch_metrics(
    batch: DataProto, *, max_response_length: int | None = None, max_prompt_length: int | None = None
) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of the final batch of a step."""
    tensors = batch.batch
    metrics: dict[str, float] = {}
    mask_BT = tensors["response_mask"].bool()
    # Sequences kept out of the loss (overlong, failed) have an empty response mask but may well have a score.
    written_BT = tensors["attention_mask"][:, -mask_BT.shape[1] :].bool()
    rows = _Sequences(batch)
    scored_S = scored_rows(batch)[rows.first]
    if "token_level_scores" in tensors:
        score_S = rows.sum(_row_sums(tensors["token_level_scores"], written_BT))[scored_S]
        metrics |= _spread("critic/score", score_S) | _spread("reward", score_S)
    if "token_level_rewards" in tensors:
        reward_S = rows.sum(_row_sums(tensors["token_level_rewards"], written_BT))[scored_S]
        metrics |= _spread("critic/rewards", reward_S)
    for name in ("advantages", "returns", "values"):
        if name in tensors:
            metrics |= _spread(f"critic/{name}", tensors[name][mask_BT])
    if "process_rewards" in tensors:
        metrics |= _spread("implicit_reward/process_rewards", tensors["process_rewards"][mask_BT])
    if "values" in tensors and "returns" in tensors and mask_BT.sum() > 1:
        values, returns = tensors["values"][mask_BT], tensors["returns"][mask_BT]
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)
    metrics |= _length_metrics(batch, max_response_length, max_prompt_length)
    return metrics


def age_metrics(batch: DataProto, version: int, staleness: int) -> dict[str, float]:
    """How many updates older than policy `version` the weights were that drew the policy tokens; with a `staleness`
    above 0 also the share of tokens of each age."""
    ages = (version - batch.batch["token_versions"])[batch.batch["response_mask"].bool()]
    if not len(ages):
        return {}
    metrics = {"training/age/mean": float(ages.double().mean()), "training/age/max": float(ages.max())}
    for age in range(staleness + 1 if staleness else 0):
        metrics[f"training/age/share_{age}"] = float((ages == age).double().mean())
    return metrics


def scored_rows(batch: DataProto) -> torch.Tensor:
    """[B] flags of the responses whose reward function gave a score; the others have none, which is not 0."""
    errors = batch.non_tensor_batch.get("reward_error")
    if errors is None:
        return torch.ones(len(batch), dtype=torch.bool)
    return torch.tensor([error is None for error in errors], dtype=torch.bool)


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 when values foresee everything, 0 when nothing."""
    spread = returns.double().var()
    return float(1.0 - (returns - values).double().var() / (spread + 1e-8))


def step_metrics(
    batch: DataProto,
    timing_s: Mapping[str, float],
    *,
    devices: int = 1,
    model: ModelSize | None = None,
    updates_per_token: float = 1.0,
) -> dict[str, float]:
    """Speed of the step. `timing_s` maps span names ("gen", "update_actor", "step", ...) to seconds;
    `updates_per_token` is how often the actor learns from each token (`ppo_epochs`)."""
    prompt_B, response_B = sequence_lengths(batch)
    total = int((prompt_B + response_B).sum())
    produced = int(response_B.sum())
    metrics: dict[str, float] = {"perf/total_num_tokens": float(total)}
    if produced and "gen" in timing_s:
        metrics["timing_per_token_ms/gen"] = timing_s["gen"] * 1000 / produced
    for name in _PER_TOKEN:
        if total and name in timing_s:
            metrics[f"timing_per_token_ms/{name}"] = timing_s[name] * 1000 / total
    if timing_s.get("step"):
        metrics["perf/time_per_step"] = timing_s["step"]
        metrics["perf/throughput"] = total / timing_s["step"] / devices
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 1024**3
        peak = peak_flops(torch.cuda.get_device_name())
        if model is not None and peak and timing_s.get("update_actor"):
            weight_B = batch.batch.get("row_weight")  # 0: left out of the update
            length_B = prompt_B + response_B
            trained_B = length_B if weight_B is None else length_B[weight_B > 0]
            work = model.training_flops(trained_B) * updates_per_token
            metrics["perf/mfu/actor"] = work / timing_s["update_actor"] / (peak * devices)
    return metrics


def sequence_lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response lengths in tokens, [B] each; tool output counts as response."""
    mask_BL = batch.batch["attention_mask"]
    width = batch.batch["response_mask"].shape[1]
    return mask_BL[:, : mask_BL.shape[1] - width].sum(-1), mask_BL[:, mask_BL.shape[1] - width :].sum(-1)


def _length_metrics(
    batch: DataProto, max_response_length: int | None, max_prompt_length: int | None
) -> dict[str, float]:
    prompt_B, response_B = sequence_lengths(batch)
    rows = _Sequences(batch)
    prompt_S, response_S = prompt_B[rows.first], rows.sum(response_B)
    metrics = _spread("response_length", response_S) | _spread("prompt_length", prompt_S)
    if max_prompt_length is not None and len(prompt_S):
        metrics["prompt_length/clip_ratio"] = float((prompt_S >= max_prompt_length).double().mean())
    reasons = batch.non_tensor_batch.get("finish_reason")
    if reasons is not None and len(reasons):
        cut_B = torch.tensor([reason == "length" for reason in reasons])
        metrics["response_length/clip_ratio"] = float((rows.sum(cut_B.long()) > 0).double().mean())
    elif max_response_length is not None and len(response_S):
        metrics["response_length/clip_ratio"] = float((response_S >= max_response_length).double().mean())
    return metrics


class _Sequences:
    """The rows of a batch, or the conversations whose turns they are."""

    def __init__(self, batch: DataProto) -> None:
        names = batch.non_tensor_batch.get("session", np.arange(len(batch)))
        _, first, ids = np.unique(names, return_index=True, return_inverse=True)
        self.first, self._ids = torch.from_numpy(first), torch.from_numpy(ids)

    def sum(self, values_B: torch.Tensor) -> torch.Tensor:
        return values_B.new_zeros(len(self.first)).index_add_(0, self._ids.to(values_B.device), values_B)


def _row_sums(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    # `where`, not a product: what lies behind the mask may be anything, NaN included.
    return torch.where(mask_BT, values_BT, 0.0).sum(-1)


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    if values.numel() == 0:
        return {}
    values = values.double()
    return {f"{name}/{part}": float(getattr(values, part)()) for part in ("mean", "max", "min")}


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
    identical_groups: int = 0
    """Prompts whose responses are all the same; short answers are rightly equal and do not count."""


def batch_facts(batch: DataProto) -> BatchFacts:
    tensors = batch.batch
    _, length_B = sequence_lengths(batch)
    rows = _Sequences(batch)
    length_S = rows.sum(length_B)
    facts: dict[str, float | int] = {"sequences": len(length_S)}
    if len(length_S):
        facts["empty_share"] = float((length_S <= 1).double().mean())
        if "responses" in tensors:
            facts["repetitive_share"] = float(_repetitive(batch).double().mean())
    if "token_level_scores" in tensors and len(length_S):
        scores_BT = tensors["token_level_scores"]
        written_BT = torch.arange(scores_BT.shape[1])[None, :] < length_B[:, None].cpu()
        score_S = rows.sum(_row_sums(scores_BT.cpu().double(), written_BT))
        finite_S = torch.isfinite(score_S)
        facts["scores_not_finite"] = int((~finite_S).sum())
        facts |= _outlier_facts(score_S[finite_S & scored_rows(batch)[rows.first]])
        uids = batch.non_tensor_batch.get("uid")
        if uids is not None:
            groups = _groups(uids[rows.first.numpy()], score_S.tolist())
            facts["groups"] = len(groups)
            facts["constant_groups"] = sum(min(scores) == max(scores) for scores in groups)
            if "responses" in tensors and len(length_S) == len(length_B):
                written = zip(tensors["responses"].cpu().numpy(), length_B.tolist(), strict=True)
                texts = [
                    row[:length].tobytes() if length >= _WORTH_COMPARING else b"" for row, length in written
                ]
                same = [texts[0] != b"" and len(set(texts)) == 1 for texts in _groups(uids, texts)]
                facts["identical_groups"] = sum(same)
    return BatchFacts(**facts)  # type: ignore[arg-type]


def _outlier_facts(score: torch.Tensor) -> dict[str, float | int]:
    # Successes that are rare are no outliers: two values differ by no more than which is which, and clipping to [-1, 1]
    # would not change the others.
    if len(score) < 8 or float(score.abs().max()) <= 1.0 or len(score.unique()) <= 2:
        return {}
    low, middle, high = torch.quantile(score, torch.tensor([0.05, 0.5, 0.95], dtype=score.dtype)).tolist()
    # Where nearly all scores are equal the spread is 0; the usual size of a reward is then the measure.
    reach = 10 * ((high - low) or max(abs(middle), 1.0))
    far = score[(score > high + reach) | (score < low - reach)]
    if len(far) == 0:
        return {}
    largest = float(far[far.abs().argmax()])
    return {"outliers": len(far), "largest_outlier": largest, "typical_score": middle}


def _groups(uids: Iterable[str], values: Iterable[Any]) -> list[list[Any]]:
    """The values of each prompt that has several."""
    groups: dict[str, list[Any]] = {}
    for uid, value in zip(uids, values, strict=True):
        groups.setdefault(uid, []).append(value)
    return [group for group in groups.values() if len(group) > 1]


def _repetitive(batch: DataProto) -> torch.Tensor:
    """[B] bool: long responses with few distinct tokens. What tools and users wrote does not count."""
    responses_BT, mask_BT = batch.batch["responses"].cpu(), batch.batch["response_mask"].cpu().bool()
    # A row kept out of the loss has an empty mask: all that was written counts then.
    written_BT = batch.batch["attention_mask"].cpu()[:, -mask_BT.shape[1] :].bool()
    counted_BT = torch.where(mask_BT.any(-1, keepdim=True), mask_BT, written_BT)
    length_B = counted_BT.sum(-1)
    # NumPy sorts 32-bit integers several times as fast as torch, which sorts their places along.
    ordered = np.sort(np.where(counted_BT.numpy(), responses_BT.numpy().astype(np.int32), -1), axis=-1)
    changes_B = torch.from_numpy((ordered[:, 1:] != ordered[:, :-1]).sum(-1))
    # In a row without a -1 no change stands before the first token.
    distinct_B = changes_B + (length_B == counted_BT.shape[1])
    return (length_B >= _LONG_ENOUGH) & (distinct_B < _DISTINCT_SHARE * length_B)
