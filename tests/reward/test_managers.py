"""Managers: every sample one result, weighted sums, checks at start, failure accounting."""

from __future__ import annotations

import pytest

from verl.config.schema import RewardConfig, RewardFunctionConfig, WeightedRewardConfig
from verl.errors import ConfigError, RewardError, TrainingHalted
from verl.reward import FailureAccount, RewardResult, RewardSample, build_reward_manager


def config(**fields) -> RewardConfig:
    return RewardConfig(**{"in_process": True, **fields})


def sample(index: int, response: str = "#### 4", **fields) -> RewardSample:
    return RewardSample(index, "2+2?", response, **{"ground_truth": "4", "data_source": "gsm8k", **fields})


def run(manager, samples):
    for item in samples:
        manager.submit(item)
    return manager.collect()


def test_without_a_function_the_data_source_chooses_the_scorer():
    manager = build_reward_manager(config(), max_response_length=16)
    results = run(manager, [sample(5), sample(2, "#### 5")])
    assert {index: result.score for index, result in results.items()} == {5: 1.0, 2: 0.0}
    assert manager.collect() == {}


def test_an_unknown_data_source_is_refused_at_start_and_lists_the_known():
    manager = build_reward_manager(config(), max_response_length=16)
    manager.check(["gsm8k", "openai/gsm8k"])
    with pytest.raises(RewardError, match=r"No scorer for data_source 'mystery'.*gsm8k"):
        manager.check(["gsm8k", "mystery"])
    own = build_reward_manager(config(), function=lambda response: 1.0, max_response_length=16)
    own.check(["mystery"])


def test_unknown_parameters_and_kwargs_are_refused_at_start():
    manager = build_reward_manager(config(), function=lambda response, levle: 1.0, max_response_length=16)
    with pytest.raises(RewardError, match="levle"):
        manager.check(["x"], ["level"])
    scorer = config()
    scorer.custom_reward_function.reward_kwargs = {"methode": "flexible"}
    with pytest.raises(RewardError, match="methode"):
        build_reward_manager(scorer, max_response_length=16).check(["gsm8k"], [])


def test_reward_kwargs_reach_the_scorer():
    cfg = config()
    cfg.custom_reward_function.reward_kwargs = {"method": "flexible"}
    manager = build_reward_manager(cfg, max_response_length=16)
    assert run(manager, [sample(0, "it is 4")])[0].score == 1.0


def test_several_functions_are_summed_and_each_own_score_is_kept():
    def right(response):
        return {"score": 1.0, "acc": 1}

    def short(completions):
        return [0.5 if len(text) < 3 else 0.0 for text in completions]

    manager = build_reward_manager(config(), function=[right, short], max_response_length=16)
    result = run(manager, [sample(0, "ab")])[0]
    assert result.score == 1.5
    names = [term.label for term in manager.terms]
    assert [result.extra[name] for name in names] == [1.0, 0.5]
    assert result.extra["acc"] == 1


def test_extra_values_of_the_same_name_stand_beside_each_other():
    def first(response):
        return {"score": 1.0, "acc": 1}

    def second(response):
        return {"score": 1.0, "acc": 0}

    manager = build_reward_manager(config(), function=[first, second], max_response_length=16)
    extra = run(manager, [sample(0)])[0].extra
    assert extra["acc"] == 1 and extra[f"{manager.terms[1].label}/acc"] == 0


def test_the_weight_of_a_single_function_counts_too(tmp_path):
    (tmp_path / "f.py").write_text("def f(response):\n    return {'score': 3.0, 'acc': 1}\n")
    cfg = config(functions=[WeightedRewardConfig(path=f"{tmp_path}/f.py", name="f", weight=0.5)])
    result = run(build_reward_manager(cfg, max_response_length=16), [sample(0)])[0]
    assert result.score == 1.5 and result.extra == {"acc": 1}


