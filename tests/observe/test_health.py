"""The monitor judges each step once, repeats itself rarely and goes on after a resume as if never interrupted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.observe.histories import WELL, batch_of
from verl.config.load import from_dict
from verl.config.schema import DPOConfig, PPOConfig, RewardTrainingConfig, SFTConfig
from verl.errors import CheckpointError
from verl.observe.batch_metrics import batch_facts
from verl.observe.health import HealthMonitor


def monitor(kind: type = PPOConfig) -> HealthMonitor:
    return HealthMonitor(from_dict(kind, {}, checked=False))


def test_a_healthy_run_hears_nothing() -> None:
    health = monitor()
    assert health.at_start() == []
    for step in range(1, 60):
        validation = {"val-core/x/acc/mean@1": 0.1 + step / 100} if step % 10 == 0 else {}
        batch = batch_of([0.0, 1.0, 0.0, 1.0], uids=["a", "a", "b", "b"])
        assert health.check(step, WELL | validation, batch) == []


def test_a_rule_is_quiet_for_a_while_after_reporting() -> None:
    health = monitor()
    reported = [step for step in range(1, 43) if health.check(step, WELL | {"reward/failed": 1.0})]
    assert reported == [1, 21, 41]


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, DPOConfig, RewardTrainingConfig])
def test_every_rule_is_silent_without_measurements(kind: type) -> None:
    health = monitor(kind)
    assert health.at_start() == []
    assert [health.check(step, {}) for step in range(1, 30)] == [[]] * 29


def test_responses_that_are_long_and_varied_do_not_repeat() -> None:
    varied = list(range(100, 180))
    assert batch_facts(batch_of([0.0, 1.0], [varied, varied])).repetitive_share == 0


def test_a_resumed_monitor_judges_as_if_never_interrupted() -> None:
    whole, first = monitor(), monitor()
    grown = [WELL | {"actor/grad_norm": 0.1 * 1.15**step, "unwatched": 1.0} for step in range(1, 41)]
    expected = [whole.check(step, metrics) for step, metrics in enumerate(grown, start=1)]
    heard = [first.check(step, metrics) for step, metrics in enumerate(grown[:19], start=1)]
    second = monitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    heard += [second.check(step, metrics) for step, metrics in enumerate(grown[19:], start=20)]
    assert heard == expected and any(expected)


@pytest.mark.parametrize(
    "bad", [{}, [], {"steps": [[1]], "last_spoke": {}}, {"steps": [], "last_spoke": {"a": "b"}}], ids=str
)
def test_a_damaged_state_is_refused_and_changes_nothing(bad: Any) -> None:
    health = monitor()
    health.check(1, WELL | {"reward/failed": 1.0})
    before = health.state_dict()
    with pytest.raises(CheckpointError, match="record of findings"):
        health.load_state_dict(bad)
    assert health.state_dict() == before
