"""The code scorer's tests: the forms they come in, and comparing."""

from __future__ import annotations

import numpy as np
import pytest

from verl.config.sections.reward import RewardConfig, SandboxConfig
from verl.errors import RewardError
from verl.reward import sandbox
from verl.reward.sandbox import local
from verl.reward.scorers.code import compute_score, extract_code
from verl.reward.scorers.code_tests import call_passes, parse, same_output, same_value

UNAVAILABLE = local.why_unavailable()
isolated = pytest.mark.skipif(
    UNAVAILABLE is not None, reason=f"the local sandbox cannot work here: {UNAVAILABLE}"
)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nbetter:\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```\n```python\nb\n```\n```text\nc\n```", "b\n"),
        ("print(1)", "print(1)"),
        ("```bash\nls\n```", None),
        ("```python\ncut off", None),
        ("", None),
    ],
)
def test_the_code_of_a_response(text, code):
    assert extract_code(text) == code


def test_forms_of_tests():
    assert [t.stdin for t in parse({"inputs": ["1", ["2", "3"]], "outputs": ["1", "5"]}).stdin] == [
        "1",
        "2\n3",
    ]
    assert parse('[{"input": "1", "output": "2"}]').stdin[0].expected == "2"
    calls = parse({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]})
    assert calls.entry == "f" and calls.calls[0].args == [1, 2] and call_passes(calls.calls[0], 3)
    mbpp = parse(
        ["assert f(1) == 2", "assert f((1, 2), k=[3]) == {'a': 1}", "assert not f(0)", "assert f(3)"]
    )
    assert mbpp.entry == "f" and [c.expected for c in mbpp.calls] == [2, {"a": 1}, False, True]
    humaneval = parse({"entry_point": "g", "test": "def check(candidate):\n    assert candidate(1) == 2\n"})
    assert humaneval.entry == "g"
    assert parse("assert set(f([1])) == set([1])\nassert sorted(f([2])) == [2]").calls[0].view == "set"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ("nothing here", "does not know this form"),
        ({"what": 1}, "does not know this form"),
        ("assert f(x) == 2", "cannot read the assertion"),
        ("assert f(1) < 2", "cannot read the assertion"),
        ("assert f(1) == 1\nassert g(1) == 1", "several functions"),
        ({"tests": [{"args": [1], "expected": 1}]}, "entry_point"),
    ],
)
def test_tests_that_cannot_be_used_are_an_error(tests, words):
    with pytest.raises(RewardError, match=words):
        parse(tests)


def test_comparing():
    assert same_output("1 2\n3 \n", "1  2\n3") and same_output("0.30000001", "0.3")
    assert (
        not same_output("1\n2", "1 2")
        and not same_output("1", "2")
        and not same_output("10000001", "10000000")
    )
    assert (
        same_value((1, [2.0]), [1, [2.0000000001]]) and not same_value(1, "1") and not same_value([1], [1, 2])
    )
    assert not same_value(10**400, 1.0)  # beyond the range of floats
    assert same_value({"__set__": [1, 2]}, {2, 1}) and same_value({"1": 2}, {1: 2})
    test = parse("assert set(f(1)) == {1, 2}").calls[0]
    assert call_passes(test, [2, 1, 1]) and not call_passes(test, [1]) and not call_passes(test, 7)
    test = parse("assert len(f(1)) == 2").calls[0]
    assert call_passes(test, [2, 1]) and not call_passes(test, [1])
    assert call_passes(parse("assert math.isclose(f(1), 0.1, rel_tol=1e-3)").calls[0], 0.1000000001)


@isolated
def test_pass_rate_and_all_or_nothing():
    sandbox.configure(RewardConfig(timeout_s=75.0, sandbox=SandboxConfig(timeout_s=20.0)))
    tests = ["assert f((1, 2)) == 3", "assert f((2, 2)) == 5", "assert f({1}) == 1"]
    answer = "```python\ndef f(x):\n    return sum(x)\n```"
    assert compute_score(answer, tests)["score"] == pytest.approx(2 / 3)
    assert compute_score(answer, tests, all_or_nothing=True)["score"] == 0.0
    assert compute_score(answer, tests[:1], all_or_nothing=True)["score"] == 1.0
    assert compute_score(answer, tests, max_tests=1)["score"] == 1.0
    assert compute_score("I do not know ```", tests) == {
        "score": 0.0,
        "acc": 0.0,
        "passed": 0.0,
        "code_end": "no code",
    }
    assert (
        compute_score(answer, {"fn_name": "f", "inputs": np.array([[[1, 2]]]), "outputs": [3]})["score"]
        == 1.0
    )


@isolated
def test_all_tests_together_stay_within_the_budget():
    sandbox.configure(RewardConfig(timeout_s=2.5, sandbox=SandboxConfig(timeout_s=5.0)))
    slow = "import time\ntime.sleep(1.5)\nprint(input())"
    result = compute_score(slow, {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]})
    assert result["score"] <= 0.25 and result["code_end"] == "timeout"


@pytest.fixture(autouse=True)
def default_settings():
    yield
    sandbox.configure(RewardConfig())
