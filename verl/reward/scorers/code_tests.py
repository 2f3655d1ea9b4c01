"""Parses the tests of a programming problem, in the forms datasets have them, and compares answers.

Two kinds: a program reads standard input and prints, or a function is called with arguments. Assertions such as
`assert f(1, 2) == 3` are split into calls and expected values; the latter stay outside the sandbox. An assertion that
cannot be split is an error, not a test silently dropped.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl.errors import RewardError

TOLERANCE = 1e-6


@dataclass(frozen=True)
class StdinTest:
    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    args: list[Any]
    expected: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    view: str = ""
    """What is compared of the result: '', truth, set, sorted, len."""
    unwrap: bool = False
    """Some datasets put the single result of a call into a list."""


@dataclass(frozen=True)
class Tests:
    entry: str | None
    stdin: list[StdinTest]
    calls: list[CallTest]


def parse(ground_truth: Any) -> Tests:
    """Every form we know; RewardError otherwise."""
    spec = ground_truth
    if isinstance(spec, str):
        try:
            spec = json.loads(spec)
        except ValueError:
            return _from_assertions(spec, None)
    spec = _without_arrays(spec)
    if isinstance(spec, list | tuple):
        if spec and all(isinstance(item, str) for item in spec):
            return _from_assertions("\n".join(spec), None)
        spec = {"tests": list(spec)}
    if not isinstance(spec, dict):
        raise _unknown(ground_truth)
    entry = spec.get("fn_name") or spec.get("entry_point")
    for name in ("test_list", "asserts"):
        if spec.get(name) is not None:
            return _from_assertions("\n".join(map(str, spec[name])), entry)
    if isinstance(spec.get("test"), str):
        return _from_assertions(spec["test"], entry)
    if "inputs" in spec and "outputs" in spec:
        pairs = list(zip(spec["inputs"], spec["outputs"], strict=True))
        if entry:
            return Tests(entry, [], [_apps_call(given, expected) for given, expected in pairs])
        return Tests(None, [StdinTest(_text(given), _text(expected)) for given, expected in pairs], [])
    cases = spec.get("tests") or spec.get("test_cases")
    if isinstance(cases, list) and cases and all(isinstance(case, dict) for case in cases):
        return _from_cases(cases, entry)
    raise _unknown(ground_truth)


def _without_arrays(value: Any) -> Any:
    """Tables read from files have arrays where there were lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_without_arrays(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value


def _from_cases(cases: list[dict[str, Any]], entry: str | None) -> Tests:
    stdin, calls = [], []
    for case in cases:
        expected = case.get("expected", case.get("output"))
        if "args" in case or "kwargs" in case:
            calls.append(CallTest(list(case.get("args") or []), expected, dict(case.get("kwargs") or {})))
        elif "input" in case:
            stdin.append(StdinTest(_text(case["input"]), _text(expected)))
        else:
            raise _unknown(case)
    if calls and not entry:
        raise RewardError("Tests with 'args' need the function's name in 'entry_point' of the ground truth.")
    return Tests(entry, stdin, calls)


def _apps_call(given: Any, expected: Any) -> CallTest:
    if isinstance(given, str):
        args = [json.loads(line) for line in given.splitlines() if line.strip()]
    else:
        args = list(given) if isinstance(given, list | tuple) else [given]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError):  # else it is a text
            expected = json.loads(expected)
    return CallTest(args, expected, unwrap=True)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _unknown(ground_truth: Any) -> RewardError:
    return RewardError(
        f"The code scorer does not know this form of tests: {str(ground_truth)[:120]!r}. It takes {{'inputs': [...], "
        f"'outputs': [...]}} (with 'fn_name' for function calls), {{'tests': [{{'input', 'output'}}]}} or "
        f"[{{'args', 'expected'}}] with 'entry_point', or assertions such as 'assert f(1) == 2'."
    )


# ---- assertions


def _from_assertions(text: str, entry: str | None) -> Tests:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unknown(text) from None
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    if not statements:
        raise _unknown(text)
    names: set[str] = set()
    calls = [_assertion(node.test, names) for node in statements]
    called = {entry if entry and name == "candidate" else name for name in names}
    if len(called) != 1:
        raise RewardError(
            f"The assertions call several functions ({', '.join(sorted(called))}); only one is allowed."
        )
    return Tests(entry or called.pop(), [], calls)


