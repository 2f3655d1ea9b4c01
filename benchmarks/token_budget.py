"""`python -m benchmarks.train --token-budgets`: throughput and memory of an update for several sizes of micro-batch.

Its last lines are rows for `verl.engines.budget.BEST_TOKENS`: the smallest budget within 3 % of the best.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.train_shapes import SHAPES
from benchmarks.train_steps import Workload, clean, grpo_loss, make_batch, new_model, ragged
from verl.algorithms import token_budget_batches
from verl.config.schema import ActorConfig, ModelConfig
from verl.data.proto import DataProto

CLOSE = 0.97
LONGEST = 1024


@dataclass(frozen=True)
class Case:
    """A shape and the tokens of one update: enough for several micro-batches, few enough for the whole to take a
    minute on one GPU."""

    shape: str
    tokens: int
    timed: int
    checkpointing: bool = False
    lora_rank: int = 0

    def workload(self, tokens: int | None = None) -> Workload:
        lengths = ragged(LONGEST, tokens or self.tokens)
        return Workload(SHAPES[self.shape], lengths, self.checkpointing, self.lora_rank)


CASES = {
    case.shape: case
    for case in (
        Case("tiny", 4096, 1),
        Case("135m", 131072, 3),
        Case("0.5b", 65536, 2),
        Case("1.5b", 65536, 2),
        # Without adapters moments, masters and float32 sums of gradients of 7B do not fit on one GPU.
        Case("7b", 32768, 1, checkpointing=True, lora_rank=32),
    )
}


@dataclass(frozen=True)
class Found:
    """Of one budget. Tokens per second; `peak_gib` is 0 on a CPU."""

    budget: int
    micro_batches: int
    update: float
    forward: float
    peak_gib: float


def best(found: Sequence[Found]) -> int:
    """The smallest budget whose update is within 3 % of the fastest."""
    fastest = max(row.update for row in found)
    return min(row.budget for row in found if row.update >= CLOSE * fastest)


def measure_case(
    case: Case, budgets: Sequence[int], device: torch.device, dtype: torch.dtype, tokens: int | None = None
) -> Iterator[Found | str]:
    """Each budget in turn, smallest first; ends with the first that does not fit."""
    from verl.engines import build_engine

    work = case.workload(tokens)
    total = sum(work.lengths)
    config = ModelConfig(
        dtype=str(dtype).removeprefix("torch."),
        enable_gradient_checkpointing=case.checkpointing,
        lora_rank=case.lora_rank,
    )
    batch = make_batch(work)
    micro_batches = 0

    def loss_fn(output: Any, micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
        nonlocal micro_batches
        micro_batches += 1
        return grpo_loss(output.log_probs, micro, micro.meta_info["batch_num_tokens"]), {}

    def update(engine: Any) -> None:
        nonlocal micro_batches
        micro_batches = 0
        engine.forward_backward(batch, loss_fn, with_entropy=True)
        engine.optimizer_step()

    for budget in sorted(budgets):
        if budget > 2 * total:
            return
        clean(device)
        role = ActorConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=budget)
        role.optim.lr = 1e-5
        engine = build_engine("actor", config, role, model=new_model(work, device, dtype), device=device)
        seconds, peak = timed(functools.partial(update, engine), device, case.timed)
        forward, _ = timed(functools.partial(engine.log_probs, batch), device, case.timed)
        hidden = engine.info.hidden_size
        del engine
        if micro_batches > len(token_budget_batches(work.lengths, budget, hidden_size=hidden)):
            yield f"{case.shape}: {budget} tokens do not fit"  # the engine has split what ran out of memory
            return
        yield Found(budget, micro_batches, total / seconds, total / forward, peak)


def timed(call: Callable[[], Any], device: torch.device, repeat: int) -> tuple[float, float]:
    """Seconds per call after one that is not counted, and the peak of device memory in GiB."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / repeat
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def rows(
    case: Case, budgets: Sequence[int], device: torch.device, dtype: torch.dtype, tokens: int | None
) -> Iterator[tuple[str, ...]]:
    """Rows of a table as they are measured; the last says which budget is best."""
    found: list[Found] = []
    for row in measure_case(case, budgets, device, dtype, tokens):
        if isinstance(row, str):
            yield (row, "", "", "", "", "")
            continue
        found.append(row)
        yield (
            case.shape,
            f"{row.budget}",
            f"{row.micro_batches}",
            f"{row.update:,.0f}",
            f"{row.forward:,.0f}",
            f"{row.peak_gib:.1f}" if row.peak_gib else "-",
        )
    if found:
        yield (f"BEST_TOKENS: {SHAPES[case.shape].layer_weights:.3g}: {best(found)},", "", "", "", "", "")
