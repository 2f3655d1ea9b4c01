"""Scorers on tables of right and wrong answers."""

from __future__ import annotations

import math

import pytest

from verl.errors import RewardError
from verl.reward import scorers
from verl.reward.scorers import (
    check_data_sources,
    find_scorer,
    get_scorer,
    gsm8k,
    known_scorers,
    qa,
    register_scorer,
)
from verl.reward.scorers import choice as choice_scorer
from verl.reward.scorers import math as math_scorer
from verl.reward.scorers.json_schema import compute_score as json_score
from verl.reward.scorers.shaping import (
    combine,
    length_between,
    length_penalty,
    matches,
    not_truncated,
    tagged,
)
from verl.reward.scorers.text import last_boxed, normalise

LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{a \\boxed{\\frac{1}{2}} b}", "a \\frac{1}{2} b"),
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed 7 done", "7"),
        ("\\fbox{3}", "3"),
        ("\\boxed{a\\}b}", "a\\}b"),
        ("\\boxed{1} and then cut off \\boxed{2", "1"),
        ("\\boxed{", None),
        ("no box", None),
        ("\\boxed{" * 20_000, None),
    ],
)
def test_the_last_complete_box_is_taken(text, content):
    assert last_boxed(text) == content


QUICK_RIGHT = [
    ("0.5", "\\frac{1}{2}"), ("1/2", "\\dfrac12"), (".5", "0.5"), ("-\\frac{3}{4}", "−0.75"), ("3/2", "1\\frac{1}{2}"),
    ("1,234", "1234"), ("1{,}234", "1234"), ("\\$42", "42"), ("42.0", "42"), ("42\\text{ dollars}", "42"),
    ("10\\text{ cm}", "10"), ("5 \\text{ cm}^2", "5"), ("12 inches", "12"), ("90^\\circ", "90"), ("50\\%", "50"),
    ("50\\%", "0.5"), ("\\text{Evelyn}", "evelyn"), ("x=5", "5"), ("x \\in [-2,7]", "[-2,7]"),
    ("\\left( \\frac{1}{2}, 3\\right)", "(0.5,3)"), ("(1, 2)", "(1,2)"), ("[0, 1)", "[0,1)"), ("\\sqrt2", "\\sqrt{2}"),
    ("2 \\cdot \\pi", "2\\times\\pi"), ("$7$", "7"), ("7.", "7"), ("１２", "12"), (LONG, LONG), ("1e3", "1000"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("11:30\\text{ a.m.}", "11:30"),
]  # fmt: skip
QUICK_WRONG = [
    ("3", "4"), ("-3", "3"), ("", "3"), ("1,23", "123"), ("0.333", "\\frac{1}{3}"), (LONG, LONG[:-1] + "8"),
    ("\\text{Tom}", "\\text{Tim}"), ("\\frac{1}{0}", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), QUICK_RIGHT)
def test_equal_answers_are_seen_without_algebra(answer, truth):
    assert math_scorer.quickly_equal(normalise(answer), normalise(truth)) is True
    assert math_scorer.compute_score(f"so \\boxed{{{answer}}}", truth)["score"] == 1.0


@pytest.mark.parametrize(("answer", "truth"), QUICK_WRONG)
def test_different_answers_are_wrong(answer, truth):
    assert math_scorer.compute_score(f"so \\boxed{{{answer}}}", truth, symbolic=False)["score"] == 0.0


SYMBOLIC = [
    ("2\\sqrt{2}", "\\sqrt{8}", True),
    ("(x+1)^2", "x^2+2x+1", True),
    ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}", True),
    ("10^{10}", "10000000000", True),
    ("\\{1,2\\}", "\\{2,1\\}", True),
    ("(1,2)", "(2,1)", False),
    ("[0,1)", "[0,1]", False),
    ("\\pi", "3.14", False),
    ("x^2", "x^3", False),
]


@pytest.mark.slow
def test_algebra_decides_what_text_cannot_and_is_killed_when_it_does_not_end():
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    for answer, truth, expected in SYMBOLIC:
        assert math_scorer.equal(answer, truth) is expected, (answer, truth)
    hostile = "2^{2^{2^{2^{2^{2}}}}}"
    assert math_scorer.equal(hostile, "7") is False
    assert math_scorer.verifier.restarts >= 1  # it had to be killed
    assert math_scorer.equal("2\\sqrt{2}", "\\sqrt{8}") is True  # and the next one is served


