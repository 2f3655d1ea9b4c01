"""One rank of the Megatron tests: run as `megatron_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

A scenario trains a tiny model in one layout of ranks and leaves log-probs, loss, gradients and weights in FOLDER for
the test to compare with the FSDP engine. The same scenario in one process (world 1) is that FSDP engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

STEPS = 3
# A large eps: with a small one AdamW makes whole steps of gradients that are rounding errors.
ROLE = {
    "optim.eps": 1e-4,
    "ppo_micro_batch_size_per_gpu": 2,
    "optim.lr": 0.001,
    "grad_clip": 0.5,
    "optim.weight_decay": 0.1,
}
SIZES = {
    "tp": "megatron.tensor_model_parallel_size",
    "pp": "megatron.pipeline_model_parallel_size",
    "cp": "megatron.context_parallel_size",
    "sp": "ulysses_sequence_parallel_size",
    "ep": "megatron.expert_model_parallel_size",
}


def engine_of(world: int, kind: str, sizes: dict[str, int], architecture: str, **options: Any) -> Any:
    changes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        **options.pop("model", {}),
    }
    if architecture == "qwen3":
        changes["head_dim"] = 8
    model = conftest.make_model(architecture, **changes)
    role: dict[str, Any] = {**ROLE, "strategy": "megatron", **options.pop("role", {})}
    if world > 1:
        role |= {SIZES[name]: size for name, size in sizes.items()}
    else:
        role["strategy"] = "fsdp"
    return conftest.make_engine(kind, model=model, role=role, **options)


def share(batch: Any, rank: int, engine: Any) -> Any:
    """Uneven over data-parallel ranks; those that split the model have the same rows."""
    layout = engine.info.layout
    return gloo_worker.share(batch, layout.data_rank(rank), layout.dp)


def gradients(engine: Any) -> list[tuple[str, list[int], list[int], torch.Tensor]]:
    """Name, shape of the whole weight, where this rank's part begins in it, and the part."""
    optimizer = engine._optimizer
    if not hasattr(optimizer, "table"):
        found = optimizer.named_gradients().items()
        return [(name, list(x.shape), [0] * x.ndim, x.clone()) for name, x in found]
    from verl.engines.megatron.optimizer import row_range

    optimizer.reduce_gradients()
    parts = []
    for place in optimizer.table:
        offsets = list(place.offsets)
        offsets[0] += row_range(place.rows, *optimizer._replica(place)[:2])[0]
        parts.append(
            (place.name, list(place.shape), offsets, optimizer.named_gradients()[place.name].clone())
        )
    return parts


