"""Several real processes over gloo give what one process gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("gloo_worker.py")
ALL = [
    "base",
    "kept_whole_and_recomputed",
    "hybrid",
    "critic",
    "lora",
    "distilled",
    "distilled_top",
    "generate_and_resume",
    "half_precision",
    "small_moments",
    "muon",
]
GENERATING = ["idle_rank", "idle_rank_without_copy", "same_as_sharded"]
OTHERS = [*GENERATING, "kept_types", "norm_of_halves"]
"""Whose results are not those of training."""


class Scenarios(dict):
    """Results by name, computed in this process when they are first asked for."""

    def __init__(self, worker, folder):
        self._worker, self._folder = worker, folder

    def __missing__(self, name):
        self[name] = self._worker.SCENARIOS[name](0, 1, self._folder)
        return self[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("gloo_worker", WORKER)
    assert spec and spec.loader
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    folder = tmp_path_factory.mktemp("alone")
    return Scenarios(worker, folder), folder


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow(seconds=20)) for n in (2, 3)])
def together(request, tmp_path_factory, run_ranks):
    """Two ranks go through every scenario; of three, the last one is killed at the end."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"world{world}")
    if world == 2:
        return run_ranks(WORKER, world, folder, [*ALL, *OTHERS]), folder, world
    scenarios = ["base", "critic", "killed"]
    return run_ranks(WORKER, world, folder, scenarios, expected=[0, 0, -9]), folder, world


def test_weights_leave_the_ranks_in_the_types_they_were_loaded_in(alone, together):
    expected, _ = alone
    results, _, _ = together
    for types in results.get("kept_types", []):
        assert types == expected["kept_types"]
        assert {types["model.norm.weight"], types["model.layers.1.mlp.gate.e_score_correction_bias"]} == {
            torch.bfloat16,
            torch.float32,
        }


def test_the_norm_of_gradients_in_half_precision_is_computed_in_float32(together):
    results, _, _ = together
    for norms in results.get("norm_of_halves", []):
        assert norms["found"] == pytest.approx(norms["exact"], rel=1e-5)


def test_ranks_agree_with_one_process(alone, together):
    expected, _ = alone
    results, _, _ = together
    for name in results.keys() - set(OTHERS):
        ranks = results[name]
        tolerance = {"half_precision": 3e-2, "small_moments": 5e-3, "muon": 5e-3}.get(name, 2e-5)
        want = expected[name]
        before = torch.cat([rank["before"] for rank in ranks])
        torch.testing.assert_close(
            before, want["before"], rtol=tolerance, atol=tolerance, msg=f"{name} before"
        )
        for rank in ranks:
            assert rank["norms"] == pytest.approx(want["norms"], rel=max(1e-4, 3 * tolerance)), name
            assert rank["weights"].keys() == want["weights"].keys()
            for weight, value in want["weights"].items():
                torch.testing.assert_close(
                    rank["weights"][weight], value, rtol=tolerance, atol=5 * tolerance, msg=f"{name} {weight}"
                )


def test_weights_did_move(alone, tools):
    """Guards the comparison above against comparing two untouched models."""
    results, _ = alone
    start = dict(tools.model(tie_word_embeddings=True).named_parameters())
    moved = [(results["base"]["weights"][name] - value).abs().max() for name, value in start.items()]
    assert min(change.item() for change in moved) > 1e-3


@pytest.mark.parametrize("scenario", ["idle_rank", "idle_rank_without_copy"])
def test_a_rank_without_prompts_takes_part_in_training(alone, together, scenario):
    """Its collectives match those of the ranks that generated: the scenario ends and the weights are right."""
    results, _, world = together
    if world != 2:
        pytest.skip("a scenario of two ranks")
    expected = alone[0]["idle_rank"]
    assert [rank["tokens"] for rank in results[scenario]] == [expected["tokens"], []]
    for rank in results[scenario]:
        for name, value in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=2e-5, atol=1e-4, msg=name)


def test_generation_keeps_fused_layers_and_addresses_over_a_step(together):
    """What a captured CUDA graph depends on: the session is used again, and no weight has moved."""
    results, _, world = together
    if world != 2:
        pytest.skip("a scenario of two ranks")
    first, idle = results["idle_rank"]
    assert first["kept"] == [False, True] and first["fused"] == [True, True]
    for rank in (first, idle):
        assert rank["addresses"][0] == rank["addresses"][1]
        assert len(set(rank["addresses"][0])) == len(rank["addresses"][0])
    through_fsdp = results["idle_rank_without_copy"][0]
    assert through_fsdp["fused"] == [True, True]


def test_adapters_and_whole_weights_survive_sharding(alone, together):
    expected, alone_folder = alone
    results, folder, world = together
    if world == 2:
        reference = torch.cat([rank["reference"] for rank in results["lora"]])
        torch.testing.assert_close(reference, expected["lora"]["reference"], rtol=1e-5, atol=1e-5)
        for rank in results["generate_and_resume"]:
            torch.testing.assert_close(
                rank["logits"], expected["generate_and_resume"]["logits"], rtol=1e-4, atol=1e-4
            )
        _same_file(
            folder / "adapter2/adapter_model.safetensors", alone_folder / "adapter1/adapter_model.safetensors"
        )
    assert expected["critic"]  # its weights are saved by then
    _same_file(folder / f"critic{world}/model.safetensors", alone_folder / "critic1/model.safetensors")


def _same_file(first: Path, second: Path) -> None:
    from safetensors.torch import load_file

    left, right = load_file(first), load_file(second)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-4, msg=name)


def test_a_killed_rank_is_named_by_the_others(together):
    _, folder, world = together
    if world == 3:
        for rank in (0, 1):
            message = (folder / f"halted{rank}.txt").read_text()
            assert message.startswith(f"rank {rank} stops because rank 2 on ")
            assert "resume_mode" in message
