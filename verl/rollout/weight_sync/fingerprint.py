"""Fingerprints of tensors: integer arithmetic over their bits, equal on every device and in every process.

Taken of what is sent, of what arrived, and of what the engine then holds, where it holds it in the form it came in
(`verl.rollout.vllm.worker`). Other forms (repacked, quantised) are checked by log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl.errors import TrainingHalted
from verl.models.weight_source import NamedTensors

_SAMPLES = 4096
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 3


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape, the sum of all bit patterns, and a sum over strided samples weighted by their index.

    The plain sum sees any single changed value, the weighted one values that were exchanged."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return f"{tensor.dtype}:{tuple(tensor.shape)}"
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    samples = bits[:: max(bits.numel() // _SAMPLES, 1)].to(torch.int64)
    factors = torch.arange(1, 2 * samples.numel(), 2, device=samples.device)
    total, weighted = torch.stack([bits.sum(dtype=torch.int64), (samples * factors).sum()]).tolist()
    return f"{str(tensor.dtype).removeprefix('torch.')}:{tuple(tensor.shape)}:{total:x}:{weighted:x}"


def same_values(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same values, in any order."""
    return one.rpartition(":")[0] == other.rpartition(":")[0]


class WeightManifest(dict[str, str]):
    """Fingerprints by name."""

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, recorded as they pass."""
        for name, tensor in tensors:
            self[name] = fingerprint(tensor)
            yield name, tensor


def compare(
    sent: dict[str, str],
    received: dict[str, str],
    version: int,
    engine: str,
    advice: str = "if it happens again, use actor_rollout_ref.rollout.name=native and report it",
) -> None:
    """TrainingHalted when the two sides differ, with both values of the first that do."""
    different = [name for name in sent if received.get(name) != sent[name]]
    extra = [name for name in received if name not in sent]
    if not different and not extra:
        return
    lines = [
        f"{name}: sent {sent[name]}, received {received.get(name, 'nothing')}" for name in different[:_SHOWN]
    ]
    lines += [f"{name}: not sent, received {received[name]}" for name in extra[:_SHOWN]]
    raise TrainingHalted(
        f"the weights {engine} received for policy version {version} are not those the trainer sent: "
        f"{len(different) + len(extra)} of {len(sent)} tensors differ.\n  " + "\n  ".join(lines) + "\n"
        f"Restart from the last checkpoint; {advice}"
    )
