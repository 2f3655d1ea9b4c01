"""`verl doctor --exact RUN`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.doctor.cli import build_parser, run
from verl.doctor.exact import exact
from verl.errors import ConfigError


@pytest.mark.slow
def test_a_run_is_computed_in_every_way(
    copied_run: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied_run()
    (found,) = exact(str(folder))
    assert found.status == "ok" and "70 random tokens" in found.seen and "global_step_2" in found.seen
    (folder / "bad_batches").mkdir()
    row = {"tokens": [5, 6, 7, 8, 9, 5], "prompt": 3, "temperature": 1.0}
    (folder / "bad_batches" / "exact_row.json").write_text(json.dumps(row))
    (found,) = exact(str(folder))
    assert found.status == "ok" and "the row that ended the run" in found.seen

    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def planted(module: Any, x: torch.Tensor) -> torch.Tensor:
        out = forward(module, x)
        return torch.nextafter(out, torch.tensor(torch.inf)) if x.shape[1] > 6 else out

    monkeypatch.setattr(LlamaMLP, "forward", planted)
    (found,) = exact(str(folder))
    assert (
        found.status == "fatal"
        and "model.layers.0" in found.seen
        and "in a pack with other rows" in found.seen
    )


def test_without_a_run_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="verl doctor --exact RUN"):
        run(build_parser().parse_args(["--exact"]))
