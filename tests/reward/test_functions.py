"""Finding, binding and believing reward functions."""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict
from decimal import Decimal

import numpy as np
import pytest

from verl.errors import RewardError
from verl.json_input import check_nesting
from verl.reward import scoring
from verl.reward.base import RewardResult, RewardSample
from verl.reward.functions import (
    FunctionSpec,
    RewardFunction,
    Signature,
    check_file,
    load_function,
    signature_of,
    spec_of,
)
from verl.reward.scoring import InProcessBackend, interpret, interpret_batch, plain


def score(function: RewardFunction, samples: list[RewardSample]) -> list[RewardResult]:
    return asyncio.run(scoring.score(function, samples))


def sample(index: int = 3, response: str = "four", **fields) -> RewardSample:
    return RewardSample(index, "2+2?", response, ground_truth="4", data_source="sums", **fields)


@pytest.fixture
def reward_file(tmp_path):
    def write(text: str, name: str = "my_reward.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.5\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SCORE, None),
        (SCORE, "compute_score"),
        ("def compute_reward(prompt, response):\n    return 0.5\n", None),
        ("def compute_reward(prompt, response):\n    return 0.5\n", "compute_score"),
        ("def only_one(prompt, response):\n    return 0.5\n", "compute_score"),
        ("import os\ndef a(response):\n    return 0.5\ndef b(response):\n    return 1\n", "a"),
        ("class K:\n    @staticmethod\n    def a(response):\n        return 0.5\n", "K.a"),
    ],
)
def test_a_function_is_found_in_a_file(reward_file, text, name):
    function = load_function(FunctionSpec(reward_file(text), name))
    assert score(RewardFunction(function), [sample()])[0].score == 0.5


def test_a_function_is_found_by_module_and_by_module_colon_function(tmp_path, monkeypatch):
    (tmp_path / "pkg_for_reward").mkdir()
    (tmp_path / "pkg_for_reward" / "__init__.py").write_text("")
    (tmp_path / "pkg_for_reward" / "mod.py").write_text(SCORE + "def other(response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function(FunctionSpec("pkg_for_reward.mod")).__name__ == "compute_score"
    assert load_function(FunctionSpec("pkg_for_reward.mod", "other")).__name__ == "other"
    assert load_function(FunctionSpec("pkg_for_reward.mod:other", "compute_score")).__name__ == "other"
    assert load_function(FunctionSpec("pkg_for_reward.mod.other")).__name__ == "other"


def test_a_file_with_a_function_after_a_colon_and_neighbours_to_import(reward_file):
    reward_file("FACTOR = 2\n", "neighbour_of_reward.py")
    path = reward_file("from neighbour_of_reward import FACTOR\ndef f(response):\n    return FACTOR\n")
    assert load_function(FunctionSpec(f"{path}:f"))("x") == 2


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (FunctionSpec("/nowhere/reward.py"), ["/nowhere/reward.py", "does not exist", ".path"]),
        (FunctionSpec("no_such_module_anywhere"), ["no_such_module_anywhere", "pkg.module:function"]),
        (FunctionSpec("verl.errors", "compute_scores"), ["compute_scores", "missing_package", ".name"]),
        (FunctionSpec("verl.errors:__doc__"), ["__doc__", "str", "not a function"]),
        (FunctionSpec(""), ["path is empty"]),
        (FunctionSpec("verl.errors:missing_package", "other"), ["missing_package", "other", "keep one"]),
    ],
)
def test_what_is_not_there_is_named(spec, words):
    with pytest.raises(RewardError) as caught:
        load_function(spec)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\nraise KeyError('gone')\n", ["KeyError", "gone", "line 2"]),
        ("def f(:\n", ["SyntaxError", "line 1"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit", "3"]),
        ("import no_such_package_x\n", ["no_such_package_x"]),
        ("def a(response): return 1\ndef b(response): return 2\n", ["a, b", ".name"]),
    ],
)
def test_a_file_that_cannot_be_used_says_why(reward_file, text, words):
    with pytest.raises(RewardError) as caught:
        load_function(FunctionSpec(reward_file(text)))
    for word in words:
        assert word in str(caught.value)


