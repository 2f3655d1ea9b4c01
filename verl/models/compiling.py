"""torch.compile of the decoder layers, one by one, with a way back.

What always holds: parameter names do not change; our attention stays outside the compiled graphs, because its
arguments (the lengths of the pack) differ at every call; shapes are dynamic, so a new pack is not a new graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from verl.models import attention


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Takes effect at the next call of each layer, and may fail there; see `undo`."""
    attention.register_attention(outside_graphs=True)
    for layer in layers:
        layer.compile(dynamic=True)


def undo(layers: Sequence[nn.Module]) -> None:
    """Back to the plain layers."""
    for layer in layers:
        layer._compiled_call_impl = None
    import torch._dynamo

    torch._dynamo.reset()
