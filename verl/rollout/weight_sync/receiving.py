"""Weights that arrive, into the module they are for.

What always holds: what is fingerprinted is what the module has, not what was meant to arrive; a weight that nothing
reached stops the run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from verl.errors import TrainingHalted
from verl.rollout.weight_sync.fingerprint import Manifest, fingerprint
from verl.rollout.weight_sync.weights import Pairs


def load_into(module: nn.Module, pairs: Pairs, wanted: Callable[[str], bool] = lambda name: True) -> Manifest:
    """Write every pair into the module's own tensors (in their type) and fingerprint what then stands there.

    `wanted` says which of the module's tensors they are: those and all of those. Where the types differ, the
    fingerprint is of what arrived: there is nothing else the sender's could equal."""
    held = {name: value for name, value in module.state_dict(keep_vars=True).items() if wanted(name)}
    manifest = Manifest()
    with torch.no_grad():
        for name, tensor in pairs:
            if name not in held or held[name].shape != tensor.shape:
                there = tuple(held[name].shape) if name in held else "nothing"
                raise TrainingHalted(
                    f"the trainer sent {name} of shape {tuple(tensor.shape)}; the model that generates has {there} of "
                    "that name. Both are built from actor_rollout_ref.model: is its folder the same on every node?"
                )
            held[name].copy_(tensor)
            manifest[name] = fingerprint(held[name] if held[name].dtype == tensor.dtype else tensor)
    missing = [name for name in held if name not in manifest]
    if missing:
        raise TrainingHalted(
            f"{len(missing)} weights of the model that generates were not among those the trainer sent, e.g. "
            f"{', '.join(missing[:3])}. Both are built from actor_rollout_ref.model: is its folder the same on every "
            "node?"
        )
    return manifest
