"""Whether a row that an agent loop returned is what the policy drew.

Each token with mask 1 must be a token of a draw of this conversation, after those before it in the same draw, and the
draws in their order. A draw may be cut at its end or left out; nothing else may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.rollout.base import Response

_TOLERANCE = 1e-5
"""Of log-probs, which may have been through float32."""


@dataclass
class Drawn:
    """One request to the policy: what it read, and what it drew."""

    prompt_ids: list[int]
    response: Response | None = None
    """None: not answered."""

    @property
    def token_ids(self) -> list[int]:
        return [] if self.response is None else self.response.token_ids


@dataclass(frozen=True)
class Part:
    """So many tokens of a draw, from position `start` of the row's response on."""

    start: int
    count: int
    draw: Drawn


class NotDrawn(Exception):
    """The row is not what the policy drew; the text says where, and why that may be."""


@dataclass
class _Match:
    """The first so many tokens with mask 1, explained."""

    parts: list[Part] = field(default_factory=list)
    in_context: int = 0
    """Draws that read what the row has in front of them."""


def match_draws(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
    draws: Sequence[Drawn],
    decode: Callable[[Sequence[int]], str],
) -> list[Part]:
    """The draws that the row's tokens with mask 1 are, or NotDrawn."""
    own = [position for position, mask in enumerate(response_mask) if mask]
    run = _run_lengths(response_mask)
    matches = {0: _Match()}
    for draw in draws:
        for count, match in list(matches.items()):
            if count == len(own) or not draw.token_ids:
                continue
            start = own[count]
            length = min(len(draw.token_ids), run[start])
            if list(response_ids[start : start + length]) != draw.token_ids[:length]:
                continue
            same = draw.prompt_ids == [*prompt_ids, *response_ids[:start]]
            longer = _Match([*match.parts, Part(start, length, draw)], match.in_context + same)
            other = matches.get(count + length)
            if other is None or longer.in_context > other.in_context:
                matches[count + length] = longer
    if len(own) not in matches:
        furthest = max(matches)
        used = matches[furthest].parts
        left = draws[draws.index(used[-1].draw) + 1 if used else 0 :]
        start = own[furthest]
        raise NotDrawn(_explain(response_ids, start, start + run[start], left, decode))
    return matches[len(own)].parts


def check_contexts(prompt_ids: Sequence[int], response_ids: Sequence[int], parts: Sequence[Part]) -> None:
    """NotDrawn where the policy drew a turn after other tokens than the row has in front of it."""
    for part in parts:
        row, read = [*prompt_ids, *response_ids[: part.start]], part.draw.prompt_ids
        if row != read:
            pairs = enumerate(zip(row, read, strict=False))
            at = next((at for at, (ours, drawn) in pairs if ours != drawn), min(len(row), len(read)))
            raise NotDrawn(
                f"the turn at response_ids[{part.start}] was drawn after {len(read)} tokens; the {len(row)} in front "
                f"of it differ from position {at} on: return the ids that generate() was given, or set "
                "rollout.multi_turn.history=split, which trains each turn after what it was drawn after"
            )


def check_log_probs(log_probs: Sequence[float], parts: Sequence[Part]) -> None:
    """NotDrawn where a token has another log-prob than the one it was drawn with."""
    for part in parts:
        assert part.draw.response is not None
        for offset, drawn in enumerate(part.draw.response.log_probs[: part.count]):
            given = float(log_probs[part.start + offset])
            if not math.isclose(given, drawn, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                raise NotDrawn(
                    f"response_logprobs[{part.start + offset}] is {given:g}, and its token was drawn with {drawn:g}: "
                    "return those that generate() gave, or None"
                )


def _run_lengths(mask: Sequence[int]) -> list[int]:
    """For each position, how many in a row have mask 1 from there on."""
    lengths = [0] * (len(mask) + 1)
    for position in range(len(mask) - 1, -1, -1):
        lengths[position] = lengths[position + 1] + 1 if mask[position] else 0
    return lengths


def _explain(
    response_ids: Sequence[int],
    start: int,
    end: int,
    draws: Sequence[Drawn],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Where the tokens from `start` to `end` leave the draw they have most in common with, and the likeliest cause."""
    ids = list(response_ids[start:end])

    def common(draw: Drawn) -> int:
        pairs = enumerate(zip(ids, draw.token_ids, strict=False))
        return next((at for at, (ours, drawn) in pairs if ours != drawn), min(len(ids), len(draw.token_ids)))

    draw = max(draws, key=common, default=Drawn([]))
    at = common(draw)
    token, rest = ids[at], draw.token_ids[at:]
    where = f"response_ids[{start + at}] is {token} ({decode([token])!r}) with mask 1, "
    where += (
        f"where the policy drew {rest[0]} ({decode(rest[:1])!r})" if rest else "which the policy did not draw"
    )
    text, drawn = decode(ids), decode(draw.token_ids)
    if drawn.strip() and (text.startswith(drawn.strip()) or drawn.startswith(text.strip())):
        return (
            f"{where}: the text is the policy's and its ids are others, so it was tokenised again; keep the ids that "
            "generate() returned"
        )
    if token in rest:
        return f"{where}: tokens that it drew before this one are missing"
    return f"{where}: what tools, users or the chat template write must have mask 0"
