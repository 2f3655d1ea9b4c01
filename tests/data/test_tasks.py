"""Procedural tasks: every generator agrees with its verifier, splits never share a problem, wrong is wrong."""

import itertools
import random
import re
import sys
from fractions import Fraction

import pytest

from verl.data.tasks import compute_score, get_task, known_tasks, register_task
from verl.data.tasks.base import LEVELS, Problem, Task, final_answer, parse_integer, split_of
from verl.data.tasks.countdown import evaluate_expression
from verl.data.tasks.word_problems import PLANS, WordProblems
from verl.data.write import write_rows
from verl.errors import DataError, MissingPackage

ALL = [(name, level) for name in known_tasks() for level in range(1, LEVELS + 1)]


def take(name, count, **choice):
    return list(itertools.islice(get_task(name).problems(choice.pop("seed", 0), **choice), count))


@pytest.mark.parametrize(("name", "level"), ALL)
def test_reference_answers_are_right_and_others_answers_are_not(name, level):
    problems = take(name, 60, difficulty=level)
    task = get_task(name)
    for problem in problems:
        assert task.score(f"I think so. #### {problem.answer}", problem.truth) == 1.0
        assert task.score(problem.answer, problem.truth) == 0.0  # no mark, no answer
        assert task.score(f"#### {problem.answer} ####", problem.truth) == 0.0  # the last mark counts
    wrong = sum(
        task.score(f"#### {other.answer}", problem.truth) == 0.0
        for problem, other in itertools.pairwise(problems)
    )
    assert wrong > 30


@pytest.mark.parametrize("name", known_tasks())
def test_same_seed_same_problems_and_another_seed_others(name):
    assert take(name, 20, seed=3, difficulty=3) == take(name, 20, seed=3, difficulty=3)
    assert take(name, 20, seed=3, difficulty=3) != take(name, 20, seed=4, difficulty=3)


@pytest.mark.parametrize("name", known_tasks())
def test_training_and_test_rows_never_share_a_problem_whatever_the_seeds(name):
    task = get_task(name)
    train = {row["prompt"][0]["content"] for seed in (0, 1) for row in task.rows(150, seed, 2, "train")}
    test = {row["prompt"][0]["content"] for seed in (0, 5) for row in task.rows(30, seed, 2, "test")}
    assert train and test and not train & test


def test_rows_are_different_problems_in_the_ordinary_columns():
    rows = get_task("countdown").rows(50, seed=1, difficulty=2)
    assert len({row["prompt"][0]["content"] for row in rows}) == 50
    assert rows[0]["data_source"] == "tasks/countdown"
    assert rows[7]["extra_info"]["index"] == 7
    assert set(rows[0]["reward_model"]["ground_truth"]) == {"numbers", "target"}


def test_word_problems_keep_number_pairs_apart():
    task = get_task("word_problems")

    def pairs(split):
        texts = [row["prompt"][0]["content"] for row in task.rows(400, 0, 2, split)]
        return {tuple(re.findall(r"\d+", text)) for text in texts}

    train, test = pairs("train"), pairs("test")
    assert len(test) > 20 and not train & test


def test_word_problems_ask_for_what_their_plan_says():
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        story = WordProblems().story(rng, 2)
        first, second = map(int, re.findall(r"\d+", story.text))
        lost = re.search(r"gives|sells|lost", story.text) is not None
        if re.search(r"(in all|left)\?$", story.text):
            truth = first - second if lost else first + second
        else:
            truth = first if story.text.endswith("at first?") else second
        assert story.answer == truth, story.text
        seen.add(story.plan)
    assert seen == set(PLANS)


@pytest.mark.parametrize("level", [1, 2])
def test_easy_word_problems_need_no_carrying(level):
    rng = random.Random(1)
    for _ in range(200):
        story = WordProblems().story(rng, level)
        for a, b in zip(reversed(str(story.first)), reversed(str(story.second)), strict=False):
            assert int(b) <= int(a) and int(a) + int(b) <= 9
        assert story.first - story.second >= 10


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("3 + 7", True),
        ("(3 + 7)", True),
        ("3+7 = 10", True),
        ("30 / 3", True),
        ("(30 − 7 × 3) + 1", False),
        ("3 + 3 + 4", False),
        ("10", False),
        ("7 + 3 + 30 - 30", False),
        ("3 + 7 * (30 - 30)", False),
        ("30 / (3 - 3)", False),
        ("9 ** 9 ** 9 ** 9", False),
        ("-3 + 13", False),
        ("__import__('os').getpid()", False),
        ("'3' + '7'", False),
        ("True + 9", False),
        ("3.0 + 7", False),
        ("(" * 500 + "3", False),
        ("3 +", False),
        ("", False),
    ],
)
def test_countdown_judges_the_expression_itself(answer, right):
    assert get_task("countdown").verify(answer, {"numbers": [3, 7, 30], "target": 10}) is right