_VIEWS = {"set": "set", "sorted": "sorted", "len": "len", "tuple": "", "list": ""}
_MAKERS: dict[str, Callable[..., Any]] = {
    "set": set, "frozenset": set, "sorted": sorted, "tuple": tuple, "list": list, "float": float,
}  # fmt: skip


def _assertion(test: ast.expr, names: set[str]) -> CallTest:
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    inner = test.operand if negated else test  # type: ignore[attr-defined]
    try:
        if isinstance(inner, ast.Compare) and len(inner.ops) == 1 and not negated:
            operator, right = inner.ops[0], inner.comparators[0]
            constant = isinstance(operator, ast.Is) and isinstance(right, ast.Constant)
            if isinstance(operator, ast.Eq) or constant:
                call, view = inner.left, _VIEWS.get(_called(inner.left))
                if view is not None and isinstance(call, ast.Call) and len(call.args) == 1:
                    return _call(call.args[0], names, _literal(right), view)
                return _call(call, names, _literal(right), "")
        if isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Attribute) and inner.func.attr == "isclose" and not negated:
                return _call(inner.args[0], names, _literal(inner.args[1]), "")
            return _call(inner, names, not negated, "truth")
    except (ValueError, TypeError, IndexError, SyntaxError):
        pass
    raise RewardError(
        f"The code scorer cannot read the assertion {ast.unparse(test)[:120]!r}; it knows 'f(literals) == literal', "
        f"'f(literals)', 'not f(literals)', set(...), sorted(...), len(...) around the call, and math.isclose."
    )


def _call(node: ast.expr, names: set[str], expected: Any, view: str) -> CallTest:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("not a plain call")
    names.add(node.func.id)
    kwargs = {keyword.arg: _wire(_literal(keyword.value)) for keyword in node.keywords if keyword.arg}
    return CallTest([_wire(_literal(arg)) for arg in node.args], expected, kwargs, view)


def _literal(node: ast.expr) -> Any:
    """A literal's value; also set([...]), sorted([...]), tuple(...) and float('inf') of literals."""
    maker = _MAKERS.get(_called(node))
    if maker is not None and isinstance(node, ast.Call) and len(node.args) <= 1 and not node.keywords:
        return maker(*(ast.literal_eval(arg) for arg in node.args))
    return ast.literal_eval(node)


def _called(node: ast.expr) -> str:
    """The plain name that an expression calls, if it does."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _wire(value: Any) -> Any:
    """A form of an argument that JSON preserves."""
    if isinstance(value, tuple | set | frozenset | bytes | complex | dict):
        return {"__python__": repr(value)}
    return [_wire(item) for item in value] if isinstance(value, list) else value


# ---- comparing


def call_passes(test: CallTest, returned: Any) -> bool:
    """Whether what a call returned is what was expected."""
    expected = test.expected
    if test.view == "truth":
        return bool(returned) is expected
    if not test.view:
        unwrapped = test.unwrap and isinstance(expected, list) and len(expected) == 1
        return same_value(returned, expected) or (unwrapped and same_value(returned, expected[0]))
    members = returned.get("__set__", returned) if isinstance(returned, dict) else returned
    if not isinstance(members, list | str | dict):
        return False
    if test.view == "len":
        return len(members) == expected
    if not isinstance(expected, list | tuple | set):
        return False
    left, right = sorted(map(_key, members)), sorted(map(_key, expected))
    return left == right if test.view == "sorted" else set(left) == set(right)


def _key(item: Any) -> str:
    return json.dumps(_plain(item), sort_keys=True, default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"__set__": sorted((_plain(item) for item in value), key=repr)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def same_value(left: Any, right: Any) -> bool:
    """Equal as data: tuples are lists, floats have a tolerance."""
    left, right = _plain(left), _plain(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, float) or isinstance(right, float):
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return False
        try:
            return left == right or math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:  # an integer beyond the range of floats
            return False
    return type(left) is type(right) and bool(left == right)


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line without space at the ends; numbers with a decimal point have a tolerance."""
    left = [line.split() for line in printed.strip().splitlines()]
    right = [line.split() for line in expected.strip().splitlines()]
    return list(map(len, left)) == list(map(len, right)) and all(
        all(map(_same_token, *lines)) for lines in zip(left, right, strict=True)
    )


def _same_token(left: str, right: str) -> bool:
    if left == right:
        return True
    if "." not in left and "." not in right:
        return False
    try:
        return math.isclose(float(left), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False
