"""The audit of rows that agent loops return: what the policy drew passes, everything else is refused with its place."""

from __future__ import annotations

import random

import pytest

from verl.agents.loop_audit import Drawn, NotDrawn, check_contexts, check_log_probs, match_draws
from verl.rollout.base import Response

TEXTS = {1: "hel", 2: "lo", 3: "hello", 4: "!", 5: "bye", 9: "<end>"}
PROMPT = [70, 71]
TOOL = [80, 81]


def drawn(ids: list[int], prompt: list[int], *, shift: float = 0.0) -> Drawn:
    log_probs = [-0.5 - 0.25 * number - shift for number in range(len(ids))]
    return Drawn(prompt, Response("r", 0, ids, log_probs, "stop"))


FIRST = drawn([1, 2, 4, 9], PROMPT)
SECOND = drawn([5, 4, 9], [*PROMPT, 1, 2, 4, 9, *TOOL])
DRAWS = [FIRST, SECOND]
WHOLE = [1, 2, 4, 9, *TOOL, 5, 4, 9]
MASK = [1, 1, 1, 1, 0, 0, 1, 1, 1]


def decode(ids: object) -> str:
    return "".join(TEXTS.get(token, f"<{token}>") for token in ids)  # type: ignore[attr-defined]


def spans(ids: list[int], mask: list[int], draws: list[Drawn] = DRAWS) -> list[tuple[int, int, int]]:
    parts = match_draws(PROMPT, ids, mask, draws, decode)
    return [(part.start, part.count, draws.index(part.draw)) for part in parts]


def test_what_was_drawn_passes() -> None:
    assert spans(WHOLE, MASK) == [(0, 4, 0), (6, 3, 1)]
    assert spans([], []) == []


def test_a_draw_may_be_cut_at_its_end_or_left_out() -> None:
    assert spans(WHOLE[:-2], MASK[:-2]) == [(0, 4, 0), (6, 1, 1)], "cut at the budget"
    assert spans([1, 2, 4, *TOOL, 5, 4, 9], [1, 1, 1, 0, 0, 1, 1, 1]) == [(0, 3, 0), (5, 3, 1)]
    assert spans([5, 4, 9], [1, 1, 1]) == [(0, 3, 1)]
    assert spans(WHOLE, [0] * 4 + MASK[4:]) == [(6, 3, 1)], "a turn that is read and not learned"


def test_a_turn_that_was_drawn_after_other_tokens_is_refused() -> None:
    check_contexts(PROMPT, WHOLE, match_draws(PROMPT, WHOLE, MASK, DRAWS, decode))
    for ids, at in (([1, 2, 4, 9, 80, 5, 4, 9], 7), ([1, 2, 4, 9, 80, 82, 5, 4, 9], 7), ([5, 4, 9], 2)):
        mask = [int(token < 10) for token in ids]
        parts = match_draws(PROMPT, ids, mask, DRAWS, decode)
        with pytest.raises(NotDrawn, match=f"differ from position {at} on"):
            check_contexts(PROMPT, ids, parts)


@pytest.mark.parametrize(
    ("ids", "mask", "told"),
    [
        pytest.param(
            [3, 4, 9, *TOOL, 5, 4, 9],
            [1, 1, 1, 0, 0, 1, 1, 1],
            r"response_ids\[0\] is 3 \('hello'\).*drew 1 \('hel'\).*tokenised again",
            id="text tokenised again",
        ),
        pytest.param(
            [1, 4, 9, *TOOL, 5, 4, 9],
            [1, 1, 1, 0, 0, 1, 1, 1],
            r"response_ids\[1\] is 4 .*drew 2 .*missing",
            id="a token dropped",
        ),
        pytest.param(
            WHOLE,
            [1] * 9,
            r"response_ids\[4\] is 80 .*with mask 1, where the policy drew 5 .*must have mask 0",
            id="a tool's text with mask 1",
        ),
        pytest.param(
            [5, 4, 9, *TOOL, 1, 2, 4, 9],
            [1, 1, 1, 0, 0, 1, 1, 1, 1],
            r"response_ids\[5\] is 1 .*mask 1",
            id="in another order",
        ),
        pytest.param(
            [*FIRST.token_ids, *FIRST.token_ids],
            [1] * 8,
            r"response_ids\[4\] is 1 .*mask 1",
            id="a draw twice",
        ),
    ],
)
def test_another_row_is_refused_with_its_place_and_cause(ids: list[int], mask: list[int], told: str) -> None:
    with pytest.raises(NotDrawn, match=told):
        spans(ids, mask)


def test_of_equal_draws_the_one_in_the_rows_context_counts() -> None:
    """The same tokens were drawn after another prompt, with other log-probs."""
    elsewhere = drawn([5, 4, 9], [7, 7], shift=1.0)
    for draws in ([FIRST, elsewhere, SECOND], [FIRST, SECOND, elsewhere]):
        assert spans(WHOLE, MASK, draws) == [(0, 4, 0), (6, 3, draws.index(SECOND))]


def test_a_draw_that_begins_as_another_does_is_found() -> None:
    draws = [drawn([1], PROMPT), drawn([1, 2], PROMPT), drawn([2, 4], [*PROMPT, 1])]
    assert spans([1, 2], [1, 1], draws[:2]) == [(0, 2, 1)]
    assert spans([1, 2, 4], [1, 1, 1], draws) == [(0, 1, 0), (1, 2, 2)]


def test_random_rows_pass_as_drawn_and_not_with_one_token_changed() -> None:
    draws = random.Random(5)
    for _ in range(200):
        row, mask, record = list[int](), list[int](), list[Drawn]()
        for _ in range(draws.randint(1, 4)):
            ids = [draws.randrange(4) for _ in range(draws.randint(1, 5))]
            record.append(drawn(ids, [*PROMPT, *row]))
            read = [draws.randrange(4) for _ in range(draws.randint(0, 3))]
            row, mask = [*row, *ids, *read], [*mask, *[1] * len(ids), *[0] * len(read)]
        parts = match_draws(PROMPT, row, mask, record, decode)
        assert [(part.draw, part.count) for part in parts] == [(each, len(each.token_ids)) for each in record]
        place = draws.choice([at for at, own in enumerate(mask) if own])
        with pytest.raises(NotDrawn):
            match_draws(PROMPT, [*row[:place], 1000, *row[place + 1 :]], mask, record, decode)


def test_log_probs_are_those_of_the_draws() -> None:
    parts = match_draws(PROMPT, WHOLE, MASK, DRAWS, decode)
    given = [-0.5, -0.75, -1.0, -1.25, 0.0, 0.0, -0.5, -0.75, -1.0]
    check_log_probs(given, parts)
    check_log_probs([value * (1 + 1e-7) for value in given], parts)  # through float32
    for wrong in (-0.76, float("nan")):
        with pytest.raises(NotDrawn, match=r"response_logprobs\[7\] is .*drawn with -0.75"):
            check_log_probs([*given[:7], wrong, given[8]], parts)
