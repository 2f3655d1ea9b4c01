"""Every diagnosis reports what it should and nothing else, and what it advises can be typed."""

from __future__ import annotations

import pytest

from tests.observe.histories import RIGHT, SICK
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