@pytest.mark.parametrize(("name", "notices"), [("my_reward", 1), ("compute_score", 0), ("compute_reward", 0)])
def test_a_function_of_another_name_is_used_with_a_notice(tmp_path, caplog, name, notices):
    file = tmp_path / "mine.py"
    file.write_text(f"def {name}(response):\n    return 2.0\n")
    cfg = config(custom_reward_function=RewardFunctionConfig(path=str(file)))
    with caplog.at_level("INFO"):
        assert run(build_reward_manager(cfg, max_response_length=16), [sample(0)])[0].score == 2.0
    lines = [line for line in caplog.messages if "its only one, my_reward, is used" in line]
    assert len(lines) == notices and all("custom_reward_function.name=my_reward" in line for line in lines)


def test_when_one_of_several_rewards_fails_the_sample_has_no_score():
    def good(response):
        return 1.0

    def bad(response):
        raise ValueError("no")

    manager = build_reward_manager(config(), function=[good, bad], max_response_length=16)
    result = run(manager, [sample(0)])[0]
    assert result.score is None and "ValueError: no" in (result.error or "")


def test_dapo_lowers_long_responses():
    cfg = config()
    cfg.reward_manager.name = "dapo"
    cfg.overlong_buffer.enable, cfg.overlong_buffer.len = True, 20
    manager = build_reward_manager(cfg, function=lambda response: 1.0, max_response_length=100)
    results = run(manager, [sample(0, response_length=50), sample(1, response_length=90)])
    assert (results[0].score, results[1].score) == (1.0, 0.5)
    assert results[1].extra == {}
    cfg.overlong_buffer.log = True
    manager = build_reward_manager(cfg, function=lambda response: 1.0, max_response_length=100)
    assert run(manager, [sample(1, response_length=90)])[1].extra == {
        "overlong_reward": -0.5,
        "overlong": 1.0,
    }
    cfg.overlong_buffer.len = 101
    with pytest.raises(ConfigError, match="between 1 and data.max_response_length=100"):
        build_reward_manager(cfg, function=lambda response: 1.0, max_response_length=100)


def test_a_response_without_a_score_gets_none_from_its_length():
    cfg = config()
    cfg.overlong_buffer.enable, cfg.overlong_buffer.len = True, 20
    manager = build_reward_manager(cfg, function=lambda response: None, max_response_length=100)
    assert run(manager, [sample(0, response_length=90)])[0].score is None


def test_preflight_raises_only_when_nothing_can_be_scored():
    def picky(response):
        return 1.0 if response == "a" else None

    manager = build_reward_manager(config(), function=picky, max_response_length=16)
    assert [r.score for r in manager.preflight([sample(0, "a"), sample(1, "b")])] == [1.0, None]
    with pytest.raises(RewardError, match=r"any of 2 rows.*2x.*None"):
        manager.preflight([sample(0, "b"), sample(1, "c")])


def results(good: int, bad: int) -> list[RewardResult]:
    return [RewardResult(1.0)] * good + [RewardResult(None, error=f"row {i} hung") for i in range(bad)]


def test_failures_are_counted_and_the_run_goes_on_below_the_share():
    account = FailureAccount(0.2)
    assert account.add(results(8, 2)) == {"reward/failed": 2.0, "reward/failed_ratio": 0.2}
    assert (account.scored, account.failed) == (8, 2)
    assert account.add([]) == {"reward/failed": 0.0, "reward/failed_ratio": 0.0}


def test_above_the_share_the_run_stops_with_the_cause():
    account = FailureAccount(0.2)
    account.add(results(10, 0))
    with pytest.raises(TrainingHalted, match=r"3 of 10 .*30%.*3x row 0 hung.*max_failure_ratio"):
        account.add(results(7, 3))


def test_a_first_batch_with_some_scores_halts_as_a_function_that_works():
    with pytest.raises(TrainingHalted, match="5 of 10"):
        FailureAccount(0.2).add(results(5, 5))


def test_a_function_that_never_scored_is_the_users_error_not_a_halt():
    with pytest.raises(RewardError, match="verl reward test"):
        FailureAccount(0.2).add(results(0, 4))


def test_an_unknown_manager_lists_the_known():
    cfg = config()
    cfg.reward_manager.name = "fast"
    with pytest.raises(RewardError, match="batch, dapo, naive, none, prime"):
        build_reward_manager(cfg, max_response_length=16)
