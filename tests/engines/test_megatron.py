"""The Megatron engine in every layout gives what the FSDP engine gives in one process."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch

from verl.config.parallelism import Layout

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytestmark = pytest.mark.components

WORKER = Path(__file__).with_name("megatron_worker.py")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def load_worker():
    spec = importlib.util.spec_from_file_location("megatron_worker", WORKER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = load_worker()


def names(world: int) -> list[str]:
    return [name for name, case in worker.CASES.items() if case[0] == world]


@pytest.fixture(scope="module")
def two(tmp_path_factory, run_ranks):
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two"), [*names(2), "probe"])


@pytest.fixture(scope="module")
def four(tmp_path_factory, run_ranks):
    return run_ranks(WORKER, 4, tmp_path_factory.mktemp("four"), names(4))


@pytest.mark.parametrize("name", list(worker.CASES))
def test_layouts_agree_with_one_process(name, request, tmp_path):
    world, kind, *_ = worker.CASES[name]
    ranks = request.getfixturevalue("two" if world == 2 else "four")[name]
    alone = worker.SCENARIOS[name](0, 1, tmp_path)
    shards = {}
    for rank, found in enumerate(ranks):
        layout = Layout(*found["layout"])
        assert layout.world_size == world
        shards[layout.data_rank(rank)] = found
    for key in ("values",) if kind == "critic" else ("log_probs", "entropy", "sum_pi_squared"):
        together = torch.cat([shards[at][key] for at in sorted(shards)])
        torch.testing.assert_close(
            together, alone[key], **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}"
        )
    reporting = [found for rank, found in enumerate(ranks) if layout.reports(rank)]
    assert sum(loss for found in reporting for loss in found["loss"]) == pytest.approx(
        alone["loss"][0], rel=1e-5
    )
    if name.startswith("groups"):
        assert all(share > 0.3 for found in reporting for share in found["shared"])
    gradients = worker.joined([part for found in ranks for part in found["gradients"]])
    wanted = worker.joined(alone["gradients"])
    assert gradients.keys() == wanted.keys()
    for weight, expected in wanted.items():
        torch.testing.assert_close(
            gradients[weight], expected, **TOLERANCE, msg=lambda t, w=weight: f"{w}: {t}"
        )
    for found in ranks:
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert found["weights"].keys() == alone["weights"].keys()
        for weight, expected in alone["weights"].items():
            torch.testing.assert_close(
                found["weights"][weight], expected, **TOLERANCE, msg=lambda t, w=weight: f"{w}: {t}"
            )


@pytest.mark.parametrize("name", worker.PROBED)
def test_ranks_of_one_model_compare_different_tokens(name, two):
    alone = worker.engine_of(1, "actor", {}, "llama")
    for rank, found in enumerate(two["probe"]):
        expected = worker.probed(alone, rank)
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected), **TOLERANCE)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_an_engine_that_is_no_longer_used_is_freed(strategy, tools):
    engine = tools.engine(model=tools.model(), role={"strategy": strategy}, dtype="bfloat16")
    engine.forward_backward(tools.batch(), tools.policy_loss)
    engine.optimizer_step()
    optimizer = weakref.ref(engine._optimizer)
    assert optimizer() is not None
    del engine
    gc.collect()
    assert optimizer() is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_between_steps_changes_nothing(dtype, tools):
    weights, moments = [], []
    for offload in (False, True):
        engine = tools.engine(
            model=tools.model(), role={"strategy": "megatron", "optim.lr": 0.01}, dtype=dtype
        )
        for _ in range(3):
            engine.forward_backward(tools.batch(), tools.policy_loss)
            engine.optimizer_step()
            if offload:
                engine.offload()
        weights.append({name: value.clone() for name, value in engine.weights().named_tensors()})
        moments.append(engine.state()["optimizer"]["exp_avg"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert all(
        torch.equal(value.to_local(), moments[1][name].to_local()) for name, value in moments[0].items()
    )
