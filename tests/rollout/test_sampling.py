"""The sampler against closed forms: frequencies (chi-square), filters by brute force, noise by its key."""

from __future__ import annotations

import math

import pytest
import torch
from sampling_checks import boundary_rows, kept_by_definition, key_of, selection_rows

from verl.rollout.base import SamplingParams
from verl.rollout.sampling import (
    SamplingBatch,
    apply_filters,
    invert_cdf,
    mix,
    penalise_repeats,
    sample,
    seen_tokens,
    sequence_key,
    uniform,
)

VOCAB = 300
DRAWS = 20_000


def brute_force(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> list[float]:
    """The distribution to draw from, one token at a time, in float64."""
    values = logits.double().tolist()
    for token in set(history):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    values = [value / params.temperature for value in values]
    peak = max(values)
    weights = [math.exp(value - peak) for value in values]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    top = weights[order[0]]
    kept = [token for token in kept if weights[token] >= params.min_p * top]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


CASES = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(top_k=7),
    "top_k_one": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.7),
    "top_p_tiny": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.05),
    "penalty": SamplingParams(repetition_penalty=1.8),
    "all": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
}


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", CASES)
def test_frequencies_match_the_filtered_softmax(name: str) -> None:
    params = CASES[name]
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(VOCAB, generator=generator) * 2
    history = [3, 17, 200, 17]
    expected = torch.tensor(brute_force(logits, params, history), dtype=torch.float64)
    batch = SamplingBatch.of([params] * DRAWS, [sequence_key(0, "request", i) for i in range(DRAWS)])
    positions = torch.zeros(DRAWS, dtype=torch.int64)
    seen = seen_tokens(torch.tensor([[*history, -1]]), VOCAB).expand(DRAWS, -1)
    tokens, log_probs = sample(logits.expand(DRAWS, VOCAB), batch, positions, seen)

    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert counts[expected == 0].sum() == 0, "a removed token was drawn"
    # Pool rare tokens so that every cell expects at least 8 draws, as the chi-square statistic needs.
    order = expected.argsort(descending=True)
    cells: list[tuple[float, float]] = []
    want = have = 0.0
    for token in order.tolist():
        want += float(expected[token]) * DRAWS
        have += float(counts[token])
        if want >= 8:
            cells.append((want, have))
            want = have = 0.0
    if cells and want > 0:
        cells[-1] = (cells[-1][0] + want, cells[-1][1] + have)
    statistic = sum((have - want) ** 2 / want for want, have in cells)
    freedom = max(len(cells) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5, (
        f"chi-square {statistic:.1f} with {freedom} degrees"
    )

    scaled = (logits / params.temperature).log_softmax(-1)
    torch.testing.assert_close(log_probs, scaled[tokens], atol=1e-5, rtol=0)


def test_nucleus_wider_than_the_first_guess_is_exact() -> None:
    vocab = 2000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 0.1
    params = SamplingParams(top_p=0.95)
    expected = torch.tensor(brute_force(logits, params, []))
    rows = 4000
    batch = SamplingBatch.of([params] * rows, [sequence_key(1, "r", i) for i in range(rows)])
    tokens, _ = sample(logits.expand(rows, vocab), batch, torch.zeros(rows, dtype=torch.int64))
    assert (expected[tokens] > 0).all()
    assert (expected > 0).sum() > 1800
    assert len(tokens.unique()) > 1000


def test_greedy_and_random_rows_mix_in_one_batch() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0, top_p=0.5)]
    batch = SamplingBatch.of(params, [1, 2, 3])
    tokens, log_probs = sample(logits, batch, torch.tensor([0, 5, 9]))
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_log_probs_by_convention() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3)).repeat_interleave(2, 0)
    params = [SamplingParams(temperature=0.5), SamplingParams(temperature=0.5, raw_log_probs=True)] * 2
    tokens, log_probs = sample(
        logits, SamplingBatch.of(params, [7, 7, 8, 8]), torch.zeros(4, dtype=torch.int64)
    )
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3]
    scaled = (logits / 0.5).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    raw = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, torch.stack([scaled[0], raw[1], scaled[2], raw[3]]))


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(4))
    params = [list(CASES.values())[i % len(CASES)] for i in range(64)]
    keys = [sequence_key(3, f"q{i}", i % 4) for i in range(64)]
    positions = torch.arange(64)
    history = seen_tokens(torch.full((64, 1), 5), VOCAB)
    together, _ = sample(logits, SamplingBatch.of(params, keys), positions, history)
    for i in range(64):
        alone, _ = sample(
            logits[i : i + 1], SamplingBatch.of([params[i]], [keys[i]]), positions[i : i + 1], history[:1]
        )
        assert alone[0] == together[i]


def test_extreme_uniforms_never_hit_a_zero_weight() -> None:
    weights = torch.zeros(4, 700)
    weights[0, 699] = 1.0
    weights[1, 0] = 1e-30
    weights[2, 256] = weights[2, 511] = 0.1
    weights[3, 255:258] = torch.tensor([1e-20, 1.0, 1e-20])
    for value in (0.0, 2.0**-32, 0.5, 1 - 2.0**-32):
        tokens = invert_cdf(weights, torch.full((4,), value, dtype=torch.float64))
        assert (weights.gather(1, tokens[:, None]) > 0).all()


