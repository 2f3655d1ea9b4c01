"""`verl plan`: what it proposes fits by the same arithmetic that checks a run, and says what is assumed."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from verl import plan_cli
from verl.config.batch_math import batch_plan
from verl.config.device import Device
from verl.config.load import load_ppo_config
from verl.config.phases import estimate
from verl.config.scale_plan import SAFE, Proposal, Wish, propose
from verl.config.step_time import Speeds, active_parameters
from verl.errors import ConfigError

GIB = 2**30


def plan(model: str, gpus: int, memory: int, **wishes: Any) -> Proposal:
    wish = Wish(gpus=gpus, gpu_memory=memory * GIB, **wishes)
    return propose(wish, plan_cli._shape(model), Speeds.of(wish.gpu_memory))


@pytest.mark.parametrize(
    ("model", "gpus", "memory", "wishes"),
    [
        ("0.5b", 1, 24, {}),
        ("1.5b", 2, 80, {"critic": True}),
        ("7b", 8, 80, {"reference": True}),
        ("7b", 16, 80, {"critic": True, "reference": True}),
        ("14b", 16, 141, {}),
    ],
)
def test_what_is_proposed_is_accepted_and_fits(
    model: str, gpus: int, memory: int, wishes: dict[str, Any]
) -> None:
    proposal = plan(model, gpus, memory, **wishes)
    assert proposal.fits
    overrides = [f"{key}={value}" for key, value in proposal.keys.items()]
    config = load_ppo_config([*overrides, "data.train_files=x.jsonl", "actor_rollout_ref.model.path=m"])
    shape = plan_cli._shape(model)
    device = Device("cuda", "GPU", memory * GIB, min(gpus, 8))
    for phase in estimate(config, shape, shape if wishes.get("critic") else None, device).phases:
        assert phase.total <= SAFE * memory * GIB, phase
    assert batch_plan(config).ranks == gpus
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= 1024 + 2048


def test_less_memory_asks_for_thriftier_settings() -> None:
    roomy, tight = plan("7b", 8, 141), plan("7b", 8, 40)
    saved = {key for key, value in tight.keys.items() if value is True} - {
        key for key, value in roomy.keys.items() if value is True
    }
    assert saved, "the tight plan saves memory somewhere"
    assert max(p.total for p in tight.memory.phases) < max(p.total for p in roomy.memory.phases)


def test_a_model_that_cannot_fit_says_what_is_missing() -> None:
    proposal = plan("72b", 8, 80)
    assert not proposal.fits and proposal.tensor_parallel == 4
    text = " ".join(proposal.notes)
    assert "nothing tried fits" in text and "spread over 4 GPUs" in text


def test_nodes_must_be_whole() -> None:
    with pytest.raises(ConfigError, match="--gpus 12 is more than one node of 8"):
        plan("7b", 12, 80)
    assert plan("7b", 16, 80).keys["trainer.nnodes"] == 2


def test_measured_speeds_replace_assumptions_and_scale_with_gpus() -> None:
    shape = plan_cli._shape("1.5b")
    speeds = Speeds.of(80 * GIB, train=10_000, generate=5_000)

    def seconds(gpus: int) -> dict[str, float]:
        parts = propose(Wish(gpus=gpus, gpu_memory=80 * GIB), shape, speeds).parts
        assert {part.source for part in parts} == {"measured"}
        return {part.name: part.seconds for part in parts}

    one, four = seconds(1), seconds(4)
    assert one["generate"] == pytest.approx(256 * 8 * 2048 / 5_000)
    assert one["update actor"] == pytest.approx(256 * 8 * 3072 / 10_000)
    assert four["generate"] == pytest.approx(one["generate"] / 4)
    assert set(one) == {"generate", "update actor"}, "one optimiser step per batch needs no pass before it"


def test_known_sizes_have_the_published_numbers_of_parameters() -> None:
    published = {"0.5b": 494_032_768, "1.5b": 1_543_714_304, "7b": 7_615_616_512, "72b": 72_706_203_648}
    assert {size: plan_cli._shape(size).parameters for size in published} == published
    assert active_parameters(plan_cli._shape("7b")) < published["7b"]


def test_the_command_prints_keys_memory_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan_cli.add_arguments(parser)
    status = plan_cli.run(parser.parse_args(["--model", "7b", "--gpus", "8", "--gpu-memory", "80"]))
    text = capsys.readouterr().out
    assert status == 0 and "trainer.n_gpus_per_node=8" in text and "update actor" in text
    assert "assumed: 35% of 990 TFLOP/s" in text and "Not counted" in text
    assert plan_cli.run(parser.parse_args(["--model", "72b", "--gpus", "1", "--gpu-memory", "24"])) == 1
    refused = capsys.readouterr().out
    assert "does not fit" in refused and "one step" not in refused
    with pytest.raises(ConfigError, match="--gpus is 0"):
        plan_cli.run(parser.parse_args(["--model", "7b", "--gpus", "0", "--gpu-memory", "80"]))
    with pytest.raises(ConfigError, match="neither a folder"):
        plan_cli.run(parser.parse_args(["--model", "some/model", "--gpus", "1", "--gpu-memory", "80"]))
