"""Batches that hold every awkward case at once, and small helpers the files of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

MakeBatch = Callable[..., SimpleNamespace]


def _make_batch(
    seed: int = 0, rows: int = 12, width: int = 7, dtype: torch.dtype = torch.float64, garbage: bool = True
) -> SimpleNamespace:
    """Ragged masks with holes, an empty response, a single token; groups of several sizes with one of one member
    and one of equal rewards; NaN and infinities on every masked position when `garbage`."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    mask &= torch.rand(rows, width, generator=g) > 0.25
    mask[0] = False  # an empty response
    mask[1] = False
    mask[1, width // 2] = True  # a single token
    mask[2] = True
    mask[3, : width // 2] = True
    index = np.array(
        [f"p{i}" for i in torch.randint(0, max(rows // 4, 1), (rows,), generator=g).tolist()], object
    )
    index[1] = "alone"
    index[2:4] = "equal"
    rewards = normal(rows, width)
    for row in (2, 3):  # one outcome reward each, the same, on the last policy token
        rewards[row] = 0
        rewards[row, mask[row].nonzero()[-1]] = 0.7
    batch = SimpleNamespace(
        mask=mask.long(),
        index=index,
        rewards=rewards,
        values=normal(rows, width),
        old=-normal(rows, width).abs(),
        advantages=normal(rows, width),
        sum_pi_squared=torch.rand(rows, width, generator=g, dtype=torch.float64),
        baselines=normal(rows),
        returns=normal(rows, width),
        weights=torch.rand(rows, width, generator=g, dtype=torch.float64) + 0.5,
        by_key={"right": normal(rows), "form": torch.randint(0, 2, (rows,), generator=g).double()},
    )
    for name, away in (("log_prob", 0.5), ("ref", 0.5), ("rollout", 0.3)):  # near the old ones, and below 0
        setattr(batch, name, batch.old * (away * normal(rows, width)).exp())
    batch.process_rewards = normal(rows, width)
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(dtype)
            if garbage and value.dim() == 2:
                junk = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
                value = torch.where(mask, value, junk[torch.randint(0, 3, (rows, width), generator=g)])
            setattr(batch, name, value)
    return batch


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    return _make_batch