def test_only_likely_tokens_are_drawn_where_blocks_end() -> None:
    logits, numbers, likely = boundary_rows(2000, 256)
    assert uniform(torch.tensor([key_of(77)]), torch.tensor([0])).item() == 77 * 2.0**-32
    tokens = invert_cdf((logits - logits.amax()).exp(), numbers.double() * 2.0**-32)
    assert likely[tokens].all()
    share = torch.softmax(logits[0].double(), -1).cumsum(-1)
    assert (share[tokens] - numbers.double() * 2.0**-32 > -1e-6).all()


def test_a_number_between_two_sums_of_a_block_draws_no_unlikely_token() -> None:
    """The sum of a block in float32 lies above its sum in float64; the last token has a billionth of the mass."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        weights = torch.rand(1, 256, generator=generator)
        weights[0, 255] = 1e-7
        coarse, fine = float(weights.sum(-1)), float(weights.double().sum(-1))
        if coarse > fine * (1 + 2.0**-25):
            break
    else:
        raise AssertionError("no block whose float32 sum is too large")
    number = torch.tensor([(coarse + fine) / 2 / coarse], dtype=torch.float64)
    assert invert_cdf(weights, number).item() == 254


@pytest.mark.parametrize("vocab", [90, 2000])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(-1, 0.5), (-1, 1e-6), (-1, 0.9999999), (7, 1.0), (20, 0.4), (1, 0.9)]
)
def test_filters_keep_what_their_definition_keeps(vocab: int, top_k: int, top_p: float) -> None:
    weights = selection_rows(vocab)
    batch = SamplingBatch.of(
        [SamplingParams(top_k=top_k, top_p=top_p)] * len(weights), list(range(len(weights)))
    )
    kept = apply_filters(weights.clone(), batch)
    for row, found in zip(weights, kept, strict=True):
        expected = torch.where(kept_by_definition(row, top_k, top_p), row, 0.0)
        assert torch.equal(found, expected)
        assert found.max() == row.max()


def test_a_filter_is_not_switched_off_by_a_wider_one_in_the_same_batch() -> None:
    weights = torch.rand(2, 50, generator=torch.Generator().manual_seed(1))
    batch = SamplingBatch.of([SamplingParams(top_k=3), SamplingParams(top_k=500)], [1, 2])
    assert (apply_filters(weights, batch) > 0).sum(-1).tolist() == [3, 50]


def test_uniform_numbers_equal_the_integer_definition_and_depend_on_every_part_of_the_key() -> None:
    keys = [sequence_key(seed, name, index) for seed in (0, 1) for name in ("a", "b") for index in (0, 1)]
    assert len(set(keys)) == 8
    for key in keys:
        for position in (0, 1, 77):
            expected = (mix(key + (position + 1) * 0x9E3779B97F4A7C15) >> 32) / 2**32
            assert uniform(torch.tensor([key]), torch.tensor([position])).item() == expected


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    keys = torch.tensor([sequence_key(0, str(i), 0) for i in range(200)])[:, None].expand(200, 100)
    values = uniform(keys, torch.arange(100).expand(200, 100))
    counts = torch.histc(values.float(), bins=50, min=0, max=1)
    expected = values.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 49 + 5 * math.sqrt(98)
    centred = values - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs(float((centred * other).mean()) * 12) < 5 / math.sqrt(values.numel())


def test_repetition_penalty_reads_only_the_history() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    changed = penalise_repeats(logits, seen_tokens(torch.tensor([[0, 1, -1]]), 4), torch.tensor([2.0]))
    assert changed.tolist() == [[1.0, -4.0, 2.0, -2.0]]


@pytest.mark.parametrize(("penalty", "token"), [(1.0, 0), (1.5, 1)])
def test_greedy_minds_the_penalty(penalty: float, token: int) -> None:
    logits = torch.tensor([[3.0, 2.5, -1.0]])
    seen = torch.tensor([[True, False, False]])
    batch = SamplingBatch.of([SamplingParams(temperature=0, repetition_penalty=penalty)], [1])
    tokens, log_probs = sample(logits, batch, torch.tensor([0]), seen)
    assert tokens.tolist() == [token]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, token])


def test_a_penalty_above_one_always_makes_seen_tokens_rarer() -> None:
    """Of whatever sign the logit is."""
    logits = torch.tensor([[1.0, 1.0, -1.0, -1.0]]).repeat(4000, 1)
    seen = torch.tensor([[True, False, True, False]]).repeat(4000, 1)
    params = SamplingParams(temperature=0.7, repetition_penalty=2.0)
    batch = SamplingBatch.of([params] * 4000, list(range(4000)))
    tokens, _ = sample(logits, batch, torch.zeros(4000, dtype=torch.int64), seen)
    counts = torch.bincount(tokens, minlength=4) / 4000
    penalised = torch.tensor([0.5, 1.0, -2.0, -1.0])
    torch.testing.assert_close(counts, (penalised / 0.7).softmax(-1), atol=0.03, rtol=0)
