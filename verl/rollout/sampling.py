"""Drawing one token per row from logits: repetition penalty, temperature, top-k, top-p, min-p, greedy.

A row draws by inverting its cumulative distribution at one uniform number (see `noise`), so that a draw
costs one pass over the vocabulary. Filters apply in the order penalty, temperature, top-k, top-p, min-p;
top-p sees the distribution renormalised by top-k.

What always holds: a token whose probability is zero, or which a filter removed, is never drawn. The log-prob
returned is the one a trainer recomputes from the plain logits: of the temperature-scaled distribution before
penalty and filters, or at temperature 1 where `raw` is set or the row is greedy.

Shape suffixes: B rows, V vocabulary, N blocks of the vocabulary, L length of the longest history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from verl.rollout import noise
from verl.rollout.base import SamplingParams

_BLOCK = 256
_NUCLEUS_GUESS = 512
"""Most nuclei fit in this many tokens; only rows that do not are sorted whole."""


@dataclass(frozen=True)
class Kinds:
    """Which kinds of work any row needs; known on the host, so that sampling never waits for the device."""

    greedy: bool
    scaled: bool
    penalty: bool
    raw: bool
    top_p: bool
    min_p: bool
    top_k: int
    """The largest top-k in use, 0 when none is."""

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> Kinds:
        return Kinds(
            greedy=any(p.temperature == 0 for p in params),
            scaled=any(p.temperature not in (0, 1) for p in params),
            penalty=any(p.repetition_penalty != 1 for p in params),
            raw=any(p.raw_log_probs and p.temperature not in (0, 1) for p in params),
            top_p=any(p.top_p < 1 for p in params),
            min_p=any(p.min_p > 0 for p in params),
            top_k=max((p.top_k for p in params if p.top_k > 0), default=0),
        )

    @property
    def filters(self) -> bool:
        return self.top_p or self.min_p or self.top_k > 0

    @property
    def plain(self) -> bool:
        """Nothing but temperature and greedy rows."""
        return not (self.filters or self.penalty or self.raw)


@dataclass
class SamplingBatch:
    """The sampling settings of B rows as tensors."""

    keys_B: torch.Tensor
    temperature_B: torch.Tensor
    top_p_B: torch.Tensor
    top_k_B: torch.Tensor
    min_p_B: torch.Tensor
    penalty_B: torch.Tensor
    raw_B: torch.Tensor
    greedy_B: torch.Tensor
    kinds: Kinds

    @staticmethod
    def of(
        params: Sequence[SamplingParams], keys: Sequence[int], device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        def column(values: list[float] | list[bool] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        greedy = [p.temperature == 0 for p in params]
        temperature = [1.0 if g else p.temperature for p, g in zip(params, greedy, strict=True)]
        return SamplingBatch(
            keys_B=column(list(keys), torch.int64),
            temperature_B=column(temperature, torch.float32),
            top_p_B=column([p.top_p for p in params], torch.float32),
            top_k_B=column([p.top_k for p in params], torch.int64),
            min_p_B=column([p.min_p for p in params], torch.float32),
            penalty_B=column([p.repetition_penalty for p in params], torch.float32),
            raw_B=column([p.raw_log_probs for p in params], torch.bool),
            greedy_B=column(greedy, torch.bool),
            kinds=Kinds.of(params),
        )

    def select(self, rows_B: torch.Tensor) -> SamplingBatch:
        """The settings of some rows; the kinds of work stay those of the whole."""
        return replace(self, **{name: getattr(self, name)[rows_B] for name in _COLUMNS})


_COLUMNS = (
    "keys_B",
    "temperature_B",
    "top_p_B",
    "top_k_B",
    "min_p_B",
    "penalty_B",
    "raw_B",
    "greedy_B",
)


def seen_tokens(history_BL: torch.Tensor, vocab: int) -> torch.Tensor:
    """[B, V]: which tokens stand in each row's history (prompt and response, padded with -1)."""
    seen_BV = torch.zeros(len(history_BL), vocab + 1, dtype=torch.bool, device=history_BL.device)
    return seen_BV.scatter_(1, torch.where(history_BL < 0, vocab, history_BL), True)[:, :vocab]


def penalise_repeats(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty_B: torch.Tensor) -> torch.Tensor:
    """Logits of tokens seen before divided by the penalty if positive, else multiplied."""
    penalty_B1 = penalty_B[:, None]
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV & (penalty_B1 != 1), changed_BV, logits_BV)


def _rows(mask_B: torch.Tensor) -> torch.Tensor | slice:
    """The rows a filter is for. On a device all of them: finding out would wait for it."""
    return mask_B.nonzero()[:, 0] if mask_B.device.type == "cpu" else slice(None)


