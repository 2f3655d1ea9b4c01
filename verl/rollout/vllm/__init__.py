"""vLLM as a rollout engine: in the trainer's process, or as a server (`rollout.mode=server`).

`settings` maps our config keys to vLLM's, `worker` runs inside vLLM's workers, `engine` drives vLLM's engine from this
process and `server` its HTTP server; `base` is what both share. Only these files import vllm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl.models.weight_source import WeightSource
from verl.rollout.base import RolloutEngine
from verl.rollout.vllm.version import require_vllm

if TYPE_CHECKING:
    from verl.config.schema import RolloutConfig


def build(
    source: WeightSource, tokenizer: Any | None, config: RolloutConfig, watchdog_s: float
) -> RolloutEngine:
    """The engine `rollout.name=vllm` asks for, by `rollout.mode`."""
    require_vllm()
    if config.mode == "server":
        from verl.rollout.vllm.server import VLLMServerRollout

        return VLLMServerRollout(source, tokenizer, config, watchdog_s=watchdog_s)
    from verl.rollout.vllm.engine import VLLMRollout

    return VLLMRollout(source, tokenizer, config, watchdog_s=watchdog_s)
