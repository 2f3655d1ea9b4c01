"""What to do about an error that ended a run: the line beside it in `crash.txt`, with the values of the run."""

from __future__ import annotations

import errno
from typing import Any

from verl.errors import RESUME, VerlError


def is_out_of_memory(error: BaseException) -> bool:
    """Device or host: torch has its own class on devices and a plain RuntimeError on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def likely_fix(error: BaseException, config: Any = None) -> str:
    """One line, or nothing when the error itself says it (a VerlError does). `config`: the PPOConfig of the run."""
    if isinstance(error, VerlError):
        return ""
    if is_out_of_memory(error) and config is not None:
        return out_of_memory_advice(config)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk is full: free some space, set trainer.default_local_dir to another disk, or keep fewer "
            "checkpoints with trainer.max_actor_ckpt_to_keep=1"
        )
    return f"stopped by hand; {RESUME}" if isinstance(error, KeyboardInterrupt) else RESUME


def out_of_memory_advice(config: Any) -> str:
    """Keys with amounts, those that cost least first."""
    key = "actor_rollout_ref"
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    tokens, sequences = actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu
    steps: list[str] = []
    if actor.use_dynamic_bsz and tokens:
        steps.append(f"{key}.actor.ppo_max_token_len_per_gpu={max(1, tokens // 2)}")
    elif sequences is None or sequences > 1:
        steps.append(f"{key}.actor.ppo_micro_batch_size_per_gpu={max(1, (sequences or 8) // 2)}")
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        steps.append(f"{key}.model.enable_gradient_checkpointing=True")
    if not actor.fsdp_config.optimizer_offload:
        steps.append(f"{key}.actor.fsdp_config.optimizer_offload=True")
    elif not actor.fsdp_config.param_offload:
        steps.append(f"{key}.actor.fsdp_config.param_offload=True")
    if rollout.gpu_memory_utilization > 0.2:
        lower = max(0.2, round(rollout.gpu_memory_utilization - 0.2, 2))
        steps.append(f"{key}.rollout.gpu_memory_utilization={lower:g}")
    steps.append(f"data.max_response_length={max(1, config.data.max_response_length // 2)}")
    return "out of memory. In this order, until it fits: " + ", then ".join(steps)
