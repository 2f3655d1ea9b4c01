"""Conversations of several turns as `multi_turn.history` makes rows of them: one row each (append), or one row per
turn (split)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from verl.data.proto import DataProto

FLOATS = (
    "token_level_scores", "token_level_rewards", "values", "returns", "old_log_probs", "rollout_log_probs",
    "ref_log_prob", "sum_pi_squared", "advantages",
)  # fmt: skip
LONGEST_TURN = 4


@dataclass
class TurnRows:
    append: DataProto
    split: DataProto
    places: list[tuple[int, int, int, int]]
    """Of each policy token: row and position in `append`, row and position in `split`."""

    def same(self, name: str, tolerance: float = 1e-12) -> None:
        """The tensor has the same numbers on the policy's tokens, and zeros elsewhere in `split`."""
        in_append, at, in_split, then = torch.tensor(self.places).unbind(-1)
        whole, parts = self.append.batch[name], self.split.batch[name]
        torch.testing.assert_close(
            parts[in_split, then], whole[in_append, at], rtol=tolerance, atol=tolerance
        )
        parts = parts.clone()
        parts[in_split, then] = 0
        assert not bool((parts != 0).any())


def turn_rows(seed: int = 0, prompts: int = 4, n: int = 3) -> TurnRows:
    """Turns of 1 to 4 tokens with tool output between them; NaN wherever no token of the policy is. The second
    conversation has no score: its mask is empty and its group its own."""
    draw, rows = random.Random(seed), prompts * n
    turns = [[draw.randint(1, LONGEST_TURN) for _ in range(draw.randint(1, 4))] for _ in range(rows)]
    gaps = [[draw.randint(1, 3) for _ in each] for each in turns]
    width = max(sum(each) + sum(between) for each, between in zip(turns, gaps, strict=True))
    owner = [row for row, each in enumerate(turns) for _ in each]
    shapes = {"append": (rows, width), "split": (len(owner), LONGEST_TURN)}
    tensors: dict[str, dict[str, torch.Tensor]] = {
        kind: {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in FLOATS}
        | {"response_mask": torch.zeros(shape, dtype=torch.long)}
        for kind, shape in shapes.items()
    }
    places, turn_number = [], 0
    for row, each in enumerate(turns):
        start = 0
        for length, gap in zip(each, gaps[row], strict=True):
            places += [(row, start + t, turn_number, t) for t in range(length) if row != 1]
            start += length + gap
            turn_number += 1
    for row, at, turn, then in places:
        for name in FLOATS:
            value = draw.gauss(0, 1)
            value = -abs(value) if "log_prob" in name else value
            tensors["append"][name][row, at] = tensors["split"][name][turn, then] = value
        tensors["append"]["response_mask"][row, at] = tensors["split"]["response_mask"][turn, then] = 1
    uids = [f"p{row // n}" if row != 1 else "p0#1" for row in range(rows)]
    baselines = torch.tensor([draw.gauss(0, 1) for _ in range(rows)], dtype=torch.float64)
    columns = {
        "uid": uids,
        "finish_reason": [draw.choice(["stop", "length", "turns"]) for _ in range(rows)],
        "reward_error": [None if row != 1 else "failed" for row in range(rows)],
        "reward_extra": [{"right": draw.gauss(0, 1), "form": float(draw.randint(0, 1))} for _ in range(rows)],
    }
    tensors["append"]["reward_baselines"] = baselines
    tensors["split"]["reward_baselines"] = baselines[owner]
    repeated = {name: [values[row] for row in owner] for name, values in columns.items()}
    repeated["session"] = [f"conversation {row}" for row in owner]
    return TurnRows(
        DataProto.from_dict(tensors["append"], columns, {"temperature": 1.0}),
        DataProto.from_dict(tensors["split"], repeated, {"temperature": 1.0}),
        places,
    )
