"""The benchmark of what Ray costs: both sides must do the same work, or its figure means nothing."""

from __future__ import annotations

import argparse
import json

import pytest

pytestmark = pytest.mark.components


def test_both_sides_do_the_same_work(joined, tmp_path, capsys):
    from benchmarks import overhead

    parser = argparse.ArgumentParser()
    overhead.add_arguments(parser)
    sizes = ["--prompts", "6", "--n", "2", "--max-tokens", "6", "--steps", "2", "--warm-up", "1"]
    args = parser.parse_args([*sizes, "--set", "trainer.device=cpu", "--json", str(tmp_path / "out.json")])
    assert overhead.run(args) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    norms = list(figures["last_grad_norm"].values())
    assert len(norms) == 2 and norms[0] > 0 and norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert set(figures["overhead"]) == {"generate", "log_probs", "update", "step"}
    assert "of a step" in capsys.readouterr().out
