from __future__ import annotations

import argparse

import pytest

from verl.algorithms import adv_estimator_names, policy_loss_names
from verl.bench import algorithms as bench


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(
        parser.parse_args(["--batch", "8", "--width", "12", "--group", "4", "--repeat", "1", *words])
    )


@pytest.mark.slow(seconds=4)
def test_every_estimator_and_loss_is_timed_and_agrees_with_its_loop(capsys):
    assert run() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {(line[0], line[1]): line for line in lines if line and line[0] in ("estimator", "loss")}
    estimators = {name for name in adv_estimator_names() if not name.endswith("_vectorized")}
    assert {name for kind, name in rows if kind == "estimator"} == estimators
    assert {name for kind, name in rows if kind == "loss"} == set(policy_loss_names())
    for row in rows.values():
        assert row[4].endswith("x") and float(row[5]) < 1e-4, row


@pytest.mark.parametrize(("name", "code"), [("grpo", 0), ("grpoo", 2)])
def test_only_takes_known_names(name, code, capsys):
    assert run("--only", name) == code
    said = capsys.readouterr()
    assert name in (said.out if code == 0 else said.err)
