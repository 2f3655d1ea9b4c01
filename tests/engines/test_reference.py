"""A reference that takes over the policy has its log-probs, and keeps them while the policy learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from verl.errors import ConfigError

WORKER = Path(__file__).with_name("reference_worker.py")


def check(found: dict[str, torch.Tensor]) -> None:
    assert torch.equal(found["untouched"], found["first"])
    # Weights are compared bit by bit in the worker; passes of two engines may be cut differently.
    torch.testing.assert_close(found["refreshed"], found["trained"], rtol=0, atol=2e-2)
    assert torch.equal(found["kept"], found["refreshed"])
    if found["first"].dim():  # a rank with results
        assert (found["trained"] - found["first"]).abs().max() > 0.1
        assert (found["later"] - found["kept"]).abs().max() > 0.1


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("reference_worker", WORKER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("name", ["whole", "half", "adapters"])
def test_one_process(worker, name, tmp_path):
    check(worker.SCENARIOS[name](0, 1, tmp_path))


@pytest.mark.slow(seconds=15)
def test_shards_on_two_ranks(worker, tmp_path, run_ranks):
    names = ["whole", "replicas", "half", "adapters"]
    results = run_ranks(WORKER, 2, tmp_path, names)
    for name in names:
        for rank in results[name]:
            check(rank)
    alone = worker.SCENARIOS["adapters"](0, 1, tmp_path)
    together = torch.cat([rank["kept"] for rank in results["adapters"]])
    torch.testing.assert_close(together, alone["kept"], rtol=2e-4, atol=2e-4)


@pytest.mark.components
def test_megatrons_parts(tmp_path, run_ranks):
    pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
    results = run_ranks(WORKER, 4, tmp_path, ["tensor", "pipeline"])
    for ranks in results.values():
        assert any(rank["first"].dim() for rank in ranks)
        for rank in ranks:
            check(rank)


def test_without_adapters_there_is_nothing_to_copy(tools):
    engine = tools.engine(model=tools.model())
    with pytest.raises(ConfigError, match="without adapters there is nothing to copy"):
        engine.refresh_reference()