def test_math_takes_lists_whole_solutions_and_gives_a_format_score():
    assert math_scorer.compute_score("\\boxed{b}", ["a", "b"])["score"] == 1.0
    assert math_scorer.compute_score("\\boxed{3}", "Thus the answer is \\boxed{3}.")["score"] == 1.0
    assert math_scorer.compute_score("\\boxed{3}", "4", format_score=0.1)["score"] == 0.1
    assert math_scorer.compute_score("3", "3", format_score=0.1)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("...\nAnswer: 34", "34", 1.0),
        ("Answer: $\\frac{1}{2}$", "0.5", 1.0),
        ("**Answer: 7**", "7", 1.0),
        ("Answer: \\boxed{7}", "7", 1.0),
        ("answer: 1\nAnswer: 2", "2", 1.0),
        ("Answer: 35", "34", -1.0),
        ("34", "34", -1.0),
        ("Answer: 34" + "." * 400, "34", -1.0),
    ],
)
def test_math_dapo(response, truth, score):
    assert math_scorer.compute_dapo_score(response, truth, symbolic=False)["score"] == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("The answer is (B).", "B", 1.0),
        ("Answer: c", "C", 1.0),
        ("\\boxed{D}", "D", 1.0),
        ("\\boxed{\\text{(D)}}", "D", 1.0),
        ("I think\n\nB", "B", 1.0),
        ("**B**", "B", 1.0),
        ("(A) is wrong, so (C)", "C", 1.0),
        ("The answer is B", 1, 1.0),
        ("answer: A\nNo, answer: B", "(B)", 1.0),
        ("The answer is A", "B", 0.0),
        ("A banana is yellow", "A", 0.0),
        ("", "A", 0.0),
        ("The final answer is a good one: (C)", "C", 1.0),
    ],
)
def test_multiple_choice(response, truth, score):
    assert choice_scorer.compute_score(response, truth)["score"] == score


def test_multiple_choice_by_the_text_of_a_choice():
    choices = ["Paris", "London"]
    assert choice_scorer.compute_score("\\boxed{London}", "London", choices)["score"] == 1.0
    assert choice_scorer.compute_score("Paris", "A", choices)["score"] == 1.0
    with pytest.raises(RewardError, match="letter A to J"):
        choice_scorer.compute_score("x", "Rome", choices)


@pytest.mark.parametrize(
    ("response", "truth", "em", "f1"),
    [
        ("<answer>The Beatles</answer>", "beatles", 1.0, 1.0),
        ("<answer>no</answer> wait <answer>Yes!</answer>", ["yes"], 1.0, 1.0),
        ("Answer: Zürich", "Zurich", 1.0, 1.0),
        ("Paris", {"target": ["London", "Paris"]}, 1.0, 1.0),
        ("the cat sat", "cat sat down", 0.0, 0.8),
        ("dog", "cat", 0.0, 0.0),
        ("東京都", "東京", 0.0, 0.8),
        ("", "", 1.0, 1.0),
        ("", "cat", 0.0, 0.0),
    ],
)
def test_question_answering(response, truth, em, f1):
    assert qa.compute_em(response, truth)["score"] == em
    assert math.isclose(qa.compute_f1(response, truth)["score"], f1)


def test_question_answering_contains_and_bad_settings():
    assert qa.compute_score("it was the cat here", "cat", metric="contains")["score"] == 1.0
    assert qa.compute_score("category", "cat", metric="contains")["score"] == 0.0
    with pytest.raises(RewardError, match="em, f1, contains"):
        qa.compute_score("a", "b", metric="bleu")
    with pytest.raises(RewardError, match="no accepted answer"):
        qa.compute_em("a", [])


PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
        "boss": {"$ref": "#"},
    },
}


