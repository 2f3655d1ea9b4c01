"""Conversations of several turns as `multi_turn.history` makes rows of them: one row each (append), or one row per
turn (split, as `split_turns` makes them)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from verl.agents.conversation import Conversation
from verl.data.assemble import assemble_rollouts, split_turns
from verl.data.proto import DataProto
from verl.rollout.base import Response

FLOATS = (
    "token_level_scores", "token_level_rewards", "values", "returns", "old_log_probs", "rollout_log_probs",
    "ref_log_prob", "sum_pi_squared", "advantages",
)  # fmt: skip
LONGEST_TURN = 4
PAD = 0


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
    talks = [_conversation(draw, f"p{row // n}", row % n) for row in range(rows)]
    columns: dict[str, list[Any]] = {
        "uid": [f"p{row // n}" if row != 1 else "p0#1" for row in range(rows)],
        "prompt_ids": [talk.prompt_ids for talk in talks],
        "conversation": talks,
        "reward_error": [None if row != 1 else "failed" for row in range(rows)],
        "reward_extra": [{"right": draw.gauss(0, 1), "form": float(draw.randint(0, 1))} for _ in range(rows)],
    }
    append = assemble_rollouts(
        DataProto.from_dict(non_tensors=columns, meta_info={"temperature": 1.0}), talks, PAD
    )
    mask = append.batch["response_mask"]
    mask[1] = 0
    append.batch["reward_baselines"] = torch.tensor(
        [draw.gauss(0, 1) for _ in range(rows)], dtype=torch.float64
    )
    for name in FLOATS:
        values = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        for row, at in mask.nonzero().tolist():
            value = draw.gauss(0, 1)
            values[row, at] = -abs(value) if "log_prob" in name else value
        append.batch[name] = values
    split = split_turns(append, PAD)
    off = split.batch["response_mask"] == 0
    split.batch |= {name: split.batch[name].masked_fill(off, torch.nan) for name in FLOATS}
    turns = [(row, turn) for row, talk in enumerate(talks) for turn in talk.model_turns]
    places = [
        (row, turn.start + at, number, at)
        for number, (row, turn) in enumerate(turns)
        for at in range(turn.end - turn.start)
        if row != 1
    ]
    return TurnRows(append, split, places)


def _conversation(draw: random.Random, uid: str, sample: int) -> Conversation:
    talk = Conversation(uid, sample, [1, 2], [{"role": "user", "content": "?"}])
    for _ in range(draw.randint(1, 4)):
        tokens = [draw.randint(3, 9) for _ in range(draw.randint(1, LONGEST_TURN))]
        prompt = [*talk.prompt_ids, *talk.token_ids]
        response = Response(f"{uid}#{sample}", 0, tokens, [-1.0] * len(tokens), "stop")
        talk.add_model_turn(response, "!", prompt_ids=prompt)
        talk.add_messages([2] * draw.randint(1, 3), [{"role": "tool", "content": "."}])
    talk.finish_reason = draw.choice(["stop", "length", "turns"])
    return talk
