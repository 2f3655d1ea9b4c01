"""A model in pipeline stages gives what the whole model gives."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core (make test-components)")
pytestmark = [pytest.mark.components, pytest.mark.slow(seconds=2), pytest.mark.timeout(1200)]

SCENARIOS = {"four_stages": 4, "few_micro_batches": 4, "two_models": 2, "critic": 2, "automatic_size": 4}
"""Stages of each; four processes go through all of them."""
WORKER = Path(__file__).with_name("megatron_pipeline_worker.py")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("megatron_pipeline_worker", WORKER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def together(run_ranks, tmp_path_factory):
    """Results by scenario and rank, and the folder with what the ranks have written in the last, in which they fail."""
    folder = tmp_path_factory.mktemp("ranks")
    names = [*SCENARIOS, "failing_loss"]
    results = run_ranks(WORKER, 4, folder, names)
    assert results.keys() == SCENARIOS.keys()
    return results, folder


@pytest.fixture(params=SCENARIOS)
def scenario(request):
    return request.param


@pytest.fixture
def results(together, scenario):
    return together[0][scenario]


@pytest.fixture
def alone(worker, scenario, tools):
    """The same batch through the whole model, in this process: outputs, loss and gradients."""
    kind = "critic" if scenario == "critic" else "actor"
    engine = tools.engine(kind, model=worker.whole_model(scenario))
    batch, losses = tools.batch(holes=True), []
    loss_fn = tools.value_loss if kind == "critic" else tools.policy_loss

    def recorded(output, micro):
        loss, _ = loss_fn(output, micro)
        losses.append(loss.detach())
        return loss, {}

    if kind == "critic":
        outputs = {"values": engine.values(batch)}
    else:
        outputs = engine.log_probs(batch, temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    engine.forward_backward(batch, recorded, temperature=0.7, with_entropy=kind == "actor")
    gradients = {name: gradient.clone() for name, gradient in tools.gradients(engine).items()}
    return outputs, torch.stack(losses).sum(), gradients


def test_every_stage_has_the_outputs_of_the_whole_model(results, scenario, alone):
    expected, _, _ = alone
    for stage in range(SCENARIOS[scenario]):
        shards = len(results) // SCENARIOS[scenario]
        mine = results[stage * shards : (stage + 1) * shards]
        for name, values in expected.items():
            found = torch.cat([rank["outputs"][name] for rank in mine])
            torch.testing.assert_close(found, values, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")
        assert all(rank["outputs"].keys() == expected.keys() for rank in mine)


def test_gradients_and_loss_are_those_of_the_whole_model(results, scenario, alone):
    """Of a tied embedding, the first and the last stage compute a part each."""
    _, expected_loss, expected = alone
    shards = len(results) // SCENARIOS[scenario]
    found = defaultdict(float)
    for rank in results:
        for name, gradient in rank["gradients"].items():
            found[name] += gradient / shards
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )
    losses = [metrics["loss"] for rank in results for metrics in rank["metrics"] if metrics]
    torch.testing.assert_close(torch.stack(losses).sum() / shards, expected_loss, **TOLERANCE)


def test_only_the_last_stage_calls_the_loss_function(results, scenario):
    shards = len(results) // SCENARIOS[scenario]
    rows = [[metrics.get("rows", 0) for metrics in rank["metrics"]] for rank in results]
    assert not any(any(counts) for counts in rows[:-shards])
    assert sum(sum(counts) for counts in rows[-shards:]) == 6
    assert len({len(counts) for counts in rows}) == 1  # as many micro-batches everywhere


def test_one_forward_one_backward(results, scenario):
    """A stage runs ahead by as many micro-batches as stages follow, and keeps no output once it is sent."""
    stages = SCENARIOS[scenario]
    for rank, result in enumerate(results):
        count = len(result["metrics"])
        ahead = min(stages - 1 - rank // (len(results) // stages), count)
        assert result["events"] == "F" * ahead + "FB" * (count - ahead) + "B" * ahead
        in_backward, after = result["alive"]
        assert after == 0 and in_backward <= (1 if ahead == 0 else 0)


def test_micro_batch_counts(together):
    counts = {name: len(ranks[0]["metrics"]) for name, ranks in together[0].items()}
    assert counts["four_stages"] == 6 and counts["few_micro_batches"] == 2 and counts["two_models"] == 3
    assert counts["critic"] > 2


def test_idle_stages_are_warned_of_once_per_kind(together):
    first, *others = (rank["warnings"] for rank in together[0]["few_micro_batches"])
    assert not any(others)
    forward, train = first
    assert "2 micro-batches" in train and "60 %" in train and "ppo_max_token_len_per_gpu" in train
    assert "60 %" in forward and "log_prob_max_token_len_per_gpu" in forward


def test_stages_agree_on_a_measured_size(together):
    sizes = [rank["sizes"] for rank in together[0]["automatic_size"]]
    assert len(set(map(tuple, sizes))) == 1 and all(sizes[0])


def test_a_stage_out_of_memory_names_itself_and_the_keys(together):
    for stage, result in enumerate(together[0]["automatic_size"]):
        message = result["out_of_memory"]
        assert f"stage {stage} " in message and "lower ppo_max_token_len_per_gpu" in message
        assert message.endswith("tried to allocate 1 GiB")


def test_an_error_of_the_loss_function_is_the_one_raised(together):
    _, folder = together
    errors = [(folder / f"failed{rank}.txt").read_text() for rank in range(4)]
    assert errors[3] == "ZeroDivisionError: no tokens to learn from"
    assert all(not error.startswith("ZeroDivisionError") for error in errors[:3])
