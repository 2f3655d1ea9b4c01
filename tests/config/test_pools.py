"""Where generation goes, and what does not fit, from the config alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.config.load import from_dict
from verl.config.machine import Device
from verl.config.parallelism import dedicated_server, engine_size, rollout_pool, sharing_errors
from verl.config.plan import RunPlan
from verl.config.schema import PPOConfig
from verl.config.unused_keys import unused_keys


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
    assert rollout_pool(cfg) and not [*sharing_errors(cfg)]


def test_one_server_beside_one_process_needs_no_ray() -> None:
    server = {
        "name": "vllm",
        "mode": "server",
        "nnodes": 1,
        "n_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
    }
    assert dedicated_server(config(**server)) and not rollout_pool(config(**server))
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
    assert not [*sharing_errors(fits)]
    # Two nodes have eight together, but no group of four on one of them divides six.
    apart = config(name="vllm", tensor_model_parallel_size=4, trainer__n_gpus_per_node=6, trainer__nnodes=2)
    (line,) = sharing_errors(apart)
    assert "is 4, which does not divide trainer.n_gpus_per_node=6" in line
    assert "Values that work: 1, 2, 3, 6; or trainer.n_gpus_per_node=8" in line
    pool = config(
        name="vllm", tensor_model_parallel_size=4, nnodes=1, n_gpus_per_node=2, trainer__n_gpus_per_node=8
    )
    (line,) = sharing_errors(pool)
    assert "Values that work: 1, 2; or actor_rollout_ref.rollout.n_gpus_per_node=4" in line


def test_memory_of_gpus_for_rollout_is_their_own(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    gpu = Device("cuda", "a GPU", 80 * 2**30, 8)

    def phases(**changes: Any) -> dict[str, dict[str, int]]:
        given = {
            "actor_rollout_ref.model.path": str(folder),
            "data.train_files": str(folder / "config.json"),
            "data.train_batch_size": 64,
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.rollout.max_num_seqs": 1024,
            "trainer.n_gpus_per_node": 2,
            **{f"actor_rollout_ref.rollout.{key}": value for key, value in changes.items()},
        }
        memory = RunPlan(from_dict(PPOConfig, given), gpu).memory
        assert memory is not None
        return {phase.name: dict(phase.parts) for phase in memory.phases}

    shared = phases()
    own = phases(nnodes=1, n_gpus_per_node=2)
    halves = phases(nnodes=1, n_gpus_per_node=2, name="vllm", tensor_model_parallel_size=2)
    assert shared["generate"]["optimiser"] > 0 and set(own["generate"]) == {"weights", "KV cache"}
    assert own["generate"]["KV cache"] == shared["generate"]["KV cache"]
    assert halves["generate"]["weights"] == own["generate"]["weights"] // 2
    # One engine has twice the sequences of each of two, spread over two GPUs.
    assert halves["generate"]["KV cache"] == own["generate"]["KV cache"]
    assert {name: parts for name, parts in own.items() if name != "generate"} == {
        name: parts for name, parts in shared.items() if name != "generate"
    }


def test_what_has_an_effect_changes_with_a_pool() -> None:
    keys = {"free_cache_engine": False, "trainer__watchdog_s": 60.0, "trainer__max_restarts": 2}
    keys["trainer__device"] = "cuda"

    def idle(**more: Any) -> list[str]:
        return sorted(line.split("=")[0] for line in unused_keys(config(**keys, **more)))

    assert idle() == ["'trainer.max_restarts'", "'trainer.watchdog_s'"], "one process"
    assert idle(nnodes=1, n_gpus_per_node=1) == ["'actor_rollout_ref.rollout.free_cache_engine'"]