def test_countdown_computes_exactly():
    assert evaluate_expression("1 / 3 * 3") == (Fraction(1), [1, 3, 3])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("1,234", 1234),
        ("−7", -7),
        ("- 7", -7),
        ("+5.", 5),
        ("4 2", None),
        ("42.0", None),
        ("", None),
    ],
)
def test_integers_as_people_write_them(text, value):
    assert parse_integer(text) == value


def test_final_answer_is_the_rest_of_the_line_after_the_last_mark():
    assert final_answer("#### 1\nno, #### 2 \nbye") == "2"
    assert final_answer("nothing") is None
    assert final_answer("####") == ""


def test_a_problem_belongs_to_one_split_for_ever():
    shares = [split_of(str(number)) for number in range(5000)]
    assert shares == [split_of(str(number)) for number in range(5000)]
    assert 0.08 < shares.count("test") / 5000 < 0.12


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: get_task("chess"), "unknown task 'chess'; known: countdown, word_problems"),
        (lambda: get_task("countdown").rows(1, difficulty=6), "difficulty=6 .* allowed: 1 to 5"),
        (lambda: get_task("countdown").rows(1, split="dev"), "allowed: train, test"),
        (lambda: get_task("countdown").rows(10**6, difficulty=1), "has only about"),
    ],
)
def test_bad_requests_are_refused_with_the_allowed_values(call, says, monkeypatch):
    if "only about" in says:
        monkeypatch.setattr(get_task("countdown"), "generate", lambda rng, level: _fixed(rng.randrange(30)))
        call = lambda: get_task("countdown").rows(100, difficulty=1)  # noqa: E731
    with pytest.raises(DataError, match=says):
        call()


def _fixed(number):
    return Problem(str(number), "1", "1", str(number))


def test_scorer_is_found_by_data_source_and_reads_what_parquet_gives_back(tmp_path):
    import pyarrow.parquet as pq

    from verl.reward.scorers import get_scorer

    for name in known_tasks():
        file = tmp_path / f"{name}.parquet"
        write_rows(get_task(name).rows(5, difficulty=2), file)
        for row in pq.read_table(file).to_pylist():
            scorer = get_scorer(row["data_source"])
            truth = row["reward_model"]["ground_truth"]
            assert scorer(row["data_source"], row["extra_info"]["reference"], truth) == 1.0
            assert compute_score(row["data_source"], "#### x", truth) == 0.0


def test_own_task_can_be_registered():
    class Parrot(Task):
        name = "parrot"
        ability = "imitation"

        def generate(self, rng, difficulty):
            word = str(rng.randrange(10**6))
            return Problem(f"Say {word}", word, word, word)

        def verify(self, answer, truth):
            return answer == truth

    register_task(Parrot())
    try:
        row = get_task("tasks/parrot").rows(1)[0]
        truth = row["reward_model"]["ground_truth"]
        assert compute_score("tasks/parrot", f"#### {truth}", truth) == 1.0
    finally:
        from verl.data import tasks

        del tasks._tasks["parrot"]


def test_missing_reasoning_gym_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingPackage, match="pip install 'reasoning-gym>="):
        get_task("gym/no_such_dataset_yet")


def test_reasoning_gym_rows_score_by_its_own_verifier():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    task = get_task("gym/basic_arithmetic")
    train, test = task.rows(20, seed=1), task.rows(3, seed=1, split="test")
    assert train == task.rows(20, seed=1)
    assert not {r["prompt"][0]["content"] for r in train} & {r["prompt"][0]["content"] for r in test}
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], row["extra_info"]["reference"], truth) == 1.0
        assert compute_score(row["data_source"], "#### no idea", truth) == 0.0
    with pytest.raises(DataError, match="has no dataset 'chess_960'"):
        get_task("gym/chess_960")