def positional(prompt, response, /, *, ground_truth):
    return f"{prompt}|{response}|{ground_truth}"


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda data_source, solution_str, ground_truth, extra_info=None: (data_source, solution_str, ground_truth),
         ("sums", "four", "4")),
        (lambda prompt, response: (prompt, response), ("2+2?", "four")),
        (lambda prompt, response, ground_truth: (prompt, response, ground_truth), ("2+2?", "four", "4")),
        (lambda completion, level: (completion, level), ("four", 7)),
        (lambda response, bonus=0.25: bonus, 0.25),
        (lambda response, level=0: level, 7),
        (positional, "2+2?|four|4"),
        (lambda **everything: sorted(everything),
         ["data_source", "extra_info", "ground_truth", "level", "prompt", "response", "solution_str"]),
    ],
)  # fmt: skip
def test_parameters_are_bound_by_name(function, seen):
    assert RewardFunction(function).call([sample(columns={"level": 7})]) == seen


def test_reward_kwargs_win_over_everything():
    function = RewardFunction(
        lambda response, level, **rest: (level, rest["scale"]), {"level": 1, "scale": 3}
    )
    assert function.call([sample(columns={"level": 7})]) == (1, 3)
    assert (
        RewardFunction(lambda **rest: rest["level"], {"level": 1}).call([sample(columns={"level": 7})]) == 1
    )


def test_a_batch_function_sees_lists():
    samples = [sample(0, "a", columns={"level": 1}), sample(1, "b", columns={"level": 2})]

    def completions_form(completions, **columns):
        assert columns["prompts"] == ["2+2?", "2+2?"]
        assert columns["ground_truth"] == ["4", "4"]
        return [len(text) + level for text, level in zip(completions, columns["level"], strict=True)]

    def manager_form(data_sources, solution_strs, ground_truths, extra_infos):
        return {"score": [1, 2], "acc": [True, False]}

    assert RewardFunction(completions_form).signature.is_batch
    assert [r.score for r in score(RewardFunction(completions_form), samples)] == [2, 3]
    assert [(r.score, r.extra) for r in score(RewardFunction(manager_form), samples)] == [
        (1.0, {"acc": True}),
        (2.0, {"acc": False}),
    ]


def test_async_functions_are_awaited():
    async def one(prompt, response):
        return {"score": 1, "note": response}

    class Caller:
        async def __call__(self, completions):
            return [0.5 for _ in completions]

    assert RewardFunction(one).signature.is_async
    assert RewardFunction(Caller()).signature.is_async
    assert score(RewardFunction(one), [sample()])[0].extra == {"note": "four"}
    assert [r.score for r in score(RewardFunction(Caller()), [sample(), sample()])] == [0.5, 0.5]


def test_unknown_parameters_are_an_error_at_start():
    signature = signature_of(lambda prompt, respnse, level: 0, "mine")
    with pytest.raises(
        RewardError, match=r"mine asks for 'respnse', which nothing provides.*difficulty, level"
    ):
        signature.check({}, ["level", "difficulty"])
    signature.check({}, None)  # columns not known yet: nothing can be said
    signature.check({"respnse": 1}, ["level"])


@pytest.mark.parametrize("name", ["ground_truth", "ground_truths"])
def test_a_function_that_must_have_the_truth_is_refused_where_no_row_has_one(name):
    made: dict = {}
    exec(f"def needs(completions, {name}): return 0\ndef can(completions, {name}=None): return 0", made)
    needs, can = signature_of(made["needs"]), signature_of(made["can"])
    with pytest.raises(
        RewardError, match=rf"needs asks for '{name}'.*reward_model.ground_truth.*prompt, solution"
    ):
        needs.check({}, ["prompt", "solution"])
    for column in ("reward_model", "ground_truth", "answer"):
        needs.check({}, ["prompt", column])
    needs.check({name: "42"}, ["prompt"])
    needs.check({}, [])  # no columns known
    can.check({}, ["prompt", "solution"])


def test_a_folder_is_no_reward_file_unless_it_is_a_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_x").mkdir()
    (tmp_path / "rewards_x" / "mine.py").write_text("def compute_score(response): return 1.0\n")
    for path in ("rewards_x", "./rewards_x", str(tmp_path / "rewards_x")):
        with pytest.raises(RewardError, match=r"is a folder; give the file.*mine.py"):
            check_file(FunctionSpec(path))
    (tmp_path / "rewards_x" / "__init__.py").write_text("from rewards_x.mine import compute_score\n")
    check_file(FunctionSpec("rewards_x"))
    assert load_function(FunctionSpec("rewards_x"))("a") == 1.0


