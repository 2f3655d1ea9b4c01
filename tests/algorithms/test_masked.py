from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms import (
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from verl.errors import DataError

JUNK = [float("nan"), float("inf"), -float("inf")]


@given(
    values=st.lists(st.floats(-50, 50), min_size=2, max_size=20),
    junk=st.lists(st.sampled_from(JUNK), max_size=5),
    shift=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_statistics_see_only_kept_values(values, junk, shift):
    x = torch.tensor([*values, *junk], dtype=torch.float64)
    mask = torch.tensor([1] * len(values) + [0] * len(junk))
    total, n = math.fsum(values), len(values)
    variance = math.fsum((v - total / n) ** 2 for v in values) / (n - 1)
    assert float(masked_sum(x, mask)) == pytest.approx(total, abs=1e-9)
    assert float(masked_mean(x, mask)) == pytest.approx(total / (n + 1e-8), abs=1e-9)
    assert float(masked_var(x, mask)) == pytest.approx(variance, abs=1e-9)
    mean = total / (n + 1e-8)
    wanted = [(v - mean) / math.sqrt(variance + 1e-8) + (0 if shift else mean) for v in values]
    assert masked_whiten(x, mask, shift_mean=shift).tolist() == pytest.approx(
        wanted + [0.0] * len(junk), abs=1e-6
    )


def test_axis_and_bool_masks():
    x, mask = torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), torch.tensor([[True, True], [True, False]])
    assert masked_sum(x, mask, axis=-1).tolist() == [3.0, 3.0]
    assert masked_mean(x, mask, axis=-1).tolist() == pytest.approx([1.5, 3.0])
    assert masked_mean(x, mask, axis=0).tolist() == pytest.approx([2.0, 2.0])


def test_gradient_does_not_see_what_is_masked():
    x = torch.tensor([1.0, float("inf"), 3.0], requires_grad=True)
    masked_mean(x, torch.tensor([1, 0, 1])).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("kept", [0, 1])
def test_variance_of_fewer_than_two_values_is_refused(kept):
    with pytest.raises(DataError, match=f"this one has {kept}"):
        masked_var(torch.ones(3), torch.tensor([kept, 0, 0]))
