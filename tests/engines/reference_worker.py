"""One rank of the tests of a reference that takes over the policy: run as
`reference_worker.py RANK WORLD MEETING FOLDER SCENARIO...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

TRAINED = {"ppo_micro_batch_size_per_gpu": 2, "optim.lr": 0.05, "grad_clip": 0.5}
TENSOR, PIPELINE = "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size"


class Steps:
    """An engine with this rank's rows."""

    def __init__(self, engine: Any, rank: int) -> None:
        layout = engine.info.layout
        self.engine, self._reports = engine, layout.reports(rank)
        whole = conftest.make_batch(holes=True)
        self._rows = gloo_worker.share(whole, layout.data_rank(rank), layout.dp)

    def train(self) -> None:
        self.engine.forward_backward(self._rows, conftest.policy_loss)
        assert self.engine.optimizer_step()["skipped"] == 0

    def log_probs(self, engine: Any) -> torch.Tensor:
        found = engine.log_probs(self._rows)["log_probs"]
        return found.clone() if self._reports else torch.zeros(())

    def reference(self) -> torch.Tensor:
        return self.engine.reference_log_probs(self._rows).clone()


def _full(rank: int, role: dict[str, Any], **options: Any) -> dict[str, Any]:
    actor = conftest.make_engine(model=conftest.make_model("llama"), role={**TRAINED, **role}, **options)
    ref = conftest.make_engine("ref", model=conftest.make_model("llama"), role=role, **options)
    steps = Steps(actor, rank)
    first = steps.log_probs(ref)
    steps.train()
    untouched, trained = steps.log_probs(ref), steps.log_probs(actor)
    ref.load_state(actor.state())
    both = zip(actor.weights().named_tensors(), ref.weights().named_tensors(), strict=True)
    for (name, mine), (_, theirs) in both:
        assert torch.equal(mine, theirs), name
    refreshed = steps.log_probs(ref)
    steps.train()
    return {
        "first": first,
        "untouched": untouched,
        "trained": trained,
        "refreshed": refreshed,
        "kept": steps.log_probs(ref),
        "later": steps.log_probs(actor),
    }


def whole(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return _full(rank, {})


def replicas(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return _full(rank, {"fsdp_config.fsdp_size": 1})


def half(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return _full(rank, {}, dtype="bfloat16")


def tensor(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return _full(rank, {"strategy": "megatron", TENSOR: 2})


def pipeline(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return _full(rank, {"strategy": "megatron", PIPELINE: 2}, dtype="bfloat16")


def adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = conftest.make_engine(model=conftest.make_model(), role=TRAINED, lora_rank=4)
    steps = Steps(engine, rank)
    first = steps.log_probs(engine)
    engine.refresh_reference()
    steps.train()
    untouched, trained = steps.reference(), steps.log_probs(engine)
    engine.refresh_reference()
    refreshed = steps.reference()
    steps.train()
    later = steps.log_probs(engine)
    state = engine.state()
    copied = {name: value.detach().clone() for name, value in state["extra"]["reference"].items()}
    kept = steps.reference()
    assert torch.equal(steps.log_probs(engine), later), "the policy is as it was before the reference's pass"
    engine.refresh_reference()
    assert not torch.equal(steps.reference(), kept)
    engine.load_state({**engine.state(), "extra": {**state["extra"], "reference": copied}})
    assert torch.equal(steps.reference(), kept), "from a checkpoint"
    return {
        "first": first,
        "untouched": untouched,
        "trained": trained,
        "refreshed": refreshed,
        "kept": kept,
        "later": later,
    }


SCENARIOS = {function.__name__: function for function in (whole, replicas, half, tensor, pipeline, adapters)}

if __name__ == "__main__":
    gloo_worker.main(SCENARIOS)
