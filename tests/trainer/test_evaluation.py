"""`verl eval`: the numbers are those one counts by hand, and a reward that fails hurts nobody else."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl.trainer.main_eval import main

ROOT = Path(__file__).resolve().parents[2]
Evaluate = Callable[..., dict[str, Any]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(*responses: list[str] | str, source: str = "digits", truth: str = "7") -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"question {number}"}],
            "data_source": source,
            "reward_model": {"ground_truth": truth},
            "extra_info": {"number": number},
            "responses": given,
        }
        for number, given in enumerate(responses)
    ]


EXACT = "def compute_score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n"


@pytest.fixture
def evaluate(tmp_path: Path) -> Evaluate:
    """Score rows by a function's source (None: the built-in scorers); the numbers."""

    def go(rows: list[dict[str, Any]], function: str | None, *more: str, code: int = 0) -> dict[str, Any]:
        data = write(tmp_path / "responses.jsonl", rows)
        keys = [f"data.path={data}"]
        if function is not None:
            (tmp_path / "reward.py").write_text(function)
            keys.append(f"custom_reward_function.path={tmp_path / 'reward.py'}")
        assert main([*keys, *more]) == code
        found: dict[str, Any] = json.loads((tmp_path / "responses.metrics.json").read_text())
        return found

    return go


def test_statistics_are_those_counted_by_hand(evaluate: Evaluate) -> None:
    answers = [["7", "7", "1", "2"], ["1", "1", "7", "1"], ["7", "7", "7", "7"]]
    function = (
        "def compute_score(solution_str, ground_truth):\n"
        "    right = float(solution_str == ground_truth)\n"
        "    return {'score': 2 * right - 1, 'acc': right, 'pred': solution_str}\n"
    )
    found = evaluate(rows_of(*answers), function)["data_sources"]["digits"]
    assert (found["rows"], found["responses"], found["failed"]) == (3, 12, 0)
    right = [[float(text == "7") for text in row] for row in answers]
    assert found["core"]["acc/mean@4"] == pytest.approx(sum(map(sum, right)) / 12)
    every = {**found["core"], **found["aux"]}
    for k in (1, 2, 4):
        some = [max(pick) for row in right for pick in itertools.combinations(row, k)]
        assert every[f"acc/pass@{k}"] == pytest.approx(sum(some) / len(some))
    for k in (2, 4):
        votes = [majority(pick) for row in answers for pick in itertools.combinations(row, k)]
        assert every[f"acc/maj@{k}"] == pytest.approx(sum(votes) / len(votes))
        best = [max(pick) for row in right for pick in itertools.combinations(row, k)]
        assert every[f"reward/best@{k}"] == pytest.approx(2 * sum(best) / len(best) - 1)


def majority(texts: tuple[str, ...]) -> float:
    """The share of right answers among those that most of the texts give."""
    counted = Counter(texts)
    most = [text for text, votes in counted.items() if votes == max(counted.values())]
    return sum(text == "7" for text in most) / len(most)


def test_each_data_source_by_itself_and_all_together(evaluate: Evaluate, capfd) -> None:
    rows = rows_of(["7", "1"], ["7", "7"]) + rows_of(["1", "1"], source="org/other")
    found = evaluate(rows, EXACT)["data_sources"]
    means = {name: numbers["core"]["reward/mean@2"] for name, numbers in found.items()}
    assert means == {"digits": 0.75, "org/other": 0.0, "all": 0.5}
    table = capfd.readouterr().out
    assert all(word in table for word in ("digits", "org/other", "mean@2", "pass@2", "0.7500", "no score"))


