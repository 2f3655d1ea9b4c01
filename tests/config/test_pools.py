"""Where generation goes, and what does not fit, from the config alone."""

from __future__ import annotations

from typing import Any

import pytest

from verl.config.load import from_dict
from verl.config.pools import engine_size, own_server, rollout_pool, sharing_errors
from verl.config.schema import PPOConfig


def config(**changes: Any) -> PPOConfig:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    values = {
        (key if key.startswith("trainer.") else f"actor_rollout_ref.rollout.{key}"): value
        for key, value in values.items()
    }
    return from_dict(PPOConfig, values, checked=False)


def test_by_default_generation_is_on_the_trainers_ranks() -> None:
    for name in ("native", "hf", "vllm"):
        assert not rollout_pool(config(name=name)) and not rollout_pool(config(name=name, trainer__nnodes=2))


@pytest.mark.parametrize("name", ["native", "hf", "vllm"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_gpus_for_rollout_make_a_pool_whatever_trains(name: str, ranks: int) -> None:
    cfg = config(name=name, nnodes=1, n_gpus_per_node=2, trainer__n_gpus_per_node=ranks)
    assert rollout_pool(cfg) and not sharing_errors(cfg)


def test_one_server_beside_one_process_needs_no_ray() -> None:
    server = {
        "name": "vllm",
        "mode": "server",
        "nnodes": 1,
        "n_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
    }
    assert own_server(config(**server)) and not rollout_pool(config(**server))
    for change in (
        {"n_gpus_per_node": 4},
        {"mode": "inprocess"},
        {"trainer__n_gpus_per_node": 2},
        {"nnodes": 2},
    ):
        assert rollout_pool(config(**{**server, **change})), change


def test_our_own_engines_hold_whole_copies() -> None:
    sizes = {
        name: engine_size(config(name=name, tensor_model_parallel_size=4)) for name in ("native", "vllm")
    }
    assert sizes == {"native": 1, "vllm": 4}


def test_gpus_that_share_a_copy_are_on_one_node() -> None:
    fits = config(name="vllm", tensor_model_parallel_size=4, trainer__n_gpus_per_node=8, trainer__nnodes=2)
    assert not sharing_errors(fits)
    # Two nodes have eight together, but no group of four on one of them divides six.
    apart = config(name="vllm", tensor_model_parallel_size=4, trainer__n_gpus_per_node=6, trainer__nnodes=2)
    (line,) = sharing_errors(apart)
    assert "is 4, which does not divide the 6 GPUs" in line and "(trainer.n_gpus_per_node)" in line
    assert "Values that work: 1, 2, 3, 6; or trainer.n_gpus_per_node=8" in line
    pool = config(
        name="vllm", tensor_model_parallel_size=4, nnodes=1, n_gpus_per_node=2, trainer__n_gpus_per_node=8
    )
    (line,) = sharing_errors(pool)
    assert "Values that work: 1, 2; or actor_rollout_ref.rollout.n_gpus_per_node=4" in line
