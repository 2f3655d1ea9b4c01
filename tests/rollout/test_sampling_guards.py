"""A greedy row takes the likeliest token after the repetition penalty, and says what the plain model thinks of it."""

from __future__ import annotations

import pytest
import torch

from verl.rollout.base import SamplingParams
from verl.rollout.sampling import SamplingBatch, sample


@pytest.mark.parametrize(("penalty", "token"), [(1.0, 0), (1.5, 1)])
def test_greedy_minds_the_penalty(penalty, token):
    logits = torch.tensor([[3.0, 2.5, -1.0]])
    seen = torch.tensor([[True, False, False]])
    batch = SamplingBatch.of([SamplingParams(temperature=0, repetition_penalty=penalty)], [1])
    tokens, log_probs = sample(logits, batch, torch.tensor([0]), seen)
    assert tokens.tolist() == [token]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, token])


def test_a_penalty_above_one_always_makes_seen_tokens_rarer():
    """Of whatever sign the logit is."""
    logits = torch.tensor([[1.0, 1.0, -1.0, -1.0]]).repeat(4000, 1)
    seen = torch.tensor([[True, False, True, False]]).repeat(4000, 1)
    params = SamplingParams(temperature=0.7, repetition_penalty=2.0)
    batch = SamplingBatch.of([params] * 4000, list(range(4000)))
    tokens, _ = sample(logits, batch, torch.zeros(4000, dtype=torch.int64), seen)
    counts = torch.bincount(tokens, minlength=4) / 4000
    penalised = torch.tensor([0.5, 1.0, -2.0, -1.0])
    torch.testing.assert_close(counts, (penalised / 0.7).softmax(-1), atol=0.03, rtol=0)