def test_unknown_reward_kwargs_are_an_error_at_start():
    with pytest.raises(RewardError, match=r"no parameter 'methd'.*'response', 'method'"):
        signature_of(lambda response, method="strict": 0).check({"methd": "flexible"}, [])


def test_a_signature_survives_the_wire():
    async def f(a, /, completions, *, c=1, **rest):
        return []

    signature = signature_of(f)
    received = Signature(**json.loads(json.dumps(asdict(signature))))
    assert received.names == signature.names and received.is_batch and received.is_async


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(0.25), 0.25), (Decimal("0.5"), 0.5),
     ({"score": np.int64(2)}, 2.0)],
)  # fmt: skip
def test_numbers_of_every_kind_are_scores(value, expected):
    assert interpret(value, "f", sample()).score == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ["None", "finite number", "on every path"]),
        (float("nan"), ["nan"]),
        (math.inf, ["inf"]),
        (10**400, ["1000", "finite"]),
        ("0.5", ["'0.5' (a str)"]),
        ([1, 2], ["[1, 2] (a list)"]),
        (np.array([1.0, 2.0]), ["ndarray"]),
        ({"reward": 1}, ["'score'", "reward"]),
        ({"score": None}, ["None"]),
        (object(), ["object"]),
    ],
)
def test_a_value_that_is_no_score_names_function_value_sample_and_fix(value, words):
    with pytest.raises(RewardError) as caught:
        interpret(value, "mine (r.py)", sample())
    for word in [*words, "mine (r.py)", "row 3", "four"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [[1.0], None, 1.0, "ab", {"score": [1.0]}, {"score": [1, 2], "acc": [1]}])
def test_a_batch_of_the_wrong_length_is_refused(value):
    with pytest.raises(RewardError, match="given 2 completions"):
        interpret_batch(value, "f", [sample(), sample()])


def test_one_bad_score_in_a_batch_does_not_spoil_its_neighbours():
    results = score(RewardFunction(lambda completions: [1.0, None, 0.0]), [sample(i) for i in range(3)])
    assert [r.score for r in results] == [1.0, None, 0.0]
    assert "None" in (results[1].error or "")


def test_a_function_that_raises_costs_the_score_and_names_the_line(reward_file):
    path = reward_file("def f(response):\n    x = 1\n    return x / 0\n")
    result = score(RewardFunction(load_function(FunctionSpec(path)), name="f"), [sample()])[0]
    assert result.score is None
    assert (
        "ZeroDivisionError" in result.error
        and "my_reward.py, line 3" in result.error
        and "row 3" in result.error
    )


def test_extra_values_become_plain():
    assert plain(np.float64(0.5)) == 0.5 and type(plain(np.float64(0.5))) is float
    assert plain(float("nan")) is None
    assert plain(10**5000) == "a very large integer"
    assert plain({"a": (1, np.int32(2))}) == {"a": [1, 2]}
    assert len(plain("x" * 10_000)) == 2000
    deep: list = []
    for _ in range(200):
        deep = [deep]
    assert json.dumps(plain({"deep": deep})).count("[") < 2000
    check_nesting(plain({"deep": deep}))  # or a checkpoint with it could not be read
    assert plain(np.zeros((2, 2))).startswith("array(")


def test_names_of_extra_values_are_clipped_like_the_values():
    name = "n" * 1_000_000
    extra = interpret({"score": 1.0, name: {name: 1}}, "f", sample()).extra
    (outer,) = extra
    (inner,) = extra[outer]
    assert len(outer) == len(inner) == 2000


def test_only_importable_functions_have_a_spec():
    assert spec_of(math.isfinite) is not None
    assert spec_of(load_function).path == "verl.reward.functions:load_function"
    assert spec_of(lambda response: 1) is None
    assert spec_of(sample().__init__) is None


def test_os_exit_in_the_trainers_process_is_an_error_that_names_the_function():
    def leave(response):
        if response == "leave":
            os._exit(0)
        child = os.fork()
        if not child:
            os._exit(3)  # ends a forked child as ever
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    exit_now = os._exit
    backend = InProcessBackend([RewardFunction(leave)], None, 1)
    stays = backend.submit(0, [sample(0, "stay")])
    backend.run([stays])
    assert stays.result()[0].score == 3.0
    leaves = backend.submit(0, [sample(1, "leave")])
    with pytest.raises(RewardError, match=r"leave called os._exit\(0\).*test_functions.py, line"):
        backend.run([leaves])
    assert os._exit is exit_now
