"""The native rollout engine: a scheduler, a paged KV cache, a runner for each kind of device, one sampler."""

from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.engine_state import Limits

__all__ = ["Limits", "NativeRollout"]