def joined(parts: list[tuple[str, list[int], list[int], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole gradients by name; what no rank has stays NaN."""
    whole: dict[str, torch.Tensor] = {}
    for name, shape, offsets, part in parts:
        target = whole.setdefault(name, torch.full(shape, float("nan")))
        target[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
    return whole


def train(rank: int, engine: Any, batch: Any, critic: bool = False) -> dict[str, Any]:
    from verl.observe.metrics import Metric

    own = share(batch, rank, engine)
    plain = conftest.value_loss if critic else conftest.policy_loss

    def loss(output: Any, micro: Any) -> Any:
        value, _ = plain(output, micro)
        return value, {"loss": Metric(value.detach() / micro.meta_info["dp_size"], "sum")}

    layout = engine.info.layout
    found: dict[str, Any] = {"layout": [layout.dp, layout.tp, layout.pp, layout.cp, layout.ep]}
    if critic:
        found["values"] = engine.values(own)
    else:
        found |= engine.log_probs(own, with_entropy=True, with_sum_pi_squared=True, temperature=0.7)
    metrics = engine.forward_backward(own, loss, with_entropy=not critic)
    found["loss"] = [float(metrics["loss"].value)] if metrics else []
    found["shared"] = [float(metrics["perf/shared_tokens/actor"].value)] if metrics and not critic else []
    found["gradients"] = gradients(engine)
    engine._optimizer.zero_grad()
    found["norms"] = []
    for _ in range(STEPS):
        engine.forward_backward(own, loss, with_entropy=not critic)
        found["norms"].append(engine.optimizer_step()["grad_norm"])
    found["weights"] = {name: value.clone() for name, value in engine.weights().named_tensors()}
    return found


def run(
    rank: int, world: int, kind: str, sizes: dict[str, int], architecture: str, **options: Any
) -> dict[str, Any]:
    groups = options.pop("groups", False)
    engine = engine_of(world, kind, sizes, architecture, **options)
    batch = conftest.make_groups() if groups else conftest.make_batch(holes=True)
    return train(rank, engine, batch, kind == "critic")


GROUPS: dict[str, Any] = {"groups": True, "role": {"ppo_micro_batch_size_per_gpu": 3}}
# Name: number of ranks, kind, sizes, architecture, changes.
CASES: dict[str, tuple[int, str, dict[str, int], str, dict[str, Any]]] = {
    "llama_tp2": (2, "actor", {"tp": 2}, "llama", {}),
    "qwen2_tied_tp2": (2, "actor", {"tp": 2}, "qwen2", {"model": {"tie_word_embeddings": True}}),
    "qwen3_tp2": (2, "actor", {"tp": 2}, "qwen3", {}),
    "llama_pp2": (2, "actor", {"pp": 2}, "llama", {}),
    "qwen2_tied_pp2": (2, "actor", {"pp": 2}, "qwen2", {"model": {"tie_word_embeddings": True}}),
    "mistral_cp2": (2, "actor", {"cp": 2}, "mistral", {}),
    "llama_dp2": (2, "actor", {}, "llama", {}),
    "critic_tp2": (2, "critic", {"tp": 2}, "qwen2", {}),
    "critic_pp2": (2, "critic", {"pp": 2}, "qwen3", {}),
    "recomputed_tp2": (2, "actor", {"tp": 2}, "llama", {"enable_gradient_checkpointing": True}),
    "one_row_pp2": (2, "actor", {"pp": 2}, "llama", {"role": {"ppo_micro_batch_size_per_gpu": 64}}),
    "groups_tp2": (2, "actor", {"tp": 2}, "llama", GROUPS),
    "groups_pp2": (2, "actor", {"pp": 2}, "qwen2", GROUPS),
    "groups_cp2": (2, "actor", {"cp": 2}, "mistral", GROUPS),
    "frozen_embeddings_tp2": (2, "actor", {"tp": 2}, "llama", {"freeze_embeddings": True}),
    "qwen3_tp2_pp2": (4, "actor", {"tp": 2, "pp": 2}, "qwen3", {"model": {"tie_word_embeddings": True}}),
    "mistral_tp2_cp2": (4, "actor", {"tp": 2, "cp": 2}, "mistral", {}),
    "qwen3_tp2_dp2": (4, "actor", {"tp": 2}, "qwen3", {}),
    "llama_pp2_dp2": (4, "actor", {"pp": 2}, "llama", {"model": {"tie_word_embeddings": True}}),
    "llama_cp4": (4, "actor", {"cp": 2, "sp": 2}, "llama", {}),
    "critic_tp2_pp2": (4, "critic", {"tp": 2, "pp": 2}, "llama", {}),
    "recomputed_pp2_cp2": (4, "actor", {"pp": 2, "cp": 2}, "qwen2", {"enable_gradient_checkpointing": True}),
    "mixture_tp2": (2, "actor", {"tp": 2}, "qwen3_moe", {}),
    "mixture_tp2_ep2": (2, "actor", {"tp": 2, "ep": 2}, "qwen3_moe", {"enable_gradient_checkpointing": True}),
    "mixture_tp2_dp2_ep2": (4, "actor", {"tp": 2, "ep": 2}, "qwen3_moe", {}),
    "mixture_tp2_dp2_ep4": (4, "actor", {"tp": 2, "ep": 4}, "qwen3_moe", {}),
    "mixture_tp2_pp2_ep2": (4, "actor", {"tp": 2, "pp": 2, "ep": 2}, "qwen3_moe", {}),
    "mixture_ep2": (2, "actor", {"ep": 2}, "qwen3_moe", {}),
    "mixture_pp2_ep2": (4, "actor", {"pp": 2, "ep": 2}, "qwen3_moe", {}),
}


def scenario(name: str) -> Any:
    _, kind, sizes, architecture, options = CASES[name]
    return lambda rank, world, folder: run(rank, world, kind, sizes, architecture, **dict(options))


PROBED: dict[str, tuple[str, dict[str, int]]] = {
    "tp2": ("megatron", {"tp": 2}),
    "pp2": ("megatron", {"pp": 2}),
    "cp2": ("megatron", {"cp": 2}),
    "dp2": ("megatron", {}),
    "ulysses2": ("fsdp", {"sp": 2}),
}


def probed(engine: Any, rank: int) -> list[list[float]]:
    """What a rank's rollout engine is compared with; each rank's has drawn other tokens."""
    found = engine.weights().log_probs([5, 3, 8], [[rank + 4, 9, 7], [11, rank + 6, 2]])
    return [list(row) for row in found.log_probs]


def probe(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return {
        name: probed(engine_of(world, "actor", sizes, "llama", role={"strategy": strategy}), rank)
        for name, (strategy, sizes) in PROBED.items()
    }


SCENARIOS = {name: scenario(name) for name in CASES} | {"probe": probe}

if __name__ == "__main__":
    gloo_worker.main(SCENARIOS)