def _keep_top_p(weights_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Zero what lies outside each row's nucleus: a token stays while the mass before it is below top_p."""
    vocab = weights_BV.shape[1]
    total_B1 = weights_BV.sum(-1, keepdim=True, dtype=torch.float64)
    guess = min(_NUCLEUS_GUESS, vocab) if weights_BV.device.type == "cpu" else vocab
    while True:
        sorted_BK, index_BK = torch.topk(weights_BV, guess, dim=-1)
        mass_BK = sorted_BK.double().cumsum(-1) / total_B1
        if guess == vocab or bool((mass_BK[:, -1] >= top_p_B).all()):
            break
        guess = vocab
    keep_BK = (mass_BK - sorted_BK.double() / total_B1) < top_p_B[:, None].double()
    keep_BK[:, 0] = True
    return torch.zeros_like(weights_BV).scatter_(1, index_BK, sorted_BK * keep_BK)


def apply_filters(weights_BV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Zero the weights (unnormalised probabilities) that top-k, top-p and min-p remove, in place; ties stay."""
    vocab = weights_BV.shape[1]
    if 0 < batch.kinds.top_k < vocab:
        rows = _rows(batch.top_k_B > 0)
        top_k_R = batch.top_k_B[rows]
        best_RK = torch.topk(weights_BV[rows], batch.kinds.top_k, dim=-1).values
        threshold_R1 = best_RK.gather(1, (top_k_R.clamp(1, batch.kinds.top_k) - 1)[:, None])
        threshold_R1 = torch.where((top_k_R > 0)[:, None], threshold_R1, 0.0)
        weights_BV[rows] = torch.where(weights_BV[rows] >= threshold_R1, weights_BV[rows], 0.0)
    if batch.kinds.top_p:
        rows = _rows(batch.top_p_B < 1)
        # A row without the filter keeps everything, also what rounding puts beyond the mass of 1.
        top_p_R = torch.where(batch.top_p_B[rows] < 1, batch.top_p_B[rows], 2.0)
        weights_BV[rows] = _keep_top_p(weights_BV[rows], top_p_R)
    if batch.kinds.min_p:
        threshold_B1 = (batch.min_p_B * weights_BV.amax(-1))[:, None]
        weights_BV = torch.where(weights_BV >= threshold_B1, weights_BV, 0.0)
    return weights_BV


def invert_cdf(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds `uniform` times the row's total.

    Two levels, blocks and then one block, so that the running sums are short and in float64.
    """
    rows, vocab = weights_BV.shape
    pad = -vocab % _BLOCK
    if pad:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, pad))
    blocks_BNW = weights_BV.view(rows, -1, _BLOCK)
    mass_BN = blocks_BNW.sum(-1).double().cumsum(-1)
    target_B1 = uniform_B[:, None] * mass_BN[:, -1:]
    block_B1 = torch.searchsorted(mass_BN, target_B1, right=True).clamp_(max=mass_BN.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, mass_BN.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    index_B = torch.arange(rows, device=weights_BV.device)
    inner_BW = blocks_BNW[index_B, block_B1[:, 0]].double().cumsum(-1)
    # The block's own running sum may differ from its float32 sum in the last bits: stay below its end.
    target_B1 = torch.minimum(target_B1 - before_B1, inner_BW[:, -1:] * (1 - 2.0**-40))
    inside_B1 = torch.searchsorted(inner_BW, target_B1, right=True).clamp_(max=_BLOCK - 1)
    return (block_B1 * _BLOCK + inside_B1)[:, 0].clamp_(max=vocab - 1)


def sample(
    logits_BV: torch.Tensor,
    batch: SamplingBatch,
    positions_B: torch.Tensor,
    seen_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row. `positions_B` counts the tokens the row has produced so far.

    Returns token ids [B] (int64) and log-probs [B] (float32). `seen_BV` (see `seen_tokens`) is needed only
    where a row has a repetition penalty.
    """
    kinds = batch.kinds
    logits_BV = logits_BV.float()
    scaled_BV = logits_BV / batch.temperature_B[:, None] if kinds.scaled else logits_BV
    drawn_BV = scaled_BV
    if kinds.penalty:
        if seen_BV is None:
            raise ValueError("a repetition penalty needs the tokens seen so far")
        drawn_BV = penalise_repeats(logits_BV, seen_BV, batch.penalty_B) / batch.temperature_B[:, None]

    peak_B1 = drawn_BV.amax(-1, keepdim=True)
    weights_BV = (drawn_BV - peak_B1).exp_()
    if kinds.penalty:
        log_total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
    else:
        log_total_B1 = weights_BV.sum(-1, keepdim=True).log_() + peak_B1
    uniform_B = noise.uniform(batch.keys_B, positions_B)
    tokens_B = invert_cdf(apply_filters(weights_BV, batch) if kinds.filters else weights_BV, uniform_B)
    if kinds.greedy:
        tokens_B = torch.where(batch.greedy_B, drawn_BV.argmax(-1), tokens_B)

    log_probs_B = (scaled_BV.gather(1, tokens_B[:, None]) - log_total_B1)[:, 0]
    if kinds.raw:
        raw_B = (logits_BV.gather(1, tokens_B[:, None]) - logits_BV.logsumexp(-1, keepdim=True))[:, 0]
        log_probs_B = torch.where(batch.raw_B, raw_B, log_probs_B)
    return tokens_B, log_probs_B
