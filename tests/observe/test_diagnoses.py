"""Every diagnosis reports what it should and nothing else, and what it advises can be typed."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.observe.histories import RIGHT, SICK
from verl.config.keys import get
from verl.config.load import from_dict
from verl.observe.diagnoses.crashes import CRASHES
from verl.observe.diagnoses.steps import START_RULES, STEP_RULES

JUDGED = [rule.name for rule in (*START_RULES, *STEP_RULES)]


def test_names_differ_and_every_case_is_of_a_rule() -> None:
    names = [*JUDGED, *(rule.name for rule in CRASHES)]
    assert len(set(names)) == len(names)
    assert set(SICK) == set(RIGHT) == set(JUDGED)


@pytest.mark.parametrize("rule", JUDGED)
def test_a_rule_reports_its_sick_histories_and_no_other_does(rule: str) -> None:
    for case in SICK[rule]:
        found = case.reported()
        assert [each.rule for each in found] == [rule], found
        assert case.seen in found[0].seen and case.key in found[0].try_, found[0].line
        assert found[0].meaning and "\n" not in found[0].line


@pytest.mark.parametrize("rule", JUDGED)
def test_nothing_is_reported_of_histories_that_are_right(rule: str) -> None:
    for case in RIGHT[rule]:
        assert case.reported() == []


@pytest.mark.parametrize("rule", JUDGED)
def test_no_advice_is_the_value_that_a_key_has(rule: str) -> None:
    """Also not where the first advice was followed and the history is as bad."""
    for case in SICK[rule]:
        for _ in range(2):
            found = [each for each in case.reported() if each.rule == rule]
            advised = dict(
                re.findall(r"(?<![\w.+])([a-z_]+\.[\w.]+)=([\w.-]+)", " ".join(each.try_ for each in found))
            )
            config = from_dict(case.kind, dict(case.settings), checked=False)
            assert [
                key for key, value in advised.items() if str(get(config, key)) in (value, f"{value}.0")
            ] == []
            case = replace(
                case, settings={**case.settings, **{key: typed(value) for key, value in advised.items()}}
            )


def typed(value: str) -> object:
    return json.loads(value.lower()) if re.fullmatch(r"True|-?[\d.]+(e-?\d+)?", value) else value