def test_the_built_in_scorer_of_a_data_source(evaluate: Evaluate) -> None:
    rows = rows_of(["so 3 + 4\n#### 7", "#### 8"], "#### 7", source="openai/gsm8k")
    found = evaluate(rows, None)["data_sources"]["openai/gsm8k"]
    assert found["core"]["acc/mean@2"] == 0.75
    assert found["responses"] == 3


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    "function",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth and data_source == 'digits' and extra_info['number'] < 2)\n",
        "def compute_score(prompt, response):\n    return float(response == '7' and 'question' in prompt)\n",
        "def compute_score(prompt, response, ground_truth):\n    return float(response == ground_truth)\n",
        "def compute_score(completions, ground_truth, **columns):\n"
        "    return [float(a == b) for a, b in zip(completions, ground_truth)]\n",
        "async def compute_score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)\n",
        "def compute_score(response, answer):\n    return {'score': float(response == answer), 'x': 1}\n",
    ],
)
def test_every_signature(evaluate: Evaluate, function: str) -> None:
    rows = [{**row, "answer": "7"} for row in rows_of(["7", "1"], ["1", "7"])]
    found = evaluate(rows, function, "data.batch_size=1")["data_sources"]["digits"]
    assert (found["core"]["reward/mean@2"], found["failed"]) == (0.5, 0)


def test_rewards_that_fail_cost_only_their_own_response(evaluate: Evaluate, tmp_path: Path, capfd) -> None:
    function = (
        "import os\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    if solution_str == 'raise': raise ValueError('no such thing')\n"
        "    if solution_str == 'none': return None\n"
        "    if solution_str == 'nan': return float('nan')\n"
        "    if solution_str == 'text': return 'seven'\n"
        "    if solution_str == 'die': os._exit(3)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    bad = ["raise", "none", "nan", "text", "die"]
    rows = rows_of(["7", "1"], *([text, "7"] for text in bad))
    output = tmp_path / "scored.parquet"
    rows.append(rows_of(["none", "none"])[0])
    found = evaluate(rows, function, f"data.output_path={output}", "data.batch_size=3")
    numbers = found["data_sources"]["digits"]
    assert (numbers["responses"], numbers["failed"]) == (14, 7)
    # One of two for the first row, one of one for each other: what has no score is left out.
    assert numbers["core"]["reward/mean@2"] == pytest.approx((0.5 + 5) / 6)
    scored = pq.read_table(output).to_pylist()
    assert [row["responses_score"] for row in scored] == [[1.0, 0.0], *([[None, 1.0]] * 5), [None, None]]
    errors = [row["responses_error"] for row in scored]
    assert errors[0] == [None, None] and "no such thing" in errors[1][0]
    for number, row in enumerate(errors[1:], start=1):
        for at, error in enumerate(row):
            assert error is None or f"row {number}, response {at}" in error
    said = capfd.readouterr().err
    assert "7 responses got no score, in 6 rows" in said and "no such thing" in found["failures"]


@pytest.mark.slow
def test_a_reward_that_hangs_is_ended_after_its_deadline(evaluate: Evaluate) -> None:
    function = (
        "import time\n"
        "def compute_score(solution_str):\n"
        "    time.sleep(10**6 if solution_str == 'hang' else 0)\n"
        "    return 1.0\n"
    )
    found = evaluate(rows_of("hang", "7"), function, "reward.timeout_s=5")
    assert found["data_sources"]["digits"]["failed"] == 1 and "reward.timeout_s=5" in found["failures"]


def test_when_nothing_can_be_scored_the_file_says_so(evaluate: Evaluate, capfd) -> None:
    function = "def compute_score(solution_str):\n    raise RuntimeError('always')\n"
    found = evaluate(rows_of(["a", "b"]), function, code=2)
    assert found["data_sources"]["digits"]["failed"] == 2 and found["data_sources"]["digits"]["core"] == {}
    assert "no response got a score" in capfd.readouterr().err


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("truth", "more"),
    [
        ({"reward_model": {"ground_truth": "7", "style": "rule"}}, []),
        ({"reward_model": '{"ground_truth": "7"}'}, []),
        ({"ground_truth": "7"}, []),
        ({"answer": "7"}, []),
        ({"gold": "7", "answer": "8"}, ["data.reward_model_key=gold"]),
        ({"gold": {"ground_truth": "7"}}, ["data.reward_model_key=gold"]),
    ],
)
def test_every_form_of_the_truth(evaluate: Evaluate, truth: dict[str, Any], more: list[str]) -> None:
    rows = [{"prompt": "q", "data_source": "digits", "responses": ["7"], **truth}]
    assert evaluate(rows, EXACT, *more)["data_sources"]["digits"]["core"]["reward/mean@1"] == 1