@pytest.mark.parametrize(
    ("response", "schema", "score"),
    [
        ('{"name": "Ann", "age": 3}', PERSON, 1.0),
        ('Here:\n```json\n{"name": "Ann", "age": 3.0}\n```\nbye', PERSON, 1.0),
        ('I say {"name": "Ann", "age": 3, "tags": ["a"]} as JSON', PERSON, 1.0),
        ('{"name": "Ann", "age": 3, "boss": {"name": "Bob", "age": 9}}', PERSON, 1.0),
        ('{"name": "Ann", "age": 3, "boss": {"name": "Bob"}}', PERSON, 0.0),
        ('{"name": "ann", "age": 3}', PERSON, 0.0),
        ('{"name": "Ann", "age": true}', PERSON, 0.0),
        ('{"name": "Ann", "age": 150}', PERSON, 0.0),
        ('{"name": "Ann", "age": 3, "x": 1}', PERSON, 0.0),
        ('{"name": "Ann", "age": 3, "tags": ["a", "a"]}', PERSON, 0.0),
        ("[" * 100_000, PERSON, 0.0),
        ("NaN", {"type": "number"}, 0.0),
        ("none here", PERSON, 0.0),
        ("4", {"multipleOf": 2, "not": {"const": 6}}, 1.0),
        ("6", {"multipleOf": 2, "not": {"const": 6}}, 0.0),
        ("0.3", {"multipleOf": 0.1}, 1.0),
        ("1", {"const": True}, 0.0),
        ("1", {"const": 1.0}, 1.0),
        ("[1, 2]", {"prefixItems": [{"const": 1}], "items": {"const": 2}}, 1.0),
        ("[1, 1]", {"contains": {"const": 1}, "maxContains": 1}, 0.0),
        ('"ab"', {"anyOf": [{"type": "number"}, {"maxLength": 2}]}, 1.0),
        ("5", {"oneOf": [{"type": "number"}, {"minimum": 1}]}, 0.0),
        ('{"a": 1}', {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, 0.0),
        ('{"a1": "x"}', {"patternProperties": {"^a": {"type": "number"}}}, 0.0),
        ('{"a": 1}', {"dependentRequired": {"a": ["b"]}}, 0.0),
        ('{"a": 1}', {"propertyNames": {"maxLength": 1}, "minProperties": 1}, 1.0),
        ('{"a": 1}', '{"allOf": [{"required": ["a"]}, {"maxProperties": 0}]}', 0.0),
        ("1", False, 0.0),
    ],
)
def test_json_schema(response, schema, score):
    assert json_score(response, schema)["score"] == score


def test_json_schema_says_where_it_does_not_fit_and_refuses_what_it_cannot_check():
    result = json_score('{"name": "Ann", "age": 3, "boss": {"name": "Bob"}}', PERSON, format_score=0.2)
    assert result["score"] == 0.2 and result["json_error"] == "$.boss: 'age' is a required property"
    with pytest.raises(RewardError, match="minimun"):
        json_score("[]", {"items": {"anyOf": [{"minimun": 3}]}})
    with pytest.raises(RewardError, match="not a JSON schema"):
        json_score("[]", {"type": "lsit"})
    with pytest.raises(RewardError, match="without end"):
        json_score("1", {"$ref": "#"})
    with pytest.raises(RewardError, match="defs/x"):
        json_score("1", {"$ref": "#/$defs/x"})
    with pytest.raises(RewardError, match="cannot be resolved within it"):
        json_score("1", {"$ref": "http://127.0.0.1:1/schema.json"})


def test_pieces_can_be_mixed():
    compute_score = combine(
        correct=(gsm8k.compute_score, 1.0), form=(tagged("think", "answer"), 0.5), done=not_truncated
    )
    good = compute_score(solution_str="<think>x</think><answer>#### 4</answer>", ground_truth="4")
    assert good["score"] == 2.5 and good["correct"] == 1.0 and good["form"] == 1.0 and good["acc"] == 1.0
    assert compute_score(solution_str="<think>x</think> 4", ground_truth="4", truncated=True)["score"] == 0.25
    with pytest.raises(RewardError, match="one sample"):
        combine(bad=lambda completions: [])


def test_format_and_length_pieces():
    assert tagged("a", "b")("<b>1</b><a>2</a>") == 0.5  # wrong order
    assert tagged("a")("<a>1</a><a>2</a>") == 0.0  # twice
    assert matches(r"<a>.*</a>")(" <a>\n</a> ") == 1.0 and matches(r"a")("ab") == 0.0
    assert [length_between(2, 4, ramp=2)("x" * n) for n in (0, 1, 2, 4, 5, 6)] == [
        0.0,
        0.5,
        1.0,
        1.0,
        0.5,
        0.0,
    ]
    assert length_between(1, 2, unit="words")("a b c") == 0.0
    assert length_between(1, 2, unit="tokens")("a b c", response_length=2) == 1.0
    assert [length_penalty(2, 4)("x" * n) for n in (2, 4, 100)] == [0.0, -0.5, -1.0]
    with pytest.raises(RewardError, match="characters, words or tokens"):
        length_between(1, 2, unit="bytes")


def test_the_registry_knows_names_patterns_and_users_own(monkeypatch):
    monkeypatch.setattr(scorers, "REGISTERED", dict(scorers.REGISTERED))
    for name in known_scorers():
        assert callable(get_scorer(name.replace("*", "x") if name != "tasks/*" else "tasks/countdown"))
    assert find_scorer("aime2024") == "aime*" and find_scorer("openai/gsm8k") == "openai/gsm8k"

    @register_scorer("my_own", "mine/*")
    def mine(solution_str):
        return 1.0

    check_data_sources(["my_own", "mine/3"])
    assert get_scorer("mine/3") is mine
    with pytest.raises(RewardError, match=r"'nobodys'.*gsm8k.*my_own"):
        check_data_sources(["my_own", "nobodys"])
