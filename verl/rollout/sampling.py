"""Drawing one token per row from logits: repetition penalty, temperature, top-k, top-p, min-p, greedy.

A row draws by inverting its cumulative distribution at one uniform number, so that a draw costs one pass over the
vocabulary. The number depends only on (seed, request, sample, position): without generator state a request draws the
same tokens whatever else is in the batch, also after a preemption or a resume. Filters apply in the order penalty,
temperature, top-k, top-p, min-p; top-p sees the distribution renormalised by top-k. A token whose probability is zero,
or which a filter removed, is never drawn.

The log-prob returned is the one a trainer recomputes from the plain logits: of the temperature-scaled distribution
before penalty and filters, or at temperature 1 where `raw` is set or the row is greedy.

Shape suffixes: B rows, V vocabulary, N blocks of the vocabulary, L length of the longest history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from verl.models.kernels import triton_fault
from verl.rollout.base import SamplingParams

_BLOCK = 256
_NUCLEUS_GUESS = 512
"""Most nuclei fit in this many tokens; only rows that do not are fully sorted."""
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(value: int) -> int:
    """The finaliser of splitmix64 on a Python integer; every input bit reaches every output bit."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MIX_A) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX_B) & _MASK64
    return value ^ (value >> 31)


@lru_cache(4096)
def _request_key(seed: int, request_id: str) -> int:
    name = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")
    return mix(mix(seed + _GOLDEN) ^ name)


def sequence_key(seed: int, request_id: str, sample: int) -> int:
    """The signed 64-bit key of one sample; stable across processes (unlike `hash`)."""
    return _signed(mix(_request_key(seed, request_id) + _GOLDEN * (sample + 1)))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: torch's shift of int64 is arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float64 with 32 random bits; `keys` and `positions` are int64 of one shape."""
    value = keys + (positions + 1) * _signed(_GOLDEN)
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_A)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_B)
    value = value ^ _shift_right(value, 31)
    return _shift_right(value, 32).to(torch.float64) * 2.0**-32


@dataclass(frozen=True)
class Kinds:
    """Which sampling features any row needs; known on the host, so that sampling never waits for the device."""

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
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return SamplingBatch(
            keys_B=column(keys, torch.int64),
            temperature_B=column([p.temperature or 1.0 for p in params]),
            top_p_B=column([p.top_p for p in params]),
            top_k_B=column([p.top_k for p in params], torch.int64),
            min_p_B=column([p.min_p for p in params]),
            penalty_B=column([p.repetition_penalty for p in params]),
            raw_B=column([p.raw_log_probs for p in params], torch.bool),
            greedy_B=column([p.temperature == 0 for p in params], torch.bool),
            kinds=Kinds.of(params),
        )

    def select(self, rows_B: torch.Tensor) -> SamplingBatch:
        """The settings of some rows; the kinds of work stay those of the whole batch."""
        columns = [field.name for field in fields(self) if field.name != "kinds"]
        return replace(self, **{name: getattr(self, name)[rows_B] for name in columns})


def seen_tokens(history_BL: torch.Tensor, vocab: int) -> torch.Tensor:
    """[B, V]: which tokens occur in each row's history (prompt and response, padded with -1)."""
    seen_BV = torch.zeros(len(history_BL), vocab + 1, dtype=torch.bool, device=history_BL.device)
    return seen_BV.scatter_(1, torch.where(history_BL < 0, vocab, history_BL), True)[:, :vocab]


def penalise_repeats(logits_BV: torch.Tensor, seen_BV: torch.Tensor, penalty_B: torch.Tensor) -> torch.Tensor:
    """Logits of tokens seen before divided by the penalty if positive, else multiplied."""
    penalty_B1 = penalty_B[:, None]
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV & (penalty_B1 != 1), changed_BV, logits_BV)


def _top_k_floor(weights_BV: torch.Tensor, top_k_B: torch.Tensor, largest: int) -> torch.Tensor:
    """[B]: each row's `top_k`-th largest weight."""
    best_BK = torch.topk(weights_BV, min(largest, weights_BV.shape[1]), dim=-1).values
    return best_BK.gather(1, top_k_B.clamp(max=best_BK.shape[1])[:, None] - 1)[:, 0]


