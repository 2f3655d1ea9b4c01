"""The class of a module, whatever has wrapped it."""

from __future__ import annotations

from torch import nn


def class_of(module: nn.Module) -> type:
    """The module's class, without those FSDP2 puts in front of it (`FSDPLlamaDecoderLayer`)."""
    bases = type(module).__mro__
    return next(base for base in bases if not base.__module__.startswith("torch.distributed.fsdp"))
