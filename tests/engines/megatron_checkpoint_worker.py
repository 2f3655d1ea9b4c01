"""One rank of the checkpoint tests: run as `megatron_checkpoint_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

FSDP ranks train and save, Megatron ranks load that and save it again, FSDP ranks load this. Each leaves the whole state
it had, in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

from verl.checkpoint.manager import CheckpointManager
from verl.rollout.base import Request, SamplingParams
from verl.rollout.native import Limits, NativeRollout
from verl.workers.train_rank import held_module

ROLE = {"ppo_micro_batch_size_per_gpu": 2, "optim.lr": 0.01, "grad_clip": 0.5, "optim.weight_decay": 0.1}
TENSOR, PIPELINE = "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size"
EXPERT = "megatron.expert_model_parallel_size"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]] = {
    # name: kind, changes of the model, model section, sizes; the rest of the four ranks holds replicas
    "tied": ("actor", {"architecture": "qwen3", "tie_word_embeddings": True}, {}, {TENSOR: 2, PIPELINE: 2}),
    "half": ("actor", {"architecture": "llama"}, {"dtype": "bfloat16"}, {PIPELINE: 2}),
    "critic": ("critic", {"architecture": "qwen2"}, {}, {TENSOR: 2}),
    "mixture": ("actor", {"architecture": "qwen3_moe"}, {}, {PIPELINE: 2, EXPERT: 2}),
    "split_mixture": ("actor", {"architecture": "qwen3_moe"}, {}, {TENSOR: 2, EXPERT: 4}),
    "frozen": ("actor", {"architecture": "qwen2"}, {"freeze_embeddings": True}, {PIPELINE: 2}),
}


def make_engine(name: str, seed: int, megatron: bool = False) -> Any:
    kind, changes, options, sizes = CASES[name]
    role = {**ROLE, **({"strategy": "megatron", **sizes} if megatron else {})}
    return conftest.make_engine(kind, model=conftest.make_model(seed=seed, **changes), role=role, **options)


def step(engine: Any, rank: int, critic: bool) -> float:
    layout = engine.info.layout
    batch = gloo_worker.share(conftest.make_batch(holes=True), layout.data_rank(rank), layout.dp)
    engine.forward_backward(batch, conftest.value_loss if critic else conftest.policy_loss)
    return float(engine.optimizer_step()["grad_norm"])


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Everything of the engine's state that this rank or its stage holds, by path."""
    found = {}
    state = engine.state()
    for path, tensors in {"model": state["model"], **state["optimizer"]}.items():
        for name, value in tensors.items():
            if not value.is_meta:
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{path}/{name}"] = whole.detach().clone()
    assert state["scheduler"] == {"step": 2}
    return found


def save(folder: Path, engine: Any) -> None:
    assert CheckpointManager(folder).save(2, {"actor": engine}, {"step": 2}) == folder / "global_step_2"


def first(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, (kind, *_) in CASES.items():
        engine = make_engine(name, seed=1)
        for _ in range(2):
            step(engine, rank, kind == "critic")
        save(folder / f"{name}_first", engine)
        engine.save_hf(folder / f"{name}_live")
        results[name] = {"state": whole_state(engine), "norm": step(engine, rank, kind == "critic")}
    return results


def between(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, (kind, *_) in CASES.items():
        engine = make_engine(name, seed=2, megatron=True)
        assert CheckpointManager(folder / f"{name}_first").resume({"actor": engine}) == {"step": 2}
        save(folder / f"{name}_between", engine)
        engine.save_hf(folder / f"{name}_again")
        found: dict[str, Any] = {"state": whole_state(engine)}
        found["weights"] = {key: value.clone() for key, value in engine.weights().named_tensors()}
        if kind == "actor":
            found["tokens"] = generate(engine, rank)
        found["norm"] = step(engine, rank, kind == "critic")
        results[name] = found
    return results


def last(rank: int, world: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, (kind, *_) in CASES.items():
        engine = make_engine(name, seed=3)
        assert CheckpointManager(folder / f"{name}_between").resume({"actor": engine}) == {"step": 2}
        results[name] = {"state": whole_state(engine), "norm": step(engine, rank, kind == "critic")}
    return results


def generate(engine: Any, rank: int) -> list[list[int]]:
    """The last rank alone generates, with weights gathered from all."""
    held = engine.weights()
    rollout = NativeRollout(held, None, Limits(max_num_seqs=4, cache_tokens=512), on_device=True)
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found = []
    with held_module(held):
        if rank == engine.info.world_size - 1:
            found = [r.token_ids for r in rollout.generate([Request("a", [5, 3, 8], sampling)])]
    return [list(tokens) for tokens in found]


SCENARIOS = {function.__name__: function for function in (first, between, last)}

if __name__ == "__main__":
    gloo_worker.main(SCENARIOS)