def _top_p_floor(weights_BV: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """[B]: the smallest weight above which less than `top_p` of the row's mass lies."""
    vocab = weights_BV.shape[1]
    goal_B1 = top_p_B.double()[:, None] * _mass(weights_BV).sum(-1, keepdim=True).double()
    guess = min(_NUCLEUS_GUESS, vocab)
    while True:
        sorted_BK = torch.topk(weights_BV, guess, dim=-1).values
        mass_BK = _mass(sorted_BK)
        stays_BK = (mass_BK.cumsum(-1) - mass_BK).double() < goal_B1
        if guess == vocab or not bool(stays_BK[:, -1].any()):
            return sorted_BK.gather(1, stays_BK.sum(-1, keepdim=True) - 1)[:, 0]
        guess = vocab


def _mass(weights: torch.Tensor) -> torch.Tensor:
    """Weights in units of 2^-44. Sums of integers are exact in any order."""
    return (weights * 2.0**44).to(torch.int64)


def _smallest_kept(weights_BV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """[B]: what top-k and top-p remove is below; zero where a row has neither."""
    kinds = batch.kinds
    if weights_BV.is_cuda and triton_fault(weights_BV.device) is None:
        from verl.rollout.native.kernels.selection import smallest_kept

        return smallest_kept(
            weights_BV, batch.top_k_B if kinds.top_k else None, batch.top_p_B if kinds.top_p else None
        )
    floor_B = torch.zeros(len(weights_BV), device=weights_BV.device)
    if kinds.top_k:
        rows = (batch.top_k_B > 0).nonzero()[:, 0]
        floor_B[rows] = _top_k_floor(weights_BV[rows], batch.top_k_B[rows], kinds.top_k)
    if kinds.top_p:
        rows = (batch.top_p_B < 1).nonzero()[:, 0]
        left_RV = torch.where(weights_BV[rows] >= floor_B[rows, None], weights_BV[rows], 0.0)
        floor_B[rows] = _top_p_floor(left_RV, batch.top_p_B[rows])
    return floor_B


def apply_filters(weights_BV: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The weights (probabilities divided by the row's largest) with those zero that top-k, top-p and min-p remove.

    Top-k keeps what is not below the k-th largest weight; of that, top-p keeps what has less than `top_p` of the mass
    strictly above it; min-p what is not below `min_p`. Equal weights stay or go together."""
    floor_B = torch.zeros(len(weights_BV), device=weights_BV.device)
    if batch.kinds.top_k or batch.kinds.top_p:
        floor_B = _smallest_kept(weights_BV, batch)
    if batch.kinds.min_p:
        floor_B = torch.maximum(floor_B, batch.min_p_B * weights_BV.amax(-1))
    return torch.where(weights_BV >= floor_B[:, None], weights_BV, 0.0)


def _covering(weights_BN: torch.Tensor, share_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, 1]: the index whose weight covers `share` of the row's sum, and the share of that weight which lies before.

    Weights (float64) below 2^-40 of the sum are never chosen. What any order of summation gets wrong is far below that,
    so the running sum grows at every weight that counts."""
    smallest_B1 = weights_BN.sum(-1, keepdim=True) * 2.0**-40
    weights_BN = torch.where(weights_BN >= smallest_B1, weights_BN, 0.0)
    running_BN = weights_BN.cumsum(-1)
    counts_BN = weights_BN > 0
    highest_B1 = torch.where(counts_BN, running_BN, 0.0).amax(-1, keepdim=True)
    target_B1 = share_B1 * highest_B1
    # A share that rounding brought to 1 belongs to the last weight.
    covered_BN = counts_BN & ((running_BN > target_B1) | (running_BN == highest_B1))
    index_B1 = covered_BN.to(torch.uint8).argmax(-1, keepdim=True)
    here_B1 = weights_BN.gather(1, index_B1)
    before_B1 = running_BN.gather(1, index_B1) - here_B1
    return index_B1, (target_B1 - before_B1) / here_B1


def invert_cdf(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds `uniform` times the row's total.

    Two levels, blocks and then one block, so that the running sums are short and in float64. The second level goes by
    the share of the block and not by the mass: a block's float32 sum and its running sum differ in the last bits, and
    what lies between the two must not fall to the last token of the block, however unlikely that is.
    """
    rows, vocab = weights_BV.shape
    pad = -vocab % _BLOCK
    if pad:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, pad))
    blocks_BNW = weights_BV.view(rows, -1, _BLOCK)
    block_B1, share_B1 = _covering(blocks_BNW.sum(-1).double(), uniform_B[:, None])
    index_B = torch.arange(rows, device=weights_BV.device)
    inside_B1, _ = _covering(blocks_BNW[index_B, block_B1[:, 0]].double(), share_B1)
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
    uniform_B = uniform(batch.keys_B, positions_B)
    tokens_B = invert_cdf(apply_filters(weights_BV, batch) if kinds.filters else weights_BV, uniform_B)
    if kinds.greedy:
        tokens_B = torch.where(batch.greedy_B, drawn_BV.argmax(-1), tokens_B)

    log_probs_B = (scaled_BV.gather(1, tokens_B[:, None]) - log_total_B1)[:, 0]
    if kinds.raw:
        raw_B = (logits_BV.gather(1, tokens_B[:, None]) - logits_BV.logsumexp(-1, keepdim=True))[:, 0]
        log_probs_B = torch.where(batch.raw_B, raw_B, log_probs_B)
    return tokens_B, log_probs_B