@pytest.mark.parametrize("gold", ['{"name": "f"}', {"name": "f"}])
def test_a_truth_may_be_json(evaluate: Evaluate, gold: Any) -> None:
    function = (
        "import json\n"
        "def compute_score(solution_str, ground_truth):\n"
        "    return float(ground_truth in (solution_str, json.loads(solution_str)))\n"
    )
    rows = [{"prompt": "q", "data_source": "calls", "gold": gold, "responses": ['{"name": "f"}']}]
    found = evaluate(rows, function, "data.reward_model_key=gold", "reward.in_process=True")
    assert found["data_sources"]["calls"]["core"]["reward/mean@1"] == 1


def test_columns_of_other_names(evaluate: Evaluate, tmp_path: Path) -> None:
    rows = [{"question": "q", "from": "here", "text": "7", "answer": "7"}]
    function = (
        "def compute_score(prompt, data_source, response, ground_truth):\n"
        "    return float((prompt, data_source, response, ground_truth) == ('q', 'here', '7', '7'))\n"
    )
    keys = ("data.prompt_key=question", "data.data_source_key=from", "data.response_key=text")
    assert evaluate(rows, function, *keys)["data_sources"]["here"]["core"]["reward/mean@1"] == 1


def test_a_function_sees_what_generation_wrote_of_each_response(evaluate: Evaluate, tmp_path: Path) -> None:
    rows = rows_of(["a", "b"])
    rows[0] |= {"responses_length": [3, 9], "responses_finish_reason": ["stop", "length"]}
    function = (
        "def compute_score(response_length, truncated):\n    return response_length + 100 * truncated\n"
    )
    output = tmp_path / "scored.json"
    evaluate(
        rows,
        function,
        f"data.output_path={output}",
        f"data.metrics_path={tmp_path / 'responses.metrics.json'}",
    )
    assert json.loads(output.read_text())[0]["responses_score"] == [3.0, 109.0]


def test_a_generations_output_is_an_evaluations_input(
    tiny_model_dir: Path, digits_data: Path, tmp_path: Path
) -> None:
    from verl.trainer import main_generation

    output = tmp_path / "responses.parquet"
    keys = [
        f"model.path={tiny_model_dir}",
        f"data.path={digits_data}/val.jsonl",
        f"data.output_path={output}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        "data.n_samples=3",
        "trainer.device=cpu",
    ]
    assert main_generation.main(keys) == 0
    reward = f"custom_reward_function.path={digits_data}/digits_reward.py"
    assert main([f"data.path={output}", reward, "data.max_samples=20"]) == 0
    found = json.loads((tmp_path / "responses.metrics.json").read_text())["data_sources"]["digits"]
    rows = pq.read_table(output).to_pylist()[:20]
    hits = [
        response.split().count(row["reward_model"]["ground_truth"]) / 4
        for row in rows
        for response in row["responses"]
    ]
    assert (found["rows"], found["responses"]) == (20, 60)
    assert found["core"]["reward/mean@3"] == pytest.approx(sum(hits) / 60)


def test_earlier_results_are_replaced_where_that_is_said(evaluate: Evaluate, tmp_path: Path) -> None:
    output, quick = tmp_path / "scored.jsonl", "reward.in_process=True"
    output.write_text("earlier")
    for metrics in ([], [f"data.metrics_path={tmp_path}/responses.metrics.json"]):  # its default name
        more = [f"data.output_path={output}", "data.overwrite=True", quick, *metrics]
        assert evaluate(rows_of("7"), EXACT, *more)["data_sources"]["digits"]["rows"] == 1
    assert json.loads(output.read_text())["responses_score"] == [1.0]
    assert evaluate(rows_of("7", "7"), EXACT, quick)["data_sources"]["digits"]["rows"] == 2


