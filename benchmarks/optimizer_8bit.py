"""`python -m benchmarks.optimizer_8bit`: AdamW with 8-bit moments, ours against torchao's, beside AdamW in float32.

A small Llama learns to continue sequences of two tokens' sums; every optimiser starts from the same weights and sees
the same batches. torchao is no dependency: where it is not installed, only ours is measured.

Columns: bytes of optimiser state per parameter; for each seed the mean loss of the last ten steps and the distance of
the weights to those of float32 AdamW (relative to how far these have moved); seconds per step; whether moments that are
saved in float32 and loaded again are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl.engines.adamw import AdamWOptions, LowMemoryAdamW, Quantised, TorchAdamW

LR = 3e-4
VOCABULARY, LENGTH, ROWS = 256, 32, 16


def new_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def batches(steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Each token is the sum of the two before it, modulo the vocabulary; one in ten is random instead."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        kept = torch.rand(ROWS, LENGTH, generator=generator) < 0.1
        for at in range(2, LENGTH):
            ids[:, at] = torch.where(kept[:, at], ids[:, at], (ids[:, at - 1] + ids[:, at - 2]) % 32)
        yield ids


class Ours:
    """One of verl's update rules."""

    def __init__(self, params: dict[str, torch.Tensor], int8: bool) -> None:
        options = AdamWOptions(weight_decay=0.01)
        self.params = params
        self.rule: Any = (
            LowMemoryAdamW(params, options, int8=True, seed=0) if int8 else TorchAdamW(params, options)
        )

    def step(self) -> None:
        gradients = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        self.rule.step(gradients, LR, 1.0)

    def state_bytes(self) -> int:
        if isinstance(self.rule, TorchAdamW):
            states = (self.rule.state(name) for name in self.params)
            return sum(value.nbytes for state in states for value in state.values())
        stores = (self.rule._first, self.rule._root_second)
        stored: list[Quantised] = [store[name] for store in stores for name in self.params]
        return sum(each.codes.nbytes + each.scales.nbytes for each in stored)

    def survives_a_round_trip(self) -> bool:
        before = {name: self.rule.state(name)["exp_avg"].clone() for name in self.params}
        for name in self.params:
            self.rule.load(name, {key: value.clone() for key, value in self.rule.state(name).items()})
        return all(torch.equal(before[name], self.rule.state(name)["exp_avg"]) for name in self.params)


class TorchAO:
    """torchao's `AdamW8bit`; vectors do not decay, as in verl."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        from torchao.optim import AdamW8bit

        groups = [
            {"params": [p for p in params.values() if (p.ndim >= 2) == decays], "weight_decay": decay}
            for decays, decay in ((True, 0.01), (False, 0.0))
        ]
        self.params, self.optimizer = params, AdamW8bit(groups, lr=LR)

    def step(self) -> None:
        with torch.compiler.set_stance("force_eager"):  # to compile takes 20 s for each new shape
            self.optimizer.step()

    def _moments(self) -> list[torch.Tensor]:
        names = ("exp_avg", "exp_avg_sq")
        return [state[name] for state in self.optimizer.state.values() for name in names]

    def state_bytes(self) -> int:
        parts = (
            [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]
            for moment in self._moments()
        )
        return sum(tensor.nbytes for tensors in parts for tensor in tensors)

    def survives_a_round_trip(self) -> bool:
        quantised = [moment for moment in self._moments() if hasattr(moment, "codes")]
        same = True
        for moment in quantised:
            saved = moment.dequantize()
            moment.copy_(saved)
            same = same and torch.equal(saved, moment.dequantize())
        return same


def train(kind: str, steps: int, seed: int) -> dict[str, Any]:
    model = new_model(seed)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    first = {name: param.detach().clone() for name, param in params.items()}
    optimizer: Any = TorchAO(params) if kind == "torchao" else Ours(params, int8=kind == "int8")
    losses, seconds = [], 0.0
    for ids in batches(steps, seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        begin = time.perf_counter()
        optimizer.step()
        seconds += time.perf_counter() - begin
        model.zero_grad()
        losses.append(loss.item())
    return {
        "bytes": optimizer.state_bytes() / sum(param.numel() for param in params.values()),
        "loss": sum(losses[-10:]) / 10,
        "seconds": seconds / steps,
        "exact": optimizer.survives_a_round_trip(),
        "weights": torch.cat([param.detach().flatten() for param in params.values()]),
        "first": torch.cat([value.flatten() for value in first.values()]),
    }


def distance(run: dict[str, Any], exact: dict[str, Any]) -> float:
    """Between the weights of two runs, relative to how far those of `exact` have moved."""
    moved = (exact["weights"] - exact["first"]).norm()
    return float((run["weights"] - exact["weights"]).norm() / moved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"float32": "float32 (torch)", "int8": "8-bit, verl", "torchao": "8-bit, torchao"}
    try:
        import torchao

        kinds["torchao"] += f" {torchao.__version__}"
    except ImportError:
        del kinds["torchao"]
    runs = [{kind: train(kind, args.steps, seed) for kind in kinds} for seed in range(args.seeds)]
    lines = [
        "| optimiser | bytes per parameter | loss | distance to float32 | s per step | round trip exact |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for kind, name in kinds.items():
        rows = [run[kind] for run in runs]
        losses = ", ".join(f"{row['loss']:.3f}" for row in rows)
        distances = ", ".join(f"{distance(run[kind], run['float32']):.3f}" for run in runs)
        seconds = min(row["seconds"] for row in rows)
        exact = "yes" if all(row["exact"] for row in rows) else "no"
        lines.append(
            f"| {name} | {rows[0]['bytes']:.3f} | {losses} | {distances} | {seconds:.4f} | {exact} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
