"""Programming problems with tests: MBPP, HumanEval, and the APPS, TACO and CodeContests family.

The truth is a JSON string in one of three forms: {"inputs": [stdin, ...], "outputs": [stdout, ...]};
{"fn_name": f, "inputs": [[argument, ...], ...], "outputs": [result, ...]}; {"asserts": [statement, ...]}, with
"entry_point" where the assertions call the function `candidate`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl.data.prepare.base import Recipe, Row, first_of, rl_row
from verl.errors import DataError
from verl.json_input import parse_json

STDIN = (
    "Write a Python program that reads standard input and prints the result. Put it in one ```python block."
)
FUNCTION = "Write the Python function{name}. Put the complete code in one ```python block."


def _parsed(value: Any, column: str) -> Any:
    """Test columns are often JSON inside a string."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise DataError(f"'{column}' is not valid JSON: {error}") from error


def _tests_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row's tests in one of the three forms; None when it has none."""
    if row.get("test_list"):  # MBPP
        setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
        return {"asserts": [f"{setup}\n{test}".strip() for test in row["test_list"]]}
    if row.get("test") and row.get("entry_point"):  # HumanEval
        return {"asserts": [row["test"]], "entry_point": row["entry_point"]}
    for column in ("input_output", "tests", "test_cases", "public_tests", "private_tests"):
        tests = _parsed(row.get(column), column) if row.get(column) else None
        if isinstance(tests, list):  # [{"input": ..., "output": ...}, ...]
            if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
                raise DataError(f"'{column}' must be a list of objects with 'input' and 'output'")
            tests = {
                "inputs": [test["input"] for test in tests],
                "outputs": [test["output"] for test in tests],
            }
        if isinstance(tests, Mapping):
            inputs, outputs = (tests.get(name, tests.get(name + "s")) for name in ("input", "output"))
            if inputs and outputs and len(inputs) == len(outputs):
                named = {"fn_name": tests["fn_name"]} if tests.get("fn_name") else {}
                return {**named, "inputs": list(inputs), "outputs": list(outputs)}
            if inputs or outputs:
                raise DataError(f"'{column}' has {len(inputs or ())} inputs and {len(outputs or ())} outputs")
    return None


def convert(row: Mapping[str, Any], index: int, split: str) -> Row | None:
    problem = str(first_of(row, ("question", "problem", "text", "prompt", "description"), "problem")).strip()
    tests = _tests_of(row)
    if tests is None:
        return None
    function = tests.get("fn_name") or row.get("entry_point")
    if "asserts" in tests and not row.get("entry_point"):
        problem += "\n\nIt must pass:\n" + "\n".join(row["test_list"][:3])
    starter = row.get("starter_code")
    if starter:
        problem += f"\n\nStart from:\n{starter}"
    by_function = "asserts" in tests or "fn_name" in tests
    instruction = FUNCTION.format(name=f" `{function}`" if function else "") if by_function else STDIN
    return rl_row(
        "code",
        f"{problem}\n\n{instruction}",
        json.dumps(tests),
        ability="code",
        index=index,
        split=split,
        extra={
            name: str(row[name]) for name in ("task_id", "difficulty", "source") if row.get(name) is not None
        },
    )


RECIPE = Recipe(
    "code",
    "programming problems with tests (MBPP, HumanEval, APPS, TACO, CodeContests)",
    convert,
    hub_id="google-research-datasets/mbpp:full",
)