def test_acc_that_some_responses_lack_is_no_headline(evaluate: Evaluate, capfd) -> None:
    function = (
        "def compute_score(solution_str, ground_truth):\n"
        "    if '#' not in solution_str: return {'score': 0.0}\n"
        "    return {'score': 1.0, 'acc': True}\n"
    )
    found = evaluate(rows_of(["# 7"], ["7"], ["no"], ["?"]), function, "reward.in_process=True")
    assert found["data_sources"]["digits"]["core"]["reward/mean@1"] == 0.25
    said = capfd.readouterr()
    assert "digits: 3 of 4 scored responses have no acc" in said.err
    assert "1.0000" not in said.out


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({}, ["data.response_key=response"], "data.response_key=responses"),
        ({"responses": 5}, [], "must hold a text or a list of texts"),
        ({"responses": ["a", None]}, [], "must hold a text or a list of texts"),
        ({}, ["custom_reward_function.path=nowhere.py"], "nowhere.py"),
        ({}, ["reward.overlong_buffer.enable=True"], "reward.overlong_buffer.enable"),
        ({}, ["reward.reward_model.n_gpus_per_node=1"], "set both to 0"),
        ({}, ["data.output_path=scored.txt"], ".parquet, .jsonl, .json"),
        (
            {"responses_score": [1]},
            ["data.output_path=scored.jsonl"],
            "has a column responses_score",
        ),
        ({}, ["reward.timout_s=3"], "'reward.timeout_s'"),
        ({}, ["data.max_samples=0"], "'data.max_samples' is 0"),
        ({}, ["data.metrics_path=reward.py/x.json"], "data.metrics_path: nothing can be written"),
        ({}, ["data.output_path=responses.jsonl"], "is the file that is read"),
        ({}, ["data.metrics_path=responses.jsonl"], "is the file that is read"),
        ({}, ["data.output_path=earlier.jsonl"], "earlier.jsonl exists; set data.overwrite=True"),
        ({}, ["data.metrics_path=earlier.jsonl"], "earlier.jsonl exists; set data.overwrite=True"),
        ({"extra_info": "{"}, [], "data.path: extra_info of row 0 of"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, capfd, monkeypatch, change: dict[str, Any], more: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "responses.jsonl", [{**rows_of(["7"])[0], **change}])
    (tmp_path / "reward.py").write_text(EXACT)
    (tmp_path / "earlier.jsonl").write_text("earlier")
    assert main([f"data.path={data}", "custom_reward_function.path=reward.py", *more]) == 2
    assert (tmp_path / "earlier.jsonl").read_text() == "earlier"
    assert said in capfd.readouterr().err
    assert not list(tmp_path.glob("*.metrics.json")) and not list(tmp_path.glob("scored*"))


def test_a_parameter_nothing_provides_is_refused_before_the_first_response(
    evaluate: Evaluate, tmp_path: Path, capfd
) -> None:
    data = write(tmp_path / "responses.jsonl", rows_of(["7"]))
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, colour):\n    return 1.0\n")
    assert main([f"data.path={data}", f"custom_reward_function.path={tmp_path / 'reward.py'}"]) == 2
    assert "'colour'" in capfd.readouterr().err


def test_a_data_source_without_scorer_is_refused(tmp_path: Path, capfd) -> None:
    data = write(tmp_path / "responses.jsonl", rows_of(["7"], source="unheard/of"))
    assert main([f"data.path={data}"]) == 2
    assert "unheard/of" in capfd.readouterr().err


def test_a_key_without_effect_is_said(evaluate: Evaluate, capfd) -> None:
    evaluate(rows_of(["7"]), EXACT, "reward.max_failure_ratio=0.5")
    assert "'reward.max_failure_ratio'=0.5 has no effect" in capfd.readouterr().err


def test_help_lists_every_key_without_torch() -> None:
    code = (
        "import sys\nfrom verl.trainer import main_eval\n"
        "try:\n    main_eval.main(['--help', 'all'])\n"
        "except SystemExit as stop:\n    print('code', stop.code, 'torch' in sys.modules)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines()[-1] == "code 0 False"
    for word in ("response_key", "data_source_key", "reward_model_key", "timeout_s", "prime"):
        assert word in out
