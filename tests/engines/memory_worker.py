"""One rank of the out-of-memory tests: run as `memory_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

Each scenario does the same thing with two engines from one model: with plenty of memory, and with one rank whose
memory runs out inside a layer. The second engine's answers, gradients and weights are left in FOLDER beside the
first one's.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

LAYERS = 4
ROLE = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 1000, "optim.lr": 0.01, "grad_clip": 0.5}


class SmallDevice:
    """Holds `limit` tokens. Beyond that a pass fails in the middle of one layer: forward behind its attention,
    backward when the gradients of its MLP and of all later layers exist already."""

    def __init__(self, engine: Any, limit: int, layer: int, backward: bool) -> None:
        self.limit, self.backward, self.failures = limit, backward, 0
        conftest.module_of(engine).model.layers[layer].self_attn.register_forward_hook(self._hook)

    def _hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        hidden = outputs[0]
        if hidden.shape[0] * hidden.shape[1] <= self.limit:
            return
        if not self.backward or not hidden.requires_grad:
            self._fail(None)
        hidden.register_hook(self._fail)

    def _fail(self, _: Any) -> None:
        self.failures += 1
        assert self.failures < 50, "the retries do not end"
        raise torch.OutOfMemoryError("injected: out of memory")


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "did not fit" in record.getMessage():
            self.texts.append(record.getMessage())


def compare(
    rank: int, world: int, *, backward: bool, where: str, role: dict[str, Any] | None = None, **model: Any
) -> dict[str, Any]:
    """`where` seeds the choice of rank and layer."""
    chance = random.Random(f"{where} {world}")
    victim, layer = chance.randrange(world), chance.randrange(LAYERS)
    found: dict[str, Any] = {"victim": victim, "failures": 0}
    batch = gloo_worker.share(conftest.make_batch(holes=True), (rank - victim) % world, world)
    for name in ("plenty", "short"):
        engine = conftest.make_engine(
            model=conftest.make_model(num_hidden_layers=LAYERS, tie_word_embeddings=True),
            role={**ROLE, **(role or {})},
            **model,
        )
        told = Told()
        logging.getLogger("verl").addHandler(told)
        device = None
        if name == "short" and rank == victim:
            device = SmallDevice(engine, 14, layer, backward)
        engine.forward_backward(batch, conftest.policy_loss, with_entropy=True)
        answers = [engine.log_probs(batch)["log_probs"]]
        engine.forward_backward(batch, conftest.policy_loss)  # a second mini-batch of the same step
        gradients = {
            key: gloo_worker._whole(value).clone() for key, value in conftest.gradients_of(engine).items()
        }
        norm = engine.optimizer_step()["grad_norm"]
        answers.append(engine.log_probs(batch)["log_probs"])
        logging.getLogger("verl").removeHandler(told)
        found[name] = {
            "answers": answers,
            "gradients": gradients,
            "norm": norm,
            "weights": dict(engine.weights().named_tensors()),
        }
        if device:
            found["failures"] = device.failures
    found["told"] = told.texts
    return found


def forward(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return compare(rank, world, backward=False, where="forward")


def backward(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return compare(rank, world, backward=True, where="backward")


def recomputed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return compare(rank, world, backward=True, where="recomputed", enable_gradient_checkpointing=True)


def kept_whole(rank: int, world: int, folder: Path) -> dict[str, Any]:
    role = {"fsdp_config.reshard_after_forward": False}
    return compare(rank, world, backward=True, where="kept", role=role)


def replicated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return compare(rank, world, backward=True, where="rep", role={"fsdp_config.fsdp_size": world // 2 or 1})


def adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return compare(rank, world, backward=True, where="adapters", lora_rank=4)


def sequences(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Micro-batches of a number of sequences instead of tokens."""
    role = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4}
    return compare(rank, world, backward=True, where="sequences", role=role)


class FailsOnce(SmallDevice):
    """Fails in the pass with the number `at`, and never again."""

    def __init__(self, engine: Any, at: int, layer: int, backward: bool) -> None:
        super().__init__(engine, 1, layer, backward)
        self.left = at

    def _hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            super()._hook(module, inputs, outputs)


def later_part(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Without gradient some parameters stay whole from one micro-batch to the next: the second one breaks off."""
    found: dict[str, Any] = {"failures": 0}
    batch = gloo_worker.share(conftest.make_batch(), rank, world)
    for name, reshard in (("freed", True), ("kept", False)):
        for way in ("plenty", "short"):
            role = {"ppo_micro_batch_size_per_gpu": 2, "fsdp_config.reshard_after_forward": reshard}
            engine = conftest.make_engine(model=conftest.make_model(num_hidden_layers=LAYERS), role=role)
            device = FailsOnce(engine, 2, 2, False) if way == "short" and rank == 0 else None
            answers = [engine.log_probs(batch)["log_probs"] for _ in range(2)]
            found[f"{name} {way}"] = answers
            found["failures"] += device.failures if device else 0
    return found


def too_long(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The last rank cannot hold a single sequence: every rank stops and says so, and none waits."""
    from verl.errors import TrainingHalted

    said = {}
    for name, backward, together in (("forward", False, 1), ("backward", True, 1), ("pair", True, 2)):
        batch = conftest.make_batch()[[2 * rank, 2 * rank + 1]]
        batch.meta_info["rows_together"] = together
        engine = conftest.make_engine(
            model=conftest.make_model(num_hidden_layers=LAYERS), role={"ppo_micro_batch_size_per_gpu": 2}
        )
        if rank == world - 1:
            SmallDevice(engine, 1, 1, backward)
        try:
            engine.forward_backward(batch, conftest.policy_loss)
        except TrainingHalted as error:
            said[name] = str(error)
    return said


def measured(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A probe that does not fit on one rank makes the smallest budget the one of all."""
    budgets = {}
    batch = gloo_worker.share(conftest.make_batch(), rank, world)
    for name, limit in (("plenty", 10_000), ("short", 100)):
        engine = conftest.make_engine(model=conftest.make_model(num_hidden_layers=LAYERS))
        if rank == world - 1:
            SmallDevice(engine, limit, 2, backward=True)
        engine.forward_backward(batch, conftest.policy_loss)
        budgets[name] = conftest.runner_of(engine).sizes["train"].max_tokens
    return budgets


SCENARIOS = {
    function.__name__: function
    for function in (
        forward,
        backward,
        recomputed,
        kept_whole,
        replicated,
        adapters,
        sequences,
        later_part,
        too_long,
        measured,
    )
}

if __name__ == "__main__":
    gloo_worker.SCENARIOS = SCENARIOS
    gloo_worker.main()
