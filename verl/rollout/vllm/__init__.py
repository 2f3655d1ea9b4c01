"""vLLM behind the rollout contract: in the trainer's process, or as a server of its own (`rollout.mode=server`).

`settings` turns our keys into vLLM's, `worker` is the part that runs inside vLLM's workers, `engine` drives vLLM's
engine in this process, `server` drives vLLM's HTTP server. Only these files import vllm.

What always holds: token ids in, token ids out; every hand-over of weights is checked on both sides
(`verl.rollout.weight_sync`); the prefix cache never outlives the weights it was computed with.
"""

from __future__ import annotations

from typing import Any

from verl.rollout import WATCHDOG_S
from verl.rollout.base import RolloutEngine
from verl.rollout.vllm.version import require_vllm


def build(source: Any, tokenizer: Any, config: Any, watchdog_s: float = WATCHDOG_S) -> RolloutEngine:
    """The engine `rollout.name=vllm` asks for, by `rollout.mode`."""
    require_vllm()
    if getattr(config, "mode", "inprocess") == "server":
        from verl.rollout.vllm.server import VLLMServerRollout

        return VLLMServerRollout(source, tokenizer, config, watchdog_s=watchdog_s)
    from verl.rollout.vllm.engine import VLLMRollout

    return VLLMRollout(source, tokenizer, config, watchdog_s=watchdog_s)
