"""Which size of micro-batch the benchmark proposes."""

from __future__ import annotations

import argparse

from verl.bench import token_budget, train
from verl.bench.token_budget import Found


def test_the_smallest_budget_close_to_the_fastest_is_proposed():
    speeds = {8192: 80.0, 16384: 97.5, 32768: 100.0, 65536: 99.0}
    found = [Found(budget, 1, speed, 1.0, 0.0) for budget, speed in speeds.items()]
    assert token_budget.best(found) == 16384


def test_each_budget_cuts_the_same_update_into_its_micro_batches(capsys):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = ["--token-budgets", "1024,256,64", "--shape", "tiny", "--tokens", "256", "--device", "cpu"]
    assert train.run(parser.parse_args(words)) == 0
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")]
    total = sum(token_budget.CASES["tiny"].workload(256).lengths)
    assert [row[1] for row in cells] == ["64", "256"], "1024 is more than the update has"
    assert cells[1][2] == "1" and int(cells[0][2]) >= total / 256
