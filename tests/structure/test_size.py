"""What is above `benchmarks/size_budget.json` is named; `make lint` compares the code lines with it."""

from __future__ import annotations

import json

import pytest

from benchmarks.size import BUDGET, ROOT, modules_of_a_grpo_run, over_budget

SIZES = {
    "code": 10,
    "longest_file": ["a.py", 9],
    "packages": {"config": {"files": 1, "code": 10}},
    "grpo_modules": 3,
}
LIMITS = {"code": 10, "longest_file": 9, "packages": {"config": 10}, "grpo_modules": 3}


@pytest.mark.parametrize("name", ["code", "longest_file", "grpo_modules"])
def test_a_figure_above_its_budget_is_named(name):
    assert not over_budget(SIZES, LIMITS)
    (line,) = over_budget(SIZES, {**LIMITS, name: LIMITS[name] - 1})
    assert line.endswith(f"the budget is {LIMITS[name] - 1}")


def test_a_package_without_a_budget_has_none():
    assert over_budget(SIZES, {**LIMITS, "packages": {}}) == ["code lines of config: 10, the budget is 0"]


@pytest.mark.slow(seconds=15)
def test_modules_that_a_grpo_run_in_one_process_imports():
    assert modules_of_a_grpo_run(ROOT) <= json.loads(BUDGET.read_text())["grpo_modules"]
