"""The mark of functions to trace: nothing is done with it, as every conversation is in the run folder (`verl view`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verl.missing_names import explain

_Function = TypeVar("_Function", bound=Callable[..., object])


def rollout_trace_op(func: _Function) -> _Function:
    return func


__getattr__ = explain(__name__)
