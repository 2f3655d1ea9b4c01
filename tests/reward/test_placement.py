"""Managers over worker processes: every signature, several functions, and where each of them runs."""

from __future__ import annotations

import os
import sys
import types

import pytest

from verl.config.schema import RewardConfig, WeightedRewardConfig
from verl.config.sections.reward import REWARD_MANAGERS
from verl.errors import RewardError
from verl.reward import (
    RewardResult,
    RewardSample,
    build_reward_manager,
    register_reward_manager,
    register_scorer,
)
from verl.reward.base import RewardManager
from verl.reward.managers import FACTORIES, known_reward_managers
from verl.reward.scorers import REGISTERED

SIGNATURES = """
import asyncio, os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + extra_info["bonus"]

def compute_reward(data_source, solution_str, ground_truth, extra_info=None):
    return compute_score(data_source, solution_str, ground_truth, extra_info)

def two(prompt, response):
    return len(prompt) + len(response)

def three(prompt, response, ground_truth):
    return {"score": response == ground_truth, "pid": os.getpid()}

def batch(completions, **columns):
    assert columns["level"] == [1, 2]
    return [len(text) for text in completions]

async def later(prompt, response):
    await asyncio.sleep(0.01)
    return 0.25

async def later_batch(completions, ground_truth):
    await asyncio.sleep(0.01)
    return [{"score": text == truth} for text, truth in zip(completions, ground_truth)]

def scaled(response, factor, shift=0.0):
    return factor * len(response) + shift

def everything(**kwargs):
    return len(kwargs["response"]) + kwargs["level"]

def picky(response):
    return None if response == "yes" else 1.0
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "signatures.py"
    path.write_text(SIGNATURES)
    return str(path)


@pytest.fixture
def build(no_children_left):
    managers = []

    def make(cfg: RewardConfig, function=None):
        managers.append(build_reward_manager(cfg, function=function, max_response_length=16))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def config(
    path: str | None = None, name: str | None = None, manager: str = "naive", **fields
) -> RewardConfig:
    cfg = RewardConfig(**{"timeout_s": 120.0, "num_workers": 2 if manager == "prime" else None, **fields})
    cfg.reward_manager.name = manager
    cfg.custom_reward_function.path = path
    cfg.custom_reward_function.name = name or "compute_score"
    return cfg


def run(manager) -> list[RewardResult]:
    for index, text in enumerate(["yes", "no"]):
        manager.submit(
            RewardSample(index, "ask", text, "yes", "test", {"bonus": 0.5}, columns={"level": index + 1})
        )
    results = manager.collect()
    return [results[0], results[1]]


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("compute_score", [1.5, 0.5]),
        ("compute_reward", [1.5, 0.5]),
        ("two", [6.0, 5.0]),
        ("three", [1.0, 0.0]),
        ("batch", [3.0, 2.0]),
        ("later", [0.25, 0.25]),
        ("later_batch", [1.0, 0.0]),
        ("everything", [4.0, 4.0]),
        ("picky", [None, 1.0]),
    ],
)
def test_every_signature_works_in_a_worker_and_in_process(build, reward_file, name, scores):
    for in_process in (False, True):
        manager = build(config(reward_file, name, in_process=in_process))
        manager.check(["test"], ["level", "reward_model"])
        assert [result.score for result in run(manager)] == scores


def test_functions_run_in_another_process_and_kwargs_reach_them(build, reward_file):
    assert run(build(config(reward_file, "three")))[0].extra["pid"] != os.getpid()
    assert run(build(config(reward_file, "three", in_process=True)))[0].extra["pid"] == os.getpid()
    cfg = config(f"{reward_file}:scaled")
    cfg.custom_reward_function.reward_kwargs = {"factor": 2.0}
    assert [result.score for result in run(build(cfg))] == [6.0, 4.0]
    cfg.custom_reward_function.reward_kwargs = {"factr": 2.0}
    with pytest.raises(RewardError, match="'factr'"):
        build(cfg).check(["test"], [])


def test_in_process_is_said_clearly(build, reward_file, caplog):
    build(config(reward_file, in_process=True))
    assert "runs in the trainer's process, without a deadline: reward.in_process=True" in caplog.text


def test_a_closure_runs_in_process_and_the_log_says_why(build, caplog):
    seen = []

    def closure(response):
        seen.append(response)
        return 1.0

    assert [result.score for result in run(build(config(), closure))] == [1.0, 1.0]
    assert seen == ["yes", "no"]
    assert "closure" in caplog.text and "no other process can import it" in caplog.text


def test_a_function_of_an_installed_module_runs_in_a_worker(build, caplog):
    from verl.reward.scorers.qa import compute_em

    assert [result.score for result in run(build(config(), compute_em))] == [1.0, 0.0]
    assert "trainer's process" not in caplog.text


def test_a_function_whose_module_no_worker_can_import_runs_in_process(build, caplog, monkeypatch):
    ghost = types.ModuleType("module_without_file")
    exec("def f(response):\n    return 1.0\n", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "module_without_file", ghost)
    assert run(build(config(), ghost.f))[0].score == 1.0
    assert "trainer's process" in caplog.text and "module_without_file" in caplog.text


def test_several_functions_with_weights(build, reward_file):
    cfg = config(manager="prime")
    cfg.functions = [
        WeightedRewardConfig(path=reward_file, name="two", weight=0.1),
        WeightedRewardConfig(path=reward_file, name="later", weight=2.0),
        WeightedRewardConfig(path=reward_file, name="batch"),
        WeightedRewardConfig(path=reward_file, name="scaled", weight=-1.0, reward_kwargs={"factor": 1.0}),
        WeightedRewardConfig(path="verl.reward.scorers.qa:compute_em", weight=10.0),
    ]
    manager = build(cfg)
    manager.check(["whatever"], ["level", "reward_model"])
    results = run(manager)
    labels = [term.label for term in manager.terms]
    assert labels == ["two", "later", "batch", "scaled", "compute_em"]
    assert [term.weight for term in manager.terms] == [0.1, 2.0, 1.0, -1.0, 10.0]
    assert [results[0].extra[label] for label in labels] == [6.0, 0.25, 3.0, 3.0, 1.0]
    assert results[0].score == pytest.approx(0.6 + 0.5 + 3.0 - 3.0 + 10.0)


def test_a_function_given_as_argument_replaces_those_of_the_config_and_says_so(build, reward_file, caplog):
    assert run(build(config(reward_file), lambda response: 7.0))[0].score == 7.0
    assert "replaces reward.custom_reward_function.path" in caplog.text


def test_the_batch_manager_wants_a_function_of_the_batch(build, reward_file):
    assert [result.score for result in run(build(config(reward_file, "batch", manager="batch")))] == [
        3.0,
        2.0,
    ]
    with pytest.raises(RewardError, match=r"two .*takes one sample.*completions"):
        build(config(reward_file, "two", manager="batch"))
    with pytest.raises(RewardError, match="scorer takes one sample"):
        build(config(manager="batch"))


def test_one_bad_answer_costs_one_score_through_workers(build, reward_file):
    results = run(build(config(reward_file, "picky")))
    assert results[0].score is None
    assert "picky" in (results[0].error or "") and "returned None" in (results[0].error or "")


def test_a_missing_file_is_said_before_any_process_starts(build):
    with pytest.raises(RewardError, match="nowhere.py"):
        build(config("nowhere.py"))


def test_settings_without_effect_are_said(build, reward_file, caplog):
    build(config(reward_file, num_workers=4))
    assert "reward.num_workers=4 has no effect with reward.reward_manager.name=naive" in caplog.text


def test_scorers_a_user_registered_work_in_workers_or_in_process(build, tmp_path, monkeypatch, caplog):
    (tmp_path / "my_scorers.py").write_text("def mine(solution_str):\n    return 0.75\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_scorers

    try:
        register_scorer("test")(my_scorers.mine)
        manager = build(config())
        manager.check(["test"], [])
        assert [result.score for result in run(manager)] == [0.75, 0.75]
        assert "trainer's process" not in caplog.text
        register_scorer("test")(lambda solution_str: 0.5)
        assert [result.score for result in run(build(config()))] == [0.5, 0.5]
        assert "cannot be imported by another process" in caplog.text
    finally:
        REGISTERED.pop("test")


@pytest.mark.slow
def test_algebra_that_does_not_end_counts_as_wrong_not_as_failed(build):
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    manager = build(config(timeout_s=60.0))
    answers = ["\\boxed{2^{2^{2^{2^{2^{2}}}}}}", "\\boxed{2\\sqrt{2}}"]
    for index, text in enumerate(answers):
        manager.submit(RewardSample(index, "", text, ground_truth="\\sqrt{8}", data_source="math"))
    results = manager.collect()
    assert [results[index].score for index in (0, 1)] == [0.0, 1.0]


@pytest.mark.slow(seconds=3)
def test_a_helper_process_dies_with_the_worker_that_started_it(build, tmp_path, gone):
    path = tmp_path / "nested.py"
    path.write_text(
        "import time\n"
        "from verl.config.schema import RewardConfig\n"
        "from verl.reward.functions import FunctionSpec\n"
        "from verl.reward.pool import WorkerPool\n"
        "def compute_score(response, extra_info):\n"
        f"    spec = FunctionSpec({str(tmp_path / 'sleeper.py')!r})\n"
        "    pool = WorkerPool([spec], RewardConfig(timeout_s=600))\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(pool.pids[0]))\n"
        "    pool.submit(0, [])\n"
        "    time.sleep(600)\n"
    )
    (tmp_path / "sleeper.py").write_text(
        "def compute_score(completions):\n    import time\n    time.sleep(600)\n"
    )
    pid, limit = tmp_path / "pid", 2.0
    while not (pid.exists() and pid.read_text()):  # on a busy machine the helper takes longer to start
        manager = build(config(str(path), timeout_s=limit))
        manager.submit(RewardSample(0, "", ""))
        assert manager.collect()[0].score is None
        limit *= 2
    assert gone(int(pid.read_text()))


def test_a_users_own_manager_is_found_by_name(build):
    class Constant(RewardManager):
        def __init__(self, reward_cfg, *, tokenizer, function, max_response_length):
            self.value, self.indices = max_response_length, []

        def submit(self, sample):
            self.indices.append(sample.index)

        def collect(self):
            indices, self.indices = self.indices, []
            return {index: RewardResult(float(self.value)) for index in indices}

    try:
        register_reward_manager("constant")(Constant)
        manager = build(config(manager="constant"))
        manager.check(["x"], ["y"])  # nothing to check is fine
        assert [result.score for result in run(manager)] == [16.0, 16.0]
    finally:
        FACTORIES.pop("constant")


def test_the_config_knows_our_managers():
    assert sorted(REWARD_MANAGERS) == known_reward_managers()
