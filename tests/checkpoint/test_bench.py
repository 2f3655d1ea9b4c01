"""The benchmark runs and says what it promises to say."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from verl.bench.checkpoint import add_arguments, run


def test_the_benchmark_prints_a_ratio_for_every_way_and_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--millions", "1", "--repeat", "1", "--folder", str(tmp_path)])) == 0
    out = capsys.readouterr().out
    table, _, verdicts = out.partition("\n\nsaving")
    assert len(re.findall(r"\d\.\d{2}x", table)) == 7 * 2 + 2
    assert len(re.findall(r"bar \d\.\dx: (held|MISSED)", verdicts)) == 2
    sizes = [float(size) for size in re.findall(r"x +(\d+\.\d+)$", out, flags=re.MULTILINE)]
    # Weights and two moments of 4 bytes each; headers add a little, whole weights in the same precision nothing.
    assert [round(size) for size in sizes] == [12, 12, 12, 12]
    assert list(tmp_path.iterdir()) == []
