"""One rank of the tests of split sequences: run as `ulysses_worker.py RANK WORLD MEETING FOLDER SCENARIO...`.

Scenarios train the cases of `CASES` with sequences split over all ranks, or over two of four. Run by one process, a
case gives what the ranks must agree with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import conftest
import gloo_worker

from verl.engines.sharding import EngineRanks
from verl.errors import TrainingHalted
from verl.models.attention import AttentionCall, PackedAttention
from verl.models.ulysses import UlyssesAttention
from verl.models.value_model import ValueModel

STEPS = 3
KEY = "ulysses_sequence_parallel_size"
ROLE = {"ppo_micro_batch_size_per_gpu": 2, "optim.lr": 1e-3, "optim.eps": 1e-5, "grad_clip": 0.5}
TIED = {"tie_word_embeddings": True}

CASES: dict[str, dict[str, Any]] = {
    "llama_tied": {"model": TIED},
    "qwen2": {"architecture": "qwen2"},
    "qwen3_recomputed": {"architecture": "qwen3", "options": {"enable_gradient_checkpointing": True}},
    "gemma2": {"architecture": "gemma2", "model": TIED},  # soft-capping; every other layer has a window
    "mistral": {"architecture": "mistral"},
    "gpt_oss": {"architecture": "gpt_oss"},  # each rank has the attention sinks of its heads
    "longrope": {  # two micro-batches have rows below and above the limit
        "architecture": "phi3",
        "model": {
            "original_max_position_embeddings": 8,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 8,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    "one_by_one": {"role": {"ppo_micro_batch_size_per_gpu": 1}},  # among them a pack of two tokens
    "one_kv_head": {"model": {"num_key_value_heads": 1}},
    "groups_cut": {"model": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}},
    "critic": {"kind": "critic", "architecture": "qwen2"},
    "critic_recomputed": {"kind": "critic", "options": {"enable_gradient_checkpointing": True}},
    "lora": {"options": {"lora_rank": 4}},
    "lora_recomputed": {
        "architecture": "qwen2",
        "options": {"lora_rank": 4, "enable_gradient_checkpointing": True},
    },
    "token_budget": {"role": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 10}},
    "groups": {"groups": True, "role": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20}},
    "groups_recomputed": {
        "groups": True,
        "architecture": "mistral",
        "role": {"ppo_micro_batch_size_per_gpu": 6},
        "options": {"enable_gradient_checkpointing": True},
    },
    "measured": {"role": {"ppo_micro_batch_size_per_gpu": None}},
    "replicated": {"role": {"fsdp_config.fsdp_size": 2}},
}


def engine_of(case: dict[str, Any], degree: int) -> Any:
    kind = case.get("kind", "actor")
    model = conftest.make_model(case.get("architecture", "llama"), **case.get("model", {}))
    if kind == "critic":
        model = ValueModel(model.base_model)
        with torch.no_grad():  # it begins with zeros, which would hide the rest of the model
            model.score.weight.copy_(torch.linspace(-0.1, 0.1, 32)[None])
    return conftest.make_engine(
        kind,
        model=model,
        role={**ROLE, **case.get("role", {}), KEY: degree},
        share_prefixes=degree > 1,  # compared with separate rows
        **case.get("options", {}),
    )


def train(case: dict[str, Any], rank: int, world: int, degree: int) -> dict[str, Any]:
    """Outputs, loss and gradients of a mini-batch, gradient norms and weights of three steps."""
    engine = engine_of(case, degree)
    layout = engine.info.layout
    assert (layout.dp, layout.cp) == (world // degree, degree)
    rows = conftest.make_groups() if case.get("groups") else conftest.make_batch(holes=True)
    batch = gloo_worker.share(rows, layout.data_rank(rank), layout.dp)
    critic = hasattr(conftest.module_of(engine), "score")
    if critic:
        outputs = {"values": engine.values(batch)}
    else:
        outputs = engine.log_probs(batch, temperature=0.7, with_entropy=True, with_sum_pi_squared=True)
    losses: list[float] = []

    def loss(output: Any, micro: Any) -> Any:
        value, metrics = (conftest.value_loss if critic else conftest.policy_loss)(output, micro)
        losses.append(value.item() / layout.dp)
        return value, metrics

    gradients: dict[str, torch.Tensor] = {}
    norms = []
    for _ in range(STEPS):
        metrics = engine.forward_backward(batch, loss, temperature=0.7, with_entropy=not critic)
        if degree > 1 and case.get("groups"):
            assert metrics["perf/shared_tokens/actor"].value > 0.3
        if not gradients:
            gradients = {
                name: gloo_worker._whole(grad).clone() for name, grad in conftest.gradients_of(engine).items()
            }
            first_loss = sum(losses)
        norms.append(engine.optimizer_step()["grad_norm"])
    return {
        "outputs": outputs,
        "loss": first_loss,
        "gradients": gradients,
        "norms": norms,
        "weights": dict(engine.weights().named_tensors()),
    }


FOUR = (
    "groups",
    "llama_tied",
    "qwen3_recomputed",
    "gemma2",
    "one_by_one",
    "one_kv_head",
    "critic",
    "lora_recomputed",
)
TWO_OF_FOUR = ("llama_tied", "token_budget", "replicated", "critic")


def trained(rank: int, world: int, degree: int, names: Iterable[str]) -> dict[str, Any]:
    return {name: train(CASES[name], rank, world, degree) for name in names}


def split_over_all(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return trained(rank, world, world, CASES if world == 2 else FOUR)


def split_over_two(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Four ranks; the data ranks have different numbers of micro-batches."""
    return trained(rank, world, 2, TWO_OF_FOUR)


