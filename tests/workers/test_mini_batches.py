"""Mini-batches: all rows once per pass, in order first, with the counts of their own rows."""

from __future__ import annotations

import torch

from verl.data.proto import DataProto
from verl.workers.mini_batches import mini_batches


def batch() -> DataProto:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1]])
    return DataProto.from_dict(
        tensors={"response_mask": mask, "row": torch.arange(5)}, meta_info={"temperature": 0.7}
    )


def test_denominators_are_those_of_the_rows_at_hand():
    minis = list(mini_batches(batch(), 3, 1, seed=0))
    counts = [(m.meta_info["batch_num_tokens"], m.meta_info["global_batch_size"]) for m in minis]
    assert counts == [(3, 2), (4, 2)], "a row without policy tokens counts in neither"
    assert all(m.meta_info["temperature"] == 0.7 for m in minis)


def test_the_first_pass_keeps_the_order_and_later_ones_are_shuffled_by_the_seed():
    def passes(seed: int) -> list[list[int]]:
        rows = [row for mini in mini_batches(batch(), 2, 3, seed=seed) for row in mini.batch["row"].tolist()]
        return [rows[start : start + 5] for start in (0, 5, 10)]

    first, *later = passes(1)
    assert first == [0, 1, 2, 3, 4] and all(sorted(rows) == first for rows in later)
    assert passes(1) == passes(1) and any(passes(seed)[1] != first for seed in range(4))
