"""Scorers under verl's import paths return what verl's return: numbers, and a dict for DAPO's data."""

from __future__ import annotations

import pytest

from verl.data.proto import DataProto
from verl.errors import RewardError
from verl.reward.scorers import REGISTERED, register_scorer
from verl.utils.reward_score import default_compute_score, gsm8k, math, math_dapo, math_reward
from verl.utils.reward_score.search_r1_like_qa_em import compute_score as exact_match


def test_scores_are_plain_numbers() -> None:
    assert gsm8k.compute_score("so #### 72", "72") == 1.0
    assert gsm8k.compute_score("so #### 5", "72", format_score=0.1) == 0.1
    assert gsm8k.compute_score("so 72", "72") == 0.0
    assert gsm8k.compute_score("so 72", "72", "flexible") == 1.0
    assert gsm8k.extract_solution("#### 1,000") == "1000"
    assert math_reward.compute_score(r"\boxed{1/2}", r"\frac{1}{2}") == 1.0
    assert math.compute_score is math_reward.compute_score
    assert math_reward.is_equiv("0.5", r"\frac{1}{2}") and not math_reward.is_equiv("1", "2")
    assert exact_match("<answer>Paris</answer>", {"target": ["Paris"]}) == 1.0
    for value in (gsm8k.compute_score("x", "1"), math_reward.compute_score("x", "1")):
        assert type(value) is float


def test_dapo_gives_its_details() -> None:
    found = math_dapo.compute_score("Answer: 34", "34")
    assert (found["score"], found["acc"], found["pred"]) == (1.0, 1.0, "34")
    assert math_dapo.compute_score("Answer: 3", "34")["score"] == -1.0
    assert math_dapo.compute_score(r"\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0


def test_the_default_is_chosen_by_data_source() -> None:
    assert default_compute_score("openai/gsm8k", "#### 72", "72", {"index": 1}) == 1.0
    assert default_compute_score("lighteval/MATH", r"\boxed{2}", "3") == 0.0
    assert default_compute_score("math_dapo", "Answer: 34", "34")["acc"] == 1.0
    with pytest.raises(RewardError, match="No scorer for data_source 'unheard_of'"):
        default_compute_score("unheard_of", "a", "b")


def test_a_registered_scorer_is_asked() -> None:
    register_scorer("mine")(lambda solution_str, extra_info: extra_info["worth"] * len(solution_str))
    try:
        assert default_compute_score("mine", "abc", None, {"worth": 2}) == 6
    finally:
        del REGISTERED["mine"]


def test_data_proto_is_one_class() -> None:
    import verl
    import verl.protocol

    assert verl.DataProto is verl.protocol.DataProto is DataProto