def attention(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Output and gradients of the attention itself, also for values of another size than keys."""
    sequence = EngineRanks(torch.device("cpu")).sequence_group(world)
    whole = PackedAttention.from_lengths([5, 3, 8], "cpu")
    mine = slice(rank * 16 // world, (rank + 1) * 16 // world)
    for kv_heads in (1, 2, 3, 4, 6, 12):
        for value_size in (8, 4):
            torch.manual_seed(0)
            sink = torch.randn(12)
            sinks = [sink.clone().requires_grad_() for _ in range(2)]
            shapes = ((12, 8), (kv_heads, 8), (kv_heads, value_size))
            expected = [torch.randn(1, heads, 16, size, requires_grad=True) for heads, size in shapes]
            own = [x.detach()[:, :, mine].clone().requires_grad_() for x in expected]
            weights = torch.randn(1, 16, 12, value_size)
            want = whole.attend(AttentionCall(*expected, window=4, sink=sinks[0]))
            found = UlyssesAttention(whole, sequence).attend(AttentionCall(*own, window=4, sink=sinks[1]))
            (want * weights).sum().backward()
            (found * weights[:, mine]).sum().backward()
            pairs = [
                (found, want[:, mine]),
                *((a.grad, b.grad[:, :, mine]) for a, b in zip(own, expected, strict=True)),
                *((a.grad.chunk(world)[rank], b.grad.chunk(world)[rank]) for a, b in [sinks[::-1]]),
            ]
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return {}


def half_precision(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """bfloat16 outputs, and the same in float32 arithmetic."""
    engine = engine_of({"options": {"dtype": "bfloat16"}}, world)
    batch = conftest.make_batch(holes=True)
    rounded = engine.log_probs(batch)["log_probs"]
    exact = engine.float32_log_probs(batch)
    engine.forward_backward(batch, conftest.policy_loss)
    return {"rounded": rounded, "exact": exact, "norm": engine.optimizer_step()["grad_norm"]}


def out_of_memory(rank: int, world: int, folder: Path) -> dict[str, Any]:
    engine = engine_of({}, world)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("the test says so")

    conftest.module_of(engine).model.layers[1].mlp.register_forward_hook(fail)
    try:
        engine.forward_backward(conftest.make_batch(), conftest.policy_loss)
    except TrainingHalted as error:
        return {"message": str(error)}
    return {}


if __name__ == "__main__":
    scenarios = (attention, split_over_all, split_over_two, half_precision, out_of_memory)
    gloo_worker.SCENARIOS = {function.__name__: function for function in scenarios}
    gloo_worker.main()
